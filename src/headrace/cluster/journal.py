"""``actors.jsonl`` in the run's folder: which actor started where, as which process, and how the others ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.cluster.spec import ActorSpec

FILE_NAME = "actors.jsonl"


class ActorJournal:
    """Appends one line for each event. It explains a run and nothing depends on it, so a full disk costs lines only."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._has_failed = False

    def started(self, spec: ActorSpec, *, pid: int, node: str) -> None:
        place = {"role": spec.role, "index": spec.index, "incarnation": spec.incarnation}
        self._append({"event": "started", "name": spec.name, **place, "pid": pid, "node": node})

    def note(self, text: str) -> None:
        self._append({"event": "note", "text": text})

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), **fields}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if not self._has_failed:
                print(f"headrace: {self._path} cannot be written: {error.strerror}", file=sys.stderr)
            self._has_failed = True


def read_journal(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Oldest first; a line that was cut off by a kill is left out."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue
