"""The ledger on disk: a segment for each lineage, replayed at start, committed before work is acknowledged.

The books themselves are ``headrace.control.ledger``; they are handed in, and this module only carries their records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from headrace.record.files import RecordError
from headrace.record.segments import SegmentWriter, read_segment

_NAME = re.compile(r"lineage-(\d+)\.jsonl$")


class LedgerLike(Protocol):
    """What the store needs of the books."""

    sink: Callable[[dict[str, Any]], None] | None

    def open_lineage(self, lineage: int, checkpoint_update: int | None = None) -> None: ...

    def apply(self, record: Mapping[str, Any]) -> None: ...


class LedgerStore:
    """Carries a ledger's records to ``ledger/lineage-<n>.jsonl``.

    Example::

        store = LedgerStore(run.ledger_path, ledger)        # replays what is there
        store.open_lineage(checkpoint_update)               # None for a new run
        ledger.issue(...); store.commit()                   # durable, then the work may start
    """

    def __init__(self, path: Path, ledger: LedgerLike) -> None:
        """Replay all segments into ``ledger`` (fresh). Raises RecordError for a damaged or illegal record."""
        self._path = path
        self._ledger = ledger
        self._writer: SegmentWriter | None = None
        self.num_replayed = 0
        for file in _segments(path):
            for number, record in enumerate(read_segment(file), start=1):
                try:
                    ledger.apply(record)
                except Exception as error:
                    raise RecordError(f"{file}, line {number} cannot follow what is before it: {error}") from error
                self.num_replayed += 1

    def open_lineage(self, checkpoint_update: int | None) -> int:
        """Begin a new segment; returns the lineage's number. ``checkpoint_update``: of the checkpoint that was
        restored, 0 for the initial weights, None for a new run. The opening record is durable on return."""
        if self._writer is not None:
            raise RecordError("this process has opened its lineage already; one process writes one lineage")
        files = _segments(self._path)
        lineage = _lineage_of(files[-1]) + 1 if files else 0
        if self.num_replayed == 0:
            checkpoint_update = None  # killed before the first record was durable: there is nothing to take back
        self._writer = SegmentWriter(self._path / f"lineage-{lineage}.jsonl")
        self._ledger.sink = self._writer.append
        self._ledger.open_lineage(lineage, checkpoint_update)
        self.commit()
        return lineage

    @property
    def position(self) -> dict[str, Any]:
        """Where the ledger stands, for a checkpoint's extra state."""
        if self._writer is None:
            raise RecordError("no lineage is open; call open_lineage() first")
        return {"segment": self._writer.path.name, "size_bytes": self._writer.size_bytes}

    def commit(self) -> None:
        """Make every record so far durable. Raises RecordError; the records stay pending."""
        if self._writer is not None:
            self._writer.commit()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """All ledger records of the run's ledger folder, in order; may be read while they are written."""
    for file in _segments(path):
        yield from read_segment(file)


class Survival:
    """Which updates of which lineage the surviving chain holds: a lineage's updates survive up to the lowest checkpoint
    that any later lineage started from."""

    def __init__(self, ledger_path: Path) -> None:
        self._last_update: dict[int, float] = {}
        for file in _segments(ledger_path):
            first = next(read_segment(file), None)
            if first is None:
                continue
            if first.get("kind") != "lineage":
                raise RecordError(f"{file} does not begin with its lineage record; it was changed from outside")
            if first["checkpoint_update"] is not None:
                for lineage, last in self._last_update.items():
                    self._last_update[lineage] = min(last, first["checkpoint_update"])
            self._last_update[first["lineage"]] = math.inf

    def holds(self, lineage: int, update: int) -> bool:
        """True where what happened in ``lineage`` up to ``update`` is part of the run as it stands now."""
        return update <= self._last_update.get(lineage, math.inf)


def _segments(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    return sorted((f for f in path.iterdir() if _NAME.match(f.name)), key=_lineage_of)


def _lineage_of(file: Path) -> int:
    match = _NAME.match(file.name)
    if match is None:
        raise RecordError(f"{file} is not a ledger segment")
    return int(match[1])
