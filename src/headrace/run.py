"""Starts and ends a run: signals, the stall watch, first causes, and the report that is left whatever happens."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.config.schema import RunConfig
from headrace.control.watchdog import DeadlineError
from headrace.engines.errors import EngineError
from headrace.errors import HeadraceError, PartLost
from headrace.evaluation.result import EvaluationResult
from headrace.loop import Loop
from headrace.monitor.report import write_curve_png, write_report
from headrace.parts import Parts
from headrace.trainer.crew import LeadingTrainer
from headrace.wiring import build_parts

WATCH_INTERVAL_S = 5.0
START_DEADLINE_S = 120.0
"""For the verifiers' self-tests."""


class RunFailed(HeadraceError):
    """A guard, a deadline or a part that failed ended the run. The message says what, where, and how to go on."""

    def __init__(self, message: str, *, part_lost: bool = False) -> None:
        """``part_lost``: a process or a machine is gone or does not answer, and a resume may go on at once."""
        super().__init__(message)
        self.part_lost = part_lost


class StallError(RunFailed):
    """Nothing moved for too long; the message is the watchdog's report (I19)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run came to."""

    run_dir: Path
    report: Path
    num_updates: int
    """Published versions, those of earlier lineages included."""
    stopped: bool
    """Ended by Ctrl-C or SIGTERM before its last batch."""
    evaluations: tuple[tuple[int, EvaluationResult], ...]
    """(version number, result) of this process's evaluations, oldest first."""


class Controls:
    """A running run for other threads: how far it is, and how to stop it."""

    def __init__(self) -> None:
        self._loop: Loop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested = False

    @property
    def num_updates(self) -> int:
        return 0 if self._loop is None else self._loop.batch_index

    def stop(self) -> None:
        """Ask the run to end at its next safe point, also before it has begun."""
        self._stop_requested = True
        if self._event_loop is not None and self._loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._loop.stop)

    def attach(self, loop: Loop) -> None:
        """Called by the run, on its thread."""
        self._event_loop, self._loop = asyncio.get_running_loop(), loop
        if self._stop_requested:
            loop.stop()


def train(config: RunConfig, *, resume_from: Path | None = None, controls: Controls | None = None) -> TrainResult:
    """Run ``config`` to its end, from its start or from the newest complete checkpoint of ``resume_from``.

    Raises HeadraceError for what the user can mend, RunFailed where a guard or a deadline ended the run.
    """
    return asyncio.run(_train(config, resume_from, controls or Controls()))


async def _train(config: RunConfig, resume_from: Path | None, controls: Controls) -> TrainResult:
    try:
        parts = build_parts(config, resume_from=resume_from)
    except PartLost as error:
        raise RunFailed(str(error), part_lost=True) from error
    try:
        loop = await _run(parts, controls)
    except BaseException as error:
        failure = _explained(parts, first_cause(error))
        try:
            await _leave(parts)
        except Exception as second:  # told, but it must not hide why the run ended
            print(f"headrace: while the run was closed: {type(second).__name__}: {second}", file=sys.stderr)
        raise failure from error
    await _leave(parts)
    return TrainResult(
        run_dir=parts.record.run_dir.path,
        report=parts.record.run_dir.report_path,
        num_updates=loop.batch_index,
        stopped=loop.stop_requested and loop.batch_index < config.trainer.num_batches,
        evaluations=tuple(loop.evaluations),
    )


async def _run(parts: Parts, controls: Controls) -> Loop:
    parts.progress.start()
    if parts.workers is not None:
        deadline_s = 2 * parts.workers.start_deadline_s
        await parts.wait(parts.workers.start(), waiter="run", on="workers", what="their start", deadline_s=deadline_s)
    self_tests = parts.reward.start()
    await parts.wait(
        self_tests, waiter="loop", on="reward", what="the verifiers' self-tests", deadline_s=START_DEADLINE_S
    )
    loop = Loop(parts)
    controls.attach(loop)
    with _stop_on_signals(loop), nothing_is_garbage_yet():
        await _run_watched(loop)
    return loop


@contextmanager
def nothing_is_garbage_yet() -> Iterator[None]:
    """What exists before the loop starts (modules, the model) is not looked through at every collection: with torch
    imported these are a million objects, and the loop makes many small ones."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _run_watched(loop: Loop) -> None:
    """The loop, and beside it the watch; whichever ends first decides."""
    work = asyncio.create_task(loop.run(), name="loop")
    watch = asyncio.create_task(_watch(loop.parts), name="watch")
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            watch.result()  # raises
        await work
    finally:
        watch.cancel()
        work.cancel()


async def _watch(parts: Parts) -> None:
    """I19: no progress makes a report; as long again without any ends the run."""
    while True:
        await asyncio.sleep(WATCH_INTERVAL_S)
        if isinstance(parts.trainer, LeadingTrainer):
            parts.trainer.check_followers()
        if not parts.watchdog.stalled():
            continue
        report = parts.watchdog.report_text()
        path = _write_stall_report(parts, report)
        parts.progress.note(f"no progress for {parts.watchdog.idle_s:.0f} s; who waits on whom: {path}")
        while parts.watchdog.stalled():
            await asyncio.sleep(WATCH_INTERVAL_S)
            if parts.watchdog.idle_s > 2 * parts.watchdog.stall_after_s:
                message = f"the run stands still and was ended. {report}\n{_how_to_resume(parts)}"
                raise StallError(message, part_lost=True)


def _write_stall_report(parts: Parts, report: str) -> str:
    """Returns where it is: on a full disk, only in the terminal."""
    path = parts.record.run_dir.path / "stall-report.txt"
    try:
        path.write_text(report + "\n")
    except OSError as error:
        print(report, file=sys.stderr)
        return f"above ({path} could not be written: {error.strerror})"
    return str(path)


def first_cause(error: BaseException) -> BaseException:
    """The exception that started it all, out of the groups that asyncio wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _explained(parts: Parts, cause: BaseException) -> BaseException:
    """What a guard, a deadline or a part that failed said, and how to go on. Defects stay as they are."""
    if not isinstance(cause, HeadraceError) or isinstance(cause, StallError):
        return cause
    path = _write_stall_report(parts, parts.watchdog.report_text())
    part_lost = isinstance(cause, (PartLost, DeadlineError)) or type(cause) is EngineError
    return RunFailed(f"{cause}\nWho waited on whom: {path}\n{_how_to_resume(parts)}", part_lost=part_lost)


def _how_to_resume(parts: Parts) -> str:
    checkpoint = parts.record.checkpoints.latest()
    start = f"checkpoint {checkpoint.step}" if checkpoint else "the initial weights (no checkpoint was complete yet)"
    return f"Nothing is lost up to {start}; once mended, go on with: headrace resume {parts.record.run_dir.path}"


@contextmanager
def _stop_on_signals(loop: Loop) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks the loop to stop at a safe point; the second ends the process at once."""
    event_loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if loop.stop_requested:
            print("headrace: second signal: leaving without a checkpoint", file=sys.stderr)
            os._exit(128 + number)
        loop.parts.progress.note("stopping after the update in progress; once more to leave at once")
        loop.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in numbers:
            event_loop.add_signal_handler(number, on_signal, number)
    except (RuntimeError, ValueError):  # not on the main thread (a test, a notebook): its own handlers stay
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            event_loop.remove_signal_handler(number)


async def _leave(parts: Parts) -> None:
    """Close everything, then write the report: also after a failure, which is when it is needed most. What goes wrong
    here is told, and must not hide why the run ended; ``headrace report`` writes the report again."""
    for sink in await parts.close():
        if not sink.is_ok:
            print(f"headrace: {sink}", file=sys.stderr)
    try:
        write_report(parts.record.run_dir.path)
        write_curve_png(parts.record.run_dir.path)
    except Exception as error:
        print(f"headrace: the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)
