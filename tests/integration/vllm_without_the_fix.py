"""The vLLM server with its fix of the tied head taken out, and its look at the modules with it: what is then wrong, the
canary must find by log-probabilities alone. Run as a program."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "src" / "headrace" / "serve_vllm.py"


def main(*, look_at_modules: bool) -> None:
    spec = importlib.util.spec_from_file_location("serve_vllm", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.name_packages()

    from headrace.engines.vllm.server import vllm_0_32
    from headrace.engines.vllm.server.backend import Served

    vllm_0_32.repack_tied_heads = lambda model: None
    if not look_at_modules:
        vllm_0_32.VllmBackend.served = lambda self, tensors: Served(stale={}, unchecked=[])
    program.main(sys.argv[1:])


if __name__ == "__main__":
    main(look_at_modules=False)
