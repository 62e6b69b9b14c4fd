"""The task cursor: pure order, nothing skipped or doubled by a resume (failures 107 to 114)."""

from __future__ import annotations

import json

import pytest

from headrace.control.cursor import TaskCursor


def draw(cursor: TaskCursor, count: int) -> list[tuple[int, int]]:
    return [tuple(cursor.next()) for _ in range(count)]


def test_every_epoch_is_another_permutation_of_all_tasks() -> None:
    """Each task once an epoch, in an order that changes with epoch and seed."""
    cursor = TaskCursor(10, seed=1)
    epochs = [[cursor.task_index(g) for g in range(e * 10, e * 10 + 10)] for e in range(4)]
    assert all(sorted(e) == list(range(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert [TaskCursor(10, seed=2).task_index(g) for g in range(10)] != epochs[0]


def test_task_of_a_group_is_a_pure_function() -> None:
    """Failure 112: any order of asking gives the same answers, far epochs included."""
    forward = [TaskCursor(6, seed=4).task_index(g) for g in range(40)]
    cursor = TaskCursor(6, seed=4)
    assert [cursor.task_index(g) for g in reversed(range(40))] == forward[::-1]
    # Golden: a resumed run of another release must meet the same tasks.
    assert forward[:12] == GOLDEN


GOLDEN = [1, 3, 0, 4, 2, 5, 2, 3, 5, 0, 1, 4]


@pytest.mark.parametrize("num_drawn", range(0, 14))
def test_resume_at_every_offset_skips_and_doubles_nothing(num_drawn: int) -> None:
    """Failures 107, 108, 109, 112, 113: the groups settled before the cut plus those drawn after the resume are those
    of the uninterrupted run, epoch borders (5, 10) included; what was outstanding comes first."""
    whole = draw(TaskCursor(5, seed=0), 20)
    cursor = TaskCursor(5, seed=0)
    drawn = draw(cursor, num_drawn)
    settled = [d for d in drawn if d[0] % 3 != 1]
    for group, _ in settled:
        cursor.settle(group)
    resumed = TaskCursor(5, seed=0)
    resumed.restore(json.loads(json.dumps(cursor.state())))
    owed = [d for d in drawn if d not in settled]
    assert resumed.num_owed == len(owed)
    after = draw(resumed, 20 - len(settled))
    assert after[: len(owed)] == owed
    assert sorted(settled + after) == whole


def test_a_second_resume_still_owes_what_the_first_did_not_settle() -> None:
    """I11: groups owed and not yet drawn again are in the state, too."""
    cursor = TaskCursor(5, seed=0)
    draw(cursor, 4)
    resumed = TaskCursor(5, seed=0)
    resumed.restore(cursor.state())
    resumed.next()
    assert resumed.state() == cursor.state()


def test_other_tasks_or_seed_are_refused() -> None:
    """Failure 114: a resume with another data set must not run on silently."""
    state = TaskCursor(5, seed=0).state()
    with pytest.raises(ValueError, match="num_tasks = 5, this run has 6"):
        TaskCursor(6, seed=0).restore(state)
    with pytest.raises(ValueError, match="seed = 0, this run has 1"):
        TaskCursor(5, seed=1).restore(state)
    with pytest.raises(ValueError, match="task source is empty"):
        TaskCursor(0, seed=0)


def test_a_group_is_settled_once() -> None:
    """I10: a second settle is a defect."""
    cursor = TaskCursor(5, seed=0)
    group = cursor.next().group
    cursor.settle(group)
    with pytest.raises(ValueError, match="not outstanding"):
        cursor.settle(group)
    assert cursor.next_group == 1
