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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksum
from headrace.weights.inprocess import WeightUpdateError

ALIGNMENT = 64
"""Bytes; each tensor begins at a multiple."""
_SHARED_FOLDER = Path("/dev/shm")

Manifest = dict[str, Any]


class SharedMemorySender:
    """The trainer's side. ``fd`` is what the engine's process must inherit."""

    def __init__(self) -> None:
        folder = _SHARED_FOLDER if _SHARED_FOLDER.is_dir() else None
        self._file = tempfile.TemporaryFile(prefix="headrace-weights-", dir=folder)  # noqa: SIM115 (closed by close)
        self._where = str(folder or tempfile.gettempdir())
        self._size = 0

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Write all tensors of ``update`` and say where they are. Not while an engine still reads the last ones.

        Raises WeightUpdateError where there is nothing to send, or no room for it.
        """
        entries: list[tuple[str, str, list[int], int, str]] = []
        offset = 0
        for name, tensor in _tensors(update):
            raw = tensor.detach().contiguous().flatten().view(torch.uint8)
            self._write(raw, offset, update.version)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append((name, dtype, list(tensor.shape), offset, checksum(tensor)))
            offset += -(-len(raw) // ALIGNMENT) * ALIGNMENT
        return {"version": update.version, "base": base, "num_bytes": offset, "tensors": entries}

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


def _tensors(update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
    if update.buckets is not None:
        for bucket in update.buckets():
            yield from bucket.items()
    elif update.tensors is not None:
        yield from update.tensors.items()
    else:
        raise WeightUpdateError(
            f"weights {update.version} came without tensors, but this engine runs in another process; publish with "
            "tensors or buckets"
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of every update must look like."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """An update that has passed every check. The tensors map the sender's memory; do not keep them."""

    version: PolicyVersion
    tensors: Mapping[str, Tensor]
    checksums: Mapping[str, str]
    specs: Mapping[str, TensorSpec]


class SharedMemoryReceiver:
    """The engine's side, over the inherited descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._version: PolicyVersion | None = None
        self._checksums: Mapping[str, str] = {}
        self._specs: Mapping[str, TensorSpec] = {}

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def version(self) -> PolicyVersion | None:
        """Of the last committed update; None before the first."""
        return self._version

    def read(self, manifest: Mapping[str, Any]) -> ReceivedWeights | None:
        """The tensors of ``manifest``; None where they are the committed ones. Raises WeightUpdateError."""
        version = PolicyVersion(*manifest["version"])
        sums = {name: digest for name, _, _, _, digest in manifest["tensors"]}
        specs = {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape, _, _ in manifest["tensors"]}
        problems = list(self._version_problems(version, manifest["base"], sums))
        if not problems and version == self._version:
            return None
        problems += self._spec_problems(specs)
        tensors: dict[str, Tensor] = {}
        if not problems:
            tensors, problems = self._mapped(manifest)
        if problems:
            more = f" and {len(problems) - 5} more problems" if len(problems) > 5 else ""
            raise WeightUpdateError(
                f"weights {version} do not fit this engine, nothing was changed: " + "; ".join(problems[:5]) + more
            )
        return ReceivedWeights(version=version, tensors=tensors, checksums=sums, specs=specs)

    def commit(self, read: ReceivedWeights) -> None:
        """The engine has loaded them."""
        self._version, self._checksums, self._specs = read.version, read.checksums, read.specs

    def _version_problems(self, version: PolicyVersion, base: Any, sums: Mapping[str, str]) -> Iterator[str]:
        held = self._version
        if held is None:
            return
        if version < held:
            yield f"they are older than the engine's {held}; an engine never goes back"
        elif version == held:
            if sums != self._checksums:
                yield f"the engine holds other weights under the same version {held}"
        elif base is not None and PolicyVersion(*base) != held:
            yield f"they build on {PolicyVersion(*base)}, but the engine holds {held}"

    def _spec_problems(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        expected = self._specs or specs
        problems = [f"{name} is missing" for name in expected if name not in specs]
        for name, spec in specs.items():
            if name not in expected:
                problems.append(f"{name} was never part of it")
            elif spec != expected[name]:
                was = expected[name]
                problems.append(f"{name} is {spec.dtype} {spec.shape}, the engine's is {was.dtype} {was.shape}")
        return problems

    def _mapped(self, manifest: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
        num_bytes, size = manifest["num_bytes"], os.fstat(self._fd).st_size
        if not 0 < num_bytes <= size:
            return {}, [f"the manifest says {num_bytes} bytes, and {size} are there"]
        # A private map: the tensors look writable to torch, but nothing that is done to them reaches the sender.
        memory = mmap.mmap(self._fd, num_bytes, access=mmap.ACCESS_COPY)
        tensors: dict[str, Tensor] = {}
        problems = []
        for name, dtype_name, shape, offset, digest in manifest["tensors"]:
            dtype = getattr(torch, dtype_name, None)
            count = prod(shape)
            if not isinstance(dtype, torch.dtype) or offset < 0 or offset + count * dtype.itemsize > num_bytes:
                problems.append(f"{name} ({dtype_name} {shape} at {offset}) does not lie in the {num_bytes} bytes")
                continue
            tensor = torch.empty(shape, dtype=dtype)
            if count:
                tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
            if checksum(tensor) != digest:
                problems.append(f"{name} arrived with other bits than were sent (checksum)")
            tensors[name] = tensor
        return tensors, problems
