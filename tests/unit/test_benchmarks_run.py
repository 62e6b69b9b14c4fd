"""The benchmarks run, on a tiny model on the CPU: that they compute what they say, not how fast.

No GPU exists where this suite is made: benchmarks/gpu_check.py is proved to run here, and nothing more.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.model.load import load_model
from headrace.testing import save_tiny

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("bench") / "model", initializer_range=0.2)


def load_benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trainer_options(model: Path, **changes: Any) -> argparse.Namespace:
    chosen: dict[str, Any] = {
        "model": str(model),
        "threads": 1,
        "dtype": "float32",
        "device": "cpu",
        "repeats": 1,
        "scenarios": ["group", "ragged", "long"],
        "paths": ["packed", "shared", "recomputed", "whole_logits"],
        "scale": 8,
        "peak_size": 64,
        "profile": True,
        "float64": True,
    }
    return argparse.Namespace(**{**chosen, **changes})


def test_trainer_benchmark_compares_equal_gradients(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 3, end criterion 5: every path's gradient is the plain path's to 1e-5, and as near to float64 as the plain
    one is; ratios and shares are reported."""
    benchmark = load_benchmark("trainer", monkeypatch)
    result = benchmark.run(trainer_options(model))
    assert result["same_gradients"] and result["clock"] == "cpu"
    assert result["targets"]["group"]["target"] == 2.0 and result["targets"]["long"]["target"] == 0.6
    for scenario in result["scenarios"].values():
        assert set(scenario["paths"]) == {"plain", "packed", "shared", "recomputed", "whole_logits"}
        assert scenario["paths"]["plain"]["ratio"] == 1.0 and scenario["profile"]
        for path in scenario["paths"].values():
            assert path["gradient_difference"] < 1e-5 and path["tokens_per_s"] > 0 and path["share_of_peak"] > 0
            assert 0 < path["float64_difference"] < 1e-5
        assert scenario["paths"]["packed"]["sharing_difference"] == 0.0
    assert 0 < result["targets"]["sharing"]["measured"] < 1e-5 and result["targets"]["sharing"]["met"]


def test_flops_by_hand(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 per multiply-add, backward twice the forward; a shared prompt counts once, its attention per visible pair."""
    benchmark = load_benchmark("trainer", monkeypatch)
    loaded = load_model(model)
    samples = benchmark.scenarios(loaded.vocab_size, 32)["group"]  # 8 replies of 1 token to a prompt of 8
    trainer = benchmark.make_trainer(loaded)
    per_token, head, per_pair = 2 * 2 * (4 * 64 * 64 + 3 * 64 * 256), 2 * 64 * loaded.vocab_size, 4 * 64 * 2
    paths = benchmark.build_paths(loaded, trainer, samples)
    assert benchmark.flops(loaded, paths["shared"][1]) == 3 * (8 * per_token + head + 36 * per_pair)
    assert benchmark.flops(loaded, paths["plain"][1]) == 3 * 8 * (8 * per_token + head + 36 * per_pair)


def test_gpu_check_runs_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part does its work and passes in bfloat16; on a GPU it is untested."""
    benchmark = load_benchmark("gpu_check", monkeypatch)
    options = argparse.Namespace(
        model=str(model), device="cpu", batches=1, groups=2, max_new_tokens=4, scale=8, limit_s=600.0
    )
    result = benchmark.run(options)
    assert result["passed"], result
    for dtype in ("float32", "bfloat16"):
        assert {"padded_eager", "packed/default", "shared/math"} <= result["parity"][dtype].keys()
    assert result["loop"]["num_batches"] == 1 and result["trainer"]["dtype"] == "bfloat16"
    assert torch.get_num_threads() == 1 and "gpu" not in result
    first, _, _ = result["lease"]["hand_overs"]
    assert (first["giver"], first["taker"]) == ("engine", "trainer")
    assert first["between_bytes"] == {"engine": 0, "trainer": 0} != first["after_bytes"]


def test_gpu_check_tells_what_failed_and_what_was_skipped(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing part is an error in the report, the others still run, and the whole does not pass."""
    benchmark = load_benchmark("gpu_check", monkeypatch)

    def broken(_: argparse.Namespace) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(benchmark, "PARTS", {"parity": broken, "loop": lambda _: {"passed": True}})
    options = argparse.Namespace(model=str(model), device="cpu", limit_s=600.0)
    result = benchmark.run(options)
    assert result["parity"]["error"] == "RuntimeError: no such kernel" and result["loop"]["passed"]
    assert not result["passed"]
    late = benchmark.run(argparse.Namespace(model=str(model), device="cpu", limit_s=-1.0))
    assert "skipped" in late["loop"] and not late["passed"]
    assert "trainer" in sys.modules


def test_weights_benchmark_measures_every_carrier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Issue 4: seconds and bytes for each, beside a memory copy of the same size; delta is at most 5 % of the bytes at
    1 % changed, and whole where everything changed."""
    benchmark = load_benchmark("weights", monkeypatch)
    result = benchmark.run(
        argparse.Namespace(
            num_millions=6.0,
            dtype="bfloat16",
            changed=0.01,
            rounds=2,
            threads=1,
            carriers=list(benchmark.CARRIERS),
            folder=tmp_path,
        )
    )
    assert result["memory_copy_s"] > 0 and result["num_bytes"] == 2 * result["num_parameters"] > 8e6
    assert set(result["carriers"]) == set(benchmark.CARRIERS)
    shares = {name: carrier["share_of_bytes"] for name, carrier in result["carriers"].items()}
    assert 0.001 < shares.pop("delta") <= 0.05
    assert all(1.0 <= share < 1.01 for share in shares.values())
    assert all(c["total_s"] >= c["send_s"] >= 0 for c in result["carriers"].values())
    assert list(tmp_path.iterdir()) == []
