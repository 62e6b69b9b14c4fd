"""Packed rows: who attends to whom when many sequences lie in one row without padding.

A row is a list of trees. A tree is one prompt and the replies that continue it (a group), or a single sequence
without shared prompt. Tokens see their own tree's prompt and their own reply up to themselves, nothing else; the
prompt's keys and values are computed once and receive gradient from all its replies. This is exact: attention of a
reply over [prompt, reply] does not depend on the neighbours.

Legend: B batch (always 1), H query heads, K key-value heads, T tokens of the row, D head size.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

MAX_CHUNK_TOKENS = 64
"""Replies of one tree attend in chunks of about so many tokens, so that cost and mask stay bounded. Scores between the
replies of a chunk are computed and masked away: with 1024, 8 replies of 64 tokens cost a training pass 29 % more."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Lengths of a prompt and of its replies. A plain sequence has prompt_length 0 and one reply."""

    prompt_length: int
    reply_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.prompt_length + sum(self.reply_lengths)


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call: queries are piece ``query``; keys are that piece, behind piece ``prompt`` if given."""

    query: int
    prompt: int | None
    mask_QS: Tensor | None
    """Added to the scores; None means plain causal."""


class PackedLayout:
    """The AttentionLayout of a packed row. Masks are built once here and shared by all layers."""

    def __init__(self, trees: list[TreeShape], dtype: torch.dtype, device: torch.device) -> None:
        self._pieces: list[int] = []
        self._calls: list[_Call] = []
        for tree in trees:
            self._add_tree(tree, dtype, device)

    def _add_tree(self, tree: TreeShape, dtype: torch.dtype, device: torch.device) -> None:
        replies = [length for length in tree.reply_lengths if length]
        if not tree.prompt_length or not replies:
            for length in replies or [tree.prompt_length]:
                self._calls.append(_Call(self._add_piece(length), None, None))
            return
        if len(replies) == 1:
            self._calls.append(_Call(self._add_piece(tree.prompt_length + replies[0]), None, None))
            return
        if tree.num_tokens <= 2 * MAX_CHUNK_TOKENS:  # one call: the prompt's queries ride along
            mask = _tree_mask(tree.prompt_length, replies, True, dtype, device)
            self._calls.append(_Call(self._add_piece(tree.num_tokens), None, mask))
            return
        prompt = self._add_piece(tree.prompt_length)
        self._calls.append(_Call(prompt, None, None))
        for chunk in _chunks(replies):
            mask = _tree_mask(tree.prompt_length, chunk, False, dtype, device)
            self._calls.append(_Call(self._add_piece(sum(chunk)), prompt, mask))

    def padded(self, num_tokens: int) -> PackedLayout:
        """This layout with ``num_tokens`` behind it that see each other only."""
        out = copy.copy(self)
        out._pieces, out._calls = [*self._pieces], [*self._calls]
        out._calls.append(_Call(out._add_piece(num_tokens), None, None))
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
            if call.prompt is not None:
                key = torch.cat((keys[call.prompt], key), dim=2)
                value = torch.cat((values[call.prompt], value), dim=2)
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


def _chunks(lengths: list[int]) -> list[list[int]]:
    """Whole replies, in order, in chunks of at most MAX_CHUNK_TOKENS; a longer reply is a chunk of its own."""
    chunks: list[list[int]] = []
    for length in lengths:
        if chunks and sum(chunks[-1]) + length <= MAX_CHUNK_TOKENS:
            chunks[-1].append(length)
        else:
            chunks.append([length])
    return chunks


def _tree_mask(
    prompt_length: int, reply_lengths: list[int], with_prompt_queries: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[Q, S] of 0 and -inf: keys are [prompt, replies], queries the same, or the replies only."""
    num_keys = prompt_length + sum(reply_lengths)
    allowed = torch.zeros(num_keys, num_keys, dtype=torch.bool, device=device)
    allowed[:, :prompt_length] = True
    bounds = accumulate(reply_lengths, initial=prompt_length)
    for start, end in ((0, prompt_length), *pairwise(bounds)):
        allowed[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool, device=device).tril()
    if not with_prompt_queries:
        allowed = allowed[prompt_length:]
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))
