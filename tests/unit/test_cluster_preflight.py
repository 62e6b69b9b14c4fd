"""The preflight: every collective on every axis, and the rank that holds the others up is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.model.parallel.preflight import OPERATIONS, slow_ranks

WORKER = Path(__file__).parents[1] / "preflight_worker.py"


def run(axes: dict[str, int], num: int, slow: int, folder: Path) -> dict[str, Any]:
    """What rank 0 found."""
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    address = f"file://{folder / 'rendezvous'}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(num), address, str(slow), json.dumps(axes)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), [error for _, error in outputs]
    return json.loads(outputs[0][0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the name of the loopback interface is Linux's")
def test_a_slowed_rank_is_named_and_every_axis_is_measured(tmp_path: Path) -> None:
    """Of 2 x 2 ranks, rank 2 answers 30 ms late: it is named, and none of its neighbours is."""
    found = run({"dp_shard": 2, "tp": 2}, 4, slow=2, folder=tmp_path)
    measured = {(axis, operation) for axis, operation, _, _ in found["rows"]}
    assert {(axis, operation) for axis in ("fsdp", "tp") for operation in OPERATIONS} <= measured
    assert all(seconds > 0 for *_, seconds in found["rows"])
    assert [rank for rank, _ in found["slow"]] == [2]
    late = {axis: seconds for axis, operation, _, seconds in found["rows"] if operation == "all_reduce"}
    assert late["tp"] > 0.02 and late["fsdp"] > 0.02, "a slow rank shows in the collectives of all its groups"


def test_the_rank_whose_best_link_is_slow_is_named() -> None:
    own = [{"its messages": t, "its own arithmetic": 0.001} for t in (0.001, 0.001, 0.050, 0.0012)]
    (slow,) = slow_ranks(own)
    assert (slow.rank, slow.what) == (2, "its messages") and slow.factor > 40


def test_arithmetic_names_the_slow_one_of_two() -> None:
    """Both ends of a link see the same delay; only one of them computes slowly."""
    own = [{"its messages": 0.05, "its own arithmetic": t} for t in (0.001, 0.02)]
    assert [slow.rank for slow in slow_ranks(own)] == [1]


def test_microseconds_name_nobody() -> None:
    assert slow_ranks([{"x": 10e-6}, {"x": 90e-6}, {"x": 11e-6}]) == ()
