"""Where the Python that has vLLM is, and whether it can serve. Needs neither vLLM nor torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.child_process import how_it_ended
from headrace.config.vllm_versions import DISTRIBUTIONS, backend_of
from headrace.errors import ConfigError

VARIABLE = "HEADRACE_VLLM_PYTHON"
DEFAULT = Path(".venv-vllm", "bin", "python")
PROBE_DEADLINE_S = 60.0
OLDEST_PYTHON = (3, 11)
_HOW = "`make setup-vllm` makes one in .venv-vllm"
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
found = [d.version for name in {names!r} for d in m.distributions(name=name)] if u.find_spec("vllm") else None
print(json.dumps({{"python": list(sys.version_info[:2]), "vllm": found}}))
"""


def find_python(configured: str | None) -> Path:
    """``engine.python``, else $HEADRACE_VLLM_PYTHON, else .venv-vllm of the working directory or of the checkout.

    Raises ConfigError where there is none, or where it is too old, has no vLLM, or one of no known version.
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


def check_this_python() -> None:
    """Of a run that holds vLLM in its own process. Raises ConfigError where this Python cannot."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f'engine.mode = "in_process" needs vLLM in the Python that runs headrace, and {sys.executable} has none: '
            f"start the run with a Python that has both ({_HOW}: .venv-vllm/bin/headrace train ...), or leave "
            'engine.mode at "server"'
        )
    _check_versions(
        [found.version for name in DISTRIBUTIONS for found in importlib.metadata.distributions(name=name)],
        sys.executable,
    )


def _check_package(python: Path) -> None:
    """A few questions to ``python``, which does not import vLLM for them."""
    try:
        done = subprocess.run(
            [str(python), "-P", "-c", _PROBE.format(names=DISTRIBUTIONS)],
            capture_output=True,
            timeout=PROBE_DEADLINE_S,
            check=False,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: {python} does not run: {error}; {_HOW}") from error
    try:
        told = json.loads(done.stdout)
        version, found = tuple(told["python"]), told["vllm"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"engine.python: {python} could not say what it has: it {how_it_ended(done.returncode)}; is it a Python "
            f"{'.'.join(map(str, OLDEST_PYTHON))} or later? {done.stderr.strip()[-200:]}; {_HOW}"
        ) from error
    if version < OLDEST_PYTHON:
        raise ConfigError(
            f"engine.python: {python} is Python {version[0]}.{version[1]}, and headrace needs "
            f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later; {_HOW}"
        )
    if found is None:
        raise ConfigError(f"engine.python: {python} has no package vllm; {_HOW}")
    _check_versions(found, str(python))


def _check_versions(found: list[str], where: str) -> None:
    """Of the installed distributions; a source tree that nobody installed has none, and is asked when it starts."""
    for version in found[:1]:
        backend_of(version, where)
