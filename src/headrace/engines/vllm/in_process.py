"""vLLM in the run's own process: the same server as elsewhere, on a thread, over the same socket pair.

vLLM takes a process for its own: it seeds every random generator, replaces ``torch.set_num_threads`` and logs to the
terminal. A run's trainer lives here too, so all of that is put back, or kept away, while vLLM starts. What cannot be
had in one process: a hanging step cannot be killed, and a crash inside vLLM ends the run; ``headrace resume`` goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import random
import socket
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from headrace.engines.errors import EngineError
from headrace.engines.vllm.server.backend import Backend, BackendOptions
from headrace.engines.vllm.server.serving import Connection, Read, Server, WeightReader
from headrace.engines.vllm.server.versions import load_backend
from headrace.openmp import release_workers

END_DEADLINE_S = 10.0
"""For the thread to end once its client is gone; then it is left alone: a thread cannot be killed."""


_ONE_AT_A_TIME = threading.Lock()
"""vLLM's process group, and more of its state, are the process's."""


class ServerThread:
    """One server on a daemon thread, started by the constructor. See ``launch.Host``."""

    def __init__(
        self,
        options: BackendOptions,
        reader: WeightReader[Read],
        *,
        frozen: WeightReader[Read] | None = None,
        log_path: Path | None = None,
        load: Callable[[BackendOptions], Backend] = load_backend,
    ) -> None:
        """``frozen``: see ``Server``. ``log_path``: what vLLM logs; None: nowhere. Raises EngineError where this
        process holds a vLLM already."""
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            raise EngineError("this process holds a vLLM already, and it can hold one; close that engine first")
        self.socket, theirs = socket.socketpair()
        self._log_path = log_path
        self._error = ""
        self._thread = threading.Thread(
            target=self._serve, args=(theirs, options, reader, frozen, load), name="headrace-vllm", daemon=True
        )
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def how_it_ended(self) -> str:
        where = f" (vLLM's log: {self._log_path})" if self._log_path is not None else ""
        if self._error:
            return f"its thread ended with{where}:\n{self._error}"
        return f"its thread {'still runs' if self.is_alive else 'ended without an error'}{where}"

    async def ended(self, deadline_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        while self.is_alive and loop.time() < until_s:
            await asyncio.sleep(0.01)
        return not self.is_alive

    async def end(self) -> None:
        await self.ended(END_DEADLINE_S)

    def kill(self) -> None:
        """Hang up: the thread ends after its step."""
        with contextlib.suppress(OSError):  # it has hung up already
            self.socket.shutdown(socket.SHUT_RDWR)

    def _serve(
        self,
        theirs: socket.socket,
        options: BackendOptions,
        reader: WeightReader[Read],
        frozen: WeightReader[Read] | None,
        load: Callable[[BackendOptions], Backend],
    ) -> None:
        connection = Connection(theirs)
        backend: Backend | None = None
        try:
            with vllm_as_a_guest(self._log_path):
                backend = load(options)
            server = Server(
                connection,
                backend,
                reader,
                frozen=frozen,
                max_batch_size=options.max_batch_size,
                recompute=options.recompute,
                leave=lambda code: None,
                rest=release_workers,
            )
            server.run()
        except Exception as error:
            self._error = traceback.format_exc(limit=-3).strip()
            if backend is None:  # else the server has told it
                with contextlib.suppress(OSError):  # the client is gone
                    connection.send({"event": "failed", "error": f"{type(error).__name__}: {error}"})
        finally:
            with contextlib.suppress(OSError):  # hung up before
                theirs.shutdown(socket.SHUT_RDWR)
            theirs.close()
            if backend is not None:
                backend.close()
            _ONE_AT_A_TIME.release()


@contextlib.contextmanager
def vllm_as_a_guest(log_path: Path | None) -> Iterator[None]:
    """While vLLM starts: its log goes to ``log_path``, and what it changes of the process is put back afterwards."""
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # or it would log to the terminal
    log = logging.getLogger("vllm")
    log.handlers = [logging.FileHandler(log_path) if log_path is not None else logging.NullHandler()]
    log.propagate = False
    log.setLevel(logging.INFO)
    numpy_random = importlib.import_module("numpy.random")
    states = random.getstate(), numpy_random.get_state(), torch.get_rng_state()
    set_num_threads, default_dtype = torch.set_num_threads, torch.get_default_dtype()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        numpy_random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = set_num_threads
        torch.set_default_dtype(default_dtype)
        gc.unfreeze()  # vLLM freezes all objects that there are, the run's too
