"""Counts of attempts, for each task and in total: what the ledger adds up.

A status is ``issued``, ``in_flight``, ``trained_uncommitted``, ``trained``, ``dropped:<reason>`` or ``failed:<class>``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

ISSUED = "issued"
IN_FLIGHT = "in_flight"
UNCOMMITTED = "trained_uncommitted"
TRAINED = "trained"
DROPPED = "dropped:"
FAILED = "failed:"

Entries = Counter[tuple[str, str]]
"""(task, status) -> count."""


class BooksError(RuntimeError):
    """The books do not balance, or an attempt was moved in a way that cannot be (I10, I11)."""


class Books:
    """``issued = in_flight + trained_uncommitted + trained + dropped + failed``, for each task and in total."""

    def __init__(self) -> None:
        self.total: Counter[str] = Counter()
        self.by_task: dict[str, Counter[str]] = {}

    def add(self, task: str, status: str, count: int = 1) -> None:
        self.total[status] += count
        counts = self.by_task.get(task)
        if counts is None:
            counts = self.by_task[task] = Counter()
        counts[status] += count

    def move(self, task: str, old: str, new: str, count: int = 1) -> None:
        self.add(task, old, -count)
        self.add(task, new, count)

    def add_entries(self, entries: Mapping[tuple[str, str], int]) -> None:
        for (task, status), count in entries.items():
            self.add(task, status, count)

    def check(self, what: str, tasks: Iterable[str] | None = None) -> None:
        """Raises BooksError naming the first imbalance. ``tasks``: those to look at; None: all."""
        _check(f"{what}, total", self.total)
        for task in self.by_task if tasks is None else tasks:
            _check(f"{what}, task {task}", self.by_task[task])

    def summary(self) -> dict[str, int]:
        """Counts by status in total, without zeros, plus the sums ``dropped`` and ``failed``."""
        counts = {status: count for status, count in sorted(self.total.items()) if count}
        for prefix in (DROPPED, FAILED):
            counts[prefix.rstrip(":")] = _sum(self.total, prefix)
        return {ISSUED: 0, TRAINED: 0, UNCOMMITTED: 0, IN_FLIGHT: 0, **counts}


def _sum(counts: Counter[str], prefix: str) -> int:
    return sum(count for status, count in counts.items() if status.startswith(prefix))


def _check(where: str, counts: Counter[str]) -> None:
    parts = {status: count for status, count in counts.items() if status != ISSUED and count}
    negative = [status for status, count in parts.items() if count < 0]
    if counts[ISSUED] == sum(parts.values()) and not negative:
        return
    terms = " + ".join(f"{count} {status}" for status, count in sorted(parts.items())) or "0"
    difference = counts[ISSUED] - sum(parts.values())
    below_zero = f", negative: {', '.join(negative)}" if negative else ""
    raise BooksError(
        f"the books do not balance, {where}: issued {counts[ISSUED]} != {terms} (off by {difference}{below_zero}). "
        "An attempt was lost or counted twice (I10): stop, and keep the ledger folder for a report"
    )
