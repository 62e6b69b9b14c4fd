"""Faults for the processes of the loop's tests: each function breaks one thing, before the command starts."""

from __future__ import annotations

import os
import signal
import time


def slow_fsync() -> None:
    """Every flush takes 20 ms, so that a kill finds the process in the middle of a checkpoint."""
    flush = os.fsync

    def fsync(fd: int) -> None:
        time.sleep(0.02)
        flush(fd)

    os.fsync = fsync


def die_after_second_checkpoint() -> None:
    """kill -9 by itself, once the marker of the second checkpoint is written and before the books say so."""
    from headrace.record.checkpoints import CheckpointStore

    remove_surplus = CheckpointStore._remove_surplus
    written = []

    def die(self: CheckpointStore) -> None:
        remove_surplus(self)
        written.append(self)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointStore._remove_surplus = die
