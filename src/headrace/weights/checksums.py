"""Checksums of weights, equal on the trainer's and the engine's side exactly when the bits are equal (I6, F78).

A cryptographic hash reads 1 to 2 GB/s on one core; this one reads about 7, because only sums are hashed. The raw bytes
of a tensor stand as 64-bit integers in rows of ``_WIDTH``; the sum of each column and of each row (modulo 2^64, so
in any order) go through BLAKE2b, with shape and dtype and the bytes that do not fill a row. What that detects for
certain: any change of one or more elements within one row or within one column, hence any single wrong element, any
two swapped elements, and a shifted, permuted or stale tensor unless all its row and column sums happen to agree. It is
no defence against somebody who makes two tensors collide on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_WIDTH = 4096
"""64-bit integers in a row."""


def checksum(tensor: Tensor) -> str:
    """16 hex digits over the bits, the shape and the dtype of ``tensor``; NaNs and signed zeros count by their bits."""
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    if raw.storage_offset() % 8:  # a slice of a larger buffer, which cannot be viewed as 64-bit integers
        raw = raw.clone()
    num_whole = len(raw) // (8 * _WIDTH) * (8 * _WIDTH)
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    if num_whole:
        rows = raw[:num_whole].view(torch.int64).view(-1, _WIDTH)
        for axis in (0, 1):
            digest.update(rows.sum(axis).cpu().numpy().tobytes())
    digest.update(raw[num_whole:].cpu().numpy().tobytes())
    return digest.hexdigest()


def checksums(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> :func:`checksum`, for example of ``named_parameters(model)``."""
    return {name: checksum(tensor) for name, tensor in named_tensors}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, under the first of its names; tied weights therefore have one entry (F81)."""
    return dict(model.named_parameters())
