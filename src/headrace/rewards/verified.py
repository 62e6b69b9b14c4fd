"""Rewards in killable worker processes: ``math``, ``format`` with a pattern, ``reasoning_gym``, functions."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from headrace.rewards.base import RewardBase, ValueRange, missing_answer
from headrace.rewards.extract import Extracted, Where, last_box
from headrace.rewards.text import ReasoningOptions, find, gold_text
from headrace.rewards.worker_pool import Verdict, WorkerPool
from headrace.types import Episode, ErrorClass, Score, ScoreError, ScoreResult

REASONING_GYM_KEY = "reasoning_gym"
"""Where the task's metadata holds the generator's entry."""
_KILL_S = 1.0
"""What killing a worker may add to a deadline."""


class MathOptions(ReasoningOptions):
    extract: Where = "boxed"
    """Strict: without a box there is no answer. ``reply`` takes the whole answer part."""
    relative_tolerance: float = Field(1e-6, ge=0, lt=1)
    """For answers or references written with a decimal point; exact values are compared exactly."""
    cpu_s: float | None = Field(None, gt=0)
    """CPU seconds of one comparison; None: a quarter of ``deadline_s``, so that a machine which gives the worker at
    least a quarter of a core tells an endless computation from its own slowness."""
    unverifiable: Literal["error", "zero"] = "error"
    """An answer that used up its CPU seconds or memory, or made the verifier raise. ``error``: no score.
    ``zero``: 0 with the component ``unverifiable``. A busy machine or a crash is an error in either case."""


class ReasoningGymOptions(ReasoningOptions):
    extract: Where = "reply"


class PooledReward(RewardBase):
    """A reward with a pool of workers."""

    def __init__(self, name: str, pool: WorkerPool, score_deadline_s: float) -> None:
        super().__init__(name)
        self.pool = pool
        self._score_deadline_s = score_deadline_s

    @property
    def value_range(self) -> ValueRange:
        """For a function of the user's known once its worker has loaded it."""
        return self.pool.value_range

    @property
    def deadline_s(self) -> float:
        return self.pool.queue_deadline_s + self._score_deadline_s + _KILL_S

    async def start(self) -> None:
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.close()

    async def _judge(self, payload: Mapping[str, Any]) -> Verdict:
        return await self.pool.judge(payload, self._score_deadline_s)


class MathReward(PooledReward):
    """1 where the answer is the same mathematics as the reference; see ``math_compare`` for what that means.

    Components ``no_answer``, ``malformed``, ``unparsable`` and ``unverifiable`` tell why a 0 is one. A wrong or
    unreadable answer is the policy's and scores 0; what the verifier could not decide is an error (I14)."""

    def __init__(self, options: MathOptions, pool: WorkerPool, deadline_s: float, name: str = "math") -> None:
        super().__init__(name, pool, deadline_s)
        self._options = options

    async def score(self, episode: Episode) -> ScoreResult:
        gold = gold_text(episode)
        if gold is None:
            return missing_answer(self.name, episode, "has no answer to compare with")
        found = find(episode, self._options.extract, self._options)
        if found.text is None:
            return self._components(0.0, found, {})
        verdict = await self._judge({"gold": last_box(gold).text or gold, "answer": found.text})
        if isinstance(verdict.result, Score):
            return self._components(verdict.result.value, found, verdict.result.components)
        if verdict.unverifiable and self._options.unverifiable == "zero":
            return self._components(0.0, found, {"unverifiable": 1.0})
        return verdict.result

    @staticmethod
    def _components(value: float, found: Extracted, others: Mapping[str, float]) -> Score:
        components = {
            "no_answer": float(found.problem == "no_answer"),
            "malformed": float(found.problem == "malformed"),
            "unparsable": 0.0,
            "unverifiable": 0.0,
            **others,
        }
        return Score(value=value, components=components)


class PatternReward(PooledReward):
    """1 where the whole reply matches the user's pattern from end to end."""

    async def score(self, episode: Episode) -> ScoreResult:
        return (await self._judge({"text": episode.reply})).result


class ReasoningGymReward(PooledReward):
    """The generator's own score for the answer, in [0, 1]; an empty reply scores 0 without asking it."""

    def __init__(
        self, options: ReasoningGymOptions, pool: WorkerPool, deadline_s: float, name: str = "reasoning_gym"
    ) -> None:
        super().__init__(name, pool, deadline_s)
        self._options = options

    async def score(self, episode: Episode) -> ScoreResult:
        source = episode.task.metadata.get(REASONING_GYM_KEY)
        if source is None:
            return missing_answer(self.name, episode, "was not made by reasoning-gym (tasks.type = 'reasoning_gym')")
        found = find(episode, self._options.extract, self._options)
        components = {
            "no_answer": float(found.problem == "no_answer"),
            "malformed": float(found.problem == "malformed"),
        }
        if found.text is None:
            return Score(value=0.0, components=components)
        result = (await self._judge({"source": source, "answer": found.text})).result
        return Score(value=result.value, components=components) if isinstance(result, Score) else result


class FunctionReward(PooledReward):
    """A function of the user's, ``module:function`` or ``file.py:function``, in a worker process."""

    async def score(self, episode: Episode) -> ScoreResult:
        try:
            without_routing = replace(episode, trace=episode.trace.without_routing())
            pickled = base64.b64encode(pickle.dumps(without_routing)).decode()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            message = (
                f"task {episode.task.id!r} cannot be sent to a reward worker: {error}; its values must be picklable"
            )
            return ScoreError(error_class=ErrorClass.INFRASTRUCTURE, message=message, reward=self.name)
        return (await self._judge({"pickled": pickled})).result
