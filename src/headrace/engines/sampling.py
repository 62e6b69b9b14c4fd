"""Drawing tokens: one pass over the logits, a random stream per request, and what the trainer must know.

The declared distribution (``types.Sampling``) is softmax(logits / temperature), then top-k, then top-p, renormalised
over the ids that were kept. Its log-probability is returned in float32 (F5 to F7 are what happens otherwise).

Randomness is counter-based: the uniform number of a token is a hash of (request seed, position in the reply), so it
depends on nothing else in the batch (I18). The token is the inverse of the cumulative distribution at that number.
The sum runs in two levels, blocks first and then inside one block, so that no float64 copy of [R, V] is made.

Legend: B draws, R rows of logits, V vocabulary, N blocks, S ids of a block, C candidates of one row.
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
    """One entry for each draw. ``kept_ids`` is None where sampling is not truncated."""

    ids: list[int]
    logprobs: list[float]
    kept_ids: list[tuple[int, ...] | None]


class Sampler:
    """Draws tokens from rows of logits, one or several from each; keeps one [R, V] float32 buffer between calls.

    ``vocab_size`` is the tokenizer's: ids at or above it are padding of the embedding and are never drawn (F14).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_blocks = -(-vocab_size // _BLOCK)
        self._weights = torch.zeros(0, self._num_blocks * _BLOCK)

    def __call__(
        self,
        logits_RV: Tensor,
        samplings: Sequence[Sampling],
        uniforms: Sequence[float],
        row_of: Sequence[int] | None = None,
    ) -> Draws:
        """One token for each of B ``uniforms``, from row ``row_of[b]`` of the logits, or from row b.

        ``samplings`` has one entry for each row of logits. Raises ``ValueError`` where a row's logits are not finite
        enough to make a distribution."""
        logits_RV = logits_RV[:, : self._vocab_size].float()
        device = logits_RV.device
        temperature_R1 = torch.tensor([s.temperature or 1.0 for s in samplings], device=device).unsqueeze(1)
        max_R1 = logits_RV.amax(-1, keepdim=True)
        weights_RNS = self._exponentials(logits_RV, max_R1, temperature_R1)
        sums_RN = weights_RNS.sum(-1).double()
        total_R = sums_RN.sum(-1)
        if not bool(torch.isfinite(total_R).all()):
            bad = [i for i, total in enumerate(total_R.tolist()) if not total < float("inf")]
            raise ValueError(f"the logits of rows {bad} are not finite: the weights or the cache are broken")

        rows = range(len(uniforms)) if row_of is None else row_of
        row_B = torch.tensor(rows, device=device)
        ids_B = _invert(weights_RNS, sums_RN, torch.tensor(uniforms, dtype=torch.float64, device=device), row_B)
        greedy = [b for b, row in enumerate(rows) if samplings[row].temperature == 0]
        if greedy:
            ids_B[greedy] = logits_RV[row_B[greedy]].argmax(-1)
        chosen_B = logits_RV[row_B, ids_B]
        scaled_B = (chosen_B - max_R1[row_B, 0]) / temperature_R1[row_B, 0]
        logprobs_B = scaled_B.double() - total_R[row_B].log()
        draws = Draws(ids_B.tolist(), logprobs_B.float().tolist(), [None] * len(rows))
        self._draw_truncated(logits_RV, total_R, samplings, uniforms, rows, draws)
        return draws

    def _exponentials(self, logits_RV: Tensor, max_R1: Tensor, temperature_R1: Tensor) -> Tensor:
        """exp((logits - max) / temperature) as [R, N, S]; the last block is filled up with zeros."""
        num_rows = logits_RV.shape[0]
        if self._weights.shape[0] < num_rows or self._weights.device != logits_RV.device:
            self._weights = torch.zeros(num_rows, self._num_blocks * _BLOCK, device=logits_RV.device)
        buffer = self._weights[:num_rows]
        weights_RV = buffer[:, : self._vocab_size]
        torch.sub(logits_RV, max_R1, out=weights_RV)
        if bool((temperature_R1 != 1).any()):
            weights_RV.div_(temperature_R1)
        weights_RV.exp_()
        return buffer.view(num_rows, self._num_blocks, _BLOCK)

    def _draw_truncated(
        self,
        logits_RV: Tensor,
        total_R: Tensor,
        samplings: Sequence[Sampling],
        uniforms: Sequence[float],
        rows: Sequence[int],
        draws: Draws,
    ) -> None:
        """Overwrite the draws with top-k or top-p. Only candidates are sorted, not the vocabulary."""
        truncated = [row for row, s in enumerate(samplings) if s.is_truncated]
        if not truncated:
            return
        size = logits_RV.shape[1]
        num_candidates = min(size, max(samplings[row].top_k or _FIRST_CANDIDATES for row in truncated))
        top_XC, top_ids_XC = logits_RV[truncated].topk(num_candidates, dim=-1)
        kept_of: dict[int, tuple[Tensor, Tensor]] = {}
        for index, row in enumerate(truncated):
            kept = _keep(top_XC[index], top_ids_XC[index], samplings[row], float(total_R[row]), size)
            if kept is None:
                kept = _keep(*logits_RV[row].sort(descending=True), samplings[row], float(total_R[row]), size)
            assert kept is not None, "the whole vocabulary always covers top_p"
            kept_of[row] = kept
        for b, row in enumerate(rows):
            if row in kept_of:
                kept_ids_C, weights_C = kept_of[row]
                cumulative_C = weights_C.cumsum(0)
                target = min(uniforms[b], 1 - 2.0**-52) * float(cumulative_C[-1])
                choice = min(int((cumulative_C <= target).sum()), len(kept_ids_C) - 1)
                draws.ids[b] = int(kept_ids_C[choice])
                draws.logprobs[b] = float((weights_C[choice] / cumulative_C[-1]).log().float())
                draws.kept_ids[b] = tuple(kept_ids_C.tolist())


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


def _invert(weights_RNS: Tensor, sums_RN: Tensor, uniform_B: Tensor, row_B: Tensor) -> Tensor:
    """Ids [B] at which the cumulative weights of row ``row_B`` pass ``uniform`` of its total."""
    num_blocks, size = weights_RNS.shape[1:]
    sums_BN = sums_RN[row_B]
    cumulative_BN = sums_BN.cumsum(-1)
    target_B1 = uniform_B.unsqueeze(1) * cumulative_BN[:, -1:]
    block_B1 = torch.searchsorted(cumulative_BN, target_B1, right=True).clamp_max_(num_blocks - 1)
    sum_B1 = sums_BN.gather(1, block_B1)
    before_B1 = cumulative_BN.gather(1, block_B1) - sum_B1
    # The block's float32 sum differs a little from the sum of its float64 parts; a fraction of the block cannot miss.
    fraction_B1 = ((target_B1 - before_B1) / sum_B1).clamp_(0, 1 - 2.0**-52)
    inner_BS = weights_RNS[row_B, block_B1.squeeze(1)].double().cumsum(-1)
    offset_B1 = torch.searchsorted(inner_BS, fraction_B1 * inner_BS[:, -1:], right=True).clamp_max_(size - 1)
    return (block_B1 * size + offset_B1).squeeze(1)
