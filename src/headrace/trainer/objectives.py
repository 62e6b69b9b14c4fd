"""What training without rollouts minimises. Each objective turns a packed row into a sum; the trainer divides by one
denominator of the whole optimizer step, whatever the split into rows (FAILURES 53).

Legend: N trained tokens of a row, P pairs of a row. Both members of a pair lie in one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from headrace.model.head import output_head
from headrace.model.load import LoadedModel
from headrace.model.logprobs import token_logprobs
from headrace.model.packing import PackedRow
from headrace.model.reward_model import RewardModel
from headrace.types import AttemptKey, Sample

Sums = dict[str, tuple[float, float]]
"""Metric -> (sum, count), so that means are formed once."""


@dataclass(frozen=True, slots=True)
class RowLoss:
    """``total`` has a gradient; it is not divided by anything yet."""

    total: Tensor
    sums: Sums = field(default_factory=dict)


class Objective(Protocol):
    """A loss over packed rows."""

    def denominator(self, samples: Sequence[Sample]) -> float:
        """Of all samples of an optimizer step."""
        ...

    def row_loss(self, row: PackedRow) -> RowLoss: ...


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """-sum(w log p) / sum(w) over the trained tokens; ``weights``: sample id -> w [T]."""

    loaded: LoadedModel
    weights: Mapping[str, Tensor]
    max_logit_tokens: int

    def denominator(self, samples: Sequence[Sample]) -> float:
        return sum(float(self.weights[sample.id].sum()) for sample in samples)

    def row_loss(self, row: PackedRow) -> RowLoss:
        logprobs_N = _logprobs(self.loaded, row, self.max_logit_tokens)
        slots = torch.split(row.slot_N.cpu(), list(row.num_N))
        weight_N = torch.cat([self.weights[s.id][t] for s, t in zip(row.samples, slots, strict=True)]).to(logprobs_N)
        total = -(weight_N * logprobs_N).sum()
        return RowLoss(total, {"nll": (float(total.detach()), float(weight_N.sum()))})


@dataclass(frozen=True, kw_only=True)
class BradleyTerry:
    """softplus(-(s_c - s_r - m)) + centre (s_c + s_r)^2, summed over pairs.

    Bradley and Terry 1952, with the margin of Touvron et al. 2023 (arXiv 2307.09288, eq. 2) and the centring of
    Eisenstein et al. 2023 (arXiv 2312.09244). ``margins`` by the pair's key; a sample's weight is +1 for the chosen
    side and -1 for the other.
    """

    model: RewardModel
    margins: Mapping[AttemptKey, float]
    centre_coefficient: float

    def denominator(self, samples: Sequence[Sample]) -> float:
        return float(len({sample.key for sample in samples}))

    def row_loss(self, row: PackedRow) -> RowLoss:
        scores_S = self.model.score_row(row)
        keys, difference_P = _pairs(row, scores_S)
        margin_P = torch.tensor([self.margins[key] for key in keys]).to(difference_P)
        pair_of_S, _ = _pair_index(row)
        sum_P = torch.zeros_like(difference_P).index_add(0, pair_of_S, scores_S)
        loss_P = softplus(margin_P - difference_P)
        total = loss_P.sum() + self.centre_coefficient * sum_P.square().sum()
        count = float(len(keys))
        sums = {
            "pair_loss": (float(loss_P.detach().sum()), count),
            "mean_score": (float(sum_P.detach().sum()) / 2, count),
        }
        return RowLoss(total, sums | _accuracy(difference_P))


@dataclass(frozen=True, kw_only=True)
class Dpo:
    """-(1 - e) log sigmoid(b d) - e log sigmoid(-b d), summed over pairs, with
    d = [log pi(chosen) - log ref(chosen)] - [log pi(rejected) - log ref(rejected)].

    Rafailov et al. 2023 (arXiv 2305.18290, eq. 7); e > 0 is the conservative form of its appendix on noisy labels.
    ``reference``: sample id -> log-probability of the whole reply under the frozen start.
    """

    loaded: LoadedModel
    reference: Mapping[str, float]
    beta: float
    label_smoothing: float
    max_logit_tokens: int

    def denominator(self, samples: Sequence[Sample]) -> float:
        return float(len({sample.key for sample in samples}))

    def row_loss(self, row: PackedRow) -> RowLoss:
        reply_S = reply_logprobs(self.loaded, row, self.max_logit_tokens)
        reference_S = torch.tensor([self.reference[s.id] for s in row.samples]).to(reply_S)
        _, difference_P = _pairs(row, reply_S - reference_S)
        loss_P = dpo_loss(difference_P, self.beta, self.label_smoothing)
        sums = {"pair_loss": (float(loss_P.detach().sum()), float(len(loss_P)))}
        margin = (float(self.beta * difference_P.detach().sum()), float(len(loss_P)))
        return RowLoss(loss_P.sum(), sums | {"margin": margin} | _accuracy(difference_P))


def dpo_loss(difference_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Loss of each pair from d as :class:`Dpo` has it."""
    return -(1 - label_smoothing) * logsigmoid(beta * difference_P) - label_smoothing * logsigmoid(-beta * difference_P)


def reply_logprobs(loaded: LoadedModel, row: PackedRow, max_logit_tokens: int) -> Tensor:
    """[S]: log-probability of each sample's trained tokens together, with gradient."""
    logprobs_N = _logprobs(loaded, row, max_logit_tokens)
    sample_N = torch.arange(len(row.samples)).repeat_interleave(torch.tensor(row.num_N)).to(logprobs_N.device)
    return logprobs_N.new_zeros(len(row.samples)).index_add(0, sample_N, logprobs_N)


def _logprobs(loaded: LoadedModel, row: PackedRow, max_logit_tokens: int) -> Tensor:
    head = output_head(loaded.model, loaded.vocab_size)
    logprobs_N, _ = token_logprobs(loaded.model, head, row, max_logit_tokens=max_logit_tokens)
    return logprobs_N


def _pair_index(row: PackedRow) -> tuple[Tensor, list[AttemptKey]]:
    """([S] index of each sample's pair, keys of the pairs)."""
    places: dict[AttemptKey, int] = {}
    index = [places.setdefault(sample.key, len(places)) for sample in row.samples]
    return torch.tensor(index, device=row.ids_1T.device), list(places)


def _pairs(row: PackedRow, values_S: Tensor) -> tuple[list[AttemptKey], Tensor]:
    """(keys, value of chosen minus value of rejected [P])."""
    pair_of_S, keys = _pair_index(row)
    sign_S = torch.tensor([s.weight for s in row.samples]).to(values_S)
    return keys, values_S.new_zeros(len(keys)).index_add(0, pair_of_S, sign_S * values_S)


def _accuracy(difference_P: Tensor) -> Sums:
    """Ties count half."""
    right = float((difference_P > 0).sum()) + 0.5 * float((difference_P == 0).sum())
    return {"accuracy": (right, float(len(difference_P)))}
