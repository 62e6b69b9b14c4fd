"""The carrier by collective: one sender broadcasts to all engines at once, over gloo or, between GPUs, NCCL.

The process group is private: built from a store of the sender's own, it touches no default group of torch's, so an
engine (vLLM, or a trainer of several processes) keeps its own. A **generation** of the group is its list of receivers
at one time. An engine that joins, leaves, or fails half way makes a new generation, with the next send. Nothing is
kept: for a late joiner, name it in ``set_receivers`` and send again.

What is broadcast, after the manifest has told the receivers to come::

    [num header bytes]  header: JSON [[name, dtype, shape, checksum], ...]  the tensors' bytes, one after the other
    ... for each bucket of at most ``bucket_bytes``, and at the end [0]; [-1] where the sender cannot go on

Receivers stage all of it (one more copy of the weights, on the group's device) and check every checksum before the
engine sees anything. The sender's tensors must stand still until :meth:`BroadcastSender.transfer` has returned.

gloo is what runs on CPUs and in this project's tests; NCCL is the same code with tensors on the GPU, and has not been
run here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import (
    Held,
    Manifest,
    ReceivedWeights,
    TensorSpec,
    WeightUpdateError,
    dtype_name,
    dtype_named,
    raw_bytes,
    refused,
    tensors_of,
)
from headrace.weights.checksums import checksum

Backend = Literal["gloo", "nccl"]
SENDER = 0
"""The sender's rank; receivers are 1 and up, in the order of their names."""
_END, _FAILED = 0, -1


class Group:
    """One generation of the private group, joined by the constructor. Collective."""

    def __init__(
        self, store: Store, generation: int, rank: int, num_ranks: int, backend: Backend, deadline_s: float
    ) -> None:
        self._device = device_of(backend)
        prefix = PrefixStore(f"headrace-weights-{generation}", store)
        deadline = timedelta(seconds=deadline_s)
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(prefix, rank, num_ranks, deadline)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = deadline
            self._group = dist.ProcessGroupNCCL(prefix, rank, num_ranks, options)
        self._deadline = deadline

    def broadcast(self, tensor: Tensor) -> Tensor:
        """From the sender to all others; returns what is on this rank's device then."""
        tensor = tensor.to(self._device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._group.broadcast([tensor], options).wait(self._deadline)
        return tensor

    def number(self, value: int = 0) -> int:
        return int(self.broadcast(torch.tensor([value])).item())

    def bytes(self, num_bytes: int) -> Tensor:
        """Receivers: uint8 [num_bytes]."""
        return self.broadcast(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))


def device_of(backend: Backend) -> torch.device:
    """Raises WeightUpdateError for NCCL where there is no GPU."""
    if backend == "gloo":
        return torch.device("cpu")
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise WeightUpdateError(
            'the carrier "broadcast" with backend "nccl" needs a GPU and a torch with NCCL on both sides, and this '
            'process has none; use backend "gloo"'
        )
    return torch.device("cuda", torch.cuda.current_device())


class BroadcastSender:
    """The trainer's side. The store listens at ``host``: every receiver must reach it there."""

    def __init__(
        self,
        receivers: Sequence[str] = ("engine",),
        *,
        backend: Backend = "gloo",
        host: str = "127.0.0.1",
        bucket_bytes: int = 256 << 20,
        deadline_s: float = 120.0,
    ) -> None:
        """``receivers``: names of the engines. ``deadline_s``: for all of them to come, and for each collective."""
        device_of(backend)
        self._backend: Backend = backend
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._host = host
        self._store = TCPStore(
            host, 0, None, True, timedelta(seconds=deadline_s), wait_for_workers=False, multi_tenant=False
        )
        self._receivers = tuple(receivers)
        self._generation = 0
        self._group: Group | None = None
        self._pending: WeightUpdate | None = None

    @property
    def receiver(self) -> Mapping[str, Any]:
        return self.receiver_of(self._receivers[0])

    def receiver_of(self, name: str) -> Mapping[str, Any]:
        """What makes the other end of the engine of that name."""
        return {
            "type": "broadcast",
            "name": name,
            "host": self._host,
            "port": self._store.port,
            "backend": self._backend,
            "deadline_s": self._deadline_s,
        }

    @property
    def inherit(self) -> tuple[int, ...]:
        return ()

    def set_receivers(self, names: Sequence[str]) -> None:
        """Who takes part from the next send on; an engine that started anew counts as another one."""
        self._receivers = tuple(names)
        self._leave()

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Announce; :meth:`transfer` is what carries."""
        if update.buckets is None and update.tensors is None:
            next(tensors_of(update))  # says so
        self._pending = update
        return {
            "version": list(update.version),
            "base": None if base is None else list(base),
            "generation": self._generation,
            "ranks": {name: rank for rank, name in enumerate(self._receivers, start=1)},
        }

    def transfer(self) -> None:
        """Broadcast what was announced. Raises WeightUpdateError where not all receivers took part in time."""
        update, self._pending = self._pending, None
        if update is None:
            raise WeightUpdateError("nothing was announced: send first, then transfer once")
        num_ranks = 1 + len(self._receivers)
        try:
            if self._group is None:
                self._group = Group(self._store, self._generation, SENDER, num_ranks, self._backend, self._deadline_s)
            self._broadcast(self._group, update)
        except RuntimeError as error:  # of a lost peer, or of a deadline: torch's are of this class
            self._leave()
            raise WeightUpdateError(
                f"weights {update.version} could not be broadcast to {', '.join(self._receivers)} within "
                f"{self._deadline_s:g} s each time: {error}. Engines keep their last version"
            ) from error
        except BaseException:
            self._leave()
            raise

    def latest(self) -> WeightUpdate | None:
        """None: nothing is kept. Send again, to a group that has the late joiner."""
        return None

    def close(self) -> None:
        self._group = None
        self._pending = None

    def _leave(self) -> None:
        self._group = None
        self._generation += 1

    def _broadcast(self, group: Group, update: WeightUpdate) -> None:
        try:
            for bucket in _buckets(tensors_of(update), self._bucket_bytes):
                entries = [(n, dtype_name(t.dtype), list(t.shape), checksum(t)) for n, t in bucket]
                header = torch.frombuffer(bytearray(json.dumps(entries).encode()), dtype=torch.uint8)
                group.number(len(header))
                group.broadcast(header)
                group.broadcast(torch.cat([raw_bytes(tensor) for _, tensor in bucket]))
        except RuntimeError:
            raise
        except BaseException:
            group.number(_FAILED)  # the receivers wait for the next bucket
            raise
        group.number(_END)


class BroadcastReceiver:
    """The engine's side. ``read`` joins the group where it is new, and takes part in one transfer."""

    def __init__(self, name: str, host: str, port: int, backend: Backend, deadline_s: float) -> None:
        device_of(backend)
        self._name = name
        self._address = (host, port)
        self._backend: Backend = backend
        self._deadline_s = deadline_s
        self._group: Group | None = None
        self._generation = -1
        self._held = Held()

    @property
    def version(self) -> PolicyVersion | None:
        return self._held.version

    def read(self, manifest: Mapping[str, Any]) -> ReceivedWeights | None:
        """Takes part to the end, whatever is wrong, since others do too. Raises WeightUpdateError."""
        version = PolicyVersion(*manifest["version"])
        rank = manifest["ranks"].get(self._name)
        if rank is None:
            known = ", ".join(manifest["ranks"])
            raise refused(version, [f"they are for {known}, and this engine is {self._name!r}"])
        try:
            group = self._joined(manifest["generation"], rank, 1 + len(manifest["ranks"]))
            tensors, sums, problems = _received(group)
        except RuntimeError as error:
            self._group = None
            raise WeightUpdateError(
                f"weights {version}: the broadcast to {self._name} broke off, or brought nothing for "
                f"{self._deadline_s:g} s: {error}. Nothing was changed"
            ) from error
        specs = {name: TensorSpec(dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
        if problems:
            raise refused(version, problems)
        return self._held.checked(version, manifest["base"], sums, specs, lambda: (tensors, []))

    def commit(self, read: ReceivedWeights) -> None:
        self._held.commit(read)

    def close(self) -> None:
        self._group = None

    def _joined(self, generation: int, rank: int, num_ranks: int) -> Group:
        if self._group is None or generation != self._generation:
            self._group = None
            host, port = self._address
            store = TCPStore(host, port, None, False, timedelta(seconds=self._deadline_s), wait_for_workers=False)
            self._group = Group(store, generation, rank, num_ranks, self._backend, self._deadline_s)
            self._generation = generation
        return self._group


def _received(group: Group) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """(tensors, their checksums, problems), once the sender has said that this is all."""
    tensors: dict[str, Tensor] = {}
    sums: dict[str, str] = {}
    problems: list[str] = []
    while (num_header_bytes := group.number()) > 0:
        header = json.loads(group.bytes(num_header_bytes).cpu().numpy().tobytes())
        dtypes = [_dtype(name) for _, name, _, _ in header]
        sizes = [prod(shape) * dtype.itemsize for (_, _, shape, _), dtype in zip(header, dtypes, strict=True)]
        payload = group.bytes(sum(sizes))
        offset = 0
        for (name, _, shape, digest), dtype, size in zip(header, dtypes, sizes, strict=True):
            raw, offset = payload[offset : offset + size], offset + size
            # A copy: of a slice at any byte, no wider element can be viewed.
            tensors[name] = raw.clone().view(dtype).view(shape)
            sums[name] = digest
    if num_header_bytes != _END:
        problems.append("the sender could not go on half way")
    return tensors, sums, problems


def _dtype(name: str) -> torch.dtype:
    dtype = dtype_named(name)
    if dtype is None:
        raise WeightUpdateError(f"the sender's torch has a dtype {name!r}, and this process's has none of that name")
    return dtype


def _buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket
