"""An asynchronous run whose replies go on under new weights: what the metrics say of it, by ``engine.kv_policy``."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_runs import metric, small_config

from headrace.run import train


def recorded(run_dir: Path, name: str) -> list[float]:
    return [value for value in metric(run_dir, name).values() if value is not None]


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
def test_replies_that_go_on_under_new_weights(tmp_path: Path, kv_policy: str) -> None:
    """Issue 4, done line 3: with recompute the tokens behind the switch are the new policy's, with keep they stand on
    old keys, and the run records by how much. Those of whole replies agree either way."""
    config = small_config(
        tmp_path,
        rollout={"max_staleness": 1},
        engine={"weights": "copy", "kv_policy": kv_policy, "max_batch_size": 6},
        trainer={"num_batches": 12, "learning_rate": 3e-3},
    )
    train(config)
    run_dir = tmp_path / "run"
    in_flight = recorded(run_dir, "engine/in_flight_gap_max")
    assert in_flight, "no reply went on under new weights"
    assert max(in_flight) < 1e-4 if kv_policy == "recompute" else max(in_flight) > 1e-3
    assert max(recorded(run_dir, "engine/gap_max")) < 1e-4
    assert "after a switch in flight" in (run_dir / "report.html").read_text()
