"""A disk that survives kill -9: what was written stays, a write that the kill interrupts stays in part.

Every write and every flush is an event, so that a kill can come between any two of them. A full disk is a flush that
fails. The files are real ones, in memory where the system has a folder for that.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.record import files, segments
from headrace.simulate.errors import Killed

_SHARED_FOLDER = Path("/dev/shm")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="headrace-sim-", dir=_SHARED_FOLDER if _SHARED_FOLDER.is_dir() else None
    ) as f:
        yield Path(f)


class Disk:
    """The run's folder, as the next life will find it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._kept = run_dir.with_name(run_dir.name + ".kept")
        self.is_full_next = False
        """The next flush finds the disk full."""

    def keep(self) -> None:
        """Called at the moment of a kill: what happens to the folder afterwards did not happen."""
        if self._run_dir.exists():
            shutil.copytree(self._run_dir, self._kept)

    def restore(self) -> None:
        """After the dead life is cleared away."""
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if self._kept.exists():
            self._kept.rename(self._run_dir)

    def forget_locks(self) -> None:
        """A dead process holds none; this one only pretends to be another."""
        files._held -= {path for path in files._held if self._run_dir.resolve() in path.parents}

    @contextmanager
    def watched(self, on_event: Callable[[str, str], object]) -> Iterator[None]:
        """Makes every write and flush of the record an event. Nothing is really flushed: nobody pulls the plug."""
        real_fsync, real_write = os.fsync, files.write_all
        self.is_full_next = False

        def fsync(fd: int) -> None:
            on_event("disk", "flush")
            if self.is_full_next:
                self.is_full_next = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def write(fd: int, data: bytes) -> None:
            half = len(data) // 2
            real_write(fd, data[:half])
            on_event("disk", "write")
            real_write(fd, data[half:])

        os.fsync = fsync  # type: ignore[assignment]
        for module in (segments, files):  # each has its own name for it
            setattr(module, "write_all", write)  # noqa: B010
        try:
            yield
        finally:
            os.fsync = real_fsync
            for module in (segments, files):
                setattr(module, "write_all", real_write)  # noqa: B010


def die(disk: Disk) -> None:
    """kill -9 now."""
    disk.keep()
    raise Killed(9)
