"""Grouping: refill, shrink, discard; joins by id; errors are never rewards (I14; failures 45, 50, 51, 92, 132, 133)."""

from __future__ import annotations

import itertools

import pytest

from headrace.control.grouping import Complete, Discard, GroupAssembler, GroupingError, Retry, Wait
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, Task, Trace

TASK = Task(id="t", messages=({"role": "user", "content": "?"},))
OTHER = Task(id="o", messages=({"role": "user", "content": "!"},))
UNJUDGED = ScoreError(error_class=ErrorClass.TIMEOUT, message="too slow")


def ended(key: AttemptKey, score: object = 1.0, outcome: Outcome = Outcome.DONE, task: Task = TASK) -> Episode:
    result = Score(value=score) if isinstance(score, float) else score
    return Episode(key=key, task=task, turns=(), trace=Trace(), outcome=outcome, score=result)  # type: ignore[arg-type]


def failed(key: AttemptKey) -> Episode:
    return ended(key, None, Outcome.INFRASTRUCTURE_ERROR)


def test_complete_whatever_the_order_of_arrival() -> None:
    """Failures 45, 50, 51: members are joined by key; the group lists them in member order."""
    for order in itertools.permutations(range(3)):
        groups = GroupAssembler(3, 2, "refill", 1)
        keys = groups.start(5, TASK)
        assert keys == [AttemptKey(5, m) for m in range(3)]
        decisions = [groups.add(ended(keys[m], float(m))) for m in order]
        assert decisions[:2] == [Wait(), Wait()]
        assert isinstance(decisions[2], Complete)
        assert decisions[2].group.rewards == (0.0, 1.0, 2.0)
        assert groups.open_groups == ()


def test_refill_tries_the_same_member_again_then_goes_on_without_it() -> None:
    """Failure 133: a member that fails is tried again, at most max_retries times; a score error counts as failure."""
    groups = GroupAssembler(2, 1, "refill", 2)
    first, second = groups.start(0, TASK)
    assert groups.add(failed(first)) == Retry(AttemptKey(0, 0, 1))
    assert groups.open_keys(0) == (AttemptKey(0, 0, 1), AttemptKey(0, 1, 0))
    assert groups.add(ended(AttemptKey(0, 0, 1), UNJUDGED)) == Retry(AttemptKey(0, 0, 2))
    assert groups.add(ended(second, 1.0)) == Wait()
    decision = groups.add(failed(AttemptKey(0, 0, 2)))
    assert isinstance(decision, Complete)
    assert decision.group.rewards == (1.0,)
    assert [e.key for e in decision.group.episodes] == [AttemptKey(0, 0, 2), second]


def test_refill_counts_those_that_are_scored_already() -> None:
    """The last open member is tried again, since with it the group reaches its minimum."""
    groups = GroupAssembler(3, 3, "refill", 1)
    first, second, third = groups.start(0, TASK)
    groups.add(ended(first))
    groups.add(ended(second))
    assert groups.add(failed(third)) == Retry(third._replace(retry=1))


def test_refill_stops_when_the_group_cannot_reach_its_minimum() -> None:
    """No more generation for a group that is lost already."""
    groups = GroupAssembler(2, 2, "refill", 1)
    first, second = groups.start(0, TASK)
    groups.add(failed(first))
    assert groups.add(failed(AttemptKey(0, 0, 1))) == Wait()
    decision = groups.add(failed(second))
    assert isinstance(decision, Discard)
    assert decision.reason == "too_few_scored"


@pytest.mark.parametrize(("num_failed", "result"), [(1, Complete), (2, Discard)])
def test_shrink_goes_on_with_at_least_the_minimum(num_failed: int, result: type) -> None:
    """min_group_size counts scored members only."""
    groups = GroupAssembler(3, 2, "shrink", 5)
    keys = groups.start(0, TASK)
    decisions = [groups.add(failed(k) if i < num_failed else ended(k)) for i, k in enumerate(keys)]
    assert isinstance(decisions[-1], result)


def test_discard_keeps_nothing_of_a_group_with_a_failure() -> None:
    """The members that did end come back with the decision, so that each can be booked (I10)."""
    groups = GroupAssembler(2, 1, "discard", 5)
    first, second = groups.start(0, TASK)
    assert groups.add(failed(first)) == Wait()
    decision = groups.add(ended(second))
    assert isinstance(decision, Discard)
    assert decision.reason == "member_failed"
    assert [e.key for e in decision.episodes] == [first, second]


def test_abandoned_group_says_what_still_runs() -> None:
    """I10: ended members and open attempts are both named, so that none is lost from the books."""
    groups = GroupAssembler(2, 1, "refill", 1)
    first, second = groups.start(3, TASK)
    groups.add(ended(first))
    assert [e.key for e in groups.ended(3)] == [first]
    decision = groups.abandon(3, "stale")
    assert (decision.group_id, decision.reason, decision.open_keys) == (3, "stale", (second,))
    assert [e.key for e in decision.episodes] == [first]
    with pytest.raises(GroupingError, match="not open"):
        groups.add(ended(second))


def test_wrong_joins_are_errors() -> None:
    """D12, failures 50, 51, 131: unknown group, twice the same episode, another task's episode."""
    groups = GroupAssembler(2, 1, "refill", 1)
    first, second = groups.start(0, TASK)
    with pytest.raises(GroupingError, match="group 8 is not open"):
        groups.add(ended(AttemptKey(8, 0)))
    with pytest.raises(GroupingError, match="of task o, its group of task t"):
        groups.add(ended(first, task=OTHER))
    groups.add(ended(first))
    with pytest.raises(GroupingError, match="added before"):
        groups.add(ended(first))
    with pytest.raises(GroupingError, match="used once"):
        groups.start(0, TASK)
    assert isinstance(groups.add(ended(second)), Complete)


def test_unjudged_and_contradictory_episodes_are_errors() -> None:
    """I14, failure 132: nothing without a verdict, and no failure with one, gets into a baseline."""
    groups = GroupAssembler(1, 1, "shrink", 0)
    (key,) = groups.start(0, TASK)
    with pytest.raises(GroupingError, match="was not judged"):
        groups.add(ended(key, None))
    with pytest.raises(GroupingError, match="never a reward"):
        groups.add(ended(key, 0.0, Outcome.TIMEOUT))


@pytest.mark.parametrize(("size", "minimum"), [(2, 3), (2, 0)])
def test_impossible_sizes_are_one_clear_error(size: int, minimum: int) -> None:
    """Bad input names both settings."""
    with pytest.raises(ValueError, match=r"rollout\.min_group_size"):
        GroupAssembler(size, minimum, "refill", 0)
