"""From configuration to rewards: names, options, what has no effect; and the text rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.config.schema import RewardConfig
from headrace.errors import ConfigError
from headrace.protocols import Reward
from headrace.rewards.build import Part, build_rewards, reward_names
from headrace.rewards.in_process import CallableReward
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, ScoreResult, Task, Trace, Turn


def config(type_: str, **fields: Any) -> RewardConfig:
    return RewardConfig(type=type_, **fields)


def score(type_: str, reply: str, gold: Any, **options: Any) -> ScoreResult:
    task = Task(id="t", messages=({"role": "user", "content": "?"},), answer=gold)
    episode = Episode(key=AttemptKey(0, 0), task=task, turns=(Turn(reply=reply),), trace=Trace(), outcome=Outcome.DONE)
    reward = build_rewards([config(type_, options=options)])
    assert isinstance(reward, Reward)
    return asyncio.run(reward.score(episode))


def value(result: ScoreResult) -> float:
    assert isinstance(result, Score), result
    return result.value


@pytest.mark.parametrize(
    ("type_", "reply", "gold", "options", "expected"),
    [
        ("exact", " 12\n", "12", {}, 1.0),
        ("exact", "12.", "12", {}, 0.0),
        ("exact", "12", 12, {}, 1.0),
        ("exact", "Yes", "yes", {}, 0.0),
        ("exact", "Yes", "yes", {"ignore_case": True}, 1.0),
        ("exact", r"so \boxed{12}", "12", {"extract": "boxed"}, 1.0),
        ("exact", "<think>12</think>13", "12", {}, 0.0),
        ("last_number", "3 * 4 = 12.", "12", {}, 1.0),
        ("last_number", "12 is 3 * 4", "12", {}, 0.0),
        ("last_number", "12.0", "12", {}, 1.0),
        ("last_number", "1,200", "1200", {}, 1.0),
        ("last_number", "no idea", "12", {}, 0.0),
        ("last_number", "12", "12", {"require_think": True}, 0.0),
        ("boxed", r"\boxed{ \frac{1}{2} }", r"\frac{1}{2}", {}, 1.0),
        ("boxed", r"\boxed{12.0}", "12", {}, 1.0),
        ("boxed", r"\boxed{$12$}", "12", {}, 1.0),
        ("boxed", "12", "12", {}, 0.0),
        ("boxed", r"\boxed{12} then \boxed{", "12", {}, 0.0),
        ("format", r"\boxed{anything}", None, {}, 1.0),
        ("format", "anything", None, {}, 0.0),
    ],
)
def test_text_rewards(type_: str, reply: str, gold: Any, options: dict[str, Any], expected: float) -> None:
    assert value(score(type_, reply, gold, **options)) == expected


def test_components_say_why_it_is_0() -> None:
    """F33, F130: a missing answer, an unfinished one and a wrong one are told apart."""
    for reply, no_answer, malformed in (("x", 1.0, 0.0), (r"\boxed{", 0.0, 1.0), (r"\boxed{3}", 0.0, 0.0)):
        result = score("boxed", reply, "12")
        assert isinstance(result, Score) and result.value == 0.0
        assert (result.components["boxed/no_answer"], result.components["boxed/malformed"]) == (no_answer, malformed)


@pytest.mark.parametrize(
    ("type_", "gold"), [("exact", None), ("boxed", " "), ("last_number", "twelve"), ("last_number", None)]
)
def test_a_task_without_a_usable_answer_is_an_error_not_a_zero(type_: str, gold: Any) -> None:
    """I14: the data is at fault, not the policy."""
    result = score(type_, "12", gold)
    assert isinstance(result, ScoreError)
    assert result.error_class is ErrorClass.MISSING_ANSWER and "task 't'" in result.message


def test_names_are_short_and_different() -> None:
    reward = build_rewards(
        [config("exact"), config("exact", weight=0.5), config("pkg.mod:mine"), config("dir/file.py:mine")],
        extra=[Part(CallableReward(lambda reply: 1.0, name="extra"), 0.1)],
    )
    assert [part.reward.name for part in reward.parts] == ["exact", "exact_2", "mine", "mine_2", "extra"]
    assert [part.weight for part in reward.parts] == [1.0, 0.5, 1.0, 1.0, 0.1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"type": "mth"}, "rewards.0..type = 'mth' is not a reward; did you mean 'math'"),
        ({"type": "zzzz"}, "known: boxed, exact"),
        (
            {"type": "exact", "options": {"ignor_case": True}},
            "ignor_case is not an option .* did you mean 'ignore_case'",
        ),
        ({"type": "exact", "options": {"extract": "box"}}, "options.extract = 'box': must be 'reply'"),
        ({"type": "math", "options": {"relative_tolerance": 2}}, "options.relative_tolerance = 2"),
        ({"type": "exact", "deadline_s": 3}, "rewards.deadline_s has no effect on reward 'exact'"),
        ({"type": "last_number", "num_workers": 2}, "rewards.num_workers has no effect"),
        ({"type": "math", "deadline_s": 3, "options": {"cpu_s": 3}}, r"options.cpu_s = 3 .* must be below deadline_s"),
        ({"type": "format", "memory_bytes": 1 << 30}, "rewards.memory_bytes has no effect"),
        ({"type": "format", "options": {"pattern": "("}}, "is not a regular expression"),
        (
            {"type": "format", "options": {"dot_matches_newline": False}},
            "no effect on reward 'format' without a pattern",
        ),
        ({"type": "format", "options": {"pattern": "a", "think_tag": "b"}}, "think_tag has no effect"),
        ({"type": "a.b:c", "options": {"x": 1}}, "options have no effect"),
        ({"type": "exact", "weight": 0}, "every reward has weight 0"),
    ],
)
def test_a_wrong_configuration_is_one_clear_error(fields: dict[str, Any], said: str) -> None:
    """I20: unknown rewards, unknown options and options without effect end before any work starts."""
    with pytest.raises(ConfigError, match=said):
        build_rewards([RewardConfig(**fields)])


def test_a_part_of_weight_0_is_reported() -> None:
    """The quickstart's strict accuracy stands beside the reward without paying."""
    task = Task(id="t", messages=({"role": "user", "content": "?"},), answer="12")
    episode = Episode(
        key=AttemptKey(0, 0), task=task, turns=(Turn(reply="it is 12"),), trace=Trace(), outcome=Outcome.DONE
    )
    reward = build_rewards([config("last_number"), config("exact", weight=0)])
    result = asyncio.run(reward.score(episode))
    assert isinstance(result, Score)
    assert (result.value, result.components["last_number"], result.components["exact"]) == (1.0, 1.0, 0.0)
    assert reward.value_range == (0.0, 1.0)


def test_every_built_in_is_listed() -> None:
    assert {"exact", "last_number", "boxed", "math", "format", "reasoning_gym"} <= set(reward_names())
