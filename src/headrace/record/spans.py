"""Spans: who did what when. The timeline, and the proof that generation and training overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.protocols import Clock
from headrace.record.segments import SegmentWriter, read_segment


class SpanWriter:
    """One process's spans: ``spans/<name>.jsonl``. Times are seconds of the injected clock.

    Example::

        with spans.span("trainer", "forward_backward", update=3):
            ...
    """

    def __init__(self, path: Path, name: str, lineage: int, clock: Clock) -> None:
        self._writer = SegmentWriter(path / f"{name}-lineage-{lineage}.jsonl")
        self._lineage = lineage
        self._clock = clock

    def add(self, actor: str, what: str, start_s: float, end_s: float, **ids: Any) -> None:
        """Buffer a finished span; ``ids``: JSON values such as update, group, request."""
        if end_s < start_s:
            raise ValueError(f"span {actor}/{what} ends {start_s - end_s:.3f} s before its start: two clocks are mixed")
        self._writer.append(
            {"actor": actor, "what": what, "start_s": start_s, "end_s": end_s, "lineage": self._lineage, **ids}
        )

    @contextmanager
    def span(self, actor: str, what: str, **ids: Any) -> Iterator[None]:
        """Time a block; a block that raises is recorded with ``error``."""
        start_s = self._clock()
        try:
            yield
        except BaseException as error:
            self.add(actor, what, start_s, self._clock(), error=type(error).__name__, **ids)
            raise
        self.add(actor, what, start_s, self._clock(), **ids)

    def commit(self) -> None:
        self._writer.commit()

    def close(self) -> None:
        self._writer.close()


def read_spans(run_path: Path) -> Iterator[dict[str, Any]]:
    """All spans of the run in folder ``run_path``, file by file."""
    for file in sorted((run_path / "spans").glob("*.jsonl")):
        yield from read_segment(file)


def busy_s(spans: Iterable[Mapping[str, Any]], actor: str) -> float:
    """Seconds in which ``actor`` did anything; its own overlapping spans count once."""
    return sum(end - start for start, end in _merged(spans, actor))


def overlap_s(spans: Iterable[Mapping[str, Any]], first: str, second: str) -> float:
    """Seconds in which both actors did something. Both must use one clock."""
    spans = list(spans)
    total_s = 0.0
    others = _merged(spans, second)
    position = 0
    for start, end in _merged(spans, first):
        while position < len(others) and others[position][1] <= start:
            position += 1
        for other_start, other_end in others[position:]:
            if other_start >= end:
                break
            total_s += min(end, other_end) - max(start, other_start)
    return total_s


def _merged(spans: Iterable[Mapping[str, Any]], actor: str) -> list[tuple[float, float]]:
    """Disjoint intervals of the actor's spans, in order. Lineages are different processes, so their clocks are not
    one: the caller passes spans of one lineage."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((s["start_s"], s["end_s"]) for s in spans if s["actor"] == actor):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
