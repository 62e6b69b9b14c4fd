"""Packed rows: who attends to whom when many sequences lie in one row without padding.

A row is a list of trees (``trees.py``). A tree is one sequence, or a prompt and the replies that continue it (a group),
with whatever the replies have in common. Tokens see their own path from the root up to themselves, nothing else; keys
and values that several sequences share are computed once and receive gradient from all of them. This is exact:
attention of a token over its path does not depend on the neighbours.

Legend: B batch (always 1), H query heads, K key-value heads, T tokens of the row, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.model.trees import TreeShape

MAX_CHUNK_TOKENS = 64
"""Nodes of one tree attend in chunks of about so many tokens, so that cost and mask stay bounded. Scores between the
nodes of a chunk are computed and masked away: with 1024, 8 replies of 64 tokens cost a training pass 29 % more."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call: queries are piece ``query``; keys are that piece, behind the pieces of ``before``."""

    query: int
    before: tuple[int, ...]
    mask_QS: Tensor | None
    """Added to the scores; None means plain causal."""


class PackedLayout:
    """The AttentionLayout of a packed row. Masks are built once here and shared by all layers."""

    def __init__(self, trees: Sequence[TreeShape], dtype: torch.dtype, device: torch.device) -> None:
        self._pieces: list[int] = []
        self._calls: list[_Call] = []
        for tree in trees:
            self._add_tree(tree, dtype, device)

    def _add_tree(self, tree: TreeShape, dtype: torch.dtype, device: torch.device) -> None:
        chunks = _chunks(tree)
        first = len(self._pieces)
        chunk_of = {node: number for number, chunk in enumerate(chunks) for node in chunk}
        for chunk in chunks:
            before = sorted({chunk_of[node] for end in chunk for node in tree.path(end)} - {chunk_of[chunk[0]]})
            mask = None
            if len(chunk) > 1 or before:
                keys = [node for number in before for node in chunks[number]] + chunk
                mask = _path_mask(tree, chunk, keys, dtype, device)
            piece = self._add_piece(sum(tree.lengths[node] for node in chunk))
            self._calls.append(_Call(piece, tuple(first + number for number in before), mask))

    def padded(self, num_tokens: int) -> PackedLayout:
        """This layout with ``num_tokens`` behind it that see each other only."""
        out = copy.copy(self)
        out._pieces, out._calls = [*self._pieces], [*self._calls]
        out._calls.append(_Call(out._add_piece(num_tokens), (), None))
        return out

    def _add_piece(self, length: int) -> int:
        self._pieces.append(length)
        return len(self._pieces) - 1

    def attend(
        self, module: torch.nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float
    ) -> Tensor:
        """Returns [1, T, H, D]."""
        # torch.split, never slices: a slice's backward allocates and fills the whole row for each piece.
        queries = torch.split(query_BHTD, self._pieces, dim=2)
        keys = torch.split(key_BKTD, self._pieces, dim=2)
        values = torch.split(value_BKTD, self._pieces, dim=2)
        outputs: list[Tensor] = []
        for call in self._calls:
            key, value = keys[call.query], values[call.query]
            if call.before:
                key = torch.cat([keys[piece] for piece in (*call.before, call.query)], dim=2)
                value = torch.cat([values[piece] for piece in (*call.before, call.query)], dim=2)
            outputs.append(_attend(queries[call.query], key, value, call.mask_QS, scaling).transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend(query_BHTD: Tensor, key_BKSD: Tensor, value_BKSD: Tensor, mask_TS: Tensor | None, scaling: float) -> Tensor:
    num_repeats = query_BHTD.shape[1] // key_BKSD.shape[1]
    native = query_BHTD.device.type == "cpu"  # elsewhere grouped queries with a mask fall back to a slow kernel
    if num_repeats > 1 and not native:
        key_BKSD = key_BKSD.repeat_interleave(num_repeats, dim=1)
        value_BKSD = value_BKSD.repeat_interleave(num_repeats, dim=1)
    return scaled_dot_product_attention(
        query_BHTD,
        key_BKSD,
        value_BKSD,
        attn_mask=mask_TS,
        is_causal=mask_TS is None,
        scale=scaling,
        enable_gqa=num_repeats > 1 and native,
    )


def _chunks(tree: TreeShape) -> list[list[int]]:
    """The nodes in their order, cut into what attends together: a small tree at once; of a large one the root alone,
    which needs no mask, then whole nodes of at most MAX_CHUNK_TOKENS together, a longer node alone."""
    nodes = range(len(tree.lengths))
    if tree.num_tokens <= 2 * MAX_CHUNK_TOKENS:
        return [[*nodes]]
    chunks: list[list[int]] = [[0]]
    room = 0
    for node in nodes[1:]:
        if tree.lengths[node] > room:
            chunks.append([])
            room = MAX_CHUNK_TOKENS
        chunks[-1].append(node)
        room -= tree.lengths[node]
    return chunks


def _path_mask(
    tree: TreeShape, queries: Sequence[int], keys: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[Q, S] of 0 and -inf: tokens of the nodes ``queries`` see those of ``keys`` that lie on their path."""
    lengths = [tree.lengths[node] for node in keys]
    start_of = dict(zip(keys, accumulate(lengths, initial=0), strict=False))
    allowed = torch.zeros(sum(tree.lengths[node] for node in queries), sum(lengths), dtype=torch.bool)
    row = 0
    for node in queries:
        length = tree.lengths[node]
        own = allowed[row : row + length]
        for ancestor in tree.path(node)[:-1]:
            own[:, start_of[ancestor] : start_of[ancestor] + tree.lengths[ancestor]] = True
        own[:, start_of[node] : start_of[node] + length] = torch.ones(length, length, dtype=torch.bool).tril()
        row += length
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf")).to(device)
