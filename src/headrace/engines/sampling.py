"""Drawing tokens: one pass over the logits, a random stream per request, and what the trainer must know.

The declared distribution (``types.Sampling``) is softmax(logits / temperature), then top-k, then top-p, renormalised
over the ids that were kept. Its log-probability is returned in float32 (F5 to F7 are what happens otherwise).

Randomness is counter-based: the uniform number of a token is a hash of (request seed, position in the reply), so it
depends on nothing else in the batch (I18). The token is the inverse of the cumulative distribution at that number.
The sum runs in two levels, blocks first and then inside one block, so that no float64 copy of [B, V] is made.

Legend: B rows, V vocabulary, N blocks, S ids of a block, C candidates of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.types import Sampling

_BLOCK = 256
_FIRST_CANDIDATES = 256
"""For top-p alone: ids looked at before the whole vocabulary has to be sorted."""
_MASK_64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """The uniform number in (0, 1) of one token.

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014), its state started at the
    mixed seed, read at ``position``. 52 bits, off centre, so that 0 and 1 cannot come out.
    """
    state = (_mix(seed & _MASK_64) + (position + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    return ((_mix(state) >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry for each row. ``kept_ids`` is None for rows whose sampling is not truncated."""

    ids: list[int]
    logprobs: list[float]
    kept_ids: list[tuple[int, ...] | None]


class Sampler:
    """Draws one token for each row of logits; keeps one [B, V] float32 buffer between calls.

    ``vocab_size`` is the tokenizer's: ids at or above it are padding of the embedding and are never drawn (F14).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_blocks = -(-vocab_size // _BLOCK)
        self._weights = torch.zeros(0, self._num_blocks * _BLOCK)

    def __call__(self, logits_BV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Draws:
        """Raises ``ValueError`` where a row's logits are not finite enough to make a distribution."""
        logits_BV = logits_BV[:, : self._vocab_size].float()
        num_rows = logits_BV.shape[0]
        device = logits_BV.device
        temperature_B1 = torch.tensor([s.temperature or 1.0 for s in samplings], device=device).unsqueeze(1)
        max_B1 = logits_BV.amax(-1, keepdim=True)
        weights_BNS = self._exponentials(logits_BV, max_B1, temperature_B1)
        sums_BN = weights_BNS.sum(-1).double()
        total_B = sums_BN.sum(-1)
        if not bool(torch.isfinite(total_B).all()):
            bad = [i for i, total in enumerate(total_B.tolist()) if not total < float("inf")]
            raise ValueError(f"the logits of rows {bad} are not finite: the weights or the cache are broken")

        ids_B = _invert(weights_BNS, sums_BN, torch.tensor(uniforms, dtype=torch.float64, device=device))
        greedy = [i for i, s in enumerate(samplings) if s.temperature == 0]
        if greedy:
            ids_B[greedy] = logits_BV[greedy].argmax(-1)
        chosen_B1 = logits_BV.gather(1, ids_B.unsqueeze(1))
        logprobs_B = ((chosen_B1 - max_B1) / temperature_B1).double().squeeze(1) - total_B.log()
        ids, logprobs = ids_B.tolist(), logprobs_B.float().tolist()
        kept_ids: list[tuple[int, ...] | None] = [None] * num_rows
        self._draw_truncated(logits_BV, total_B, samplings, uniforms, ids, logprobs, kept_ids)
        return Draws(ids, logprobs, kept_ids)

    def _exponentials(self, logits_BV: Tensor, max_B1: Tensor, temperature_B1: Tensor) -> Tensor:
        """exp((logits - max) / temperature) as [B, N, S]; the last block is filled up with zeros."""
        num_rows = logits_BV.shape[0]
        if self._weights.shape[0] < num_rows or self._weights.device != logits_BV.device:
            self._weights = torch.zeros(num_rows, self._num_blocks * _BLOCK, device=logits_BV.device)
        buffer = self._weights[:num_rows]
        weights_BV = buffer[:, : self._vocab_size]
        torch.sub(logits_BV, max_B1, out=weights_BV)
        if bool((temperature_B1 != 1).any()):
            weights_BV.div_(temperature_B1)
        weights_BV.exp_()
        return buffer.view(num_rows, self._num_blocks, _BLOCK)

    def _draw_truncated(
        self,
        logits_BV: Tensor,
        total_B: Tensor,
        samplings: Sequence[Sampling],
        uniforms: Sequence[float],
        ids: list[int],
        logprobs: list[float],
        kept_ids: list[tuple[int, ...] | None],
    ) -> None:
        """Overwrite the draws of rows with top-k or top-p. Only candidates are sorted, not the vocabulary."""
        rows = [i for i, s in enumerate(samplings) if s.is_truncated]
        if not rows:
            return
        size = logits_BV.shape[1]
        num_candidates = min(size, max(samplings[i].top_k or _FIRST_CANDIDATES for i in rows))
        top_BC, top_ids_BC = logits_BV[rows].topk(num_candidates, dim=-1)
        for index, row in enumerate(rows):
            kept = _keep(top_BC[index], top_ids_BC[index], samplings[row], float(total_B[row]), size)
            if kept is None:
                kept = _keep(*logits_BV[row].sort(descending=True), samplings[row], float(total_B[row]), size)
            assert kept is not None, "the whole vocabulary always covers top_p"
            kept_ids_C, weights_C = kept
            cumulative_C = weights_C.cumsum(0)
            target = min(uniforms[row], 1 - 2.0**-52) * float(cumulative_C[-1])
            choice = min(int((cumulative_C <= target).sum()), len(kept_ids_C) - 1)
            ids[row] = int(kept_ids_C[choice])
            logprobs[row] = float((weights_C[choice] / cumulative_C[-1]).log().float())
            kept_ids[row] = tuple(kept_ids_C.tolist())


def _keep(
    top_C: Tensor, top_ids_C: Tensor, sampling: Sampling, total: float, size: int
) -> tuple[Tensor, Tensor] | None:
    """Kept ids (ascending) and their float64 weights, or None where more candidates are needed.

    ``top_C`` descends. Top-p keeps the smallest set of most probable ids whose mass reaches p (Holtzman et al.,
    "The curious case of neural text degeneration", 2019), the mass measured after top-k.
    """
    if sampling.top_k:
        top_C, top_ids_C = top_C[: sampling.top_k], top_ids_C[: sampling.top_k]
    weights_C = ((top_C - top_C[0]) / sampling.temperature).exp().double()
    if sampling.top_p < 1:
        cumulative_C = weights_C.cumsum(0) / (weights_C.sum() if sampling.top_k else total)
        if not sampling.top_k and len(top_C) < size and float(cumulative_C[-1]) < sampling.top_p:
            return None
        num_kept = 1 + int((cumulative_C[:-1] < sampling.top_p).sum())
        weights_C, top_ids_C = weights_C[:num_kept], top_ids_C[:num_kept]
    # In the order of ids, so that ties in the logits cannot change which id a uniform number falls on.
    kept_ids_C, order_C = top_ids_C.sort()
    return kept_ids_C, weights_C[order_C]


def _invert(weights_BNS: Tensor, sums_BN: Tensor, uniform_B: Tensor) -> Tensor:
    """Ids [B] at which the cumulative weights pass ``uniform`` of the total."""
    num_blocks, size = weights_BNS.shape[1:]
    cumulative_BN = sums_BN.cumsum(-1)
    target_B1 = uniform_B.unsqueeze(1) * cumulative_BN[:, -1:]
    block_B1 = torch.searchsorted(cumulative_BN, target_B1, right=True).clamp_max_(num_blocks - 1)
    sum_B1 = sums_BN.gather(1, block_B1)
    before_B1 = cumulative_BN.gather(1, block_B1) - sum_B1
    # The block's float32 sum differs a little from the sum of its float64 parts; a fraction of the block cannot miss.
    fraction_B1 = ((target_B1 - before_B1) / sum_B1).clamp_(0, 1 - 2.0**-52)
    rows_B = torch.arange(weights_BNS.shape[0], device=weights_BNS.device)
    inner_BS = weights_BNS[rows_B, block_B1.squeeze(1)].double().cumsum(-1)
    offset_B1 = torch.searchsorted(inner_BS, fraction_B1 * inner_BS[:, -1:], right=True).clamp_max_(size - 1)
    return (block_B1 * size + offset_B1).squeeze(1)
