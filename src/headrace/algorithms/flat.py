"""A whole minibatch as flat token fields, for what no micro-batch can know.

Legend: N trained tokens of the rl stream, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch, TokenFields, sample_columns
from headrace.types import Sample


def flatten(minibatch: Minibatch, logprobs: Sequence[Tensor]) -> tuple[Tensor, TokenFields, list[str]]:
    """(log-probabilities [N], fields, a name for each token) of the rl stream, in the order of the samples' ids,
    whatever their order in the minibatch; there must be such samples. A token's name counts trained tokens alone, so
    that what stands between them has no part in it. Raises ValueError where ``logprobs`` does not fit the samples."""
    if len(logprobs) != len(minibatch.samples):
        raise ValueError(f"{len(logprobs)} lists of log-probabilities for {len(minibatch.samples)} samples")
    places = _order(minibatch.samples)
    samples = [minibatch.samples[i] for i in places]
    slots = [[t for t, trained in enumerate(sample.mask) if trained] for sample in samples]

    def gather(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([values[i].cpu()[s] for i, s in zip(places, slots, strict=True)])

    proximal, reference = minibatch.proximal_logprobs, minibatch.reference_logprobs
    fields = TokenFields(
        advantages_N=gather(minibatch.advantages),
        proximal_logprobs_N=None if proximal is None else gather(proximal),
        reference_logprobs_N=None if reference is None else gather(reference),
        totals=minibatch.totals,
        **sample_columns(samples, minibatch.version, torch.device("cpu")),
    )
    names = [f"{sample.id}/{k}" for sample in samples for k in range(sample.num_trained)]
    return gather(logprobs), fields, names


def unflatten(samples: Sequence[Sample], chosen_N: Tensor) -> list[Tensor]:
    """The reverse: bool [T] for each sample, in the order of ``samples``; False outside the rl stream."""
    out = [torch.zeros(len(sample.ids), dtype=torch.bool) for sample in samples]
    places = _order(samples)
    for i, chosen in zip(places, torch.split(chosen_N, [samples[i].num_trained for i in places]), strict=True):
        out[i][torch.tensor(samples[i].mask, dtype=torch.bool)] = chosen
    return out


def _order(samples: Sequence[Sample]) -> list[int]:
    return sorted((i for i, s in enumerate(samples) if s.stream == "rl"), key=lambda i: samples[i].id)
