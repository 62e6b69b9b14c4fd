"""metrics.jsonl: one line for each published update; the truth, of which trackers get copies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.record.files import RecordError
from headrace.record.ledger_store import Survival
from headrace.record.segments import SegmentWriter, read_segment

_OWN = frozenset({"update", "step", "lineage", "non_finite"})


class MetricsWriter:
    """Appends to the run's metrics.jsonl. A line is durable when ``log`` returns."""

    def __init__(self, path: Path, lineage: int) -> None:
        self._writer = SegmentWriter(path)
        self._lineage = lineage

    def log(self, update: int, step: int, metrics: Mapping[str, float | int | str | bool | None]) -> None:
        """``update``: number of the published policy that the line is about; ``step``: optimizer steps done.
        Non-finite numbers are written as null and named under ``non_finite``, so that the file is plain JSON."""
        if taken := _OWN & metrics.keys():
            raise RecordError(f"a metric cannot be called {', '.join(sorted(taken))}: the line itself uses that name")
        bad = {k: str(v) for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)}
        line: dict[str, Any] = {"update": update, "step": step, "lineage": self._lineage}
        line |= {k: None if k in bad else v for k, v in metrics.items()}
        if bad:
            line["non_finite"] = bad
        self._writer.append(line)
        self._writer.commit()

    def close(self) -> None:
        self._writer.close()


def read_metrics(run_path: Path, *, surviving: bool = True) -> Iterator[dict[str, Any]]:
    """Lines of the run in folder ``run_path``. ``surviving``: without those of updates that a resume took back."""
    file = run_path / "metrics.jsonl"
    if not file.exists():
        return
    survival = Survival(run_path / "ledger")
    for line in read_segment(file):
        if not surviving or survival.holds(line["lineage"], line["update"]):
            yield line
