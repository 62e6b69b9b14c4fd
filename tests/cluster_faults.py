"""For tests that kill processes and nodes of a run on a Ray cluster: the cluster, the run, and its victims.

The run's commands are executed by the Python that has Ray, as a user would; the test itself needs none.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loop_runs import assert_trained_once, books, metric

from headrace.cluster.journal import read_journal

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
START_DEADLINE_S = 600.0
"""A machine of two cores that others use too takes minutes to import torch six times."""


def ray_python() -> str | None:
    """The Python that has Ray: $HEADRACE_RAY_PYTHON, or .venv-ray of the checkout; None where there is none."""
    for candidate in (os.environ.get("HEADRACE_RAY_PYTHON"), REPOSITORY / ".venv-ray" / "bin" / "python"):
        if candidate and Path(candidate).exists():
            return str(candidate)
    return None


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY / "src"), str(TESTS)])
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **more}


class Nodes:
    """A Ray cluster of several nodes on this machine."""

    def __init__(self, num_nodes: int, num_cpus: int, log: Path) -> None:
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [ray_python(), str(TESTS / "ray_nodes.py"), str(num_nodes), str(num_cpus)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment(),
            )
        said = json.loads(self._process.stdout.readline())
        self.address: str = said["address"]
        self.nodes: list[str] = said["nodes"]

    def lose(self, node: str) -> None:
        """kill -9 of the node's raylet; what runs on the node ends with it."""
        self._ask({"lose": node})
        self.nodes.remove(node)

    def add(self, num_cpus: int) -> None:
        self.nodes.append(self._ask({"add": num_cpus})["added"])

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Run:
    """``headrace train RUN.TOML --supervise`` on the cluster."""

    def __init__(self, toml: Path, run_dir: Path, nodes: Nodes, log: Path) -> None:
        self.run_dir, self._log = run_dir, log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [ray_python(), "-m", "headrace.cli.main", "train", str(toml), "--supervise"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(RAY_ADDRESS=nodes.address, HF_HUB_OFFLINE="1"),
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        journal = self.run_dir / "actors.jsonl"
        return self._log.read_text() + (journal.read_text() if journal.exists() else "")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def updates(self) -> int:
        """Published so far, along the surviving chain."""
        return max(metric(self.run_dir, "update"), default=0) if (self.run_dir / "metrics.jsonl").exists() else 0

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = START_DEADLINE_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self._process.poll() is None, f"the run ended before: {what}\n{self.output}"
            assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}\n{self.output}"
            time.sleep(0.05)

    def actors(self, role: str) -> list[dict[str, Any]]:
        """The newest of each place of ``role`` that live."""
        newest: dict[int, dict[str, Any]] = {}
        for line in read_journal(self.run_dir):
            if line["event"] == "started" and line["role"] == role:
                newest[line["index"]] = line
        return [actor for actor in newest.values() if alive(actor["pid"])]

    def kill(self, role: str, rng: random.Random) -> dict[str, Any]:
        """kill -9 of a random living actor of ``role``; returns who it was."""
        self.until(lambda: bool(self.actors(role)), f"a living {role}")
        victim = rng.choice(self.actors(role))
        os.kill(victim["pid"], signal.SIGKILL)
        return victim

    def wait(self, timeout_s: float) -> None:
        """Until it is done, which it must be with success."""
        try:
            status = self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run had not ended after {timeout_s:g} s:\n{self.output}") from None
        assert status == 0, self.output

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def running(toml: Path, run_dir: Path, nodes: Nodes) -> Iterator[Run]:
    run = Run(toml, run_dir, nodes, run_dir.with_suffix(".log"))
    try:
        yield run
    finally:
        run.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_books_are_complete(run_dir: Path, num_batches: int, episodes_per_batch: int) -> int:
    """I10, I11: issued = trained + dropped + failed, each batch trained once along the surviving lineage. Returns the
    number of lineages before the last: how often the run was resumed."""
    ledger = books(run_dir)
    assert not ledger.in_flight, ledger.in_flight
    assert ledger.surviving().summary()["trained"] == num_batches * episodes_per_batch
    assert sorted(metric(run_dir, "update")) == list(range(1, num_batches + 1))
    assert_trained_once(run_dir)
    return ledger.lineage


def print_summary(run: Run, kills: int, what: str) -> None:
    """For whoever runs these by hand with -s."""
    notes = [line["text"].splitlines()[0][:160] for line in read_journal(run.run_dir) if line["event"] == "note"]
    print(f"\n{what}: {kills} kills, {run.updates} updates; notes:", *notes, sep="\n  ", file=sys.stderr)
