"""kill -9 of the process that publishes weights in a folder, at every file operation of the publish."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "weights_killed_publish.py"


@pytest.mark.parametrize(("kind", "least"), [("file", 12), ("delta", 8)])
def test_a_killed_publish_leaves_the_old_version_or_the_new_one(kind: str, least: int, tmp_path: Path) -> None:
    """Issue 4, I12: whichever file operation the kill cuts short (a write half way), an engine that joins then finds
    the old version whole until the manifest has its name, and the new one after; and another publisher starts anew over
    what was left, which is removed."""
    command = [sys.executable, str(SCRIPT), kind, str(tmp_path / "weights")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > least and [row["ended"] for row in rows] == [-signal.SIGKILL] * (len(rows) - 1) + [0]
    outcomes = [row["found"] for row in rows]
    assert set(outcomes) == {3, 4} and outcomes == sorted(outcomes)
    assert all(row["then"] == 5 and row["left"] == [] for row in rows)
