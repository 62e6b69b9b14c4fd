"""The vLLM server with its fix of the tied head taken out, and its look at the modules with it: what is then wrong, the
canary must find by log-probabilities alone. Run as a program, or ``patches`` in the process that holds vLLM."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[2] / "src" / "headrace" / "serve_vllm.py"


def patches(*, look_at_modules: bool) -> list[tuple[Any, str, Any]]:
    """(object, attribute, what takes its place)."""
    from headrace.engines.vllm.server import vllm_0_32
    from headrace.engines.vllm.server.backend import Served

    found: list[tuple[Any, str, Any]] = [(vllm_0_32, "repack_tied_heads", lambda model: None)]
    if not look_at_modules:
        found.append((vllm_0_32.VllmBackend, "served", lambda self, tensors: Served(stale={}, unchecked=[])))
    return found


def main(*, look_at_modules: bool) -> None:
    spec = importlib.util.spec_from_file_location("serve_vllm", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.name_packages()
    for owner, name, instead in patches(look_at_modules=look_at_modules):
        setattr(owner, name, instead)
    program.main(sys.argv[1:])


if __name__ == "__main__":
    main(look_at_modules=False)
