"""One rank of a preflight: ``python preflight_worker.py RANK NUM ADDRESS SLOW_RANK AXES_JSON``; rank 0 prints."""

from __future__ import annotations

import json
import sys
import time

import torch.distributed as dist
from torch import Tensor

from headrace.config.schema import ParallelConfig
from headrace.model.parallel.mesh import ParallelMesh, join_processes
from headrace.model.parallel.preflight import Collectives, preflight

DELAY_S = 0.03


class Slow(Collectives):
    """A rank whose messages are late."""

    def run(self, operation: str, tensor: Tensor, group: dist.ProcessGroup) -> None:
        time.sleep(DELAY_S)
        super().run(operation, tensor, group)

    def exchange(self, peer: int, is_first: bool) -> None:
        time.sleep(DELAY_S)
        super().exchange(peer, is_first)


def main() -> None:
    rank, num, address, slow, axes = sys.argv[1:]
    join_processes(rank=int(rank), num_processes=int(num), address=address, deadline_s=60.0)
    mesh = ParallelMesh.create(ParallelConfig(**json.loads(axes)))
    found = preflight(mesh, num_bytes=1 << 14, num_repeats=3, collectives=Slow() if rank == slow else None)
    if rank == "0":
        rows = [(m.axis, m.operation, m.num_ranks, m.median_s) for m in found.measurements]
        print(json.dumps({"rows": rows, "slow": [(s.rank, s.what) for s in found.slow]}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
