"""checkpoint.overlap: the run goes on while a checkpoint is written, and the books hold whatever happens meanwhile.

In virtual time over scripted parts, and with a real process that is killed.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from loop_runs import (
    Process,
    assert_same_weights,
    assert_trained_once,
    books,
    metric,
    run_to_end,
    small_data,
    surviving,
    tokens_by_attempt,
    write_toml,
)
from loop_scripted import run_scripted, scripted_config, scripted_parts

from headrace.control.watchdog import DeadlineError
from headrace.loop import Loop
from headrace.record.checkpoints import find_checkpoints
from headrace.record.files import RecordError
from headrace.record.ledger_store import read_records
from headrace.run import _run_watched, first_cause
from headrace.scripted import ScriptedThread, ScriptedTrainer, run_in_virtual_time

BATCH_S = 5.0
OVERLAP: dict[str, Any] = {
    "trainer": {"num_batches": 6},
    "checkpoint": {"every": 2, "overlap": True},
    "waits": {"checkpoint_s": 20.0},
}


def run(folder: Path, write_s: float, **parts: Any) -> tuple[Path, Loop, BaseException | None, float]:
    """Batches of 5 s, checkpoints that take ``write_s`` to write."""
    config = scripted_config(folder, **OVERLAP)
    thread = ScriptedThread({"forward_backward": BATCH_S})
    writer = ScriptedThread({"save_checkpoint": write_s})
    loop, error, took_s = run_scripted(config, thread=thread, writer=writer, **parts)
    return config.run_dir, loop, error, took_s


def order(run_dir: Path, *kinds: str) -> list[str]:
    """What the books say, in order: kind and update."""
    found = [f"{r['kind']} {r['update']}" for r in read_records(run_dir / "ledger") if r["kind"] in kinds]
    return list(dict.fromkeys(found))


def test_training_goes_on_and_the_books_wait_for_the_files(tmp_path: Path) -> None:
    """I11, I12: 'cut' before the copy is written, 'checkpoint' after the marker, batch 3 trained between the two; the
    last one is waited for."""
    run_dir, _, error, took_s = run(tmp_path, 7.0)
    assert error is None
    said = order(run_dir, "cut", "trained", "checkpoint")
    assert said.index("cut 2") < said.index("trained 3") < said.index("checkpoint 2") < said.index("trained 5")
    assert said[-1] == "checkpoint 6"
    assert took_s == pytest.approx(6 * BATCH_S + 7.0, abs=1.0), "only the last checkpoint takes time of its own"
    assert [c.step for c in find_checkpoints(run_dir / "checkpoints")] == [4, 6]
    assert books(run_dir).committed_update == 6


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    """A disk that is slower than the batches holds the run, within the deadline of the one before."""
    run_dir, _, error, took_s = run(tmp_path, 15.0)
    assert error is None and took_s == pytest.approx(2 * BATCH_S + 3 * 15.0, abs=1.0)
    said = order(run_dir, "trained", "checkpoint")
    assert said.index("trained 4") < said.index("checkpoint 2") < said.index("trained 5") < said.index("checkpoint 4")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_safe_point(tmp_path: Path) -> None:
    """I12: no half checkpoint is left, and the books know of none."""
    trainer = ScriptedTrainer()
    trainer.errors["save"] = OSError(28, "No space left on device")
    run_dir, loop, error, _ = run(tmp_path, 7.0, trainer=trainer)
    assert isinstance(error, RecordError) and "writing checkpoint" in str(error)
    assert loop.batch_index == 4
    assert not list((run_dir / "checkpoints").iterdir())
    assert books(run_dir).committed_update == 0


def test_a_writer_that_hangs_ends_the_run_at_its_deadline(tmp_path: Path) -> None:
    """I19: counted from the beginning of the writing, not from when somebody asks."""
    _, loop, error, took_s = run(tmp_path, math.inf)
    assert isinstance(error, DeadlineError) and error.on == "checkpoint writer" and "checkpoint 2" in error.what
    assert loop.batch_index <= 5 and took_s <= 2 * BATCH_S + 20.0 + BATCH_S + 1.0


def test_a_stop_waits_for_what_is_being_written(tmp_path: Path) -> None:
    """Ctrl-C: the running batch ends, both its checkpoint and the one before it are complete."""
    config = scripted_config(tmp_path, **OVERLAP)
    thread = ScriptedThread({"forward_backward": BATCH_S})
    writer = ScriptedThread({"save_checkpoint": 7.0})

    async def stop_in_batch_3(loop: Loop) -> None:
        while loop.batch_index < 2 or "forward_backward" not in thread.calls[-1:]:
            await asyncio.sleep(0.5)
        loop.stop()

    _, error, _ = run_scripted(config, thread=thread, writer=writer, during=stop_in_batch_3)
    assert error is None
    assert [c.step for c in find_checkpoints(config.run_dir / "checkpoints")] == [2, 3]
    assert books(config.run_dir).committed_update == 3


def test_a_run_that_fails_meanwhile_keeps_the_checkpoint(tmp_path: Path) -> None:
    """What was cut before the failure is completed and booked while the run is closed."""

    class Fails(ScriptedTrainer):
        def publish(self) -> Any:
            if self.version.number == 2:
                raise RecordError("as scripted")
            return super().publish()

    async def run_and_close() -> None:
        thread = ScriptedThread({"forward_backward": BATCH_S})
        writer = ScriptedThread({"save_checkpoint": 7.0})
        loop = Loop(scripted_parts(config, trainer=Fails(), thread=thread, writer=writer))
        with pytest.raises(ExceptionGroup) as caught:
            await _run_watched(loop)
        assert str(first_cause(caught.value)) == "as scripted"
        assert books(config.run_dir).committed_update == 0
        await loop.parts.close()

    config = scripted_config(tmp_path, **OVERLAP)
    run_in_virtual_time(run_and_close)
    assert [c.step for c in find_checkpoints(config.run_dir / "checkpoints")] == [2]
    assert books(config.run_dir).committed_update == 2


def test_a_kill_while_a_checkpoint_is_written_beside_the_training(tmp_path: Path) -> None:
    """I11: the resumed run, bit for bit, is the uninterrupted one; both write beside the training."""
    overlap = {"every": 2, "overlap": True}
    toml = write_toml(tmp_path / "whole.toml", small_data(tmp_path, "whole", checkpoint=overlap))
    status, output = run_to_end("train", str(toml), log=tmp_path / "log-0")
    assert status == 0, output
    toml = write_toml(tmp_path / "run.toml", small_data(tmp_path, "run", checkpoint=overlap))
    process, run_dir = (
        Process("train", str(toml), log=tmp_path / "log", before="loop_breaks:slow_fsync"),
        tmp_path / "run",
    )
    process.until(lambda: any((run_dir / "checkpoints").glob("step-4.tmp/*")) or metric(run_dir, "update").get(5))
    process.kill()
    process.wait()
    status, output = run_to_end("resume", str(run_dir), log=tmp_path / "log-2")
    assert status == 0, output
    assert surviving(run_dir) == surviving(tmp_path / "whole")
    assert tokens_by_attempt(run_dir) == tokens_by_attempt(tmp_path / "whole")
    assert_same_weights(run_dir, tmp_path / "whole")
    assert_trained_once(run_dir)
    books(run_dir)
