"""What a child process of ours inherits (an allow-list of the environment, never its secrets), and how it ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

_ALLOWED = ("PATH", "HOME", "TMPDIR", "TMP", "TEMP", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "SYSTEMROOT")


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a Python child process.

    It finds the modules that this process finds (PYTHONPATH), hashes text the same way in each run
    (PYTHONHASHSEED = 0: some task generators and verifiers depend on it) and starts no thread pools. Tokens and keys
    of the parent are not in it.
    """
    inherited = {name: os.environ[name] for name in _ALLOWED if name in os.environ}
    search_path = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(search_path),
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **(extra or {}),
    }


EXIT_LOST = 75
"""Of a supervised controller where a part of its run was lost (EX_TEMPFAIL of sysexits.h)."""
EXIT_PARENT_GONE = 3
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, even by kill -9. Elsewhere nothing happens: what serves a
    parent must also end with its connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before the call
            os._exit(EXIT_PARENT_GONE)


_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
_ASKED_TO_END = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")


def how_it_ended(returncode: int, *, lower: str = "") -> str:
    """``exited with status 3``, or the signal that killed it and what that mostly means. A process that is killed says
    nothing itself: whoever waited for it has to.

    ``returncode``: as ``subprocess`` has it, minus the signal's number. ``lower``: what takes less memory, for SIGKILL.
    """
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = "a signal without a name"
    killed = f"was killed by {name} (signal {-returncode})"
    if name == "SIGKILL":
        return f"{killed}: most likely the system was out of memory" + (f"; lower {lower}" if lower else "")
    if name in _CRASHES:
        return f"{killed}: it crashed outside of Python, in a library or for want of memory"
    if name in _ASKED_TO_END:
        return f"{killed}: somebody ended it, or a time limit, or a terminal that was closed"
    return killed
