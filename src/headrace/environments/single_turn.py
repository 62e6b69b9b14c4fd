"""The simplest environment: the task's messages, one reply, done."""

from __future__ import annotations

from headrace.protocols import Observation
from headrace.types import Task


class SingleTurn:
    """An episode of one turn. Single use, like every environment."""

    def __init__(self) -> None:
        self._state = "new"

    async def reset(self, task: Task, seed: int) -> Observation:
        """The task's messages; nothing here is random, so ``seed`` changes nothing."""
        if self._state != "new":
            raise RuntimeError("a SingleTurn environment plays one episode; make a new one for the next")
        self._state = "waiting"
        return Observation(messages=task.messages)

    async def step(self, action: str) -> Observation:
        """Any reply ends the episode."""
        if self._state != "waiting":
            raise RuntimeError(f"step() in state '{self._state}': reset() comes first, and one step ends the episode")
        self._state = "done"
        return Observation(messages=(), done=True)

    async def close(self) -> None:
        self._state = "closed"
