"""What the tests of the loop share: a small run's configuration, its processes, and what its record says."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from headrace.config.dump import dump_toml
from headrace.config.load import load_config, resolved, restore_config
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.record.checkpoints import find_checkpoints
from headrace.record.episodes import read_episodes
from headrace.record.ledger_store import read_records
from headrace.record.metrics import read_metrics

HERE = Path(__file__).parent
sys.path.append(str(HERE / "learning"))

import reversal  # noqa: E402


@functools.cache
def warm_model() -> Path:
    """The half-taught reversal model, made once per test session."""
    transformers_logging.disable_progress_bar()
    folder = tempfile.TemporaryDirectory(prefix="headrace-tests-")
    atexit.register(folder.cleanup)
    return reversal.warmed_up_model(Path(folder.name) / "model")


def small_data(output_dir: Path, name: str = "run", **sections: Any) -> dict[str, Any]:
    """A run of 6 batches of 4 groups of 4, with warm-up and decay of the learning rate. About 0.1 s a batch."""
    base: dict[str, Any] = {
        "trainer": {"num_batches": 6, "schedule": {"type": "linear", "warmup_steps": 3}},
        "rollout": {"groups_per_batch": 4, "group_size": 4},
        "checkpoint": {"every": 2},
        "tasks": {"options": {"num_train": 40, "num_held_out": 8}},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    return reversal.run_config(warm_model(), output_dir, name, **base)


def small_config(output_dir: Path, name: str = "run", **sections: Any) -> RunConfig:
    return restore_config(small_data(output_dir, name, **sections), "the test")


def write_toml(path: Path, data: dict[str, Any]) -> Path:
    """``data`` as a run's TOML file."""
    config = restore_config(data, "the test")
    path.write_text(dump_toml(config, resolved(config)))
    assert resolved(load_config(path)) == resolved(config)
    return path


# ---------------------------------------------------------------------------------------------- processes


class Server:
    """The fork server's client. One for all tests of a session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "loop_fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        )
        assert self._read() == "ready"

    def _read(self) -> Any:
        return json.loads(self._process.stdout.readline())

    def ask(self, request: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=10)


@functools.cache
def server() -> Server:
    made = Server()
    atexit.register(made.close)
    return made


class Process:
    """One ``headrace`` command in a process of its own."""

    def __init__(self, *arguments: str, log: Path, before: str | None = None) -> None:
        """``before``: ``module:function``, called in the process before the command (to break something there)."""
        self.log = log
        log.write_text("")
        self.pid: int = server().ask({"start": list(arguments), "log": str(log), "before": before})

    def wait(self, timeout_s: float = 60.0) -> int:
        """The exit status; a process that outlives ``timeout_s`` is killed and fails the test."""
        status = server().ask({"wait": self.pid, "timeout_s": timeout_s})
        if status is None:
            os.kill(self.pid, signal.SIGKILL)
            server().ask({"wait": self.pid, "timeout_s": 5.0})
            raise AssertionError(f"the process had not ended after {timeout_s:g} s; its output:\n{self.output}")
        return status

    def kill(self) -> None:
        """kill -9; nothing happens where it has ended already."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Poll until ``condition()``."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not reached in {timeout_s:g} s; output so far:\n{self.output}"
            time.sleep(0.002)

    @property
    def output(self) -> str:
        return self.log.read_text()


def run_to_end(*arguments: str, log: Path, timeout_s: float = 60.0, before: str | None = None) -> tuple[int, str]:
    """(exit status, everything that was printed)."""
    process = Process(*arguments, log=log, before=before)
    return process.wait(timeout_s), process.output


# ------------------------------------------------------------------------------------------------- records


def books(run_dir: Path) -> Ledger:
    """The run's ledger, replayed and checked in full."""
    ledger = Ledger()
    for record in read_records(run_dir / "ledger"):
        ledger.apply(record)
    ledger.check(full=True)
    return ledger


def surviving(run_dir: Path) -> dict[str, dict[str, int]]:
    """Task -> counts by status along the surviving chain, without zeros."""
    found = books(run_dir).surviving()
    found.check("surviving")
    return {task: {k: n for k, n in counts.items() if n} for task, counts in found.by_task.items()}


def trained_by_update(run_dir: Path) -> dict[int, list[tuple[int, int, int]]]:
    """Update -> attempts trained in it, along the surviving chain, as the episodes' record says."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for record in read_episodes(run_dir):
        if record["status"] == "trained":
            found.setdefault(record["update"], []).append((record["group"], record["member"], record["retry"]))
    return {update: sorted(keys) for update, keys in sorted(found.items())}


def tokens_by_attempt(run_dir: Path) -> dict[tuple[int, int, int], tuple[Any, ...]]:
    """Attempt -> (update, ids, the engine's and the trainer's log-probabilities, advantages, reward)."""
    return {
        (r["group"], r["member"], r["retry"]): (
            r["update"],
            tuple(r["ids"]),
            tuple(r["logprobs"]),
            None if r["trainer_logprobs"] is None else tuple(r["trainer_logprobs"]),
            None if r["advantages"] is None else tuple(r["advantages"]),
            r["reward"],
        )
        for r in read_episodes(run_dir)
        if r["status"] == "trained"
    }


def metric(run_dir: Path, name: str) -> dict[int, Any]:
    """Update -> value, along the surviving chain."""
    return {line["update"]: line.get(name) for line in read_metrics(run_dir)}


def last_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer moments of the newest complete checkpoint."""
    folder = find_checkpoints(run_dir / "checkpoints")[-1].path
    return load_file(folder / "weights.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_same_weights(first: Path, second: Path) -> None:
    """Bit for bit."""
    a, b = last_weights(first), last_weights(second)
    assert a.keys() == b.keys() and len(a) > 10
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"{len(different)} of {len(a)} tensors differ, the first is {different[0]}"


def assert_trained_once(run_dir: Path) -> None:
    """No attempt of the surviving chain is trained in two updates, nor twice in one."""
    times = Counter(key for keys in trained_by_update(run_dir).values() for key in keys)
    assert times and max(times.values()) == 1, times.most_common(3)


def oldest_trained_token_age(run_dir: Path) -> int:
    """Over all trained tokens: versions between the batch that trained it and the version that sampled it."""
    ages = [0]
    for record in read_episodes(run_dir):
        if record["status"] != "trained":
            continue
        starts = [sum(record["segment_lengths"][:i]) for i in range(len(record["segment_lengths"]))]
        for segment, _, number, start, end in record["version_spans"]:
            position = starts[segment]
            if any(record["mask"][position + start : position + end]):
                ages.append(record["update"] - 1 - number)
    return max(ages)
