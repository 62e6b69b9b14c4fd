"""What passes between the trainer and an algorithm's loss. Shapes: N trained tokens, E episodes.

Everything is flat over the trained tokens (mask 1) of one micro-batch: no padding exists here, so that nothing
behind a mask can ever reach a loss. All samples of one episode are in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from headrace.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts over the whole minibatch, before any rejection and over all ranks: the denominators (I17)."""

    num_tokens: int
    num_episodes: int
    max_length: int
    """L_max of Dr. GRPO: the configured ``max_new_tokens``, a constant of the run, never a batch statistic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFields:
    """Sample fields of the N trained tokens of one micro-batch, in the order of the log-probabilities."""

    advantages_N: Tensor
    behaviour_logprobs_N: Tensor
    proximal_logprobs_N: Tensor | None
    """None on the only optimizer step of a batch: then the proximal policy is the current one, detached."""
    reference_logprobs_N: Tensor | None
    weights_N: Tensor
    """Unit of weight of the token's sample."""
    episode_index_N: Tensor
    """int64 in [0, E): which episode of this micro-batch."""
    num_episodes: int
    """E of this micro-batch."""
    totals: Totals
    entropy_N: Tensor | None = None
    """With gradient; only where ``needs.entropy``."""


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
    values: Sequence[Tensor] | None = None
    """A critic's, at behaviour time."""
    value_targets: Sequence[Tensor] | None = None
