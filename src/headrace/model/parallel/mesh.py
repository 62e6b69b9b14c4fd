"""Where a process stands: one place on each axis, and the groups that it talks to.

Ranks are laid out with ``tp`` fastest, so that the ranks that talk most are neighbours::

    pp, dp_replicate, ep, dp_shard, cp, tp

Two views of the same ranks, because experts are sharded differently from the rest:

    dense    (pp, dp_replicate, fsdp, tp)    fsdp  = ep x dp_shard x cp
    expert   (pp, dp_replicate, efsdp, ep)   efsdp = dp_shard x cp x tp

Experts are never split by ``tp``: the ranks of a tp group send disjoint parts of their common tokens to the experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from headrace.config.schema import ParallelConfig
from headrace.model.parallel.check import ParallelError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMesh:
    """The device meshes of a layout and this process's place in them."""

    config: ParallelConfig
    dense: DeviceMesh
    expert: DeviceMesh
    context: DeviceMesh
    """(others, cp)"""
    data_rank: int
    """Which part of a minibatch is this process's, in [0, num_data_ranks)."""

    @classmethod
    def create(cls, config: ParallelConfig, device_type: str = "cpu") -> ParallelMesh:
        """Make the groups. Collective: every process calls it, after :func:`join_processes`."""
        if not dist.is_initialized() or dist.get_world_size() != config.world_size:
            started = dist.get_world_size() if dist.is_initialized() else 1
            raise ParallelError(
                f"[parallel] asks for {config.world_size} processes, but {started} are joined; start the run with "
                "one process for each rank"
            )
        c = config
        ranks = torch.arange(c.world_size).view(c.pp, c.dp_replicate, c.ep, c.dp_shard, c.cp, c.tp)
        dense = ranks.reshape(c.pp, c.dp_replicate, c.ep * c.dp_shard * c.cp, c.tp)
        expert = ranks.permute(0, 1, 3, 4, 5, 2).reshape(c.pp, c.dp_replicate, -1, c.ep)
        context = ranks.permute(0, 1, 2, 3, 5, 4).reshape(-1, c.cp)
        place = [int(i) for i in (ranks == dist.get_rank()).nonzero()[0]]
        return cls(
            config=config,
            dense=DeviceMesh(device_type, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
            expert=DeviceMesh(device_type, expert, mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep")),
            context=DeviceMesh(device_type, context, mesh_dim_names=("others", "cp")),
            data_rank=(place[1] * c.ep + place[2]) * c.dp_shard + place[3],
        )

    def rank(self, axis: str) -> int:
        """This process's place on axis ``pp``, ``tp`` or ``cp``."""
        mesh = self.context if axis == "cp" else self.dense
        return int(mesh.get_local_rank(axis))

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes that differ from this one on axis ``pp``, ``tp`` or ``cp`` only."""
        mesh = self.context if axis == "cp" else self.dense
        return mesh.get_group(axis)

    @property
    def is_first_stage(self) -> bool:
        return self.rank("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        return self.rank("pp") == self.config.pp - 1

    @property
    def reports(self) -> bool:
        """One process of each data rank speaks for it: the last stage's first."""
        return self.is_last_stage and self.rank("tp") == 0 and self.rank("cp") == 0

    def sharding(self, view: str = "dense") -> DeviceMesh:
        """The mesh that ``fully_shard`` takes: 1-D, or 2-D (replicate, shard) where the model is replicated."""
        mesh, axis = (self.dense, "fsdp") if view == "dense" else (self.expert, "efsdp")
        return mesh[("dp_replicate", axis)] if self.config.dp_replicate > 1 else mesh[axis]


def join_processes(*, rank: int, num_processes: int, address: str, deadline_s: float, backend: str = "gloo") -> None:
    """Join the process group. ``address`` is ``host:port``, or ``file://PATH`` for processes of one machine.

    ``deadline_s`` bounds every later collective too (I19): a process that waits longer for another one ends with an
    error that names the operation.
    """
    method = address if "://" in address else f"tcp://{address}"
    dist.init_process_group(
        backend, init_method=method, rank=rank, world_size=num_processes, timeout=timedelta(seconds=deadline_s)
    )
