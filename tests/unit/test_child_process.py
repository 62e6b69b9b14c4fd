"""How a child process ended, in words: a process that a signal kills says nothing itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.child_process import how_it_ended

ROOT = Path(__file__).parents[2]
STARTS = re.compile(r"subprocess\.(Popen|run|call|check_call|check_output)\(|create_subprocess_exec|multiprocessing")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", "exited with status 3"),
        ("os.kill(os.getpid(), 9)",
         "was killed by SIGKILL (signal 9): most likely the system was out of memory; lower it"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV (signal 11): it crashed outside of Python"),
        ("os.abort()", "was killed by SIGABRT (signal 6): it crashed outside of Python"),
        ("os.kill(os.getpid(), 15)", "was killed by SIGTERM (signal 15): somebody ended it, or a time limit"),
        ("os.kill(os.getpid(), 1)", "was killed by SIGHUP (signal 1): somebody ended it, or a time limit, or a"),
        ("os.kill(os.getpid(), 35)", "was killed by a signal without a name (signal 35)"),
        ("os.kill(os.getpid(), 10)", "was killed by SIGUSR1 (signal 10)"),
    ],
)  # fmt: skip
def test_the_end_of_a_real_process_in_words(code: str, expected: str) -> None:
    """Nothing that ends a process is silent; what a signal mostly means is said."""
    # A test run under nohup passes its ignored SIGHUP on to its children.
    prelude = "import os, signal; [signal.signal(number, signal.SIG_DFL) for number in (1, 10, 15)]"
    done = subprocess.run([sys.executable, "-c", f"{prelude}; {code}"], capture_output=True, timeout=30, check=False)
    assert how_it_ended(done.returncode, lower="it").startswith(expected)
    assert how_it_ended(-9).endswith("out of memory")


def test_whoever_starts_a_process_says_how_it_ended() -> None:
    """The whole kind: every file that starts one and could wait for it uses the words above."""
    files = [file for folder in ("src", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    starting = [file for file in files if STARTS.search(file.read_text(encoding="utf-8"))]
    assert len(starting) >= 7
    assert [str(file) for file in starting if "how_it_ended(" not in file.read_text(encoding="utf-8")] == []
