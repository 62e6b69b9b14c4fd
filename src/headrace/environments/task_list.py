"""The plain carrier of :class:`headrace.protocols.TaskSource`: tasks in memory, with a fingerprint of them all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from headrace.protocols import TaskSource
from headrace.types import Task


class TaskList:
    """A finite, ordered set of tasks.

    Example::

        tasks = TaskList([Task(id="a", messages=({"role": "user", "content": "3 * 4?"},), answer="12")])
        len(tasks), tasks[0].answer, tasks.fingerprint
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = tuple(tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (16 hex digits) over ids and contents in order: any change of a task changes it (F114)."""
        digest = hashlib.sha256()
        for task in self._tasks:
            digest.update(f"{len(task.id)}:{task.id}:{task.content_hash};".encode())
        return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSplits:
    """The tasks of a run. ``held_out`` is empty where the configuration asked for none."""

    train: TaskSource
    held_out: TaskSource
