"""Every preset through the whole loop, on a model of 134 thousand parameters: two batches of two optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms import PRESETS
from headrace.config.schema import RunConfig
from headrace.record.metrics import read_metrics
from headrace.run import train
from headrace.testing import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.2)


def run(model: Path, output_dir: Path, *, rollout: dict[str, Any] | None = None, **algorithm: Any) -> Path:
    config = RunConfig.model_validate(
        {
            "name": "run",
            "output_dir": output_dir,
            "model": {"path": str(model)},
            "tasks": {"type": "arithmetic", "max_operand": 4},
            "rewards": [{"type": f"{__name__}:starts_low"}],
            "sampling": {"max_new_tokens": 4},
            "algorithm": algorithm,
            "critic": {"type": "shared", "learning_rate": 1e-3} if algorithm["preset"] == "ppo_critic" else None,
            "trainer": {"num_batches": 2, "num_minibatches": 2, "learning_rate": 1e-3},
            "rollout": {"groups_per_batch": 4, "group_size": 4, **(rollout or {})},
            "checkpoint": {"every": 0},
            "monitor": {"progress": False, "episodes_in_report": 0},
        }
    )
    return train(config).run_dir


def starts_low(answer: str, task: Any) -> float:
    """1 for replies whose first character is in the lower half of the alphabet."""
    return float(answer[:1] < "P")


IN_EVERY_RUN = ("remax", "topr", "clip_cov", "ppo_critic")
"""What each asks of the loop and the trainer is its own; the others are slow for what they show."""


@pytest.mark.parametrize(
    "preset", [name if name in IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_a_run_of_every_preset(preset: str, model: Path, tmp_path: Path) -> None:
    """I10, I13: losses are finite and the books hold; the run itself checks I5 and I6. Greedy baselines are booked as
    dropped, one for each group, and never trained."""
    first, last = read_metrics(run(model, tmp_path, preset=preset))
    assert (first["update"], last["update"]) == (1, 2)
    assert first["train/grad_norm"] > 0 and last["train/grad_norm"] > 0
    assert last["policy/logprob_gap_max"] < 1e-4, "trainer against engine, and not how far the policy has moved"
    assert last["ledger/trained_uncommitted"] == 32
    assert last["ledger/issued"] == 32 + last["ledger/dropped"] + last["ledger/in_flight"]
    assert last.get("ledger/dropped:baseline", 0) == (8 if preset == "remax" else 0)


def test_a_greedy_baseline_in_an_asynchronous_run(model: Path, tmp_path: Path) -> None:
    """ReMax with episodes in flight across updates: the books hold, one baseline for each group."""
    rollout = {"max_staleness": 1, "group_size": 2, "max_concurrent": 6}
    _, last = read_metrics(run(model, tmp_path, preset="remax", rollout=rollout))
    assert last["ledger/trained_uncommitted"] == 16
    assert last["ledger/dropped:baseline"] >= 8
    assert last["ledger/issued"] == 16 + last["ledger/dropped"] + last["ledger/in_flight"]
