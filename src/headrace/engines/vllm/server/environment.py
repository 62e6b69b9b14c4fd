"""What must be set in the process's environment before anything imports vLLM, whatever its version."""

from __future__ import annotations

import os


def set_environment() -> None:
    """The engine's core stays in this process, nothing is fetched or sent, and nothing is compiled."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name in ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ[name] = "1"
    # Eager is eager: else one small function of the sampler is compiled in the first step, which takes 15 s on a CPU.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
