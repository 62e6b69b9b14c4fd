"""Where the Python that has vLLM is. Needs neither vLLM nor torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from headrace.child_process import how_it_ended
from headrace.errors import ConfigError

VARIABLE = "HEADRACE_VLLM_PYTHON"
DEFAULT = Path(".venv-vllm", "bin", "python")
PROBE_DEADLINE_S = 60.0
_HOW = "`make setup-vllm` makes one in .venv-vllm"


def find_python(configured: str | None) -> Path:
    """``engine.python``, else $HEADRACE_VLLM_PYTHON, else .venv-vllm of the working directory or of the checkout.

    Raises ConfigError where there is none, or where it has no vLLM.
    """
    checkout = Path(__file__).resolve().parents[3]
    named = configured or os.environ.get(VARIABLE)
    candidates = [Path(named).expanduser()] if named else [Path.cwd() / DEFAULT, checkout / DEFAULT]
    for python in candidates:
        if python.is_file():
            _check_package(python)
            return python.absolute()
    looked = " and ".join(str(path) for path in dict.fromkeys(candidates))
    raise ConfigError(
        f'engine.type = "vllm" needs a Python with vLLM in an environment of its own, and none is at {looked}: '
        f"{_HOW}; or name one with engine.python or ${VARIABLE}"
    )


def _check_package(python: Path) -> None:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", code], capture_output=True, timeout=PROBE_DEADLINE_S, check=False, text=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: {python} does not run: {error}; {_HOW}") from error
    if done.returncode != 0:
        ended = "" if done.returncode > 0 else f" (the probe {how_it_ended(done.returncode)})"
        raise ConfigError(f"engine.python: {python} has no package vllm{ended} {done.stderr.strip()[-200:]}; {_HOW}")
