"""I6: after each sync, prove that the engine serves the trainer's weights.

A fixed probe prompt is generated three times, and the trainer scores what was sampled:

* ``cold``: in a cache namespace never used before, so that nothing can be found there;
* ``kept``: in the namespace of the syncs before, so that a prefix cache that outlived the update answers with it;
* ``warm``: there once more, so that the prompt that was cached a moment ago is found.

All must agree within the band, or the run stops and names what differs: the tensors whose checksums differ, or, where
all agree, the cache. Where the engine holds a copy, checksums of all tensors are compared at every sync: a few probe
tokens cannot feel every weight.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.protocols import Engine
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


class Canary:
    """Probes one engine. ``prompt_ids`` are fixed for the run."""

    def __init__(
        self,
        engine: Engine,
        score: ScoreSamples,
        prompt_ids: Sequence[int],
        *,
        bound: float,
        trainer_checksums: Callable[[], Mapping[str, str]],
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

    async def prove(self, version: PolicyVersion) -> CanaryResult:
        """Raises SyncError, naming what differs, unless engine and trainer agree. The engine may be paused:
        probes run alone, so that no other request is served by weights that are not proved."""
        if self._engine.version != version:
            raise SyncError(
                f"canary: the engine says it serves version {self._engine.version}, the trainer published {version}"
            )
        self._num_probes += 1
        cold = self._request("cold", f"canary-{version}-{self._num_probes}")
        first = await self._engine.probe([cold, self._request("kept", _KEPT_SALT)])
        second = await self._engine.probe([self._request("warm", _KEPT_SALT)])  # after 'kept' has left its prompt
        generations = dict(zip(("cold", "kept", "warm"), [*first, *second], strict=True))
        scored = await self._score([self._sample(name, g) for name, g in generations.items()])
        gaps = {
            name: self._gap(generation, logprobs[len(self._prompt_ids) :])
            for (name, generation), logprobs in zip(generations.items(), scored, strict=True)
        }
        differing = [] if self._shares_weights else self._differing()
        if differing or not all(gap <= self._bound for gap in gaps.values()):
            raise SyncError(self._explain(version, gaps, differing or self._differing()))
        return CanaryResult(
            version=version, max_gap=max(gaps.values()), num_tokens=sum(len(g.ids) for g in generations.values())
        )

    def _request(self, name: str, salt: str) -> GenerationRequest:
        return GenerationRequest(
            id=f"canary-{self._num_probes}-{name}",
            prompt_ids=self._prompt_ids,
            sampling=Sampling(max_new_tokens=NUM_PROBE_TOKENS),
            seed=self._num_probes,
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

    def _differing(self) -> list[str]:
        """Names of tensors that are not bit for bit the same on both sides."""
        trainer, engine = self._trainer_checksums(), self._engine.weight_checksums()
        return sorted(name for name in trainer.keys() | engine.keys() if trainer.get(name) != engine.get(name))

    def _explain(self, version: PolicyVersion, gaps: Mapping[str, float], differing: Sequence[str]) -> str:
        if differing:
            cause = "these tensors differ between trainer and engine: " + ", ".join(differing[:8])
            cause += f" and {len(differing) - 8} more" if len(differing) > 8 else ""
        elif gaps["cold"] <= self._bound:
            cause = "all tensors are equal and a cold prompt agrees: the engine's prefix cache outlived an update"
        else:
            cause = "all tensors are equal: the two compute different functions of them (dtype, attention, positions)"
        return (
            f"canary of version {version}: engine and trainer log-probabilities differ by "
            f"{gaps['cold']:.2e} (cold cache) and {max(gaps['kept'], gaps['warm']):.2e} (warm cache), allowed "
            f"{self._bound:.0e}; {cause}. "
            "Nothing was trained on it; resume from the last checkpoint once mended (I6)"
        )
