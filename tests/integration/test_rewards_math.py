"""The math reward end to end, through its worker: the inputs of FAILURES.md part 3 and what hangs or eats memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.config.schema import RewardConfig
from headrace.rewards.build import build_rewards
from headrace.rewards.composite import CompositeReward
from headrace.rewards.verified import MathReward
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, ScoreResult, Task, Trace, Turn

TOWER = r"\boxed{5^{5^{5^{5^{5}}}}}"


class Judge:
    """One math reward and one event loop for all tests of this file: a worker starts once."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.rewards: dict[str, CompositeReward] = {}

    def __call__(self, gold: Any, reply: str, *, deadline_s: float = 20.0, **options: Any) -> ScoreResult:
        key = f"{deadline_s} {options}"
        if key not in self.rewards:
            config = RewardConfig(type="math", deadline_s=deadline_s, options=options)
            self.rewards[key] = build_rewards([config])
        task = Task(id="t", messages=({"role": "user", "content": "?"},), answer=gold)
        episode = Episode(
            key=AttemptKey(0, 0), task=task, turns=(Turn(reply=reply),), trace=Trace(), outcome=Outcome.DONE
        )
        return self.loop.run_until_complete(self.rewards[key].score(episode))

    def close(self) -> None:
        for reward in self.rewards.values():
            self.loop.run_until_complete(reward.close())
        self.loop.close()


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("gold", "reply", "value"),
    [
        (r"1/(3\cdot 2^{60})", r"\boxed{\frac{1}{3\cdot 2^{61}}}", 0.0),  # T01
        (r"1/(3·2^60)", r"\boxed{\frac{1}{3\cdot 2^{61}}}", 0.0),  # T01, as it stands there
        ("2102_3", r"\boxed{2102}", 0.0),  # T03
        ("2102_3", r"\boxed{65}", 1.0),  # T03
        ("21", r"\boxed{21^{\text{st}}}", 1.0),  # T05
        ("250000", r"\boxed{2.5e5}", 1.0),  # T07
        ("9", "I tested 7, 8, 9 and stopped without a conclusion", 0.0),  # T09
        ("9", r"\boxed{9} and then \boxed{", 0.0),  # T11
        (r"\frac{1}{3}", r"\boxed{\frac{1}{3}}", 1.0),  # T13
        (r"\sqrt{\frac{a_{1}}{b}}", r"\boxed{\sqrt{\frac{a_{1}}{b}}}", 1.0),  # T13
        (r"\boxed{7}", r"so \boxed{7}", 1.0),  # a reference that stands in a box itself
        (7, r"\boxed{7}", 1.0),
        ("7", r"<think>\boxed{7}</think> It is 8.", 0.0),  # F129
    ],
)
def test_inputs_of_part_3(judge: Judge, gold: Any, reply: str, value: float) -> None:
    result = judge(gold, reply)
    assert isinstance(result, Score), result
    assert result.value == value


@pytest.mark.parametrize(
    ("reply", "component"),
    [
        ("it is 9", "no_answer"),
        (r"\boxed{9} and then \boxed{", "malformed"),
        (r"\boxed{\frac{9}}", "unparsable"),
        (r"\boxed{" + "(" * 3000 + "9" + ")" * 3000 + "}", "unparsable"),
    ],
)
def test_a_0_says_why(judge: Judge, reply: str, component: str) -> None:
    """T09, T11, F123: the policy's fault is a 0 with its reason; components always have the same keys."""
    result = judge("9", reply)
    assert isinstance(result, Score), result
    flags = {name.removeprefix("math/"): flag for name, flag in result.components.items() if name != "math"}
    assert set(flags) == {"no_answer", "malformed", "unparsable", "unverifiable"}
    assert {name for name, flag in flags.items() if flag} == {component}
    assert result.value == 0.0


def test_a_tower_is_unverifiable_in_time_and_the_next_call_is_right(judge: Judge) -> None:
    """T14, F118, F119: within limit + 1 s, the pool as before, the next call right; an error unless asked otherwise."""
    deadline_s = 4.0
    assert isinstance(judge("1", r"\boxed{1}", deadline_s=deadline_s), Score)
    started = time.monotonic()
    result = judge("1", TOWER, deadline_s=deadline_s)
    assert time.monotonic() - started < deadline_s + 1
    assert isinstance(result, ScoreError)
    assert result.error_class is ErrorClass.TIMEOUT
    again = judge("1", r"\boxed{1}", deadline_s=deadline_s)
    assert isinstance(again, Score) and again.value == 1.0
    (part,) = judge.rewards[f"{deadline_s} {{}}"].parts
    assert isinstance(part.reward, MathReward) and len(part.reward.pool.pids) == 1


def test_unverifiable_can_be_mapped_to_0_by_name(judge: Judge) -> None:
    """T14: "unverifiable (0)" is the user's choice, and the component says which zeros are such."""
    result = judge("1", TOWER, deadline_s=60.0, cpu_s=1.0, unverifiable="zero")
    assert isinstance(result, Score), result
    assert result.value == 0.0 and result.components["math/unverifiable"] == 1.0


@pytest.mark.parametrize("gold", [None, "", r"\frac{1}{", "2102_2"])
def test_a_reference_that_cannot_be_read_is_an_error(judge: Judge, gold: Any) -> None:
    """F174, I14: the data is at fault, not the policy."""
    result = judge(gold, r"\boxed{1}")
    assert isinstance(result, ScoreError)
    assert result.error_class is ErrorClass.MISSING_ANSWER


def test_extraction_can_be_chosen(judge: Judge) -> None:
    """F130: extractor and prompt must agree; the gold answer in the requested form scores 1."""
    for where, reply in (
        ("reply", "1/2"),
        ("last_line", "It is easy.\n$\\frac{1}{2}$"),
        ("answer_tag", "<answer>0.5</answer>"),
        ("last_number", "so 0.5"),
    ):
        result = judge("1/2", reply, extract=where)
        assert isinstance(result, Score) and result.value == 1.0, where


@pytest.mark.parametrize(
    "answer",
    [
        "((((3!)!)!)!)!",
        r"\sum_{n=1}^{10^{12}} n^{n}",
        r"10^{10^{10}}",
        r"\prod_{k=1}^{999999999} k",
        r"\int_0^1 x^{x^{x^{x}}} \sin(x^x) dx",
        r"2^{2^{2^{2^{2^{2}}}}} - 1",
        r"\binom{10^9}{10^8}",
    ],
)
def test_pathological_answers_never_score_and_never_stay(judge: Judge, answer: str) -> None:
    """F118, F121: whatever they do, the verdict comes in time, is not 1, and the next call is right."""
    started = time.monotonic()
    result = judge("7", rf"\boxed{{{answer}}}", deadline_s=2.0)
    assert time.monotonic() - started < 3.0 + 2.0  # + 2: a worker of the last case may still be starting
    assert isinstance(result, ScoreError) or result.value == 0.0
    again = judge("7", r"\boxed{7}", deadline_s=20.0)
    assert isinstance(again, Score) and again.value == 1.0
