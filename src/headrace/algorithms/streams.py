"""Streams: what else than the policy objective may train a token of a minibatch, each with its own denominator.

A minibatch, and a packed row of it, may hold samples of every stream. Each term is aggregated over the tokens of its
own stream and divided by their counts over the whole minibatch, so that adding supervised samples to a batch does not
change the weight of the others. Legend: N trained tokens of a micro-batch, M those of one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.algorithms.aggregations import AGGREGATIONS
from headrace.algorithms.fields import LossOutput, TokenFields, Totals
from headrace.algorithms.ratios import episode_lengths
from headrace.types import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of the loss on some tokens of a micro-batch: sum(per_token_M) / denominator."""

    per_token_M: Tensor
    denominator: float
    places_M: Tensor | None
    """Where the tokens stand among the micro-batch's; None: it is all of them."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


def aggregate(loss_M: Tensor, fields_M: TokenFields, aggregation: str, stream: Stream) -> tuple[Tensor, float]:
    """Loss per token times the aggregation's and the sample's weights, and the stream's denominator.

    Raises ValueError where the minibatch's counts know no token of this stream."""
    chosen = AGGREGATIONS[aggregation]
    if chosen.token_weight is not None:
        lengths_M = episode_lengths(fields_M.episode_index_N, fields_M.num_episodes)[fields_M.episode_index_N]
        loss_M = loss_M * chosen.token_weight(lengths_M.to(loss_M.dtype))
    denominator = float(chosen.denominator(fields_M.totals.of(stream)))
    if denominator <= 0:
        raise ValueError(f"a minibatch without trained tokens of stream '{stream}' has no such loss: {fields_M.totals}")
    return loss_M * fields_M.weights_N, denominator


def split(logprobs_N: Tensor, fields: TokenFields, places_M: Tensor | None) -> tuple[Tensor, TokenFields]:
    """Log-probabilities and fields of the tokens at ``places_M``; all of them where it is None."""
    return (logprobs_N, fields) if places_M is None else (logprobs_N[places_M], fields.select(places_M))


def cross_entropy(logprobs_N: Tensor, fields: TokenFields, coefficient: float, aggregation: str) -> Term | None:
    """-l on the tokens of the supervised stream: maximum likelihood. None where there is no such token."""
    places_M = fields.places_of("supervised")
    if places_M is None or not len(places_M):
        return None
    logprobs_M, fields_M = split(logprobs_N, fields, places_M)
    per_token_M, denominator = aggregate(-coefficient * logprobs_M, fields_M, aggregation, "supervised")
    return Term(
        per_token_M=per_token_M,
        denominator=denominator,
        places_M=places_M,
        metrics={"supervised/nll": (-float(logprobs_M.detach().double().sum()), float(len(logprobs_M)))},
    )


def taught_places(fields: TokenFields) -> Tensor | None:
    """Places of the tokens that carry a teacher's log-probability, int64; None where there is none.

    Raises ValueError for a token of the distillation stream without one."""
    teacher_N = fields.teacher_logprobs_N
    alone_N = fields.places_of("distillation")  # None: there is the rl stream alone
    if teacher_N is None:
        if alone_N is not None and len(alone_N):
            raise ValueError("distillation needs fields.teacher_logprobs_N")
        return None
    places_M = (~teacher_N.isnan()).nonzero()[:, 0]
    if alone_N is not None and bool(teacher_N[alone_N].isnan().any()):
        raise ValueError("a token of the distillation stream has no teacher log-probability (NaN)")
    return places_M if len(places_M) else None


def combine(terms: Sequence[Term], logprobs_N: Tensor, totals: Totals) -> LossOutput:
    """The terms over one denominator: the first one's. Each is scaled so that its own sum over its own denominator is
    what it adds to the loss; which term comes first in a micro-batch therefore does not matter."""
    if not terms:
        raise ValueError(f"a micro-batch without trained tokens has no loss: {totals}")
    denominator = terms[0].denominator
    total_N: Tensor | None = None
    metrics: dict[str, tuple[float, float]] = {}
    for term in terms:
        metrics.update(term.metrics)
        share_M = term.per_token_M
        if term.denominator != denominator:
            share_M = share_M * (denominator / term.denominator)
        if term.places_M is not None:
            share_M = torch.zeros_like(logprobs_N).index_add(0, term.places_M, share_M)
        total_N = share_M if total_N is None else total_N + share_M
    assert total_N is not None
    return LossOutput(per_token_N=total_N, denominator=denominator, metrics=metrics)
