"""Whole runs whose weights reach the embedded engine's copy by a folder: what the carrier is changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import small_config, small_data

from headrace.config.load import restore_config
from headrace.record.metrics import read_metrics
from headrace.run import train
from headrace.types import PolicyVersion
from headrace.weights.receivers import make_receiver
from headrace.weights.store import versions_in

TRAINER: dict[str, Any] = {"num_batches": 3, "schedule": {"type": "constant"}}
SAME = ("reward/mean", "train/loss", "train/grad_norm", "policy/logprob_gap_max")
"""Of each batch; the carriers differ in times and nothing else."""


def figures(run_dir: Path) -> list[dict[str, float]]:
    metrics = list(read_metrics(run_dir))
    return [{name: row[name] for name in SAME} for row in metrics]


@pytest.mark.parametrize("adapter", [False, True], ids=["all", "lora"])
def test_a_synchronous_run_is_the_same_by_any_carrier(tmp_path: Path, adapter: bool) -> None:
    """I8, I18: bit for bit the run that shares its weights, over whole files and over differences; with LoRA only the
    adapter is in the files. The folder ends with the run's last weights, for whoever follows it."""

    def run(name: str, **engine: Any) -> Path:
        data = small_data(tmp_path, name, engine=engine, trainer=TRAINER)
        if adapter:
            data["model"] = {**data["model"], "lora": {"rank": 4}}
        return train(restore_config(data, "the test")).run_dir

    expected = figures(run("shared"))
    assert len(expected) == 3 and all(row["train/grad_norm"] > 0 for row in expected)
    for kind in ("file", "delta"):
        run_dir = run(kind, weights="copy", carrier={"type": kind})
        assert figures(run_dir) == expected
        folder = run_dir / "weights"
        assert versions_in(folder)[-1] == PolicyVersion(0, 3)
        read = make_receiver({"type": kind, "path": str(folder)}).catch_up()  # type: ignore[attr-defined]
        assert all(("lora_" in name) == adapter for name in read.tensors)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in read.tensors.values())


def test_a_resumed_run_takes_its_folder_over(tmp_path: Path) -> None:
    """I11: a new lineage begins with a whole version, and what the old one left in the folder is gone."""
    options: dict[str, Any] = {"weights": "copy", "carrier": {"type": "delta", "path": str(tmp_path / "elsewhere")}}
    run_dir = train(small_config(tmp_path, engine=options, trainer={**TRAINER, "num_batches": 2})).run_dir
    assert versions_in(tmp_path / "elsewhere") == [PolicyVersion(0, 1), PolicyVersion(0, 2)]
    train(small_config(tmp_path, engine=options, trainer={**TRAINER, "num_batches": 4}), resume_from=run_dir)
    assert versions_in(tmp_path / "elsewhere") == [PolicyVersion(1, 3), PolicyVersion(1, 4)]


def test_a_trainer_of_two_processes_publishes_whole_tensors_by_differences(tmp_path: Path) -> None:
    """F82, F90: sharded weights are gathered bucket by bucket, and reach the folder and the engine whole: every sync's
    canary compares all checksums with the trainer's."""
    options: dict[str, Any] = {"carrier": {"type": "delta"}}
    parallel = {"dp_shard": 2, "bucket_bytes": 1 << 14}
    config = small_config(tmp_path, engine=options, parallel=parallel, trainer={**TRAINER, "num_batches": 2})
    run_dir = train(config).run_dir
    assert all(row["canary/max_gap"] < 1e-4 for row in read_metrics(run_dir))
    assert [version.number for version in versions_in(run_dir / "weights")] == [0, 1, 2]
