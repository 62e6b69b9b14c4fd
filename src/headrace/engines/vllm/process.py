"""The server's process: how it is started, what it inherits, what it said last, and how it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headrace.child_process import child_environment
from headrace.engines.errors import EngineError

END_DEADLINE_S = 10.0
"""For the server to end by itself once its client is gone; then it is killed."""
_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "HF_HOME", "HF_HUB_CACHE")
_NUM_TAIL_LINES = 12
_TAIL_BYTES = 8192


class ServerProcess:
    """One server, started by the constructor. ``socket`` is this side's end of the only way to talk to it."""

    def __init__(self, command: Sequence[str], *, inherit: Sequence[int], num_threads: int, log_path: Path | None):
        """``command`` gets ``--socket FD`` appended. ``log_path``: what the server prints; None: a file without a
        name."""
        self._log_path = log_path
        self._log = tempfile.TemporaryFile("a+b") if log_path is None else log_path.open("a+b")  # noqa: SIM115
        self.socket, theirs = socket.socketpair()
        environment = child_environment(
            {"PYTHONPATH": "", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(num_threads)}
            | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        )
        try:
            self._process = subprocess.Popen(
                [*command, "--socket", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *inherit),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the run, which then closes the server
            )
        except OSError as error:
            self.socket.close()
            self._log.close()
            raise EngineError(f"the vLLM server could not be started: {command[0]}: {error.strerror}") from error
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def how_it_ended(self) -> str:
        """For a person: exit code or signal, and the end of its log."""
        code = self._process.poll()
        if code is None:
            end = f"it still runs (process {self.pid})"
        elif code < 0:
            end = f"signal {signal.Signals(-code).name} ended it"
        else:
            end = f"it ended with exit code {code}"
        return f"{end}; {self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines that it printed, and where the rest is."""
        start = max(0, os.fstat(self._log.fileno()).st_size - _TAIL_BYTES)
        text = os.pread(self._log.fileno(), _TAIL_BYTES, start).decode(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        where = f" ({self._log_path})" if self._log_path is not None else ""
        if not lines:
            return f"it printed nothing{where}"
        return f"its last words{where}:\n" + "\n".join(f"    {line[:300]}" for line in lines[-_NUM_TAIL_LINES:])

    async def ended(self, deadline_s: float) -> bool:
        """Whether it ends within ``deadline_s``."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        while self.is_alive and loop.time() < until_s:
            await asyncio.sleep(0.01)
        return not self.is_alive

    async def end(self) -> None:
        """After ``socket`` was closed, which ends it: wait for that, and kill it where it does not."""
        if not await self.ended(END_DEADLINE_S):
            self.kill()
            await self.ended(END_DEADLINE_S)
        self._log.close()

    def kill(self) -> None:
        """It and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
