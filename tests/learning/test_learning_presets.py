"""Five presets and PPO with a critic learn the reversal fixture, five seeds each (benchmarks/presets.py as a test)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import reversal

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "presets.py"
SPEC = importlib.util.spec_from_file_location("benchmark_presets", BENCHMARK)
assert SPEC is not None and SPEC.loader is not None
presets = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(presets)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_presets_learn(seed: int, tmp_path: Path) -> None:
    """Issue 3, end criterion 3: each gains at least 0.15 of sampled accuracy on fresh words."""
    model = reversal.warmed_up_model(tmp_path / "model", seed=seed, accuracy=presets.START_ACCURACY)
    gains = {preset: presets.measure(model, tmp_path, preset, seed, 100)["gain"] for preset in presets.PRESETS}
    assert all(gain >= 0.15 for gain in gains.values()), gains
