"""Environments in workers: an actor that holds many, and an environment whose real one is held there.

An episode outlives its worker. Its environment is made again on another one, by the same task, seed and actions; what
it answered before must come again, word by word. Where it does not (it draws on something besides its seed), the
attempt ends as a failure of the machinery, and is tried again like any other. So an environment that changes the world
outside of itself must bear to be played from its start more than once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.cluster.actors import ActorDied
from headrace.cluster.pool import ActorPool, Member
from headrace.errors import PartLost
from headrace.protocols import Environment, Observation
from headrace.types import Task

T = TypeVar("T")

MAX_MOVES = 3
"""Workers that one episode may lose before it counts as what kills them."""


class EnvironmentActor:
    """The worker's object: environments by the number that their user gave them."""

    def __init__(self, make_environment: Callable[[Task], Environment]) -> None:
        self._make = make_environment
        self._environments: dict[str, Environment] = {}

    async def reset(self, key: str, task: Task, seed: int) -> Observation:
        self._environments[key] = self._make(task)
        return await self._environments[key].reset(task, seed)

    async def step(self, key: str, action: str) -> Observation:
        return await self._environments[key].step(action)

    async def close(self, key: str) -> None:
        environment = self._environments.pop(key, None)
        if environment is not None:
            await environment.close()

    def num_open(self) -> int:
        """Environments that were reset and not closed."""
        return len(self._environments)


class RemoteEnvironment:
    """``protocols.Environment`` in a worker of ``pool``. What the real one raises comes as RemoteError."""

    def __init__(self, pool: ActorPool, key: str, *, worker_deadline_s: float) -> None:
        """``key``: different for every environment of the run. ``worker_deadline_s``: for a worker to be free."""
        self._pool, self._key, self._worker_deadline_s = pool, key, worker_deadline_s
        self._member: Member | None = None
        self._task: Task | None = None
        self._seed = 0
        self._actions: list[str] = []
        self._seen: list[Observation] = []
        self._num_moves = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        if self._task is not None:
            raise RuntimeError("an environment plays one episode; make a new one for the next")
        self._task, self._seed = task, seed
        return await self._next_observation()

    async def step(self, action: str) -> Observation:
        if self._task is None:
            raise RuntimeError("step() before reset()")
        self._actions.append(action)
        return await self._next_observation()

    async def close(self) -> None:
        """The worker lets go of the real one; where the worker is gone, it has."""
        member, self._member = self._member, None
        if member is None:
            return
        try:
            await member.handle.call("close", self._key)
        except ActorDied as error:
            self._pool.died(member, str(error))
        finally:
            self._pool.done(member)

    async def _next_observation(self) -> Observation:
        """Of the last action, in this worker or, where it dies, in the next."""
        while True:
            try:
                if self._member is None:
                    await self._move()
                observation = await self._asked(len(self._seen))
                self._seen.append(observation)
                return observation
            except ActorDied as error:
                self._lost(error)

    async def _move(self) -> None:
        """To a worker, and there up to where the episode stands."""
        try:
            self._member = await self._pool.member(self._worker_deadline_s)
        except TimeoutError:
            raise PartLost(
                f"no environment worker was there for {self._worker_deadline_s:g} s; see cluster.start_deadline_s"
            ) from None
        for number, before in enumerate(self._seen):
            again = await self._asked(number)
            if again != before:
                raise PartLost(
                    f"environment {self._key} lost its worker, and played again it answered action {number} "
                    f"otherwise than before ({again.messages!r:.80} instead of {before.messages!r:.80}): it draws on "
                    "something besides task, seed and actions"
                )

    async def _asked(self, number: int) -> Observation:
        """Observation ``number``: 0 is the reset's."""
        assert self._member is not None and self._task is not None
        if number == 0:
            call: Awaitable[Observation] = self._member.handle.call("reset", self._key, self._task, self._seed)
        else:
            call = self._member.handle.call("step", self._key, self._actions[number - 1])
        return await call

    def _lost(self, error: ActorDied) -> None:
        """Raises where it is enough."""
        member, self._member = self._member, None
        if member is None:  # no worker is left at all
            raise error
        self._pool.died(member, str(error))
        self._pool.done(member)
        self._num_moves += 1
        if self._num_moves >= MAX_MOVES:
            raise PartLost(
                f"environment {self._key} lost {self._num_moves} workers in a row; the last end: {error}"
            ) from error


class EnvironmentWorkers:
    """What the runner takes environments from."""

    def __init__(self, pool: ActorPool, *, worker_deadline_s: float) -> None:
        self.pool = pool
        self._worker_deadline_s = worker_deadline_s
        self._num_made = 0

    def make_environment(self, task: Task) -> Environment:
        self._num_made += 1
        return RemoteEnvironment(self.pool, f"e{self._num_made}", worker_deadline_s=self._worker_deadline_s)

    async def start(self) -> None:
        await self.pool.start()

    async def close(self) -> None:
        await asyncio.shield(self.pool.close())
