"""``headrace model export``: the trained weights, as a folder that transformers loads without headrace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.cli.main import main
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.model.load import load_model
from headrace.record.checkpoints import CheckpointStore, find_checkpoints
from headrace.testing import save_tiny
from headrace.trainer.export import export_checkpoint
from headrace.trainer.trainer import PolicyTrainer


@pytest.fixture(params=[None, {"rank": 2}], ids=["full", "lora"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[torch.Tensor]]:
    """A run's folder with checkpoints 1 and 2 of a tiny model whose weights were moved, and the moved logits."""
    config = RunConfig.model_validate(
        {
            "name": "tiny",
            "output_dir": tmp_path / "runs",
            "model": {"path": str(save_tiny(tmp_path / "model")), "lora": request.param},
            "tasks": {"type": "arithmetic"},
            "rewards": [{"type": "exact"}],
        }
    )
    config.run_dir.mkdir(parents=True)
    info = {"schema_version": 1, "name": "tiny", "config": resolved(config)}
    (config.run_dir / "run.json").write_text(json.dumps(info), encoding="utf-8")
    loaded = load_model(config.model.path, lora=config.model.lora, seed=config.seed)
    trainer = PolicyTrainer(loaded, config.trainer, num_steps=1)
    store = CheckpointStore(config.run_dir / "checkpoints", keep=2)
    logits: list[torch.Tensor] = []
    for step in (1, 2):
        with torch.no_grad():
            for parameter in loaded.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
        with store.writing(step) as folder:
            trainer.save(folder)
            store.write_state(folder, {})
        trainer.export(tmp_path / f"expected-{step}")
        logits.append(_logits(tmp_path / f"expected-{step}"))
    return config.run_dir, logits


def _logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.arange(8)[None]).logits


def test_run_exports_its_newest_checkpoint_and_a_checkpoint_itself(
    run: tuple[Path, list[torch.Tensor]], tmp_path: Path
) -> None:
    run_dir, logits = run
    newest, oldest = tmp_path / "out" / "newest", tmp_path / "out" / "oldest"
    assert main(["model", "export", str(run_dir), str(newest)]) == 0
    export_checkpoint(find_checkpoints(run_dir / "checkpoints")[0].path, oldest)
    expected_1, expected_2 = logits
    assert not torch.equal(expected_1, expected_2)
    assert torch.equal(_logits(newest), expected_2)
    assert torch.equal(_logits(oldest), expected_1)
    assert len(AutoTokenizer.from_pretrained(newest)) > 0
    assert sorted(path.name for path in newest.parent.iterdir()) == ["newest", "oldest"]


def test_nothing_to_export_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "neither a checkpoint nor a run with a complete checkpoint" in capsys.readouterr().err
