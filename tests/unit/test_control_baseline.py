"""Grouping with a greedy baseline: one more attempt, no member of the group, and no group without it (ReMax)."""

from __future__ import annotations

import itertools

import pytest

from headrace.control.grouping import Complete, Discard, GroupAssembler, OnFailure, Retry, Wait
from headrace.types import AttemptKey, Episode, Outcome, Score, Task, Trace

TASK = Task(id="t", messages=({"role": "user", "content": "?"},))


def ended(member: int, reward: float | None = 1.0, retry: int = 0) -> Episode:
    outcome = Outcome.DONE if reward is not None else Outcome.INFRASTRUCTURE_ERROR
    score = None if reward is None else Score(value=reward)
    key = AttemptKey(3, member, retry)
    return Episode(key=key, task=TASK, turns=(), trace=Trace(), outcome=outcome, score=score)


def assembler(min_group_size: int = 1, on_failure: OnFailure = "refill", max_retries: int = 1) -> GroupAssembler:
    groups = GroupAssembler(2, min_group_size, on_failure, max_retries, with_baseline=True)
    assert groups.start(3, TASK) == [AttemptKey(3, m) for m in range(3)]
    return groups


def test_the_baseline_is_beside_the_members_whatever_arrives_first() -> None:
    """FAILURES 50: by key, never by arrival; its reward is in no statistic of the group."""
    for order in itertools.permutations(range(3)):
        groups = assembler()
        *first, last = [groups.add(ended(m, float(m))) for m in order]
        assert first == [Wait(), Wait()]
        assert isinstance(last, Complete)
        assert last.group.rewards == (0.0, 1.0)
        assert last.group.baseline is not None and last.group.baseline.reward == 2.0


def test_a_baseline_that_fails_is_tried_again_and_then_the_group_is_discarded() -> None:
    """Without it the members have nothing to be compared with; their attempts are given back, all of them."""
    groups = assembler()
    assert groups.add(ended(2, None)) == Retry(AttemptKey(3, 2, 1))
    assert groups.add(ended(0)) == Wait()
    assert groups.add(ended(2, None, retry=1)) == Wait()
    decision = groups.add(ended(1))
    assert isinstance(decision, Discard) and decision.reason == "baseline_failed"
    assert [e.key for e in decision.episodes] == [AttemptKey(3, 0), AttemptKey(3, 1), AttemptKey(3, 2, 1)]
    shrinking = assembler(on_failure="shrink")
    for member, reward in ((0, 1.0), (1, 1.0)):
        assert shrinking.add(ended(member, reward)) == Wait()
    assert isinstance(shrinking.add(ended(2, None)), Discard)


def test_the_baseline_does_not_count_as_a_member() -> None:
    """One scored member and the baseline are not two members, neither for the minimum nor for a retry."""
    groups = assembler(min_group_size=2, max_retries=0)
    assert groups.add(ended(2)) == Wait()
    assert groups.add(ended(0)) == Wait()
    decision = groups.add(ended(1, None))
    assert isinstance(decision, Discard) and decision.reason == "too_few_scored"
    hopeless = assembler(min_group_size=2, max_retries=1)
    hopeless.add(ended(0, None))
    assert hopeless.add(ended(0, None, retry=1)) == Wait(), "member 0 is lost for good"
    assert hopeless.add(ended(2, None)) == Wait(), "no greedy reply for a group that cannot be used"
    assert hopeless.add(ended(1, None)) != Retry(AttemptKey(3, 1, 1))
    scored = assembler(min_group_size=2, max_retries=1)
    scored.add(ended(2))
    scored.add(ended(0, None))
    scored.add(ended(0, None, retry=1))
    decision = scored.add(ended(1, None))
    assert isinstance(decision, Discard), "the scored baseline does not make a retry worth while"


@pytest.mark.parametrize("with_baseline", [True, False])
def test_discard_wants_every_member(with_baseline: bool) -> None:
    """on_failure = discard: all members scored; the baseline adds nothing to that count."""
    groups = GroupAssembler(2, 1, "discard", 0, with_baseline=with_baseline)
    groups.start(3, TASK)
    decisions = [groups.add(ended(m)) for m in range(2 + with_baseline)]
    assert isinstance(decisions[-1], Complete)
    assert (decisions[-1].group.baseline is not None) is with_baseline
