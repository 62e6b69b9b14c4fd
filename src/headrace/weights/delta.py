"""The difference of two versions of a tensor, bit for bit: which elements changed, and their new bits.

After an optimizer step most values of a bfloat16 model round to the bits that they had (98 % and more, published
measurements say), so what changed is much less than the whole. One tensor becomes one of

* ``same``: no bit changed, nothing travels;
* ``sparse``: the gaps between the indices of changed elements, and the elements' new bits, both as byte planes (all
  lowest bytes first, and so on: gaps have few high bytes, values few exponents), each compressed by zstd;
* ``whole``: its bits, where that is smaller.

New bits replace old ones, nothing is added or multiplied: so the result is exact in every dtype, NaNs and signed zeros
included, and applying a difference twice is applying it once.

Legend: C changed elements, N bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.weights.carrier import raw_bytes

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size -> integers of that size; elements are compared as those, so that their bits count."""
_GAP = np.dtype("<u4")
_MAX_ELEMENTS = 1 << 32


class DeltaError(HeadraceError):
    """A difference that cannot be decoded, or does not belong to this tensor."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What turns the old tensor into the new one."""

    kind: str
    num_changed: int
    parts: tuple[bytes, ...] = ()
    """sparse: compressed gaps and values; whole: the tensor's bytes."""

    @property
    def num_bytes(self) -> int:
        return sum(len(part) for part in self.parts)


def zstd(level: int) -> Any:
    """pyarrow's codec: Python has zstd from 3.14 on only, and pyarrow is there already."""
    try:
        import pyarrow
    except ImportError as error:
        raise DeltaError(
            "deltas are compressed by zstd through pyarrow, which this Python does not have: `make setup-vllm` "
            'installs it beside vLLM; or choose engine.carrier.type = "file"'
        ) from error
    return pyarrow.Codec("zstd", compression_level=level)


def check_zstd() -> None:
    """Raises DeltaError where this Python cannot read or write differences."""
    zstd(1)


def difference(new: Tensor, old: Tensor, level: int) -> Difference:
    """From ``old`` to ``new``, of equal shape and dtype, both on the CPU."""
    word = _WORDS.get(new.element_size())
    if word is None or new.numel() >= _MAX_ELEMENTS:
        same = torch.equal(raw_bytes(new), raw_bytes(old))
        return Difference("same", 0) if same else _whole(new, new.numel())
    new_words, old_words = (t.detach().contiguous().flatten().view(word) for t in (new, old))
    changed_C = torch.nonzero(new_words != old_words).flatten()
    num_changed = len(changed_C)
    if num_changed == 0:
        return Difference("same", 0)
    if num_changed > len(new_words) // 2:  # more than half: gaps and values are no smaller, and cost time
        return _whole(new, num_changed)
    values_C = new_words[changed_C].numpy()
    gaps_C = np.diff(changed_C.numpy(), prepend=0).astype(_GAP)
    codec = zstd(level)
    parts = tuple(codec.compress(_planes(array), asbytes=True) for array in (gaps_C, values_C))
    if sum(map(len, parts)) >= new.numel() * new.element_size():
        return _whole(new, num_changed)
    return Difference("sparse", num_changed, parts)


def apply(change: Difference, old: Tensor) -> Tensor:
    """The new tensor; ``old`` itself where nothing changed, else another one. Raises DeltaError."""
    if change.kind == "same":
        return old
    new = old.detach().contiguous().clone()
    num_bytes = new.numel() * new.element_size()
    if change.kind == "whole":
        (part,) = change.parts
        if len(part) != num_bytes:
            raise DeltaError(f"{len(part)} bytes for a tensor of {num_bytes}")
        raw_bytes(new).copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
        return new
    if change.kind != "sparse":
        raise DeltaError(f"an unknown kind of difference: {change.kind!r}")
    word = _WORDS[new.element_size()]
    if not 0 < change.num_changed <= new.numel():
        raise DeltaError(f"{change.num_changed} changed elements of {new.numel()}")
    gaps, values = change.parts
    indices_C = np.cumsum(_unpacked(gaps, _GAP, change.num_changed), dtype=np.int64)
    if indices_C[-1] >= new.numel():
        raise DeltaError(f"element {indices_C[-1]} of {new.numel()}")
    values_C = _unpacked(values, np.dtype(f"<i{new.element_size()}"), change.num_changed)
    words = new.flatten().view(word)  # contiguous, so a view
    words[torch.from_numpy(indices_C)] = torch.from_numpy(values_C.copy()).view(word)
    return new


def _whole(new: Tensor, num_changed: int) -> Difference:
    return Difference("whole", num_changed, (raw_bytes(new).numpy().tobytes(),))


def _planes(array: np.ndarray[Any, Any]) -> bytes:
    """All lowest bytes, then all second bytes, and so on."""
    return array.view(np.uint8).reshape(len(array), array.itemsize).T.tobytes()


def _unpacked(part: bytes, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    try:
        planes = zstd(1).decompress(part, decompressed_size=count * dtype.itemsize, asbytes=True)
    except OSError as error:
        raise DeltaError(f"zstd cannot read it: {error}") from error
    if len(planes) != count * dtype.itemsize:
        raise DeltaError(f"it unpacks to {len(planes)} bytes, not {count * dtype.itemsize}")
    return np.frombuffer(planes, np.uint8).reshape(dtype.itemsize, count).T.copy().view(dtype).reshape(count)
