"""The weighted sum of a run's rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.protocols import Reward
from headrace.rewards.base import RewardBase, ValueRange, to_score
from headrace.types import Episode, Score, ScoreError, ScoreResult


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a sum. A part of weight 0 is reported as a component and pays nothing."""

    reward: Reward
    weight: float = 1.0


class CompositeReward(RewardBase):
    """value = sum of weight x value. Components: each part's value under its name, before weighting, and its own
    components under ``name/component``. If one part could not judge, there is no sum: its error is the result."""

    def __init__(self, parts: Sequence[Part], name: str = "reward") -> None:
        super().__init__(name)
        self.parts = tuple(parts)
        names = [part.reward.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"the parts of a reward need different names, and at least one: {names}")

    @property
    def value_range(self) -> ValueRange:
        ends = [sorted(part.weight * bound for bound in part.reward.value_range) for part in self.parts]
        return sum(low for low, _ in ends), sum(high for _, high in ends)

    @property
    def deadline_s(self) -> float:
        """Parts judge at the same time: the longest of their deadlines; 0 where all judge in process."""
        return max(getattr(part.reward, "deadline_s", 0.0) for part in self.parts)

    async def start(self) -> None:
        """Self-test every part; nothing is left running where one fails."""
        try:
            await asyncio.gather(*(r.start() for part in self.parts if isinstance(r := part.reward, RewardBase)))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await asyncio.gather(*(part.reward.close() for part in self.parts))

    async def score(self, episode: Episode) -> ScoreResult:
        results = await asyncio.gather(*(part.reward.score(episode) for part in self.parts))
        value = 0.0
        components: dict[str, float] = {}
        value_T: list[float] | None = None
        for part, result in zip(self.parts, results, strict=True):
            name = part.reward.name
            # A third party's reward passes the same gate as ours.
            checked = to_score(result, part.reward.value_range, name)
            if isinstance(checked, ScoreError):
                return checked
            value += part.weight * checked.value
            components[name] = checked.value
            components |= {f"{name}/{key}": component for key, component in checked.components.items()}
            if checked.value_T is not None:
                weighted = [part.weight * v for v in checked.value_T]
                value_T = weighted if value_T is None else [a + b for a, b in zip(value_T, weighted, strict=True)]
        return Score(value=value, components=components, value_T=None if value_T is None else tuple(value_T))


def with_gold(reward: CompositeReward, gold: CompositeReward) -> CompositeReward:
    """``reward`` as it is, with the value of ``gold`` as the component ``gold``, which pays nothing."""
    named = CompositeReward(gold.parts, name="gold")
    return CompositeReward([Part(reward, 1.0), Part(named, 0.0)])
