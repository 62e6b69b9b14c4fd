"""The vLLM server with its fix of the tied head taken out, but with its look at the modules. Run as a program."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import vllm_without_the_fix

if __name__ == "__main__":
    vllm_without_the_fix.main(look_at_modules=True)
