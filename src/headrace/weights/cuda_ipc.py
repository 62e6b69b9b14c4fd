"""The carrier between two processes that share one GPU: the engine maps the trainer's memory, nothing is copied.

A manifest says for each tensor which allocation it lies in and where; the receiver opens it through the driver's
inter-process handles. The sender keeps its tensors until the next send, and neither side may write into them while the
engine loads. One GPU, one machine, two processes: a process cannot open its own handles.

Not run here: this project is made on machines without a GPU. Both sides refuse to be made without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import (
    Held,
    Manifest,
    ReceivedWeights,
    WeightUpdateError,
    checksums_of,
    dtype_name,
    dtype_named,
    specs_of,
    tensors_of,
    update_by,
)
from headrace.weights.checksums import checksum


def check_gpu() -> None:
    """Raises WeightUpdateError where there is none."""
    if not torch.cuda.is_available():
        raise WeightUpdateError(
            'the carrier "cuda_ipc" hands over GPU memory, and this process has no GPU; use shared memory '
            '(engine.carrier.type = "memory")'
        )


class CudaIpcSender:
    """The trainer's side."""

    def __init__(self) -> None:
        check_gpu()
        self._kept: list[Tensor] = []
        self._latest: Manifest | None = None

    @property
    def receiver(self) -> Mapping[str, Any]:
        return {"type": "cuda_ipc"}

    @property
    def inherit(self) -> tuple[int, ...]:
        return ()

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Name every tensor's memory. Raises WeightUpdateError for tensors that are not on a GPU."""
        self._latest, self._kept = None, []
        entries: list[list[Any]] = []
        for name, tensor in tensors_of(update):
            if not tensor.is_cuda:
                raise WeightUpdateError(f"weights {update.version}: {name} lies on {tensor.device}, not on a GPU")
            own = tensor.detach().contiguous()
            self._kept.append(own)
            entries.append([name, dtype_name(own.dtype), list(own.shape), place_of(own), checksum(own)])
        torch.cuda.synchronize()  # what is still being computed must be there before another process looks
        self._latest = {"version": list(update.version), "base": None, "tensors": entries}
        return {**self._latest, "base": None if base is None else list(base)}

    def transfer(self) -> None:
        """Nothing: the memory is there."""

    def latest(self) -> WeightUpdate | None:
        """The version whose memory is kept; it must not have been written to since."""
        return None if self._latest is None else update_by(self._latest)

    def close(self) -> None:
        self._latest, self._kept = None, []


class CudaIpcReceiver:
    """The engine's side."""

    def __init__(self) -> None:
        check_gpu()
        self._held = Held()

    @property
    def version(self) -> PolicyVersion | None:
        return self._held.version

    def read(self, manifest: Mapping[str, Any]) -> ReceivedWeights | None:
        """The trainer's own memory as tensors; None where they are the committed ones. Raises WeightUpdateError."""
        version = PolicyVersion(*manifest["version"])
        sums, specs = checksums_of(manifest), specs_of(manifest)

        def fetch() -> tuple[dict[str, Tensor], list[str]]:
            return {name: opened(dtype, shape, place) for name, dtype, shape, place, _ in manifest["tensors"]}, []

        return self._held.checked(version, manifest["base"], sums, specs, fetch)

    def commit(self, read: ReceivedWeights) -> None:
        self._held.commit(read)

    def close(self) -> None:
        """Nothing is held beyond a read."""


def place_of(tensor: Tensor) -> list[Any]:
    """[offset in elements, handle of the storage]: torch's own tuple, bytes as hexadecimal text."""
    storage: Any = tensor.untyped_storage()
    handle = storage._share_cuda_()
    return [tensor.storage_offset(), [part.hex() if isinstance(part, bytes) else part for part in handle]]


def opened(dtype: str, shape: list[int], place: list[Any]) -> Tensor:
    """The tensor of :func:`place_of`, in another process. The handle's device is this process's own number."""
    offset, handle = place
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    make: Any = torch.UntypedStorage._new_shared_cuda
    storage = make(*parts)
    empty = torch.empty(0, dtype=dtype_named(dtype), device=storage.device)
    strides = torch.empty(shape, device="meta").stride()
    return empty.set_(storage, offset, torch.Size(shape), strides)
