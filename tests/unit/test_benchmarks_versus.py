"""benchmarks/versus_trl.py: its arithmetic, what both sides are told, and how a run is watched."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def versus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("versus_trl")


def step(end_s: float, reward: float = 0.5, **more: float) -> dict[str, float]:
    base = {"end_s": end_s, "reward": reward, "num_samples": 32, "num_tokens": 320}
    return base | {"generation_s": 2.0, "training_s": 5.0} | more


def test_rates_leave_the_warm_up_out_and_nothing_else(versus: ModuleType) -> None:
    """F53: sums divided once; and seconds between two steps count."""
    slow_then_two = [step(100.0, num_samples=999), step(110.0), step(124.0, num_tokens=400, num_trained_tokens=392)]
    figures = versus.rates(slow_then_two, num_warm_up=1)
    assert figures["samples_per_s"] == pytest.approx(64 / 24)
    assert figures["tokens_per_s"] == pytest.approx(712 / 24)
    assert figures["generation_tokens_per_s"] == pytest.approx(720 / 4)
    assert figures["training_tokens_per_s"] == pytest.approx(712 / 10)
    assert figures["step_s"] == 12 and figures["other_s"] == pytest.approx(5.0)
    assert versus.rates(slow_then_two[1:], num_warm_up=0)["step_s"] == 62


def test_time_to_level_is_that_of_three_successive_steps(versus: ModuleType) -> None:
    """One lucky step is not enough, and the level itself is not above the level."""
    steps = [step(10.0 * (i + 1), r) for i, r in enumerate([1.0, 0.5, 0.9, 0.9, 0.9, 1.0, 1.0])]
    found = versus.time_to_level(steps, 0.9)
    assert found == {"seconds": 60.0, "num_steps": 6, "reached": True, "step_s": 10.0}
    never = versus.time_to_level(steps[:5], 0.9)
    assert never == {"seconds": 50.0, "num_steps": 5, "reached": False, "step_s": 10.0}


def speed_round(ours: float, theirs: float) -> dict[str, Any]:
    def side(speed: float) -> dict[str, Any]:
        names = ("samples_per_s", "tokens_per_s", "generation_tokens_per_s", "training_tokens_per_s")
        return dict.fromkeys(names, speed) | {"peak_memory_bytes": 100, "rewards": [0.1]}

    return {"headrace": side(ours), "trl": side(theirs)}


def time_round(ours: float, theirs: float, **reached: bool) -> dict[str, Any]:
    return {
        side: {"seconds": s, "reached": reached.get(side, True), "peak_memory_bytes": 100}
        for side, s in (("headrace", ours), ("trl", theirs))
    }


def test_the_ratio_is_the_median_of_the_rounds_own(versus: ModuleType) -> None:
    """Speeds over TRL's, times under TRL's: above 1 is faster, in both."""
    result = versus.summary([speed_round(2.0, 1.0), speed_round(9.0, 3.0), speed_round(1.0, 1.0)], 2.0)
    assert [r["ratio"] for r in result["rounds"]] == [2.0, 3.0, 1.0]
    assert result["ratio"] == 2.0 and result["met"] is True
    assert result["median"]["headrace"]["samples_per_s"] == 2.0
    timed = versus.summary([time_round(50.0, 120.0)], 2.5)
    assert timed["ratio"] == pytest.approx(2.4) and timed["met"] is False


def test_a_level_that_headrace_never_reached_is_not_met(versus: ModuleType) -> None:
    """A missing figure is no success, however good the other rounds are; TRL's alone gives a lower bound."""
    rounds = [time_round(10.0, 100.0), time_round(10.0, 100.0, headrace=False)]
    result = versus.summary(rounds, 2.5)
    assert result["ratio"] is None and result["met"] is False
    assert versus.summary([time_round(10.0, 100.0, trl=False)], 2.5)["ratio"] == 10.0


def test_headrace_side_is_a_valid_run_with_default_guards(versus: ModuleType, tmp_path: Path) -> None:
    """I20: what the benchmark writes has an effect, key by key; nothing but the scenario is set."""
    from headrace.config.checks import check_config
    from headrace.config.load import load_config
    from headrace.config.schema import GuardsConfig

    machine = versus.Machine(model=tmp_path, trl_python=tmp_path, num_threads=2, deadline_s=1.0)
    (tmp_path / "config.json").write_text("{}")
    for scenario in versus.SCENARIOS.values():
        path = tmp_path / "run.toml"
        path.write_text(importlib.import_module("versus_sides").run_toml(scenario, machine, 1, tmp_path / "runs"))
        config = load_config(path)
        check_config(config)
        assert config.trainer.skip_zero_gradient is (scenario.name == "C")
        assert config.rollout.groups_per_batch * config.rollout.group_size == scenario.batch_size
        assert config.guards == GuardsConfig() and "guards" not in tomllib.loads(path.read_text())
        assert not config.evaluation.at_start and not config.evaluation.every and not config.checkpoint.every


def watch(versus: ModuleType, folder: Path, code: str, deadline_s: float = 60.0) -> Any:
    """Run ``code``; it is done once it has written the file ``threads``."""
    sides = importlib.import_module("versus_sides")
    machine = versus.Machine(model=folder, trl_python=folder, num_threads=3, deadline_s=deadline_s)
    return sides.watched([sys.executable, "-c", code], machine, "the run", folder, (folder / "threads").exists)


def test_a_failed_or_hanging_side_ends_with_its_last_words(versus: ModuleType, tmp_path: Path) -> None:
    """I19: a side that hangs is killed at its deadline, and named."""
    with pytest.raises(versus.SideFailed, match=r"the run: exited with status 3.\nout of luck"):
        watch(versus, tmp_path, "print('out of luck', flush=True); raise SystemExit(3)")
    with pytest.raises(versus.SideFailed, match=r"the run: no end after 1 s"):
        watch(versus, tmp_path, "import time; time.sleep(600)", deadline_s=1.0)


def test_a_run_is_stopped_once_it_is_done(versus: ModuleType, tmp_path: Path) -> None:
    """headrace ends with 130 after SIGTERM; that counts as a good end here, and only then. Threads are told."""
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(130)); "
        "open('new', 'w').write(os.environ['OMP_NUM_THREADS']); os.rename('new', 'threads'); time.sleep(600)"
    )
    used = watch(versus, tmp_path, code)
    assert used["peak_memory_bytes"] > 1 << 20 and 0 < used["cpu_s"] < 60
    assert (tmp_path / "threads").read_text() == "3"
    (tmp_path / "threads").unlink()
    with pytest.raises(versus.SideFailed, match="exited with status 130"):
        watch(versus, tmp_path, "raise SystemExit(130)")
