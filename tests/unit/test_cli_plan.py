"""``headrace plan``: the layout is checked and each rank's memory forecast without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config.schema import ParallelConfig
from headrace.model.parallel.check import ModelShape
from headrace.model.parallel.forecast import Pass, forecast, num_weights
from headrace.testing import save_tiny, tiny_model

RUN = '[model]\npath = "{path}"\n[tasks]\ntype = "arithmetic"\n[[rewards]]\ntype = "exact"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", num_layers=4)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(path=tmp_path / "model"))
    return path


def test_plan_prints_every_stage(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--parallel.pp", "2", "--parallel.tp", "2"]) == 0
    out = capsys.readouterr().out
    assert "processes   4 (tp 2, pp 2)" in out and "stage 0" in out and "stage 1" in out
    for part in ("parameters", "gradients", "optimizer", "activations", "buffers", "peak"):
        assert part in out


def test_plan_says_that_a_critic_is_not_counted(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A forecast must not look complete where it is not."""
    assert main(["plan", str(run_file)]) == 0
    assert "critic" not in capsys.readouterr().out
    assert main(["plan", str(run_file), "--critic.type", "separate"]) == 0
    assert "The critic is not part of this forecast." in capsys.readouterr().out


def test_plan_refuses_an_impossible_layout(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--parallel.tp", "3"]) == 2
    assert "parallel.tp = 3 does not divide the model's 4 attention heads" in capsys.readouterr().err


def test_plan_needs_the_models_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(path="org/name"))
    assert main(["plan", str(path)]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_plan_imports_no_torch(run_file: Path) -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
        f"from headrace.cli.main import main\nsys.exit(main(['plan', {str(run_file)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_number_of_weights_is_the_models(architecture: str, tied: bool) -> None:
    model = tiny_model(architecture, num_layers=3, num_kv_heads=2, tied=tied)  # type: ignore[arg-type]
    assert num_weights(ModelShape.of(model.config.to_dict())) == sum(p.numel() for p in model.parameters())


def test_sharding_divides_what_it_shards() -> None:
    shape = ModelShape.of(tiny_model("qwen3_moe", num_layers=4, tied=False).config.to_dict())
    work = Pass(num_tokens=1024, max_logit_tokens=128)
    (alone,) = forecast(ParallelConfig(), shape, work)
    (four,) = forecast(ParallelConfig(dp_shard=4), shape, work)
    assert abs(four.optimizer_bytes * 4 - alone.optimizer_bytes) < 0.001 * alone.optimizer_bytes
    (cp,) = forecast(ParallelConfig(cp=4), shape, work)
    assert cp.activations_bytes * 4 == four.activations_bytes
    stages = forecast(ParallelConfig(pp=4), shape, work)
    assert sum(f.parameters_bytes for f in stages) == alone.parameters_bytes
    (experts,) = forecast(ParallelConfig(ep=4), shape, work)
    assert experts.parameters_bytes == four.parameters_bytes < alone.parameters_bytes
    recomputed = forecast(
        ParallelConfig(), shape, Pass(num_tokens=1024, max_logit_tokens=128, activation_checkpointing=True)
    )
    assert recomputed[0].activations_bytes < alone.activations_bytes / 2
