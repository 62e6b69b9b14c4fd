"""Staleness: age, oldest first, what holds the next step, mask and drop (I7, I8, I9; failures 98, 99, 101)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from headrace.control.staleness import (
    BatchSelector,
    StalenessError,
    mask_overage,
    must_wait_for,
    oldest_version,
    overage,
)
from headrace.types import (
    AttemptKey,
    Episode,
    Group,
    Outcome,
    PolicyVersion,
    Sample,
    Score,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)

TASK = Task(id="t", messages=())


def episode(group: int, member: int, numbers: list[int], lineage: int = 0, issued: int = 0) -> Episode:
    """One policy token of each version number."""
    spans = tuple(VersionSpan(PolicyVersion(lineage, n), i, i + 1) for i, n in enumerate(numbers))
    policy = Segment(
        source=Source.POLICY, ids=tuple(numbers), parent=0, logprobs=(-1.0,) * len(numbers), version_spans=spans
    )
    segments = (Segment(source=Source.TEMPLATE, ids=(1,)), *((policy,) if numbers else ()))
    return Episode(
        key=AttemptKey(group, member),
        task=TASK,
        turns=(),
        trace=Trace(segments=segments),
        outcome=Outcome.DONE,
        score=Score(value=1.0),
        issued_version=PolicyVersion(lineage, issued),
    )


def group(group_id: int, *numbers: int) -> Group:
    episodes = tuple(episode(group_id, m, [n, n + 1]) for m, n in enumerate(numbers))
    return Group(id=group_id, task=TASK, episodes=episodes)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    """I7, ALGORITHMS (d): members may span versions; the oldest token of the oldest member counts, across lineages."""
    assert oldest_version(group(0, 5, 3, 4)) == 3
    assert oldest_version(episode(0, 0, [7, 6], lineage=2)) == 6
    assert oldest_version(episode(0, 0, [], issued=4)) == 4
    assert overage({0: 3, 1: 4}, version=6, max_staleness=2) == (0,)
    assert overage({8: 3, 7: 2, 6: 4}, version=6, max_staleness=2) == (7, 8)


def test_batch_is_oldest_first_then_by_id_whatever_the_order_of_arrival() -> None:
    """I18, failure 99: the choice is a function of what is buffered, and no backlog can pile up behind the newest."""
    buffered = [group(4, 2), group(1, 2), group(9, 1), group(2, 3)]
    for order in (buffered, buffered[::-1]):
        chosen = BatchSelector(2, 2).select(order, {}, version=3)
        assert [g.id for g in chosen.batch] == [9, 1]


def test_selector_says_how_many_groups_are_missing() -> None:
    """A batch that is not full is not trained, unless a smaller one is asked for."""
    selector = BatchSelector(3, 2)
    assert selector.select([group(0, 1)], {}, version=1).num_missing == 2
    assert selector.select([group(0, 1)], {}, version=1).batch == ()
    assert [g.id for g in selector.select([group(0, 1)], {}, version=1, min_groups=1).batch] == [0]


def test_a_smaller_batch_has_as_many_groups_as_were_asked_for() -> None:
    """And never none: a batch of nothing would count as a step."""
    selector = BatchSelector(3, 2)
    assert selector.select([group(0, 1)], {}, version=1, min_groups=2).num_missing == 1
    assert selector.select([], {}, version=1, min_groups=0).num_missing == 1


def test_stale_groups_fill_no_batch() -> None:
    """I9: two are there, one of them is dropped, so one is missing."""
    chosen = BatchSelector(2, 1, "drop").select([group(0, 0), group(1, 2)], {}, version=2)
    assert ([g.id for g in chosen.stale], chosen.batch, chosen.num_missing) == ([0], (), 1)


def test_the_step_waits_for_a_group_that_would_grow_too_old() -> None:
    """I7: K=1, a running group of version 0 must be in the batch of version 1."""
    selector = BatchSelector(1, 1)
    assert [g.id for g in selector.select([group(0, 0)], {7: 0}, version=0).batch] == [0]
    held = selector.select([group(1, 1)], {7: 0}, version=1)
    assert held.batch == ()
    assert held.held_by == (7,)
    assert [g.id for g in selector.select([group(1, 1), group(7, 0)], {}, version=1).batch] == [7]


def test_two_slow_groups_may_not_fall_due_for_one_place() -> None:
    """I7: K=2, B=1. Groups 1 and 2 of version 0 still run at version 1, both due at version 2. Training group 3 now
    would leave two for the one place of version 2, so the step waits although no single group would be too old yet."""
    held = BatchSelector(1, 2).select([group(3, 1)], {1: 0, 2: 0}, version=1)
    assert held.held_by == (1, 2)
    assert BatchSelector(1, 2).select([group(3, 1)], {2: 0}, version=1).batch[0].id == 3


def test_must_wait_for_names_nobody_when_all_is_young() -> None:
    """I7: pacing holds only what age demands."""
    assert must_wait_for({1: 5, 2: 5}, {3: 4}, 5, 2, 2) == ()
    assert must_wait_for({1: 3}, {}, 5, 2, 2) == (1,)


def test_a_bad_choice_that_no_wait_can_mend_is_an_error() -> None:
    """I7: leaving finished old groups out of a batch is refused instead of training them too old."""
    with pytest.raises(StalenessError, match="oldest first"):
        must_wait_for({}, {1: 3}, 5, 2, 2)
    with pytest.raises(StalenessError, match="defect"):
        BatchSelector(1, 1).select([group(0, 0)], {}, version=2)


def test_drop_names_the_stale_and_trains_the_rest() -> None:
    """I9: only on_overage = drop drops, and it says what."""
    chosen = BatchSelector(1, 1, "drop").select([group(0, 0), group(1, 2)], {5: 0}, version=2)
    assert [g.id for g in chosen.stale] == [0]
    assert [g.id for g in chosen.batch] == [1]


def test_mask_silences_old_tokens_and_keeps_the_rest() -> None:
    """I7: mask sets old tokens' mask to 0; they then say nothing (no log-probability, no version)."""
    versions = tuple(PolicyVersion(0, n) for n in (1, 2, 3))
    sample = Sample(
        id="g0m0/0",
        key=AttemptKey(0, 0),
        ids=(9, 1, 2, 3),
        mask=(0, 1, 1, 1),
        behaviour_logprobs=(0.0, -1.0, -2.0, -3.0),
        versions=(None, *versions),
    )
    masked = mask_overage(sample, version=4, max_staleness=2)
    assert masked.mask == (0, 0, 1, 1)
    assert masked.behaviour_logprobs == (0.0, 0.0, -2.0, -3.0)
    assert masked.versions == (None, None, *versions[1:])
    assert masked.ids == sample.ids
    assert mask_overage(sample, version=3, max_staleness=2) is sample


def test_ages_of_successive_versions_differ_by_one() -> None:
    """I7: the age is counted in published updates."""
    ages = [len(overage({0: 2}, version, 3)) for version in range(3, 8)]
    assert ages == [0, 0, 0, 1, 1]
    assert all(b >= a for a, b in pairwise(ages))
