"""Where new weights lie for engines in other processes: one write for each version, however many engines read it.

A call carries a reference only (``RemoteEngine``'s ``send_weights``): a manifest of shared memory on one machine, an
object of Ray's store on a cluster, which moves it to each node once. So nothing passes through the controller's calls.
The board keeps the newest version, which engines that start later read too.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.inprocess import WeightUpdateError
from headrace.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender


class _Board(ABC):
    """Writes an update once; whoever asks for the same version again gets the same reference."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._version: PolicyVersion | None = None
        self._reference: Any = None

    async def send(self, update: WeightUpdate) -> Any:
        async with self._lock:
            if update.version != self._version:
                self._version = None  # half written, if this fails
                self._reference = await asyncio.to_thread(self._write, update)
                self._version = update.version
            return self._reference

    @abstractmethod
    def _write(self, update: WeightUpdate) -> Any:
        """Put it where engines can read it; the reference to it."""


class SharedMemoryBoard(_Board):
    """For engines that inherited :attr:`fd`."""

    def __init__(self) -> None:
        super().__init__()
        self._sender = SharedMemorySender()

    @property
    def fd(self) -> int:
        return self._sender.fd

    def close(self) -> None:
        self._sender.close()

    def _write(self, update: WeightUpdate) -> Any:
        return self._sender.send(update, base=None)


class SharedMemoryInbox:
    """The engine's side: manifests to updates whose tensors map the sender's memory."""

    def __init__(self, fd: int) -> None:
        self._receiver = SharedMemoryReceiver(fd)

    def receive(self, manifest: Any) -> WeightUpdate:
        """Raises WeightUpdateError for what does not fit or arrived with other bits."""
        read = self._receiver.read(manifest)
        if read is None:  # the version that it has: read again, since the engine may not have taken it
            self._receiver = SharedMemoryReceiver(self._receiver.fd)
            read = self._receiver.read(manifest)
            assert read is not None
        self._receiver.commit(read)
        return WeightUpdate(version=read.version, tensors=read.tensors)


class RayBoard(_Board):
    """For engines on Ray: one object in its store, which lives as long as the board holds its reference."""

    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray

    def _write(self, update: WeightUpdate) -> Any:
        tensors: dict[str, Any] = {}
        if update.buckets is not None:
            for bucket in update.buckets():
                tensors |= {name: _as_array(tensor) for name, tensor in bucket.items()}
        elif update.tensors is not None:
            tensors = {name: _as_array(tensor) for name, tensor in update.tensors.items()}
        else:
            raise WeightUpdateError(
                f"weights {update.version} came without tensors, but the engines run in other processes"
            )
        return self._ray.put({"version": tuple(update.version), "tensors": tensors})


def receive_from_ray(stored: Mapping[str, Any]) -> WeightUpdate:
    """What a reference of :class:`RayBoard` comes to at the engine. The tensors are views of the store; read only."""
    tensors = {name: _as_tensor(*entry) for name, entry in stored["tensors"].items()}
    return WeightUpdate(version=PolicyVersion(*stored["version"]), tensors=tensors)


def _as_array(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], Any]:
    """(dtype, shape, bytes): numpy has no bfloat16."""
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), raw.numpy()


def _as_tensor(dtype: str, shape: tuple[int, ...], raw: Any) -> torch.Tensor:
    if not raw.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    if not raw.flags.writeable:  # torch has no read-only tensors; a copy is cheaper than a warning that means nothing
        raw = raw.copy()
    return torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)
