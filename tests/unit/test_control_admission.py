"""Admission: capacity in groups, places given back, the bound after short batches and after a resume (I7, failure
99)."""

from __future__ import annotations

import pytest

from headrace.control.admission import Admission


def fill(gate: Admission, version: int) -> int:
    count = 0
    while gate.capacity(version) > 0:
        gate.issue()
        count += 1
    return count


def test_synchronous_run_gets_exactly_one_batch_for_each_version() -> None:
    """ALGORITHMS 'Staleness control': K=0, B=4, v=0 gives 4 slots; after 4 accepted none until version 1."""
    gate = Admission(4, 0, 100)
    assert gate.capacity(0) == 4
    assert fill(gate, 0) == 4
    for _ in range(4):
        gate.accept()
    assert gate.capacity(0) == 0
    gate.close_batch(4)
    assert gate.capacity(1) == 4


def test_staleness_opens_more_batches_and_concurrency_bounds_them() -> None:
    """I7: (K + 1) * B outstanding at most, and never more than max_concurrent_groups running."""
    assert fill(Admission(4, 2, 100), 0) == 12
    assert fill(Admission(4, 2, 5), 0) == 5


def test_rejected_groups_return_their_place() -> None:
    """Failure 72, ALGORITHMS (b): a filtered or failed group is replaced, so that a batch fills for ever."""
    gate = Admission(2, 0, 100)
    for _ in range(50):
        assert fill(gate, 0) == 2 - gate.running or gate.running == 2
        gate.reject()
    assert fill(gate, 0) == 1
    gate.accept()
    gate.accept()
    assert gate.capacity(0) == 0


def test_withdrawn_group_returns_its_place() -> None:
    """I9: a group that was accepted and then dropped as stale does not eat a place of a batch."""
    gate = Admission(2, 1, 100)
    assert fill(gate, 0) == 4
    gate.accept()
    gate.withdraw()
    assert gate.capacity(0) == 1


def test_short_batch_does_not_inflate_the_bound() -> None:
    """I7: a batch closed with 1 of 4 groups (dynamic sampling gave up) leaves the next version B places, not 2B - 1."""
    gate = Admission(4, 0, 100)
    assert fill(gate, 0) == 4
    gate.accept()
    for _ in range(3):
        gate.reject()
    gate.close_batch(1)
    assert gate.capacity(1) == 4


def test_capacity_is_never_negative() -> None:
    """A batch is closed short while a group for the next one runs: one place more is taken than there is."""
    gate = Admission(2, 0, 100)
    assert fill(gate, 0) == 2
    gate.accept()
    gate.reject()
    assert fill(gate, 0) == 1
    gate.close_batch(1)
    assert (gate.running, gate.accepted, gate.capacity(0)) == (1, 2, 0)


def test_restore_sets_accepted_to_the_trained_batches() -> None:
    """Bug 1388: without it a resume at version 10 would admit all that was issued before once more."""
    gate = Admission(4, 1, 1000)
    gate.restore(10)
    assert (gate.running, gate.accepted) == (0, 40)
    assert gate.capacity(10) == 8


def test_no_group_is_admitted_that_no_batch_is_left_for() -> None:
    """I9: near the end of a run of 3 batches, staleness admits only what can still be trained."""
    gate = Admission(2, 5, 100, num_batches=3)
    assert fill(gate, 0) == 6


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_settings_are_one_clear_error(numbers: tuple[int, int, int]) -> None:
    """Bad input names the section to correct."""
    with pytest.raises(ValueError, match=r"correct the section \[rollout\]"):
        Admission(*numbers)


def test_a_group_leaves_once() -> None:
    """I10: a second accept or reject of the same group is a defect, not a silent gift of places."""
    gate = Admission(2, 0, 100)
    gate.issue()
    gate.accept()
    with pytest.raises(RuntimeError, match="without a running group"):
        gate.reject()
    with pytest.raises(RuntimeError, match="without a running group"):
        gate.accept()
    gate.withdraw()
    with pytest.raises(RuntimeError, match="without an accepted group"):
        gate.withdraw()
    with pytest.raises(ValueError, match="fit in"):
        gate.close_batch(3)
