"""I19 over several processes: whichever dies, the others end, and the run can be resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loop_runs import small_config, small_data, write_toml

from headrace.record.metrics import read_metrics
from headrace.run import train

START_DEADLINE_S = 150.0
END_DEADLINE_S = 40.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def wait_until(holds: Callable[[], bool], deadline_s: float, what: str) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.2)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two processes that trains already, and its followers' process ids."""
    data = small_data(tmp_path, "run", trainer={"num_batches": 500}, parallel={"dp_shard": 2})
    toml = write_toml(tmp_path / "run.toml", data)
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli.main", "train", str(toml)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    followers: list[int] = []
    try:
        wait_until(lambda: any(read_metrics(tmp_path / "run")), START_DEADLINE_S, "a trained batch")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        followers = [int(c) for c in children if "headrace.follower" in Path(f"/proc/{c}/cmdline").read_text()]
        assert len(followers) == 1
        yield process, followers
    finally:
        for pid in [process.pid, *followers]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_followers_end_with_their_leader(leader: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, followers = leader
    process.kill()
    wait_until(lambda: not any(alive(pid) for pid in followers), END_DEADLINE_S, "the followers' end")


def test_the_run_ends_when_a_follower_dies(leader: tuple[subprocess.Popen[str], list[int]]) -> None:
    """The leader names the signal: its own error is only of a lost connection."""
    process, followers = leader
    os.kill(followers[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=END_DEADLINE_S)
    assert process.returncode == 2 and "Traceback" not in stderr, stderr
    assert "process 1 of the run was killed by SIGKILL (signal 9): most likely the system was out of memory" in stderr
    assert "lower trainer.max_microbatch_tokens" in stderr and "headrace resume" in stderr


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Weights, moments, schedule and the engine's weights come back; the followers' too."""
    options = {"parallel": {"dp_shard": 2}, "checkpoint": {"every": 1}}
    trainer = {"num_batches": 3, "schedule": {"type": "constant", "warmup_steps": 0}}
    whole = train(small_config(tmp_path, "whole", trainer=trainer, **options)).run_dir
    train(small_config(tmp_path, "half", trainer={**trainer, "num_batches": 1}, **options))
    resumed = train(small_config(tmp_path, "half", trainer=trainer, **options), resume_from=tmp_path / "half")
    assert resumed.num_updates == 3
    expected, found = list(read_metrics(whole)), list(read_metrics(tmp_path / "half"))
    assert [m["update"] for m in found] == [m["update"] for m in expected] == [1, 2, 3]
    names = ("reward/mean", "train/loss", "train/grad_norm", "train/num_tokens", "policy/entropy_mean")
    for a, b in zip(expected, found, strict=True):
        assert {n: b.get(n) for n in names} == pytest.approx({n: a.get(n) for n in names}, rel=1e-6, nan_ok=True)
