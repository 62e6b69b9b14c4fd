"""Log-probabilities and entropies of the trained tokens of a packed row, with logits in chunks.

For a trained token with logits z (after the head's scale and softcap) and temperature T::

    log-probability = z[id] / T - logsumexp(z / T)          entropy = -sum(p log p),  p = softmax(z / T)

Where the token carries the set of ids that could have been sampled (top-p, top-k), both sums run over that set only.

Memory: logits of at most ``max_logit_tokens`` predictors are held at once, in two buffers that are reused in place.
The last chunk's probabilities are kept for the backward pass; the others are computed again there.

Precision: the head's product runs in the model's dtype, everything after it in float32 (float64 for a float64 model).

With tensor parallel each process holds a part of the vocabulary (``OutputHead.shard``) and computes its part of every
sum; the log-probabilities come out alike on all of them.

Legend: T tokens of the row, U distinct predictors, N trained tokens, C predictors of a chunk, M tokens of a chunk,
D model, V vocabulary, K largest kept-id set.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from headrace.model.attention import Routing
from headrace.model.head import OutputHead, VocabShard
from headrace.model.linear import onednn_serves, product, round_up
from headrace.model.packing import PackedRow


def token_logprobs(
    model: PreTrainedModel, head: OutputHead, row: PackedRow, *, max_logit_tokens: int
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [N], entropies [N]) of a row's trained tokens under ``model``, both with gradient.

    The order is that of the row's ``slot_N``. The entropies' gradient is only computed if something uses it.
    """
    return score_hidden(hidden_states(model, row), head, row, max_logit_tokens=max_logit_tokens)


def hidden_states(model: PreTrainedModel, row: PackedRow, routing: Routing | None = None) -> Tensor:
    """[U, D]: the last hidden states of a row's predictors, behind the model's final norm, with gradient."""
    hidden_1TD: Tensor = model.base_model(
        input_ids=row.ids_1T, position_ids=row.positions_1T, layout=row.layout, routing=routing, use_cache=False
    ).last_hidden_state
    return hidden_1TD[0].index_select(0, row.predictor_U)


def score_hidden(
    hidden_UD: Tensor, head: OutputHead, row: PackedRow, *, max_logit_tokens: int
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [N], entropies [N]) from the hidden states of the row's predictors."""
    plan = _Plan.of(row, head, max_logit_tokens)
    logprobs_N, entropies_N = _ChunkedScores.apply(hidden_UD, head.weight_VD, head.bias_V, plan)  # type: ignore[no-untyped-call]
    return logprobs_N, entropies_N


@dataclass(frozen=True, slots=True)
class _Kept:
    """Kept-id sets of those tokens of a chunk that carry any."""

    token_M: Tensor
    """Which of the chunk's tokens they are."""
    ids_MK: Tensor
    padding_MK: Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Predictors [start, end) and the tokens that they predict."""

    start: int
    end: int
    token_M: Tensor
    """Which of the N tokens."""
    row_M: Tensor
    """Index of the token's predictor within the chunk."""
    target_M: Tensor
    kept: _Kept | None


@dataclass(frozen=True, slots=True)
class _Plan:
    chunks: tuple[_Chunk, ...]
    temperature_U: Tensor | None
    """None where all are 1."""
    num_tokens: int
    scale: float
    softcap: float | None
    shard: VocabShard | None

    @classmethod
    def of(cls, row: PackedRow, head: OutputHead, max_logit_tokens: int) -> _Plan:
        num_predictors = len(row.predictor_U)
        chunks = []
        for start, end in pairwise([*range(0, num_predictors, max_logit_tokens), num_predictors]):
            token = ((row.row_N >= start) & (row.row_N < end)).nonzero()[:, 0]
            kept = None if row.kept_N is None else _pad_kept(row, token.tolist())
            chunks.append(_Chunk(start, end, token, row.row_N[token] - start, row.target_N[token], kept))
        plain = bool((row.temperature_U == 1).all())
        temperature = None if plain else row.temperature_U
        return cls(tuple(chunks), temperature, len(row.row_N), head.scale, head.softcap, head.shard)


def _pad_kept(row: PackedRow, tokens: list[int]) -> _Kept | None:
    assert row.kept_N is not None
    carried = [(m, ids) for m, n in enumerate(tokens) if (ids := row.kept_N[n]) is not None]
    if not carried:
        return None
    for m, ids in carried:
        if int(row.target_N[tokens[m]]) not in ids:
            raise ValueError(
                f"a sampled id ({int(row.target_N[tokens[m]])}) is not in its kept-id set: the engine's sets are "
                "out of step with its ids"
            )
    width = max(len(ids) for _, ids in carried)
    device = row.target_N.device
    return _Kept(
        torch.tensor([m for m, _ in carried], device=device),
        torch.tensor([(*ids, *(ids[:1] * (width - len(ids)))) for _, ids in carried], device=device),
        torch.tensor([[k >= len(ids) for k in range(width)] for _, ids in carried], device=device),
    )


@dataclass(slots=True)
class _Scored:
    """A chunk's tokens, and what its backward pass needs."""

    logprobs_M: Tensor
    entropies_M: Tensor
    probability_CV: Tensor
    entropy_C: Tensor
    kept_probability_MK: Tensor | None
    slope_CV: Tensor | None
    """Derivative of the softcap."""


class _ChunkedScores(torch.autograd.Function):
    """By hand: autograd would hold several [C, V] buffers per chunk, and visit them several times more."""

    @staticmethod
    def forward(ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, plan: _Plan) -> Any:
        dtype = torch.promote_types(hidden_UD.dtype, torch.float32)
        logprobs_N = hidden_UD.new_empty(plan.num_tokens, dtype=dtype)
        entropies_N = torch.empty_like(logprobs_N)
        ctx.save_for_backward(hidden_UD, weight_VD, bias_V)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        scored = None
        for chunk in plan.chunks:
            scored = None  # free the previous chunk's buffers first
            scored = _score(chunk, plan, hidden_UD, weight_VD, bias_V)
            logprobs_N[chunk.token_M] = scored.logprobs_M
            entropies_N[chunk.token_M] = scored.entropies_M
        ctx.last = scored
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        hidden_UD, weight_VD, bias_V = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden_UD) if needs_hidden else None
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for chunk in reversed(ctx.plan.chunks):
            scored, ctx.last = ctx.last, None
            if scored is None:
                scored = _score(chunk, ctx.plan, hidden_UD, weight_VD, bias_V)
            grad_CV = _logit_gradient(chunk, ctx.plan, scored, *gradients).to(weight_VD.dtype)
            del scored
            hidden_CD = hidden_UD[chunk.start : chunk.end]
            if grad_hidden is not None:
                grad_hidden[chunk.start : chunk.end] = _product(grad_CV, weight_VD.t())
            if needs_weight:
                grad_weight = (
                    grad_CV.t() @ hidden_CD if grad_weight is None else grad_weight.addmm_(grad_CV.t(), hidden_CD)
                )
            if needs_bias:
                grad_bias = grad_CV.sum(0) if grad_bias is None else grad_bias.add_(grad_CV.sum(0))
            del grad_CV
        if grad_hidden is not None and ctx.plan.shard is not None:
            dist.all_reduce(grad_hidden, group=ctx.plan.shard.group)
        return grad_hidden, grad_weight, grad_bias, None


def _score(chunk: _Chunk, plan: _Plan, hidden_UD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> _Scored:
    logits_CV = _product(hidden_UD[chunk.start : chunk.end], weight_VD, bias_V)
    logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if plan.scale != 1.0:
        logits_CV.mul_(plan.scale)
    slope_CV = None
    if plan.softcap is not None:
        logits_CV.div_(plan.softcap).tanh_()
        slope_CV = 1 - logits_CV.square()
        logits_CV.mul_(plan.softcap)
    if plan.temperature_U is not None:
        logits_CV.div_(plan.temperature_U[chunk.start : chunk.end, None])
    logits_CV.sub_(_total(logits_CV.amax(dim=1, keepdim=True), plan, dist.ReduceOp.MAX))
    chosen_M = _total(_pick(logits_CV, chunk.row_M, chunk.target_M, plan), plan)
    kept_probability_MK, kept_normaliser_M, kept_entropy_M = _score_kept(chunk, logits_CV, plan)
    probability_CV = logits_CV.exp()
    total_C = _total(probability_CV.sum(dim=1), plan)
    probability_CV.div_(total_C[:, None])
    # sum of p times logit, as a batched dot product: no third [C, V] buffer
    mean_logit_C = _total(torch.bmm(probability_CV[:, None, :], logits_CV[:, :, None])[:, 0, 0], plan)
    entropy_C = total_C.log() - mean_logit_C
    normaliser_M, entropies_M = total_C.log()[chunk.row_M], entropy_C[chunk.row_M]
    if chunk.kept is not None:
        assert kept_normaliser_M is not None and kept_entropy_M is not None
        normaliser_M[chunk.kept.token_M] = kept_normaliser_M
        entropies_M[chunk.kept.token_M] = kept_entropy_M
    return _Scored(chosen_M - normaliser_M, entropies_M, probability_CV, entropy_C, kept_probability_MK, slope_CV)


def _product(input_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[R, N]: input @ weight.T + bias, in the faster library. An input that is longer than its product is not copied
    for it."""
    is_worth_it = len(weight_NK) > input_RK.shape[1] or len(input_RK) == round_up(len(input_RK))
    if is_worth_it and onednn_serves(input_RK) and onednn_serves(weight_NK):
        return product(input_RK, weight_NK, bias_N)
    return torch.nn.functional.linear(input_RK, weight_NK, bias_N)


def _total(part: Tensor, plan: _Plan, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum (or maximum) over the parts of the vocabulary."""
    if plan.shard is not None:
        dist.all_reduce(part, op=how, group=plan.shard.group)
    return part


def _pick(logits_CV: Tensor, row: Tensor, ids: Tensor, plan: _Plan) -> Tensor:
    """Logits of ``ids``; 0 for those whose row of the head another process holds."""
    if plan.shard is None:
        return logits_CV[row, ids]
    own = ids - plan.shard.start
    elsewhere = (own < 0) | (own >= logits_CV.shape[1])
    return logits_CV[row, own.masked_fill(elsewhere, 0)].masked_fill(elsewhere, 0.0)


def _add_at(grad_CV: Tensor, row: Tensor, ids: Tensor, values: Tensor, plan: _Plan) -> None:
    """Add ``values`` at the ids that this process holds. index_add_ on the flat view adds in a fixed order, also for
    one id that several tokens of a row share."""
    if plan.shard is not None:
        ids = ids - plan.shard.start
        elsewhere = (ids < 0) | (ids >= grad_CV.shape[1])
        ids, values = ids.masked_fill(elsewhere, 0), values.masked_fill(elsewhere, 0.0)
    grad_CV.view(-1).index_add_(0, (row * grad_CV.shape[1] + ids).view(-1), values.reshape(-1))


def _score_kept(chunk: _Chunk, logits_CV: Tensor, plan: _Plan) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(probabilities, logsumexp, entropy) over the kept ids only; padding has probability 0."""
    if chunk.kept is None:
        return None, None, None
    rows_MK = chunk.row_M[chunk.kept.token_M, None].expand_as(chunk.kept.ids_MK)
    logits_MK = _total(_pick(logits_CV, rows_MK, chunk.kept.ids_MK, plan), plan)
    logits_MK.masked_fill_(chunk.kept.padding_MK, float("-inf"))
    normaliser_M = logits_MK.logsumexp(dim=1)
    probability_MK = (logits_MK - normaliser_M[:, None]).exp()
    return probability_MK, normaliser_M, -torch.special.xlogy(probability_MK, probability_MK).sum(dim=1)


def _logit_gradient(
    chunk: _Chunk, plan: _Plan, scored: _Scored, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None
) -> Tensor:
    """[C, V]: gradient with respect to the head's product. Uses up the buffer of ``scored``.

    For z the scaled logits of a row: d logprob / dz = onehot - p, and d entropy / dz = -p (log p + entropy).
    """
    zeros_M = torch.zeros_like(scored.logprobs_M)
    logprob_M = zeros_M if grad_logprobs_N is None else grad_logprobs_N[chunk.token_M]
    entropy_M = None if grad_entropies_N is None else grad_entropies_N[chunk.token_M]
    factor_M = torch.full_like(zeros_M, plan.scale)
    if plan.temperature_U is not None:
        factor_M = factor_M / plan.temperature_U[chunk.start : chunk.end][chunk.row_M]
    logprob_M = logprob_M * factor_M
    entropy_M = None if entropy_M is None else entropy_M * factor_M
    full_logprob_M, full_entropy_M = logprob_M, entropy_M
    if chunk.kept is not None:  # these tokens' normaliser is not the row's
        full_logprob_M = logprob_M.index_fill(0, chunk.kept.token_M, 0.0)
        full_entropy_M = None if entropy_M is None else entropy_M.index_fill(0, chunk.kept.token_M, 0.0)
    grad_CV = scored.probability_CV
    per_row_C = grad_CV.new_zeros(len(grad_CV))
    weight_C1 = per_row_C.index_add(0, chunk.row_M, full_logprob_M)[:, None]
    if full_entropy_M is None:
        grad_CV.mul_(-weight_C1)
    else:
        entropy_weight_C1 = per_row_C.index_add(0, chunk.row_M, full_entropy_M)[:, None]
        surprise_CV = torch.special.xlogy(grad_CV, grad_CV).add_(grad_CV * scored.entropy_C[:, None])
        grad_CV.mul_(-weight_C1).sub_(surprise_CV.mul_(entropy_weight_C1))
    _add_at(grad_CV, chunk.row_M, chunk.target_M, logprob_M, plan)
    if chunk.kept is not None:
        assert scored.kept_probability_MK is not None
        p_MK = scored.kept_probability_MK
        kept_grad_MK = -p_MK * logprob_M[chunk.kept.token_M, None]
        if entropy_M is not None:
            log_p_MK = torch.where(p_MK > 0, p_MK, 1).log()
            entropy_kept_M1 = scored.entropies_M[chunk.kept.token_M, None]
            kept_grad_MK -= p_MK * (log_p_MK + entropy_kept_M1) * entropy_M[chunk.kept.token_M, None]
        _add_at(grad_CV, chunk.row_M[chunk.kept.token_M, None], chunk.kept.ids_MK, kept_grad_MK, plan)
    if scored.slope_CV is not None:
        grad_CV.mul_(scored.slope_CV)
    return grad_CV
