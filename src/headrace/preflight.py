"""``headrace preflight``: starts the ranks of a run's [parallel] section, and lets them measure each other.

``python -m headrace.preflight SPEC.JSON RANK`` is one of them, started by the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.config.load import restore_config
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.model.parallel.mesh import ParallelMesh, join_processes
from headrace.model.parallel.preflight import Preflight, preflight
from headrace.trainer.crew import Followers

DEADLINE_S = 120.0
"""For the ranks to meet, and for each single operation."""


def run_preflight(config: RunConfig, *, num_bytes: int = 1 << 20) -> Preflight:
    """Measure the mesh of ``config`` with processes of this machine. Raises ConfigError where there is one process,
    FollowerDied where one of them ends."""
    if config.parallel.world_size == 1:
        raise ConfigError("all axes of [parallel] are 1: one process has nobody to talk to, so nothing to measure")
    followers = Followers(config, module="headrace.preflight")
    try:
        with followers.explained():
            return measure_rank(config, 0, followers.address, num_bytes=num_bytes)
    finally:
        followers.stop()


def measure_rank(config: RunConfig, rank: int, address: str, *, num_bytes: int = 1 << 20) -> Preflight:
    """This process's part. Collective."""
    torch.set_num_threads(1)
    join_processes(rank=rank, num_processes=config.parallel.world_size, address=address, deadline_s=DEADLINE_S)
    try:
        return preflight(ParallelMesh.create(config.parallel), num_bytes=num_bytes)
    finally:
        dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    measure_rank(restore_config(spec["config"], arguments[0]), int(arguments[1]), spec["address"])


if __name__ == "__main__":
    main(sys.argv[1:])
