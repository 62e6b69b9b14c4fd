"""Before a run pays for it: every collective on every axis of the mesh, timed, and the rank that is slow named.

A slow rank makes each collective of its groups slow for all of them, so times of collectives name nobody. What does:
messages to and fro between neighbours of each group. A rank whose *best* link is still far slower than usual is slow
itself; one with a slow link and a fast one has a slow neighbour. Where there are two ranks in all, both look alike, so
each rank's own arithmetic is timed, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.model.parallel.mesh import ParallelMesh

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
AXES = ("pp", "dp_replicate", "fsdp", "cp", "tp", "efsdp", "ep")
"""Of the mesh; ``fsdp`` is dp_shard, ep and cp together, ``efsdp`` what shards the experts (mesh.py)."""
SLOW_FACTOR = 3.0
"""Times the median of all ranks, above which a rank is named."""
MIN_EXCESS_S = 2e-3
"""What it must lose at least: times of microseconds differ by factors for no reason."""
_MATRIX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One collective on one axis, as the slowest group had it."""

    axis: str
    operation: str
    num_ranks: int
    num_bytes: int
    """That each rank put in."""
    median_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.median_s if self.median_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that holds others up."""

    rank: int
    what: str
    """``its own arithmetic``, or ``its messages``."""
    factor: float
    """Times the median of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What one preflight found; equal on all ranks."""

    measurements: tuple[Measurement, ...]
    slow: tuple[SlowRank, ...]


class Collectives:
    """The calls that are timed. A test may hold one of them up."""

    def run(self, operation: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        num = group.size()
        if operation == "all_reduce":
            dist.all_reduce(tensor, group=group)
        elif operation == "all_gather":
            dist.all_gather_into_tensor(tensor.new_empty(num * tensor.numel()), tensor, group=group)
        elif operation == "reduce_scatter":
            dist.reduce_scatter_tensor(tensor.new_empty(tensor.numel() // num), tensor, group=group)
        else:
            dist.broadcast(tensor, group_src=0, group=group)

    def exchange(self, peer: int, is_first: bool) -> None:
        """One message to rank ``peer`` and one back."""
        message = torch.zeros(1)
        if is_first:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)

    def compute(self) -> None:
        a = torch.ones(_MATRIX, _MATRIX)
        for _ in range(4):
            a = (a @ a) / _MATRIX


def preflight(
    mesh: ParallelMesh, *, num_bytes: int = 1 << 20, num_repeats: int = 5, collectives: Collectives | None = None
) -> Preflight:
    """Collective: every rank of the mesh calls it. Raises HeadraceError naming the operation and the axis that failed;
    each is bounded by the deadline that the process group was joined with."""
    calls = collectives or Collectives()
    groups = {axis: group for axis in AXES if (group := _group(mesh, axis)).size() > 1}
    measurements = [
        _measured(calls, axis, operation, group, num_bytes, num_repeats)
        for axis, group in groups.items()
        for operation in OPERATIONS
    ]
    own = {"its own arithmetic": _median_s(calls.compute, num_repeats)}
    links_s = []
    for axis, group in groups.items():
        with _named("messages", axis):
            links_s.append(_best_link_s(calls, group, num_repeats))
    own["its messages"] = min(links_s)  # over all axes: a healthy rank has a healthy neighbour on some
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {"own": own, "measurements": [asdict(m) for m in measurements]})
    return Preflight(
        measurements=_slowest([e["measurements"] for e in everybody]), slow=slow_ranks([e["own"] for e in everybody])
    )


def slow_ranks(own_by_rank: Sequence[dict[str, float]]) -> tuple[SlowRank, ...]:
    """The ranks whose own times stand out, worst first, each once. ``own_by_rank``: what -> seconds, by rank."""
    worst: dict[int, SlowRank] = {}
    for what in own_by_rank[0]:
        times = [own[what] for own in own_by_rank]
        usual_s = median(times) if len(times) > 2 else min(times)
        for rank, time_s in enumerate(times):
            if time_s <= SLOW_FACTOR * usual_s or time_s - usual_s < MIN_EXCESS_S:
                continue
            found = SlowRank(rank=rank, what=what, factor=time_s / usual_s if usual_s > 0 else float("inf"))
            if rank not in worst or worst[rank].factor < found.factor:
                worst[rank] = found
    return tuple(sorted(worst.values(), key=lambda slow: -slow.factor))


def _group(mesh: ParallelMesh, axis: str) -> dist.ProcessGroup:
    device_mesh = mesh.context if axis == "cp" else mesh.expert if axis in ("efsdp", "ep") else mesh.dense
    return device_mesh.get_group(axis)


def _measured(
    calls: Collectives, axis: str, operation: str, group: dist.ProcessGroup, num_bytes: int, num_repeats: int
) -> Measurement:
    num = group.size()
    tensor = torch.ones(max(num, num_bytes // 4 // num * num))
    with _named(operation, axis):
        median_s = _median_s(lambda: calls.run(operation, tensor, group), num_repeats)
    return Measurement(axis=axis, operation=operation, num_ranks=num, num_bytes=tensor.numel() * 4, median_s=median_s)


def _best_link_s(calls: Collectives, group: dist.ProcessGroup, num_repeats: int) -> float:
    """Of this rank's links to its neighbours in the ring of its group. Pairs take turns by a colouring of the ring's
    links, so that nobody waits for somebody who is busy with another: even links, odd links, the link that closes an
    odd ring."""
    ranks = dist.get_process_group_ranks(group)
    num, place = len(ranks), ranks.index(dist.get_rank())
    links = [(i, (i + 1) % num) for i in range(num if num > 2 else 1)]
    best_s = float("inf")
    for first, second in sorted(links, key=lambda link: (link[0] == num - 1 and num % 2, link[0] % 2)):
        if place not in (first, second):
            continue
        peer, is_first = ranks[second if place == first else first], place == first

        def exchange(peer: int = peer, is_first: bool = is_first) -> None:
            calls.exchange(peer, is_first)

        best_s = min(best_s, _median_s(exchange, num_repeats))
    return best_s


def _median_s(call: Callable[[], None], num_repeats: int) -> float:
    """Without the first call, which pays for connections."""
    times = []
    for _ in range(num_repeats + 1):
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return median(times[1:])


def _slowest(by_rank: Sequence[Sequence[dict[str, Any]]]) -> tuple[Measurement, ...]:
    """Every rank measured the same list, each in its own groups."""
    return tuple(Measurement(**max(same, key=lambda m: m["median_s"])) for same in zip(*by_rank, strict=True))


class _named:
    """What fails inside says which operation it was, on which axis."""

    def __init__(self, operation: str, axis: str) -> None:
        self._what = f"{operation} on axis {axis}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise HeadraceError(
                f"preflight: {self._what} failed on rank {dist.get_rank()}: {str(error).splitlines()[0]}; look at that "
                "rank's neighbours on the axis, their network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) first"
            ) from error
