"""The control plane under simulation: I7 to I12 and I19 at every event, and proof that the simulation finds faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from simulation_plants import PLANTS

from headrace.cli.main import main
from headrace.control.ledger import Ledger
from headrace.simulate.control import simulate

NUM_SEEDS, NUM_ALL_SEEDS = 500, 10_000
FOUND_WITHIN = 30
"""Seeds until a planted fault is found."""


def broken(seeds: range) -> list[str]:
    return [outcome.line() for outcome in map(simulate, seeds) if outcome.broken]


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_seeds(first: int) -> None:
    """I7 to I12, I19: the books, ages, proofs, lineages and deadlines, whatever dies and whatever gets lost."""
    assert broken(range(first, first + 50)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(NUM_SEEDS, NUM_ALL_SEEDS, 500))
def test_all_seeds(first: int) -> None:
    """The same, twenty times as many."""
    assert broken(range(first, first + 500)) == []


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the simulation can fail: each fault is found within so many seeds, and its seed says so again."""
    plant(monkeypatch)
    seed = next((seed for seed in range(FOUND_WITHIN) if simulate(seed).broken), None)
    assert seed is not None, f"not found within {FOUND_WITHIN} seeds"
    assert "I" in simulate(seed).broken


@pytest.mark.timeout(600)
def test_a_seed_is_the_same_every_time() -> None:
    """A replay must meet the same events: in this process, and in another one with other hashes."""
    code = "from headrace.simulate.control import simulate; print([simulate(seed).log for seed in (3, 11)])"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=280,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(printed) == 1 and len(printed.pop()) > 10_000


def test_a_failing_seed_prints_how_to_replay_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what broke and how to see it again; the replay shows the events before it."""

    def fail(self: Ledger, keys: object, error_class: str) -> None:
        """A failed attempt that nobody books."""

    monkeypatch.setattr(Ledger, "fail", fail)
    seed = next(seed for seed in range(50) if simulate(seed).broken)
    assert main(["simulate", "control", "--seed", str(seed), "--events", "5"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and "checked events" in lines[5]
    assert lines[6].startswith(f"seed {seed}: I10") and f"headrace simulate control --seed {seed}" in lines[6]
    assert main(["simulate", "control", "--seed", str(seed), "--num-seeds", "2"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 seeds, ")
