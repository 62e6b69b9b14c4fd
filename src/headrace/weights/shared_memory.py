"""The carrier between two processes of one machine: tensors lie in memory that both map, and a manifest says where.

The memory is a file without a name (in /dev/shm where there is one), inherited by the engine's process as an open
descriptor. So nothing is left behind whatever is killed, and nobody else can find it. It holds the newest update only;
the sender may write again once the engine has answered.

A manifest is JSON (dtype names are torch's)::

    {"version": [lineage, number], "base": [lineage, number] or null, "num_bytes": int,
     "tensors": [[name, dtype, shape, offset, checksum], ...]}

The receiver checks everything before it hands out the first tensor: version not older than its own, ``base`` the
version that it holds, the same names, shapes and dtypes as ever, and each tensor's checksum over the bits that it maps.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
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
    raw_bytes,
    specs_of,
    tensors_of,
    update_by,
)
from headrace.weights.checksums import checksum

ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple."""
_SHARED_FOLDER = Path("/dev/shm")


class SharedMemorySender:
    """The trainer's side. ``fd`` is what the engine's process must inherit."""

    def __init__(self) -> None:
        folder = _SHARED_FOLDER if _SHARED_FOLDER.is_dir() else None
        self._file = tempfile.TemporaryFile(prefix="headrace-weights-", dir=folder)  # noqa: SIM115 (closed by close)
        self._where = str(folder or tempfile.gettempdir())
        self._size = 0
        self._latest: Manifest | None = None

    @property
    def fd(self) -> int:
        return self._file.fileno()

    @property
    def receiver(self) -> Mapping[str, Any]:
        return {"type": "shared_memory", "fd": self.fd}

    @property
    def inherit(self) -> tuple[int, ...]:
        return (self.fd,)

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Write all tensors of ``update`` and say where they are. Not while an engine still reads the last ones.

        Raises WeightUpdateError where there is nothing to send, or no room for it.
        """
        entries: list[tuple[str, str, list[int], int, str]] = []
        offset = 0
        self._latest = None  # until all of it is written
        for name, tensor in tensors_of(update):
            raw = raw_bytes(tensor)
            self._write(raw, offset, update.version)
            entries.append((name, dtype_name(tensor.dtype), list(tensor.shape), offset, checksum(tensor)))
            offset += -(-len(raw) // ALIGNMENT) * ALIGNMENT
        self._latest = {"version": update.version, "base": None, "num_bytes": offset, "tensors": entries}
        return {**self._latest, "base": base}

    def transfer(self) -> None:
        """Nothing: the memory is there."""

    def latest(self) -> WeightUpdate | None:
        """The version that lies in the memory. No send may run until the engine that gets it has answered."""
        return None if self._latest is None else update_by(self._latest)

    def release(self) -> None:
        """Give the memory back. Only once no engine reads it any more: what still did would crash."""
        os.ftruncate(self.fd, 0)
        self._size, self._latest = 0, None

    def close(self) -> None:
        self._file.close()

    def _write(self, raw: Tensor, offset: int, version: PolicyVersion) -> None:
        end = offset + -(-len(raw) // ALIGNMENT) * ALIGNMENT
        try:
            if end > self._size:
                # Claims the room now: writing into a full memory file system through a map would end the process.
                os.posix_fallocate(self.fd, 0, end)
                self._size = end
            view = raw.cpu().numpy().data
            while view:
                num_written = os.pwrite(self.fd, view, offset)
                view, offset = view[num_written:], offset + num_written
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise WeightUpdateError(
                f"weights {version} need {end:,} bytes or more in {self._where}, which is full; free some, or mount it "
                "larger. The engine still has its last version"
            ) from error


class SharedMemoryReceiver:
    """The engine's side, over the inherited descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = Held()

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def version(self) -> PolicyVersion | None:
        """Of the last committed update; None before the first."""
        return self._held.version

    def read(self, manifest: Mapping[str, Any]) -> ReceivedWeights | None:
        """The tensors of ``manifest``; None where they are the committed ones. Raises WeightUpdateError."""
        version = PolicyVersion(*manifest["version"])
        sums, specs = checksums_of(manifest), specs_of(manifest)
        return self._held.checked(version, manifest["base"], sums, specs, lambda: self._mapped(manifest))

    def commit(self, read: ReceivedWeights) -> None:
        """The engine has loaded them."""
        self._held.commit(read)

    def close(self) -> None:
        """Nothing: the descriptor belongs to whoever passed it on."""

    def _mapped(self, manifest: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
        num_bytes, size = manifest["num_bytes"], os.fstat(self._fd).st_size
        if not 0 < num_bytes <= size:
            return {}, [f"the manifest says {num_bytes} bytes, and {size} are there"]
        # A private map: the tensors look writable to torch, but nothing that is done to them reaches the sender.
        memory = mmap.mmap(self._fd, num_bytes, access=mmap.ACCESS_COPY)
        tensors: dict[str, Tensor] = {}
        problems = []
        for name, dtype_text, shape, offset, _ in manifest["tensors"]:
            dtype = dtype_named(dtype_text)
            count = prod(shape)
            if dtype is None or offset < 0 or offset + count * dtype.itemsize > num_bytes:
                problems.append(f"{name} ({dtype_text} {shape} at {offset}) does not lie in the {num_bytes} bytes")
                continue
            tensor = torch.empty(shape, dtype=dtype)
            if count:
                tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
            tensors[name] = tensor
        return tensors, problems
