"""What passes between the trainer and an algorithm's loss. Shapes: N trained tokens, E episodes.

Everything is flat over the trained tokens (mask 1) of one micro-batch: no padding exists here, so that nothing
behind a mask can ever reach a loss. All samples of one episode are in one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import torch
from torch import Tensor

from headrace.types import AttemptKey, PolicyVersion, Sample, Stream

STREAMS: tuple[Stream, ...] = ("rl", "supervised", "distillation")
"""A token's ``stream_N`` is a place in this tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTotals:
    """Counts of one stream over the whole minibatch."""

    num_tokens: int = 0
    num_episodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the whole minibatch, before any rejection and over all ranks: the denominators (I17).

    ``num_tokens`` and ``num_episodes`` are those of the rl stream; each other stream has its own."""

    num_tokens: int
    num_episodes: int
    max_length: int
    """L_max of Dr. GRPO: the configured ``max_new_tokens``, a constant of the run, never a batch statistic."""
    supervised: StreamTotals = StreamTotals()
    distillation: StreamTotals = StreamTotals()
    """All tokens that carry a teacher's log-probabilities, those of the rl stream too."""

    def of(self, stream: Stream) -> Totals:
        """The counts of one stream in the place of the rl stream's."""
        if stream == "rl":
            return self
        counts: StreamTotals = getattr(self, stream)
        return Totals(num_tokens=counts.num_tokens, num_episodes=counts.num_episodes, max_length=self.max_length)

    @staticmethod
    def count(samples: Iterable[Sample], max_length: int) -> Totals:
        """Of the samples of a minibatch."""
        samples = list(samples)
        rl = _count(s for s in samples if s.stream == "rl")
        return Totals(
            num_tokens=rl.num_tokens,
            num_episodes=rl.num_episodes,
            max_length=max_length,
            supervised=_count(s for s in samples if s.stream == "supervised"),
            distillation=_count(s for s in samples if s.teacher_logprobs is not None),
        )


def _count(samples: Iterable[Sample]) -> StreamTotals:
    chosen = list(samples)
    return StreamTotals(num_tokens=sum(s.num_trained for s in chosen), num_episodes=len({s.key for s in chosen}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFields:
    """Sample fields of the N trained tokens of one micro-batch, in the order of the log-probabilities."""

    advantages_N: Tensor
    behaviour_logprobs_N: Tensor
    proximal_logprobs_N: Tensor | None
    """None on the only optimizer step of a batch: then the proximal policy is the current one, detached. None also
    where ``needs.skips_proximal``."""
    reference_logprobs_N: Tensor | None
    weights_N: Tensor
    """Unit of weight of the token: its sample's, times the token's own."""
    episode_index_N: Tensor
    """int64 in [0, E): which episode of this micro-batch."""
    num_episodes: int
    """E of this micro-batch."""
    totals: Totals
    entropy_N: Tensor | None = None
    """With gradient; only where ``needs.entropy``."""
    stream_N: Tensor | None = None
    """int64: the token's stream as a place in ``STREAMS``; None: all are of the rl stream."""
    teacher_logprobs_N: Tensor | None = None
    """NaN for tokens that no teacher has seen."""
    rewards_N: Tensor | None = None
    """Reward of the token's episode, before any shaping."""
    ages_N: Tensor | None = None
    """int64: trainer's version minus the token's, in versions; 0 where the token has none."""
    selected_N: Tensor | None = None
    """bool: tokens that :meth:`~headrace.protocols.WholeMinibatchAlgorithm.prepare` chose in the whole minibatch."""
    mean_correction: float | None = None
    """Mean importance weight of the whole minibatch, from the same call."""

    def places_of(self, stream: Stream) -> Tensor | None:
        """Places of the tokens of a stream, int64; None: all of them, which is so where ``stream_N`` is None."""
        if self.stream_N is None:
            return None
        return (self.stream_N == STREAMS.index(stream)).nonzero()[:, 0]

    def select(self, places_M: Tensor) -> TokenFields:
        """The fields of some of the tokens, in the given order (int64 [M])."""
        return TokenFields(
            advantages_N=self.advantages_N[places_M],
            behaviour_logprobs_N=self.behaviour_logprobs_N[places_M],
            proximal_logprobs_N=_pick(self.proximal_logprobs_N, places_M),
            reference_logprobs_N=_pick(self.reference_logprobs_N, places_M),
            weights_N=self.weights_N[places_M],
            episode_index_N=self.episode_index_N[places_M],
            num_episodes=self.num_episodes,
            totals=self.totals,
            entropy_N=_pick(self.entropy_N, places_M),
            stream_N=_pick(self.stream_N, places_M),
            teacher_logprobs_N=_pick(self.teacher_logprobs_N, places_M),
            rewards_N=_pick(self.rewards_N, places_M),
            ages_N=_pick(self.ages_N, places_M),
            selected_N=_pick(self.selected_N, places_M),
            mean_correction=self.mean_correction,
        )


def _pick(values_N: Tensor | None, places_M: Tensor) -> Tensor | None:
    return None if values_N is None else values_N[places_M]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``per_token_N`` already carries the aggregation's weights: loss = per_token_N.sum() / denominator."""

    per_token_N: Tensor
    denominator: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count): means are formed once over the whole minibatch, never as a mean of means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The samples of one optimizer step. Lists are aligned with ``samples``, each entry a float32 tensor [T]."""

    samples: tuple[Sample, ...]
    advantages: Sequence[Tensor]
    proximal_logprobs: Sequence[Tensor] | None
    reference_logprobs: Sequence[Tensor] | None
    totals: Totals
    selected: Sequence[Tensor] | None = None
    """bool [T] each: the token choice of :meth:`~headrace.protocols.WholeMinibatchAlgorithm.prepare`."""
    mean_correction: float | None = None
    """From the same call."""
    values: Sequence[Tensor] | None = None
    """A critic's, at behaviour time."""
    value_targets: Sequence[Tensor] | None = None
    version: PolicyVersion | None = None
    """The trainer's when the rollout batch was closed; the ages of the tokens are counted from it."""


class SampleColumns(TypedDict):
    """The fields of TokenFields that follow from the samples alone."""

    behaviour_logprobs_N: Tensor
    weights_N: Tensor
    episode_index_N: Tensor
    num_episodes: int
    stream_N: Tensor | None
    teacher_logprobs_N: Tensor | None
    rewards_N: Tensor
    ages_N: Tensor | None


def sample_columns(samples: Sequence[Sample], version: PolicyVersion | None, device: torch.device) -> SampleColumns:
    """Flat over the trained tokens of ``samples``, in order of the samples and then of their tokens."""
    trained = [[t for t, is_trained in enumerate(sample.mask) if is_trained] for sample in samples]
    counts = torch.tensor([len(slots) for slots in trained], dtype=torch.int64, device=device)

    def tokens(name: str, missing: float) -> Tensor:
        values: list[float] = []
        for sample, slots in zip(samples, trained, strict=True):
            per_token = getattr(sample, name)
            values.extend([missing] * len(slots) if per_token is None else [per_token[t] for t in slots])
        return torch.tensor(values, dtype=torch.float32, device=device)

    def repeat(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(counts)

    episodes: dict[AttemptKey, int] = {}
    index = [episodes.setdefault(sample.key, len(episodes)) for sample in samples]
    weights_N = repeat([sample.weight for sample in samples], torch.float32)
    if any(sample.weight_T is not None for sample in samples):
        weights_N = weights_N * tokens("weight_T", 1.0)
    is_all_rl = all(sample.stream == "rl" for sample in samples)
    has_teacher = any(sample.teacher_logprobs is not None for sample in samples)
    return SampleColumns(
        behaviour_logprobs_N=tokens("behaviour_logprobs", 0.0),
        weights_N=weights_N,
        episode_index_N=repeat(index, torch.int64),
        num_episodes=len(episodes),
        stream_N=None if is_all_rl else repeat([STREAMS.index(s.stream) for s in samples], torch.int64),
        teacher_logprobs_N=tokens("teacher_logprobs", math.nan) if has_teacher else None,
        rewards_N=repeat([math.nan if s.reward is None else s.reward for s in samples], torch.float32),
        ages_N=None if version is None else torch.tensor(_ages(samples, trained, version), device=device),
    )


def _ages(samples: Sequence[Sample], trained: Sequence[Sequence[int]], version: PolicyVersion) -> list[int]:
    ages = []
    for sample, slots in zip(samples, trained, strict=True):
        for t in slots:
            sampled_by = sample.versions[t]
            ages.append(0 if sampled_by is None else version.number - sampled_by.number)
    return ages
