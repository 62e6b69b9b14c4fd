"""Keys and values that the embedded engine owns: rows of running requests, kept prompts, and the two layouts.

A layout (``headrace.model.attention.AttentionLayout``) is what attention layers call. Two are enough here:
:class:`PrefillLayout` for several documents packed into one row without padding, and :class:`DecodeLayout` for one
new token in each row.

Legend: R rows of the store, B rows in use, S lines among them, H query heads, K key-value heads, G query heads for
each of them (H / K), D head size, T tokens of the pass, L used length, C capacity of a row in tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from headrace.engines.lines import Lines

_MIN_CAPACITY = 64


@dataclass(frozen=True, slots=True)
class Document:
    """The keys and values [K, T, D] of one prefilled sequence, by layer, and its last token's logits [V]."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    logits_V: Tensor
    num_tokens: int
    routing: Tensor | None = None
    """What the routers chose, [T, routers, experts of a token], where the engine records it."""


class PrefillLayout:
    """Documents packed into one row [1, T]; each token sees its own document up to itself.

    Keeps the keys and values of every layer for :meth:`document`.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        self._spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def attend(
        self, module: nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float
    ) -> Tensor:
        layer = _layer_of(module)
        self._keys[layer], self._values[layer] = key_BKTD[0], value_BKTD[0]
        grouped = query_BHTD.shape[1] != key_BKTD.shape[1]
        out_BTHD = torch.empty_like(query_BHTD.transpose(1, 2), memory_format=torch.contiguous_format)
        for start, end in self._spans:
            out_BTHD[:, start:end] = scaled_dot_product_attention(
                query_BHTD[:, :, start:end],
                key_BKTD[:, :, start:end],
                value_BKTD[:, :, start:end],
                is_causal=True,
                scale=scaling,
                enable_gqa=grouped,
            ).transpose(1, 2)
        return out_BTHD

    def document(self, index: int, logits_V: Tensor, routing: Tensor | None = None) -> Document:
        """A copy of one document's keys and values, so that the packed pass can be freed. ``routing``: the pass's."""
        start, end = self._spans[index]
        return Document(
            {layer: key[:, start:end].clone() for layer, key in self._keys.items()},
            {layer: value[:, start:end].clone() for layer, value in self._values.items()},
            logits_V,
            end - start,
            None if routing is None else routing[start:end].clone(),
        )


class RowStore:
    """Keys and values of the running requests: for each layer one buffer [R, K, C, D], written in place.

    Rows and capacity grow by doubling. Row ``i`` belongs to the ``i``-th running request; what lies beyond a row's
    length is finite but meaningless, so every reader must mask it.
    """

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.num_rows = 0
        self.capacity = 0

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._keys.values())).dtype

    def write(self, first_row: int, num_rows: int, document: Document) -> None:
        """Put one document into ``num_rows`` adjacent rows (a group's shared prompt)."""
        rows = slice(first_row, first_row + num_rows)
        for layer, key_KTD in document.keys.items():
            if layer not in self._keys:
                self._keys[layer] = self._new_buffer(key_KTD)
                self._values[layer] = self._new_buffer(document.values[layer])
            self._keys[layer][rows, :, : document.num_tokens] = key_KTD
            self._values[layer][rows, :, : document.num_tokens] = document.values[layer]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of one row over another (compaction)."""
        for buffers in (self._keys, self._values):
            for buffer_RKCD in buffers.values():
                buffer_RKCD[target, :, :length] = buffer_RKCD[source, :, :length]

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for ``num_rows`` rows of ``length`` tokens; what is stored stays."""
        if num_rows <= self.num_rows and length <= self.capacity:
            return
        if num_rows > self.num_rows:
            num_rows = max(num_rows, 2 * self.num_rows)
        if length > self.capacity:
            length = max(length, 2 * self.capacity, _MIN_CAPACITY)
        old_rows, old_capacity = self.num_rows, self.capacity
        self.num_rows, self.capacity = max(num_rows, old_rows), max(length, old_capacity)
        for buffers in (self._keys, self._values):
            for layer, old_RKCD in buffers.items():
                buffers[layer] = self._new_buffer(old_RKCD[0])
                buffers[layer][:old_rows, :, :old_capacity] = old_RKCD

    def append(self, layer: int, slots_X: Tensor, key_BKTD: Tensor, value_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token for each row at the flat ``slots_X`` (see :meth:`slots`); returns both whole buffers."""
        keys_RKCD, values_RKCD = self._keys[layer], self._values[layer]
        head_size = keys_RKCD.shape[-1]
        keys_RKCD.view(-1, head_size).index_copy_(0, slots_X, key_BKTD.reshape(-1, head_size))
        head_size = values_RKCD.shape[-1]
        values_RKCD.view(-1, head_size).index_copy_(0, slots_X, value_BKTD.reshape(-1, head_size))
        return keys_RKCD, values_RKCD

    def num_bytes(self) -> int:
        return sum(b.nbytes for buffers in (self._keys, self._values) for b in buffers.values())

    def slots(self, positions_B: Tensor) -> Tensor:
        """Where token ``positions_B[i]`` of row i lies in a buffer seen as [R * K * C, D]; shape [B * K]."""
        num_heads = next(iter(self._keys.values())).shape[1]
        device = positions_B.device
        heads = torch.arange(len(positions_B) * num_heads, device=device).view(-1, num_heads)
        return (heads * self.capacity + positions_B.unsqueeze(1)).flatten()

    def _new_buffer(self, like_KTD: Tensor) -> Tensor:
        # Zeros, not empty: masked positions are still multiplied by 0, and 0 times a stray NaN would be NaN.
        return like_KTD.new_zeros(self.num_rows, like_KTD.shape[0], self.capacity, like_KTD.shape[-1])


class DecodeLayout:
    """One new token for each of the first B rows of a store; row i already holds ``lengths[i]`` tokens.

    The pass computes a token once for all rows of a line (``lines.py``): S tokens in all. Each row keeps keys and
    values of its own, so that nothing has to be copied where a line parts.
    """

    def __init__(self, store: RowStore, lengths: Sequence[int], lines: Lines, device: torch.device) -> None:
        self._store = store
        self._line_B: Tensor | None = None
        self._first_S: Tensor | None = None
        if not lines.are_single:
            self._line_B, self._first_S = lines.tensors(device)
        positions_B = torch.tensor(lengths, device=device)
        self.positions_S = positions_B if self._first_S is None else positions_B[self._first_S]
        self._used = max(lengths) + 1
        self._slots_X = store.slots(positions_B)
        self._mask_B11L: Tensor | None = None
        if min(lengths) + 1 < self._used:
            hidden_BL = torch.arange(self._used, device=device) > positions_B.unsqueeze(1)
            mask_BL = torch.zeros(hidden_BL.shape, dtype=store.dtype, device=device)
            self._mask_B11L = mask_BL.masked_fill_(hidden_BL, float("-inf"))[:, None, None, :]

    def attend(
        self, module: nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float
    ) -> Tensor:
        if self._line_B is not None:
            query_BHTD, key_BKTD, value_BKTD = (x[self._line_B] for x in (query_BHTD, key_BKTD, value_BKTD))
        keys_RKCD, values_RKCD = self._store.append(_layer_of(module), self._slots_X, key_BKTD, value_BKTD)
        num_rows, num_query_heads, _, head_size = query_BHTD.shape
        # The G query heads that share a key-value head stand as G queries of it: no copy of keys for each head.
        query_BKGD = query_BHTD.reshape(num_rows, key_BKTD.shape[1], -1, head_size)
        keys_BKLD, values_BKLD = (b[:num_rows, :, : self._used] for b in (keys_RKCD, values_RKCD))
        attend = _attend_in_full if _prefers_products(keys_BKLD) else scaled_dot_product_attention
        out_BKGD = attend(query_BKGD, keys_BKLD, values_BKLD, attn_mask=self._mask_B11L, scale=scaling)
        out_BTHD = out_BKGD.reshape(num_rows, 1, num_query_heads, -1)
        return out_BTHD if self._first_S is None else out_BTHD[self._first_S]


class PrefixCache:
    """Prefilled prompts of one policy version, least recently used first, at most ``max_tokens`` in all.

    Keys in ``pinned`` (prompts that waiting requests will need) are kept beyond the bound, so that a group that does
    not fit into the batch at once still has its prompt computed once.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._documents: OrderedDict[Hashable, Document] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._documents)

    def get(self, key: Hashable) -> Document | None:
        document = self._documents.get(key)
        if document is not None:
            self._documents.move_to_end(key)
        return document

    def put(self, key: Hashable, document: Document) -> None:
        self._documents[key] = document
        self.num_tokens += document.num_tokens

    def num_bytes(self) -> int:
        return sum(
            tensor.nbytes
            for document in self._documents.values()
            for tensor in (*document.keys.values(), *document.values.values(), document.logits_V)
        )

    def trim(self, pinned: Set[Hashable]) -> None:
        for key in list(self._documents):
            if self.num_tokens <= self._max_tokens:
                return
            if key not in pinned:
                self.num_tokens -= self._documents.pop(key).num_tokens

    def clear(self) -> None:
        self._documents.clear()
        self.num_tokens = 0


def _prefers_products(keys_BKLD: Tensor) -> bool:
    """Where a batch of small products is faster than the tiled kernel, which is made for many queries: on two cores
    1.5 times at 64 rows of 60 to 90 tokens. Not in half precision, whose scores that kernel keeps in float32."""
    return keys_BKLD.device.type == "cpu" and keys_BKLD.dtype in (torch.float32, torch.float64)


def _attend_in_full(
    query_BKGD: Tensor, keys_BKLD: Tensor, values_BKLD: Tensor, *, attn_mask: Tensor | None, scale: float
) -> Tensor:
    """softmax(q k / sqrt(d)) v with all scores in memory: [B, K, G, L], small for one new token in each row."""
    scores_BKGL = torch.matmul(query_BKGD * scale, keys_BKLD.transpose(2, 3))
    if attn_mask is not None:
        scores_BKGL += attn_mask
    return torch.matmul(scores_BKGL.softmax(-1), values_BKLD)


def _layer_of(module: nn.Module) -> int:
    layer = module.layer_idx
    assert isinstance(layer, int)
    return layer
