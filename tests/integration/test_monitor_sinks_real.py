"""The sinks against their real packages, offline: TensorBoard, Prometheus and trackio.

W&B and MLflow are held by fakes in tests/unit/test_monitor_fanout.py.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from headrace.config.schema import MonitorConfig
from headrace.monitor.fanout import SinkError, build_sinks
from headrace.monitor.sinks import PrometheusSink


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    """Scalars with their steps, as TensorBoard's own reader sees them."""
    pytest.importorskip("tensorboard", reason="extra 'tensorboard' is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fan_out = build_sinks(MonitorConfig(sinks=("tensorboard",)), tmp_path, "r", {})
    for step in (1, 2, 3):
        fan_out.log(step, {"reward/mean": step / 4, "health/alarms": ["x"], "time": 1e9 + step})
    assert [h.num_logged for h in fan_out.close()] == [3]
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert [(e.step, e.value, e.wall_time) for e in accumulator.Scalars("reward/mean")] == [
        (1, 0.25, 1e9 + 1),
        (2, 0.5, 1e9 + 2),
        (3, 0.75, 1e9 + 3),
    ]


def test_prometheus_serves_the_last_values_on_loopback(tmp_path: Path) -> None:
    """An HTTP endpoint with gauges, gone after close."""
    pytest.importorskip("prometheus_client", reason="extra 'prometheus' is not installed")
    sink = PrometheusSink(tmp_path, "r", {}, port=0)
    sink.log(1, {"reward/mean": 0.25})
    sink.log(2, {"reward/mean": 0.5, "policy/logprob_gap_p95": 1e-6})
    url = f"http://127.0.0.1:{sink.port}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    assert 'headrace_reward_mean{run="r"} 0.5' in text
    assert 'headrace_step{run="r"} 2.0' in text
    assert 'headrace_policy_logprob_gap_p95{run="r"} 1e-06' in text
    sink.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=10)


def test_a_taken_prometheus_port_fails_at_start(tmp_path: Path) -> None:
    """Two runs on one machine: the second says so at once."""
    pytest.importorskip("prometheus_client", reason="extra 'prometheus' is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = MonitorConfig(sinks=("prometheus",), sink_options={"prometheus": {"port": taken.getsockname()[1]}})
        with pytest.raises(SinkError, match=r"'prometheus' could not start: OSError.*sink_options.prometheus"):
            build_sinks(config, tmp_path, "r", {})


def test_trackio_writes_its_local_database(tmp_path: Path) -> None:
    """In a process of its own, since trackio reads its folder from the environment when it is imported."""
    pytest.importorskip("trackio", reason="extra 'trackio' is not installed")
    script = (
        "from pathlib import Path\n"
        "from headrace.config.schema import MonitorConfig\n"
        "from headrace.monitor.fanout import build_sinks\n"
        "fan_out = build_sinks(MonitorConfig(sinks=('trackio',)), Path('.'), 'r', {'seed': 0})\n"
        "fan_out.log(1, {'reward/mean': 0.25, 'time': 1.0})\n"
        "fan_out.log(2, {'reward/mean': 0.5, 'time': 2.0})\n"
        "print([str(h) for h in fan_out.close(60)])\n"
    )
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "sink trackio: closed, 2 lines logged" in done.stdout
    with sqlite3.connect(tmp_path / "headrace.db") as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [1, 2]
    assert '"reward/mean"' in str(rows[1][1]) and "0.5" in str(rows[1][1])
