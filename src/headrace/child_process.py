"""What a child process of ours inherits: an allow-list of the environment, never its secrets."""

from __future__ import annotations

import os
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
