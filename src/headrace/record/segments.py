"""Append-only segments: one JSON value a line, committed in groups, whole to the last complete line after kill -9."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.record.files import FileLock, RecordError, clear_errors, disk_error, fsync_folder, write_all

_CHUNK_BYTES = 1 << 20


class SegmentWriter:
    """The one writer of a segment. ``append`` only buffers; ``commit`` makes all that was appended durable with one
    write and one fsync.

    Opening an existing segment cuts off a torn last line and goes on behind it. Where a commit fails (disk full), the
    file is cut back to the last commit, RecordError is raised, and what was appended stays buffered for another try.
    """

    def __init__(self, path: Path) -> None:
        with clear_errors(path.parent, "opening"):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), f"segment {path.name}")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._size_bytes = _complete_bytes(self._fd)
            os.ftruncate(self._fd, self._size_bytes)
            fsync_folder(path.parent)
        except OSError as error:
            self._lock.release()
            raise disk_error(path, "opening", error) from error
        self._pending: list[bytes] = []

    @property
    def path(self) -> Path:
        return self._path

    @property
    def num_pending(self) -> int:
        """Records appended and not committed."""
        return len(self._pending)

    @property
    def size_bytes(self) -> int:
        """Committed bytes."""
        return self._size_bytes

    def append(self, record: Any) -> None:
        """Buffer one record. The value is turned into JSON now: later changes to it do not matter."""
        self._pending.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")

    def commit(self) -> None:
        """Write and fsync what is pending. Raises RecordError; the segment then holds what the last commit left."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        try:
            write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError as error:
            # A part may have been written. Without it the next try, or the reader, starts from a whole line.
            os.ftruncate(self._fd, self._size_bytes)
            raise disk_error(self._path, "appending to", error) from error
        self._size_bytes += len(data)
        self._pending.clear()

    def close(self) -> None:
        """Commit and let go; a second call does nothing."""
        if self._fd < 0:
            return
        try:
            self.commit()
        finally:
            os.close(self._fd)
            self._fd = -1
            self._lock.release()


def read_segment(path: Path) -> Iterator[Any]:
    """The records of a segment, in order. A torn last line (no newline yet) is not there; a broken line before the end
    raises RecordError with its number, since no kill can make one. May be read while it is written."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise RecordError(
                    f"{path}, line {number} is not JSON ({error}): the file was changed or damaged from outside; "
                    "restore it from a copy"
                ) from error


def _complete_bytes(fd: int) -> int:
    """Length of the file up to and with its last newline."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - _CHUNK_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
