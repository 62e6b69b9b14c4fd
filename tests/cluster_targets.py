"""Objects for the tests of actors, made in the actors' own processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from typing import Any

from headrace.protocols import Observation
from headrace.types import Task


class Echo:
    """Answers what it is told, and breaks in every way that it is asked for."""

    def __init__(self, prefix: str = "", inherited_fd: int | None = None) -> None:
        self._prefix, self._fd = prefix, inherited_fd
        self.cancelled = 0

    def echo(self, value: Any) -> Any:
        return self._prefix + value if isinstance(value, str) else value

    async def wait(self) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def num_cancelled(self) -> int:
        return self.cancelled

    def fail(self) -> None:
        raise KeyError("no such thing")

    def unspeakable(self) -> Any:
        return object()

    def leave(self, status: int) -> None:
        print("these are my last words", file=sys.stderr, flush=True)
        os._exit(status)

    def pid(self) -> int:
        return os.getpid()

    def read_inherited(self) -> bytes:
        return os.pread(self._fd, 100, 0)

    def loaded_modules(self) -> list[str]:
        return sorted(sys.modules)

    def spin(self) -> None:
        """Holds the interpreter for good, so that no signal handler of Python's gets to run."""
        ctypes.PyDLL(None).pause() if sys.platform == "linux" else time.sleep(3600)


def failing() -> Echo:
    raise RuntimeError("no disk, no model")


def slow() -> Echo:
    print("still loading", flush=True)
    time.sleep(3600)
    return Echo()


class Counting:
    """An environment of three turns that answers with what it was told so far, and the seed."""

    def __init__(self) -> None:
        self._said: list[str] = []

    async def reset(self, task: Task, seed: int) -> Observation:
        self._seed = seed
        return self._observation()

    async def step(self, action: str) -> Observation:
        self._said.append(action)
        return self._observation()

    async def close(self) -> None:
        pass

    def _observation(self) -> Observation:
        text = f"{self._seed}: {' '.join(self._said)}"
        return Observation(messages=({"role": "user", "content": text},), done=len(self._said) == 3)


class Forgetful(Counting):
    """Draws on the clock, so that it cannot be played again."""

    def _observation(self) -> Observation:
        return Observation(messages=({"role": "user", "content": str(time.monotonic_ns())},))


def counting() -> Any:
    from headrace.cluster.environments import EnvironmentActor

    return EnvironmentActor(lambda task: Forgetful() if task.id == "forgetful" else Counting())
