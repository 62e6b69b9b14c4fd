"""I6: after each sync, prove that the engine serves the trainer's weights.

A fixed probe prompt is generated three times, and the trainer scores what was sampled:

* ``cold``: in a cache namespace never used before, so that nothing can be found there;
* ``kept``: in the namespace of the syncs before, so that a prefix cache that outlived the update answers with it;
* ``warm``: there once more, so that the prompt that was cached a moment ago is found.

All must agree within the band, or the run stops and names what differs: the tensors whose checksums differ, or, where
all agree, the cache. Where the engine holds a copy, checksums of all tensors are compared at every sync: a few probe
tokens cannot feel every weight. Of a fleet each engine is proved, and the message names the one that differs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import EngineLost, HeadraceError
from headrace.protocols import Fleet, Probed
from headrace.types import AttemptKey, Generation, GenerationRequest, PolicyVersion, Sample, Sampling

NUM_PROBE_TOKENS = 2
"""One from the prefill and one from a decode step: the two paths that weights can take."""
_KEPT_SALT = "canary"


class SyncError(HeadraceError):
    """The engine does not serve what the trainer published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    version: PolicyVersion
    max_gap: float
    """Largest |log-probability of engine - of trainer| over the probe tokens, cold and warm."""
    num_tokens: int


ScoreSamples = Callable[[Sequence[Sample]], Awaitable[Sequence[Sequence[float]]]]
"""The trainer's forward pass: log-probabilities per sample, each as long as its ids."""

TrainerChecksums = Callable[[], Awaitable[Mapping[str, str]]]
"""The trainer's checksum of each tensor. It may read all weights, of all processes: not on the event loop's thread."""


class Canary:
    """Probes one engine, or each engine of a fleet. ``prompt_ids`` are fixed for the run."""

    def __init__(
        self,
        engine: Probed,
        score: ScoreSamples,
        prompt_ids: Sequence[int],
        *,
        bound: float,
        trainer_checksums: TrainerChecksums,
        shares_weights: bool,
    ) -> None:
        """``bound``: largest gap of a log-probability. ``shares_weights``: one storage, so tensors cannot differ."""
        self._engine = engine
        self._trainer_checksums = trainer_checksums
        self._shares_weights = shares_weights
        self._score = score
        self._prompt_ids = tuple(prompt_ids)
        self._bound = bound
        self._num_probes = 0
        self._trainer_turn = asyncio.Lock()
        """Engines are probed at the same time; the trainer's processes answer one question after the other."""
        self._results: list[CanaryResult] = []
        """Of engines that were proved since :meth:`prove` was last asked."""

    async def prove(self, version: PolicyVersion) -> CanaryResult:
        """Raises SyncError, naming what differs, unless engine and trainer agree. The engine may be paused:
        probes run alone, so that no other request is served by weights that are not proved. Of a fleet: each engine
        that was not proved yet, all at once; those that are lost meanwhile are left out."""
        if isinstance(self._engine, Fleet):
            return await self._prove_fleet(self._engine, version)
        result = await self.prove_engine(self._engine, version)
        self._results.clear()
        return result

    async def _prove_fleet(self, fleet: Fleet, version: PolicyVersion) -> CanaryResult:
        async def one(name: str, engine: Probed) -> None:
            try:
                await self.prove_engine(engine, version, name=name, trainer_checksums=trainer_checksums)
            except EngineLost:
                return
            fleet.proved(name, version)

        trainer_checksums = _once(self._trainer_checksums)  # the same for all
        members = await fleet.unproved()
        await asyncio.gather(*(one(*member) for member in members.items()))
        results, self._results = self._results, []  # those of engines that were proved one by one, too
        return CanaryResult(
            version=version,
            max_gap=max((r.max_gap for r in results), default=0.0),
            num_tokens=sum(r.num_tokens for r in results),
        )

    async def prove_engine(
        self,
        engine: Probed,
        version: PolicyVersion,
        *,
        name: str = "the engine",
        score: ScoreSamples | None = None,
        trainer_checksums: TrainerChecksums | None = None,
    ) -> CanaryResult:
        """One engine against the trainer, or against what ``score`` and ``trainer_checksums`` say in its place."""
        if engine.version != version:
            raise SyncError(f"canary: {name} says it serves version {engine.version}, the trainer published {version}")
        self._num_probes += 1
        number = self._num_probes
        cold = self._request(number, "cold", f"canary-{version}-{number}")
        first = await engine.probe([cold, self._request(number, "kept", _KEPT_SALT)])
        second = await engine.probe([self._request(number, "warm", _KEPT_SALT)])  # after 'kept' has left its prompt
        generations = dict(zip(("cold", "kept", "warm"), [*first, *second], strict=True))
        async with self._trainer_turn:
            scored = await (score or self._score)([self._sample(kind, g) for kind, g in generations.items()])
            gaps = {
                kind: self._gap(generation, logprobs[len(self._prompt_ids) :])
                for (kind, generation), logprobs in zip(generations.items(), scored, strict=True)
            }
            checksums = trainer_checksums or self._trainer_checksums
            is_near = all(gap <= self._bound for gap in gaps.values())
            differing: list[str] = []
            if not self._shares_weights or not is_near:
                differing = _differing(await checksums(), engine.weight_checksums())
        if differing or not is_near:
            raise SyncError(self._explain(name, version, gaps, differing))
        result = CanaryResult(
            version=version, max_gap=max(gaps.values()), num_tokens=sum(len(g.ids) for g in generations.values())
        )
        self._results.append(result)
        return result

    def _request(self, number: int, kind: str, salt: str) -> GenerationRequest:
        return GenerationRequest(
            id=f"canary-{number}-{kind}",
            prompt_ids=self._prompt_ids,
            sampling=Sampling(max_new_tokens=NUM_PROBE_TOKENS),
            seed=number,
            cache_salt=salt,
        )

    def _sample(self, name: str, generation: Generation) -> Sample:
        num_prompt = len(self._prompt_ids)
        return Sample(
            id=f"canary/{name}",
            key=AttemptKey(0, ("cold", "kept", "warm").index(name)),
            ids=self._prompt_ids + generation.ids,
            mask=(0,) * num_prompt + (1,) * len(generation.ids),
            prefix_length=num_prompt,
            prefix_key="canary",
            behaviour_logprobs=(0.0,) * num_prompt + generation.logprobs,
            versions=(None,) * num_prompt
            + tuple(span.version for span in generation.version_spans for _ in range(span.start, span.end)),
        )

    @staticmethod
    def _gap(generation: Generation, trainer_logprobs: Sequence[float]) -> float:
        gaps = [abs(a - b) for a, b in zip(generation.logprobs, trainer_logprobs, strict=True)]
        return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)

    def _explain(self, name: str, version: PolicyVersion, gaps: Mapping[str, float], differing: Sequence[str]) -> str:
        if differing:
            cause = "these tensors differ between trainer and engine: " + ", ".join(differing[:8])
            cause += f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        elif gaps["cold"] <= self._bound:
            cause = "all tensors are equal and a cold prompt agrees: the engine's prefix cache outlived an update"
        else:
            cause = "all tensors are equal: the two compute different functions of them (dtype, attention, positions)"
        return (
            f"canary of version {version}: {name} and trainer log-probabilities differ by "
            f"{gaps['cold']:.2e} (cold cache) and {max(gaps['kept'], gaps['warm']):.2e} (warm cache), allowed "
            f"{self._bound:.0e}; {cause}. "
            "Nothing was trained on it; resume from the last checkpoint once mended (I6)"
        )


def _once(ask: TrainerChecksums) -> TrainerChecksums:
    """``ask`` with the first answer kept. One caller at a time."""
    answers: list[Mapping[str, str]] = []

    async def answer() -> Mapping[str, str]:
        if not answers:
            answers.append(await ask())
        return answers[0]

    return answer


def _differing(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """Names of tensors that are not bit for bit the same on both sides."""
    return sorted(name for name in trainer.keys() | engine.keys() if trainer.get(name) != engine.get(name))
