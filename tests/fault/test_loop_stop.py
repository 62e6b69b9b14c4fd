"""Ctrl-C and SIGTERM: the run checkpoints, says how to go on, and goes on as if nothing had happened."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_runs import (
    Process,
    assert_same_weights,
    assert_trained_once,
    books,
    metric,
    oldest_trained_token_age,
    run_to_end,
    small_data,
    surviving,
    tokens_by_attempt,
    trained_by_update,
    write_toml,
)

from headrace.record.checkpoints import find_checkpoints
from headrace.record.ledger_store import read_records

SLOW = {"rewards": [{"type": f"{Path(__file__).parents[1] / 'loop_rewards.py'}:slow"}]}
"""5 ms for each reply, so that a signal finds groups half judged."""
FILTERED: dict[str, Any] = {**SLOW, "algorithm": {"preset": "dapo"}, "checkpoint": {"every": 0}}
"""Dynamic sampling: a batch is gathered in several waves."""


def start(folder: Path, settings: dict[str, Any]) -> tuple[Process, Path]:
    toml = write_toml(folder / "run.toml", small_data(folder, "run", **settings))
    return Process("train", str(toml), log=folder / "log"), folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Uninterrupted runs, by name."""
    folder = tmp_path_factory.mktemp("stop")
    for name, settings in (("slow", SLOW), ("filtered", FILTERED)):
        toml = write_toml(folder / f"{name}.toml", small_data(folder, name, **settings))
        status, output = run_to_end("train", str(toml), log=folder / "log")
        assert status == 0, output
    yield {"slow": folder / "slow", "filtered": folder / "filtered"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_checkpoints_and_says_how_to_resume(
    number: signal.Signals, whole: dict[str, Path], tmp_path: Path
) -> None:
    """Exit code 130, a complete checkpoint of the newest version, one line that says how to go on; the resumed run
    equals the uninterrupted one bit for bit (I11)."""
    process, run_dir = start(tmp_path, {**SLOW, "checkpoint": {"every": 0}})
    process.until(lambda: len(metric(run_dir, "update")) >= 3)
    process.signal(number)
    assert process.wait() == 130
    done = max(metric(run_dir, "update"))
    assert done < 6
    assert [c.step for c in find_checkpoints(run_dir / "checkpoints")] == [done]
    assert f"stopped after {done} updates; go on with: headrace resume {run_dir}" in process.output
    assert "Traceback" not in process.output
    assert (run_dir / "report.html").is_file()
    assert books(run_dir).committed_update == done
    status, output = run_to_end("resume", str(run_dir), log=tmp_path / "log-2")
    assert status == 0, output
    assert tokens_by_attempt(run_dir) == tokens_by_attempt(whole["slow"])
    assert surviving(run_dir) == surviving(whole["slow"])
    assert_same_weights(run_dir, whole["slow"])


def has_filtered_since_update(run_dir: Path, update: int) -> bool:
    """At ``update`` or later, groups of the batch that is being gathered are filtered out already."""
    records = list(read_records(run_dir / "ledger"))
    trained = [i for i, r in enumerate(records) if r["kind"] == "trained" and r["update"] >= update]
    return bool(trained) and any(r["kind"] == "dropped" for r in records[trained[-1] :])


@pytest.mark.parametrize("moment", range(3))
def test_a_stop_between_two_waves_of_dynamic_sampling_resumes_to_the_same_run(
    moment: int, whole: dict[str, Path], tmp_path: Path
) -> None:
    """I11: a stop inside a batch takes nothing of that batch along; the groups that dynamic sampling had filtered by
    then are filtered again, and the batch comes out of the same waves."""
    process, run_dir = start(tmp_path, FILTERED)
    process.until(lambda: has_filtered_since_update(run_dir, 1 + moment))
    process.signal(signal.SIGINT)
    assert process.wait() == 130
    status, output = run_to_end("resume", str(run_dir), log=tmp_path / "log-2")
    assert status == 0, output
    assert surviving(run_dir) == surviving(whole["filtered"])
    assert trained_by_update(run_dir) == trained_by_update(whole["filtered"])
    assert tokens_by_attempt(run_dir) == tokens_by_attempt(whole["filtered"])
    assert_same_weights(run_dir, whole["filtered"])


def test_a_signal_before_the_first_update_leaves_a_run_that_starts_again(
    whole: dict[str, Path], tmp_path: Path
) -> None:
    """I11: no checkpoint of version 0 is needed: a resume starts from the initial weights."""
    process, run_dir = start(tmp_path, SLOW)
    process.until(lambda: any(r["kind"] == "issued" for r in read_records(run_dir / "ledger")))
    process.signal(signal.SIGINT)
    assert process.wait() == 130
    assert f"headrace resume {run_dir}" in process.output
    status, output = run_to_end("resume", str(run_dir), log=tmp_path / "log-2")
    assert status == 0, output
    assert_same_weights(run_dir, whole["slow"])
    assert surviving(run_dir) == surviving(whole["slow"])


def test_an_asynchronous_run_that_is_stopped_and_resumed_keeps_books_and_bound(tmp_path: Path) -> None:
    """I7, I10: what was in flight at the stop is issued again and trained once."""
    process, run_dir = start(tmp_path, {**SLOW, "rollout": {"max_staleness": 2}})
    process.until(lambda: len(metric(run_dir, "update")) >= 2)
    process.signal(signal.SIGTERM)
    assert process.wait() == 130
    status, output = run_to_end("resume", str(run_dir), log=tmp_path / "log-2")
    assert status == 0, output
    assert not books(run_dir).in_flight
    assert sorted({g for keys in trained_by_update(run_dir).values() for g, _, _ in keys}) == list(range(24))
    assert_trained_once(run_dir)
    assert oldest_trained_token_age(run_dir) <= 2


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    """The user can always leave: here the first Ctrl-C waits for a gradient that hangs, and the second ends the process
    without a checkpoint, and says so."""
    toml = write_toml(tmp_path / "run.toml", small_data(tmp_path, "run", checkpoint={"every": 0}))
    before = "loop_breaks:hang_in_gradient_after_first_update"
    process, run_dir = Process("train", str(toml), log=tmp_path / "log", before=before), tmp_path / "run"
    process.until(lambda: len(metric(run_dir, "update")) >= 1)
    process.signal(signal.SIGINT)
    process.until(lambda: "once more to leave at once" in process.output)
    process.signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert "second signal: leaving without a checkpoint" in process.output
    assert not find_checkpoints(run_dir / "checkpoints")
