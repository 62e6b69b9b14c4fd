"""Done line 4 of issue 3: the same loop in one and in four processes; only the ``parallel`` section differs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import small_config

from headrace.errors import HeadraceError
from headrace.model.load import load_model
from headrace.record.checkpoints import find_checkpoints
from headrace.record.metrics import read_metrics
from headrace.run import train
from headrace.trainer.export import export_checkpoint

FOUR = {"dp_shard": 2, "tp": 2}
SAME = (
    "reward/mean",
    "reward/std",
    "train/loss",
    "train/grad_norm",
    "train/num_tokens",
    "train/learning_rate",
    "supervised/nll",
    "supervised/num_tokens",
)


def run(folder: Path, parallel: dict[str, int], **sections: Any) -> Path:
    config = small_config(folder, trainer={"num_batches": 3, "num_minibatches": 2}, parallel=parallel, **sections)
    return train(config).run_dir


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.timeout(280)
def test_four_processes_make_the_run_of_one(tmp_path: Path) -> None:
    """Generation, training (with supervised data beside the rollouts), publishing, canaries and checkpoints: same
    rewards and norms, and weights to 1e-5. Each run then goes on in another layout, with the weights and the optimizer
    state that it had."""
    before = children()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": c * 6}, {"role": "assistant", "content": c}]}) + "\n"
            for c in "abcdefgh"
        )
    )
    data = {"path": str(rows), "conversations_per_batch": 3}
    alone = run(tmp_path / "one", {}, supervised_data=data)
    together = run(tmp_path / "four", FOUR, supervised_data=data)
    deadline = time.monotonic() + 20
    while children() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not children() - before, "followers outlive the run"
    expected, found = list(read_metrics(alone)), list(read_metrics(together))
    assert len(expected) == len(found) == 3
    for a, b in zip(expected, found, strict=True):
        assert {n for n in a if not n.startswith("memory/")} == {n for n in b if not n.startswith("memory/")}
        assert {n: b[n] for n in SAME} == pytest.approx({n: a[n] for n in SAME}, rel=1e-4, abs=1e-6)
        assert b["canary/max_gap"] < 1e-4
    assert max(a["train/grad_norm"] for a in expected) > 1e-3, "nothing was trained"
    for line, num_processes in ((expected[0], 1), (found[0], 4)):
        peaks = line["memory/peak_bytes"]  # a tiny model may stay below what the imports held for a moment
        assert len(peaks) == num_processes and peaks.count(None) == len(line.get("memory/unknown", ()))
        assert len(line["memory/forecast_bytes"]) == num_processes and min(line["memory/forecast_bytes"]) > 0
    weights = []
    for folder in (alone, together):
        checkpoint = find_checkpoints(folder / "checkpoints")[-1].path
        exported = load_model(export_checkpoint(folder, folder / "export")).model
        weights.append({name: p.detach() for name, p in exported.named_parameters()})
        assert (checkpoint / "shards").is_dir() == (folder == together)
    one, four = weights
    assert max(float((one[n] - four[n]).norm() / one[n].norm()) for n in one) <= 1e-5
    assert all(torch.isfinite(p).all() for p in four.values())
    for folder, parallel in ((together, {}), (alone, {"dp_shard": 2})):
        trainer = {"num_batches": 4, "num_minibatches": 2}
        config = small_config(folder.parent, trainer=trainer, parallel=parallel, supervised_data=data)
        train(config, resume_from=folder)
    (*_, a), (*_, b) = read_metrics(alone), read_metrics(together)
    assert a["update"] == b["update"] == 4 and len(a["memory/peak_bytes"]) == 2 and len(b["memory/peak_bytes"]) == 1
    assert {n: b[n] for n in SAME} == pytest.approx({n: a[n] for n in SAME}, rel=1e-4, abs=1e-6)


def test_an_impossible_layout_ends_before_any_process_starts(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(HeadraceError, match=r"parallel\.tp = 3 does not divide"):
        run(tmp_path, {"tp": 3})
    assert children() <= before and not any(tmp_path.iterdir())
