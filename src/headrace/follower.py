"""The entry of a follower: a process of a run that trains along and runs no loop. Started by the leader, never by hand.

``python -m headrace.follower SPEC.json RANK``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from headrace.checked import check_before_work, load_policy
from headrace.config.load import restore_config
from headrace.config.schema import RunConfig
from headrace.engine_wiring import num_threads
from headrace.model.parallel.mesh import ParallelMesh
from headrace.trainer.crew import follow, join_run
from headrace.wiring import build_parallel_trainer


def main(arguments: list[str]) -> None:
    """Join the run and make the leader's calls until it ends this process."""
    spec = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    follow_run(restore_config(spec["config"], arguments[0]), int(arguments[1]), spec["address"])


def follow_run(config: RunConfig, rank: int, address: str) -> None:
    """Train along as process ``rank`` of the run whose leader waits at ``address``, until it is gone."""
    torch.set_num_threads(num_threads(config)[1])
    verbs = join_run(config, rank, address)
    checked = check_before_work(config, asks_servers=False)
    trainer = build_parallel_trainer(checked, load_policy(config), ParallelMesh.create(config.parallel))
    follow(trainer, checked.algorithm, verbs)


if __name__ == "__main__":
    main(sys.argv[1:])
