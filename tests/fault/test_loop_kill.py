"""kill -9 of a run's process at any moment, then ``headrace resume`` (I11, I12): real processes, a real model."""

from __future__ import annotations

import random
import time
from pathlib import Path

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

NUM_BATCHES = 6


class Uninterrupted:
    """A run that nobody killed, and how long its process took."""

    def __init__(self, folder: Path) -> None:
        toml = write_toml(folder / "whole.toml", small_data(folder, "whole", trainer={"num_batches": NUM_BATCHES}))
        started_s = time.monotonic()
        status, output = run_to_end("train", str(toml), log=folder / "whole.log")
        self.duration_s = time.monotonic() - started_s
        assert status == 0, output
        self.run_dir = folder / "whole"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("kill"))


def start(folder: Path, before: str | None = None, **sections: object) -> tuple[Process, Path]:
    data = small_data(folder, "run", **{"trainer": {"num_batches": NUM_BATCHES}, **sections})
    return Process(
        "train", str(write_toml(folder / "run.toml", data)), log=folder / "log", before=before
    ), folder / "run"


def resume_to_end(folder: Path, run_dir: Path) -> None:
    if not (run_dir / "run.json").exists():  # killed before the run began: there is nothing to resume
        status, output = run_to_end("train", str(folder / "run.toml"), log=folder / "log-2")
    else:
        status, output = run_to_end("resume", str(run_dir), log=folder / "log-2")
    assert status == 0, output


def assert_equal_to(whole: Path, run_dir: Path) -> None:
    """The surviving lineage is the uninterrupted run: books, learning rates, tokens, weights, all bit for bit."""
    assert surviving(run_dir) == surviving(whole)
    assert trained_by_update(run_dir) == trained_by_update(whole)
    assert metric(run_dir, "train/learning_rate") == metric(whole, "train/learning_rate")
    assert metric(run_dir, "reward/mean") == metric(whole, "reward/mean")
    assert tokens_by_attempt(run_dir) == tokens_by_attempt(whole)
    assert_same_weights(run_dir, whole)
    assert_trained_once(run_dir)
    books(run_dir)


@pytest.mark.parametrize("moment", range(10))
def test_a_run_killed_at_a_random_moment_and_resumed_equals_the_uninterrupted_one(
    moment: int, whole: Uninterrupted, tmp_path: Path
) -> None:
    """I11, failures 107 to 113: same books, learning rate, tokens and weights."""
    process, run_dir = start(tmp_path)
    # One kill in each tenth of the run's life, where within it is random.
    part = (moment + random.Random(moment).random()) / 10
    time.sleep(part * whole.duration_s)
    process.kill()
    process.wait()
    resume_to_end(tmp_path, run_dir)
    assert_equal_to(whole.run_dir, run_dir)


def test_a_kill_before_the_first_checkpoint_starts_again_from_the_initial_weights(
    whole: Uninterrupted, tmp_path: Path
) -> None:
    """I11: updates without a checkpoint are taken back, and their tasks are issued again."""
    process, run_dir = start(tmp_path, checkpoint={"every": 0})
    process.until(lambda: len(metric(run_dir, "update")) >= 2)
    process.kill()
    process.wait()
    assert not find_checkpoints(run_dir / "checkpoints")
    resume_to_end(tmp_path, run_dir)
    assert books(run_dir).summary()["dropped:rolled_back"] >= 16
    assert_equal_to(whole.run_dir, run_dir)


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before_it(whole: Uninterrupted, tmp_path: Path) -> None:
    """I12: with slow flushes, the kill comes while ``step-4.tmp`` is written."""
    process, run_dir = start(tmp_path, before="loop_breaks:slow_fsync")
    process.until(lambda: any((run_dir / "checkpoints").glob("step-4.tmp/*")))
    process.kill()
    process.wait()
    assert [c.step for c in find_checkpoints(run_dir / "checkpoints")] == [2]
    resume_to_end(tmp_path, run_dir)
    assert_equal_to(whole.run_dir, run_dir)


def test_a_kill_between_a_complete_checkpoint_and_its_word_in_the_books(whole: Uninterrupted, tmp_path: Path) -> None:
    """I11: 'cut' is in the books, the checkpoint is complete, 'checkpoint' is not in the books yet."""
    process, run_dir = start(tmp_path, before="loop_breaks:die_after_second_checkpoint")
    assert process.wait() == -9
    assert [c.step for c in find_checkpoints(run_dir / "checkpoints")] == [2, 4]
    assert books(run_dir).committed_update == 2
    resume_to_end(tmp_path, run_dir)
    assert_equal_to(whole.run_dir, run_dir)


def test_a_resume_that_is_killed_too(whole: Uninterrupted, tmp_path: Path) -> None:
    """I11: two lineages die, the third finishes."""
    process, run_dir = start(tmp_path)
    process.until(lambda: len(metric(run_dir, "update")) >= 3)
    process.kill()
    process.wait()
    process = Process("resume", str(run_dir), log=tmp_path / "log-1")
    process.until(lambda: max(metric(run_dir, "update"), default=0) >= 5)
    process.kill()
    process.wait()
    resume_to_end(tmp_path, run_dir)
    assert books(run_dir).lineage == 2
    assert_equal_to(whole.run_dir, run_dir)


def test_resume_of_a_finished_run_changes_nothing_and_may_go_further(tmp_path: Path) -> None:
    """I11: nothing is issued or trained again; with more batches the run goes on from its last weights."""
    process, run_dir = start(tmp_path, trainer={"num_batches": 2, "schedule": {"type": "constant"}})
    assert process.wait() == 0
    before = surviving(run_dir), trained_by_update(run_dir), (run_dir / "metrics.jsonl").read_text()
    assert run_to_end("resume", str(run_dir), log=tmp_path / "log")[0] == 0
    assert (surviving(run_dir), trained_by_update(run_dir), (run_dir / "metrics.jsonl").read_text()) == before
    status, output = run_to_end("resume", str(run_dir), "--trainer.num_batches", "4", log=tmp_path / "log")
    assert status == 0, output
    assert sorted(trained_by_update(run_dir)) == [1, 2, 3, 4]
    assert_trained_once(run_dir)
    books(run_dir)


@pytest.mark.parametrize("moment", range(3))
def test_an_asynchronous_run_killed_and_resumed_keeps_books_and_bound(
    moment: int, whole: Uninterrupted, tmp_path: Path
) -> None:
    """I7, I10, I11: every group is trained exactly once along the surviving lineage, no token is too old."""
    process, run_dir = start(tmp_path, rollout={"max_staleness": 2}, trainer={"num_batches": 8})
    seen = 1 + 2 * moment
    process.until(lambda: len(metric(run_dir, "update")) >= seen)
    time.sleep(random.Random(moment).random() * whole.duration_s / NUM_BATCHES)
    process.kill()
    process.wait()
    resume_to_end(tmp_path, run_dir)
    ledger = books(run_dir)
    assert not ledger.in_flight and ledger.surviving().summary()["trained"] == 8 * 16
    trained = trained_by_update(run_dir)
    assert sorted(trained) == list(range(1, 9)) and all(len(keys) == 16 for keys in trained.values())
    assert sorted({group for keys in trained.values() for group, _, _ in keys}) == list(range(32))
    assert_trained_once(run_dir)
    assert oldest_trained_token_age(run_dir) <= 2
