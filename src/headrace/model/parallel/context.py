"""Context parallel: each rank computes a stretch of a packed row; attention exchanges heads for tokens (Ulysses).

Everything but attention works token by token. For attention a rank gives all its tokens' heads away and gets all
tokens of its own heads, so that the packed layout, with its shared prompts, attends exactly as in one process.

Legend: B batch (always 1), H query heads, K key-value heads, T tokens of the row, t of this rank's stretch, D head
size, C ranks of the group, U predictors, N trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.model.attention import AttentionLayout
from headrace.model.packing import PackedRow
from headrace.model.parallel.collectives import exchange, sum_forward


class ContextLayout:
    """The AttentionLayout of a rank's stretch of a row."""

    def __init__(self, whole: AttentionLayout, group: dist.ProcessGroup) -> None:
        self._whole = whole
        self._group = group
        self._size = dist.get_world_size(group)

    def attend(
        self, module: torch.nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float
    ) -> Tensor:
        """Returns [1, t, H, D]."""
        query, key, value = (self._all_tokens(x) for x in (query_BHTD, key_BKTD, value_BKTD))
        return self._all_heads(self._whole.attend(module, query, key, value, scaling))

    def _all_tokens(self, x_BHtD: Tensor) -> Tensor:
        """[1, H, t, D] to [1, H / C, T, D]"""
        _, heads, tokens, size = x_BHtD.shape
        x = exchange(x_BHtD.reshape(self._size, heads // self._size, tokens, size), self._group)
        return x.transpose(0, 1).reshape(1, heads // self._size, self._size * tokens, size)

    def _all_heads(self, x_BTHD: Tensor) -> Tensor:
        """[1, T, H / C, D] to [1, t, H, D]"""
        _, tokens, heads, size = x_BTHD.shape
        x = exchange(x_BTHD.reshape(self._size, tokens // self._size, heads, size), self._group)
        return x.permute(1, 0, 2, 3).reshape(1, tokens // self._size, self._size * heads, size)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A rank's part of a row: what it computes, and which of the row's trained tokens it scores."""

    row: PackedRow
    """What has an entry for each token, ``layout`` and the predictors are this rank's; the rest is the whole row's."""
    token_M: Tensor
    """Which of the row's N trained tokens are scored here."""


def stretch_of(row: PackedRow, group: dist.ProcessGroup) -> Stretch:
    """This rank's part of ``row``, whose length must be a multiple of the group's size.

    A rank without a predictor scores its first token for nothing, so that the head has a gradient on every rank.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    length = row.num_tokens // size
    start = rank * length
    here_U = (row.predictor_U >= start) & (row.predictor_U < start + length)
    token_M = here_U[row.row_N].nonzero()[:, 0]
    new_index_U = here_U.cumsum(0) - 1
    part = replace(
        row,
        ids_1T=row.ids_1T[:, start : start + length],
        positions_1T=row.positions_1T[:, start : start + length],
        layout=ContextLayout(row.layout, group),
        predictor_U=row.predictor_U[here_U] - start,
        temperature_U=row.temperature_U[here_U],
        row_N=new_index_U[row.row_N[token_M]],
        target_N=row.target_N[token_M],
        kept_N=None if row.kept_N is None else tuple(row.kept_N[n] for n in token_M.tolist()),
        uses_T=row.uses_T[start : start + length],
        recorded_TLK=None if row.recorded_TLK is None else row.recorded_TLK[start : start + length],
    )
    if not len(token_M):
        zero = torch.zeros(1, dtype=torch.long, device=row.target_N.device)
        one = row.temperature_U.new_ones(1)
        part = replace(part, predictor_U=zero, temperature_U=one, row_N=zero, target_N=zero, kept_N=None)
    return Stretch(part, token_M)


def gather_scores(scores_2M: Tensor, stretch: Stretch, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """[2, N] on every rank, from each rank's own; gradient goes back to the rank that scored the token."""
    own = scores_2M if len(stretch.token_M) else scores_2M[:, :0] + 0 * scores_2M.sum()
    whole = scores_2M.new_zeros(2, num_tokens).index_copy(1, stretch.token_M, own)
    if not len(stretch.token_M):
        whole = whole + 0 * scores_2M.sum()  # keeps the head's gradient alive
    return sum_forward(whole, group)
