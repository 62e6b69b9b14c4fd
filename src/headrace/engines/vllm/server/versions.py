"""Finds the module that follows the vLLM that is installed here, and starts vLLM through it."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from typing import TYPE_CHECKING, cast

from headrace.config.vllm_versions import DISTRIBUTIONS, backend_of
from headrace.engines.vllm.server.environment import set_environment

if TYPE_CHECKING:
    from headrace.engines.vllm.server.backend import Backend, BackendOptions


def load_backend(options: BackendOptions) -> Backend:
    """Start vLLM. Takes seconds to minutes. Raises ConfigError for a vLLM of no known range, ImportError without."""
    set_environment()
    module = importlib.import_module(backend_of(installed_version(), sys.executable))
    return cast("Backend", module.VllmBackend(options))


def installed_version() -> str:
    """Of the distribution, or what a source tree says of itself."""
    for name in DISTRIBUTIONS:
        for found in importlib.metadata.distributions(name=name):
            return found.version
    return str(importlib.import_module("vllm").__version__)
