"""Where a vLLM server runs, and how it is started: a process of its own, or a thread of the run's own process.

The client sees no difference: a socket, and a few questions about the other side's health.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from headrace.config.engines import VllmEngineConfig
from headrace.engines.vllm.process import ServerProcess
from headrace.engines.vllm.server.backend import AdapterOptions, BackendOptions

PROGRAM = Path(__file__).resolve().parents[2] / "serve_vllm.py"


class Host(Protocol):
    """What a server runs in; ``process.ServerProcess`` and ``in_process.ServerThread``."""

    socket: socket.socket
    """This side's end of the only way to talk to the server."""

    def how_it_ended(self) -> str:
        """For a person."""
        ...

    async def ended(self, deadline_s: float) -> bool:
        """Whether it ends within ``deadline_s``."""
        ...

    async def end(self) -> None:
        """After ``socket`` was closed, which ends it: wait a bounded time for that."""
        ...

    def kill(self) -> None:
        """End it now, as far as that can be done."""
        ...


Launch = Callable[[], Host]
"""Starts the server."""


def backend_options(
    config: VllmEngineConfig,
    *,
    model: Path,
    dtype: str,
    vocab_size: int,
    max_context: int,
    adapter: AdapterOptions | None = None,
) -> BackendOptions:
    """``model``: folder with the model's configuration. ``max_context``: of the model, where the configuration sets
    none."""
    return BackendOptions(
        model=str(model),
        dtype=dtype,
        vocab_size=vocab_size,
        max_context=config.max_context or max_context,
        max_batch_size=config.max_batch_size,
        prefix_cache=config.prefix_cache,
        kv_cache_bytes=config.kv_cache_bytes,
        num_threads=config.num_threads,
        recompute=config.kv_policy == "recompute",
        seed=0,
        adapter=adapter,
    )


def in_a_process(
    options: BackendOptions,
    *,
    python: Path,
    weights: Mapping[str, Any],
    frozen: Mapping[str, Any] | None = None,
    inherit: Sequence[int],
    log_path: Path | None,
    program: Path = PROGRAM,
) -> Launch:
    """``weights``: what the server makes the receiving half of its carrier of (the sending half's ``receiver``);
    ``frozen``: of another one, for the weights under an adapter. ``inherit``: open descriptors of both."""
    command = [str(python), "-P", str(program), "--weights", json.dumps(dict(weights))]
    command += ["--options", json.dumps(asdict(options))]
    command += [] if frozen is None else ["--frozen", json.dumps(dict(frozen))]
    return partial(ServerProcess, command, inherit=inherit, num_threads=options.num_threads or 1, log_path=log_path)
