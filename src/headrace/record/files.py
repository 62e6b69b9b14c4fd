"""Files that survive a kill: atomic replacement, flushed folders, and a lock that dies with its holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.errors import HeadraceError


class RecordError(HeadraceError):
    """The record could not be written or read. Says which file, why, and what to do."""


def disk_error(path: Path, what: str, error: OSError) -> RecordError:
    """A clear error for an OSError while writing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RecordError(
            f"{what} {path}: the disk is full ({error.strerror}). What was committed before is whole; free some space "
            "and resume the run"
        )
    return RecordError(f"{what} {path} failed: {error.strerror or error}. What was committed before is whole")


@contextmanager
def clear_errors(path: Path, what: str) -> Iterator[None]:
    """An OSError inside becomes a :func:`disk_error`."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, what, error) from error


def fsync_folder(path: Path) -> None:
    """Make renames and new names inside ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """``os.write`` until everything is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: after a kill it holds the old bytes or the new ones, never a part. Raises
    RecordError (disk full and the like), after which the old file stands."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        aside.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise disk_error(path, "writing", error) from error


def write_json_atomically(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(value, indent=2, sort_keys=True, default=str) + "\n").encode())


_held: set[Path] = set()


class FileLock:
    """One process holds it. The kernel lets go when that process dies, so that a lock is never stale; the file's text
    (pid, host) is for the message only. POSIX record locks: a forked child does not inherit them. They end when any
    descriptor of the file is closed, so the lock has a file of its own that nobody else opens."""

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock. Raises RecordError naming the holder where another process, or this one, has it."""
        self._path = path.resolve()
        if self._path in _held:
            raise RecordError(f"{what} is open in this process already ({path}); close it first")
        self._fd = -1
        with clear_errors(self._path, "locking"):
            while self._fd < 0:
                self._fd = self._take(what)
            _held.add(self._path)
            try:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            except OSError:
                self.release()
                raise

    def _take(self, what: str) -> int:
        """Open and lock the file; -1 where its last holder removed it in between."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(fd, 200).decode(errors="replace").strip() or "another process"
            os.close(fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            message = f"{what} is being written by {holder} ({self._path}); wait for it, or end it"
            raise RecordError(message) from None
        if self._path.exists() and self._path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
        os.close(fd)
        return -1

    def release(self) -> None:
        """Let go and remove the file; a second call does nothing."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1
            _held.discard(self._path)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
