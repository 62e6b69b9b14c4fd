"""The controller's benchmark runs and adds up: that it counts what the loop did, not how fast."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "controller.py"


def test_it_books_every_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 4, end criterion 7: every episode is issued, scored, grouped, trained and committed, and memory is read."""
    spec = importlib.util.spec_from_file_location("benchmark_controller", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out = tmp_path / "controller.json"
    options = ["--episodes", "96", "--group-size", "4", "--groups-per-batch", "4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["controller.py", *options])
    module.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(out.read_text())
    assert result["num_episodes"] == 96 and result["episodes_per_s"] > 0
    assert result["books"]["issued"] == 96 == result["books"]["trained"] and not result["books"]["in_flight"]
    assert result["resident_bytes"]["at_the_end"] > 0
