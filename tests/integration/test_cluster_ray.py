"""Faults on a real Ray cluster of three nodes (raylets on this machine), with a real model and the reversal task.

Issue 4, done when 4: kill -9 of an engine, an environment worker, a reward worker, a trainer rank and the controller,
and the loss of a node: the run goes on or resumes by itself, and its books are complete. The test in which each role
dies once runs always; five random moments for each take minutes.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_faults import Nodes, assert_books_are_complete, environment, print_summary, ray_python, running
from loop_runs import small_data, write_toml

NUM_CPUS = 5
"""Of each node: two nodes have room for the run, so that one may be lost."""
END_DEADLINE_S = 900.0
GOES_ON = ("environment", "reward", "engine")
"""A run outlives these; for the others it resumes from its newest checkpoint."""

pytestmark = [
    pytest.mark.skipif(ray_python() is None, reason="no Ray here: make setup-ray"),
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(3, NUM_CPUS, tmp_path_factory.mktemp("ray") / "nodes.log")
    yield made
    made.close()


def written(folder: Path, num_batches: int, **more: Any) -> tuple[Path, Path]:
    """(the run's file, its folder). ``more``: of the section cluster."""
    cluster = {
        "type": "ray",
        "num_environment_workers": 2,
        "num_reward_workers": 2,
        "max_restarts": 10,
        "controller_restarts": 10,
        "start_deadline_s": 120.0,
        **more,
    }
    data = small_data(
        folder,
        "run",
        trainer={"num_batches": num_batches, "schedule": {"type": "constant", "warmup_steps": 0}},
        checkpoint={"every": 1},
        parallel={"dp_shard": 2},
        fleet={"num_engines": 2, "max_restarts": 10},
        rollout={"groups_per_batch": 4, "group_size": 4, "max_retries": 5},
        cluster=cluster,
    )
    return write_toml(folder / "run.toml", data), folder / "run"


def test_every_role_dies_once_and_a_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    """One run: each role is killed once, then the node of the controller or, where that is the head, another one."""
    rng = random.Random(0)
    num_batches = 30
    toml, run_dir = written(tmp_path, num_batches)
    with running(toml, run_dir, nodes) as run:
        for number, role in enumerate(("environment", "reward", "engine", "trainer", "controller")):
            run.until(lambda number=number: run.updates >= 1 + 2 * number, f"update {1 + 2 * number}")
            run.kill(role, rng)
        run.until(lambda: run.updates >= 12, "update 12")
        run.until(lambda: bool(run.actors("controller")), "the controller")
        head, *others = nodes.nodes
        node = run.actors("controller")[0]["node"]
        nodes.lose(node if node != head else others[0])
        assert run.is_running, "the run ended before a node was lost"
        run.wait(END_DEADLINE_S)
        print_summary(run, 6, "each once")
    nodes.add(NUM_CPUS)
    assert_books_are_complete(run_dir, num_batches, 16)


def test_a_dead_address_of_the_cluster_is_told_at_once(tmp_path: Path) -> None:
    """Line 8: one clear error, nothing begun."""
    toml, run_dir = written(tmp_path, 2, address="127.0.0.1:1")
    ended = subprocess.run(
        [ray_python(), "-m", "headrace.cli.main", "train", str(toml)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "nobody listens at the Ray cluster's address '127.0.0.1:1'" in ended.stderr
    assert not (run_dir / "run.json").exists()


def test_a_run_that_the_cluster_has_no_room_for_says_what_it_needs(nodes: Nodes, tmp_path: Path) -> None:
    """I19: not a wait for ever."""
    toml, run_dir = written(tmp_path, 2, start_deadline_s=5.0, engine={"num_gpus": 1})
    ended = subprocess.run(
        [ray_python(), "-m", "headrace.cli.main", "train", str(toml)],
        env=environment(RAY_ADDRESS=nodes.address),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert "did not have room for the run within 5 s: it needs 7 bundles with CPU 7, GPU 2 in all" in ended.stderr
    assert not (run_dir / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["environment", "reward", "engine", "trainer", "controller"])
def test_five_kills_at_random_moments(role: str, nodes: Nodes, tmp_path: Path) -> None:
    """Between two kills the run must have gone on: the next comes at a random moment after a further update."""
    rng = random.Random(role)
    num_batches = 60  # of a third of a second each where nothing is lost: more than the five moments take
    toml, run_dir = written(tmp_path, num_batches)
    with running(toml, run_dir, nodes) as run:
        for number in range(5):
            run.until(lambda number=number: run.updates >= 1 + 2 * number, f"update {1 + 2 * number}")
            time.sleep(rng.random() * 2.0)
            run.kill(role, rng)
        run.wait(END_DEADLINE_S)
        print_summary(run, 5, role)
    num_resumes = assert_books_are_complete(run_dir, num_batches, 16)
    if role in GOES_ON:
        assert num_resumes == 0, "the run outlives these without a resume"
        assert not (run_dir / "stall-report.txt").exists()
    else:
        assert num_resumes >= 1


@pytest.mark.slow
def test_the_loss_of_a_node(nodes: Nodes, tmp_path: Path) -> None:
    """A node with workers on it, then, on the cluster made whole again, another."""
    rng = random.Random(1)
    num_batches = 30
    toml, run_dir = written(tmp_path, num_batches)
    with running(toml, run_dir, nodes) as run:
        for number in range(2):
            run.until(lambda number=number: run.updates >= 2 + 3 * number, f"update {2 + 3 * number}")
            nodes.lose(rng.choice(nodes.nodes[1:]))
            assert run.is_running, "the run ended before a node was lost"
            nodes.add(NUM_CPUS)
        run.wait(END_DEADLINE_S)
        print_summary(run, 2, "nodes")
    assert_books_are_complete(run_dir, num_batches, 16)
