"""Rewards in workers: an actor that holds the run's rewards, and a reward that asks it.

A score depends on its episode only, so the score that a dying worker owed is asked of the next one. What can be lost
that way is time, never a verdict; after several workers it is an error of class infrastructure, never a value (I14).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from headrace.cluster.actors import ActorDied
from headrace.cluster.pool import ActorPool
from headrace.protocols import Reward
from headrace.types import Episode, ErrorClass, Group, ScoreError, ScoreResult

MAX_WORKERS_PER_SCORE = 3
Which = Literal["reward", "gold"]


class RewardActor:
    """The worker's object: the run's reward and, where there is one, the reward with its gold standard."""

    def __init__(self, reward: Reward, with_gold: Reward | None = None) -> None:
        self._rewards = {"reward": reward, "gold": with_gold or reward}

    async def start(self) -> None:
        """Self-test (I15); the gold standard holds the reward, and starts it too."""
        await self._rewards["gold"].start()

    async def score(self, which: Which, episode: Episode) -> ScoreResult:
        return await self._rewards[which].score(episode)

    async def score_group(self, which: Which, group: Group) -> list[ScoreResult]:
        return await self._rewards[which].score_group(group)

    async def close(self) -> None:
        await self._rewards["gold"].close()


class RemoteReward:
    """``protocols.Reward`` over the workers of ``pool``, each of which holds the same as ``local``."""

    def __init__(self, local: Reward, pool: ActorPool, which: Which, *, worker_deadline_s: float) -> None:
        """``local`` is never started: it tells name, range and deadline. ``worker_deadline_s``: for a free worker."""
        self._local, self._pool, self._which, self._worker_deadline_s = local, pool, which, worker_deadline_s

    @property
    def name(self) -> str:
        return self._local.name

    @property
    def value_range(self) -> tuple[float, float]:
        return self._local.value_range

    @property
    def deadline_s(self) -> float:
        """A score may be asked of several workers, one after the other."""
        return MAX_WORKERS_PER_SCORE * (self._local.deadline_s + self._worker_deadline_s)

    async def start(self) -> None:
        """Start the workers. The pool's ``start`` lets each prove itself before it serves, the later ones too."""
        await self._pool.start()

    async def score(self, episode: Episode) -> ScoreResult:
        result: ScoreResult = await self._asked("score", replace(episode, trace=episode.trace.without_routing()))
        return result

    async def score_group(self, group: Group) -> list[ScoreResult]:
        result = await self._asked("score_group", group)
        return [result] * len(group.episodes) if isinstance(result, ScoreError) else list(result)

    async def close(self) -> None:
        await self._pool.close()

    async def _asked(self, method: str, argument: Any) -> Any:
        why = ""
        for _ in range(MAX_WORKERS_PER_SCORE):
            try:
                member = await self._pool.member(self._worker_deadline_s)
            except TimeoutError:
                return self._failed(f"no reward worker was free for {self._worker_deadline_s:g} s")
            except ActorDied as error:
                return self._failed(str(error))
            try:
                return await member.handle.call(method, self._which, argument)
            except ActorDied as error:
                why = str(error)
                self._pool.died(member, why)
            finally:
                self._pool.done(member)
        return self._failed(f"{MAX_WORKERS_PER_SCORE} reward workers died over one score; the last end: {why}")

    def _failed(self, message: str) -> ScoreError:
        return ScoreError(error_class=ErrorClass.INFRASTRUCTURE, message=message, reward=self.name)
