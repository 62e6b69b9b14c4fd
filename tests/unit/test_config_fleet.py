"""``[fleet]``: options without effect and contradictions are refused at start (I20)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.checks import check_config
from headrace.config.fleet import FleetConfig
from headrace.config.load import load_config
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError

BASE = 'tasks = {type = "arithmetic"}\nrewards = [{type = "exact"}]\nmodel = {path = "smollm2-135m"}\n'
COPY = '[engine]\nweights = "copy"\n'


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(BASE + text)
    return load_config(path)


def test_a_run_without_the_section_has_one_engine(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert config.fleet is None
    check_config(config)


@pytest.mark.parametrize(
    "text",
    [
        COPY + "[fleet]",
        COPY + "[fleet]\nnum_engines = 1\nmax_restarts = 5\nrestart_window_s = 60.0",
        COPY + '[fleet]\nnum_engines = 3\nrouting = "least_loaded"',
        COPY + "[fleet]\nmax_imbalance = 4\nmax_engine_lag = 1\n[rollout]\nmax_staleness = 2",
        '[engine]\ntype = "vllm"\n[fleet]\nnum_engines = 2',
        COPY + "[fleet]\nsync_deadline_s = 50.0\n[waits]\npublish_s = 60.0",
    ],
)
def test_what_fits_is_taken(tmp_path: Path, text: str) -> None:
    """Also a synchronous run: its engines hold copies because there are several."""
    config = load(tmp_path, text)
    assert isinstance(config.fleet, FleetConfig)
    check_config(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[fleet]", '[fleet] with engine.weights = "shared": engines that share the trainer\'s storage cannot be told'),
        (COPY, 'engine.weights = "copy" has no effect but memory'),
        (
            COPY + "[fleet]\nnum_engines = 1\nmax_imbalance = 3",
            "fleet.max_imbalance has no effect: fleet.num_engines is 1",
        ),
        (
            COPY + '[fleet]\nnum_engines = 1\nrouting = "affinity"',
            "fleet.routing has no effect: fleet.num_engines is 1",
        ),
        (
            COPY + '[fleet]\nrouting = "least_loaded"\nmax_imbalance = 3',
            'fleet.max_imbalance has no effect: fleet.routing is "least_loaded"',
        ),
        (
            COPY + "[fleet]\nmax_restarts = 0\nrestart_backoff_s = 2.0",
            "fleet.restart_backoff_s has no effect: fleet.max_restarts is 0",
        ),
        (
            COPY + "[fleet]\nmax_restarts = 0\nrestart_window_s = 2.0",
            "fleet.restart_window_s has no effect: fleet.max_restarts is 0",
        ),
        (
            COPY + "[fleet]\nmax_engine_lag = 1",
            "fleet.max_engine_lag = 1 has no effect: rollout.max_staleness is 0",
        ),
        (
            COPY + "[fleet]\nsync_deadline_s = 60.0\n[waits]\npublish_s = 60.0",
            "fleet.sync_deadline_s = 60 is not below waits.publish_s = 60",
        ),
    ],
)
def test_what_has_no_effect_or_contradicts_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["num_engines = 0", "max_engine_lag = 2", "max_kv_pressure = 1.5", "max_restart = 1"])
def test_values_out_of_range_and_unknown_keys_fail(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"fleet\.max|fleet\.num"):
        load(tmp_path, f"[fleet]\n{key}")
