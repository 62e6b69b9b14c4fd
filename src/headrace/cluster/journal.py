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
    """Appends one line for each event. It explains a run and nothing depends on it, so a full disk costs lines only.
    Lines wait until the run's folder is there (:meth:`open`)."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting: list[str] = []
        self._has_failed = False

    def open(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        waiting, self._waiting = self._waiting, []
        self._write("".join(waiting))

    def started(self, spec: ActorSpec, *, pid: int, node: str) -> None:
        place = {"role": spec.role, "index": spec.index, "incarnation": spec.incarnation}
        self._append({"event": "started", "name": spec.name, **place, "pid": pid, "node": node})

    def note(self, text: str) -> None:
        self._append({"event": "note", "text": text})

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps({"time": round(time.time(), 3), **fields}) + "\n"
        if self._path is None:
            self._waiting.append(line)
        else:
            self._write(line)

    def _write(self, lines: str) -> None:
        assert self._path is not None
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)
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
