"""The task cursor: which task the g-th group of the run works on, and which groups are owed again after a resume.

The task of group g is a pure function of (seed, g): epoch by epoch, each epoch a shuffle of its own. So a resume needs
no replay of a loader, and stands at the same place whether it happens inside an epoch or on its border (failures 107,
110, 112, 113). The state in a checkpoint is the next new group and the groups that were handed out and not settled when
it was cut: those are handed out again first, so nothing is skipped and nothing doubled (failures 108, 109).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple


class Draw(NamedTuple):
    """Group ``group`` works on task number ``task_index``."""

    group: int
    task_index: int


class TaskCursor:
    """Hands out groups in order. Not thread-safe: the loop's thread owns it."""

    def __init__(self, num_tasks: int, seed: int) -> None:
        if num_tasks < 1:
            raise ValueError("there are no tasks to draw from: the task source is empty")
        self._num_tasks = num_tasks
        self._seed = seed
        self._next_group = 0
        self._owed: deque[int] = deque()
        self._outstanding: set[int] = set()
        self._orders: dict[int, tuple[int, ...]] = {}

    @property
    def next_group(self) -> int:
        """The first group number that was never handed out."""
        return self._next_group

    @property
    def num_owed(self) -> int:
        """Groups that a resume still has to hand out again."""
        return len(self._owed)

    def task_index(self, group: int) -> int:
        """Task number of group ``group``: position group mod n of the shuffle of epoch group // n."""
        epoch, position = divmod(group, self._num_tasks)
        if epoch not in self._orders:
            while len(self._orders) >= 2:  # runs walk forward: the current epoch and one neighbour are enough
                del self._orders[min(self._orders)]
            self._orders[epoch] = _epoch_order(self._num_tasks, self._seed, epoch)
        return self._orders[epoch][position]

    def next(self) -> Draw:
        """The next group to issue: those owed from before a resume, in order, then new ones."""
        if self._owed:
            group = self._owed.popleft()
        else:
            group = self._next_group
            self._next_group += 1
        self._outstanding.add(group)
        return Draw(group, self.task_index(group))

    def settle(self, group: int) -> None:
        """The group was trained, dropped or failed: it is not owed any more."""
        if group not in self._outstanding:
            raise ValueError(f"group {group} is not outstanding: it was never drawn, or it was settled before")
        self._outstanding.remove(group)

    def state(self) -> dict[str, Any]:
        """JSON values for a checkpoint; ``pending`` are the groups that were drawn and are not settled."""
        return {
            "num_tasks": self._num_tasks,
            "seed": self._seed,
            "next_group": self._next_group,
            "pending": sorted(self._outstanding | set(self._owed)),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state`. Raises ValueError where tasks or seed are others than then."""
        for name, mine in (("num_tasks", self._num_tasks), ("seed", self._seed)):
            if state[name] != mine:
                raise ValueError(
                    f"the checkpoint was cut with {name} = {state[name]}, this run has {mine}: groups would meet other "
                    "tasks; resume with the same tasks and seed, or start a new run"
                )
        self._next_group = int(state["next_group"])
        self._owed = deque(sorted(int(g) for g in state["pending"]))
        self._outstanding = set()


def _epoch_order(num_tasks: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Sorting by a hash is a shuffle that no library version can change under a resumed run."""
    key = f"{seed}/{epoch}".encode()

    def rank(index: int) -> bytes:
        return hashlib.blake2b(index.to_bytes(8, "little"), key=key[:64], digest_size=16).digest()

    return tuple(sorted(range(num_tasks), key=rank))
