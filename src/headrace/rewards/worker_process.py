"""One worker process as the parent sees it: start, ask, kill, reap. All waits have a deadline (I19)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.child_process import child_environment, how_it_ended

TAG_VARIABLE = "HEADRACE_WORKER_TAG"
_LINE_LIMIT_BYTES = 64 << 20
_STDERR_TAIL_LINES = 20
_REAP_DEADLINE_S = 10.0


class WorkerDied(Exception):
    """The process ended before it answered. ``cause``: ``cpu``, ``killed`` (by a signal) or ``exited``."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class WorkerProcess:
    """A running worker: its own session, so that it is killed with all that it started."""

    def __init__(self, process: asyncio.subprocess.Process, tag: str, name: str) -> None:
        self._process = process
        self._tag = tag
        self._name = name
        self._num_requests = 0
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        self._stderr_reader = asyncio.get_running_loop().create_task(self._read_stderr())

    @classmethod
    async def start(cls, name: str, judge: Mapping[str, Any], memory_bytes: int) -> WorkerProcess:
        """Start the process and set its limits; the judge is loaded by a ``load`` request."""
        tag = secrets.token_hex(8)
        spawning = asyncio.get_running_loop().create_task(_spawn(tag))
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # The process may be there already: it must not be lost.
            await cls(await spawning, tag, name).kill()
            raise
        worker = cls(process, tag, name)
        try:
            await worker._send({"judge": dict(judge), "memory_bytes": memory_bytes, "parent_pid": os.getpid()})
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stderr_tail(self) -> str:
        """The last lines that the worker, or code in it, printed."""
        return "\n".join(self._stderr_tail)

    async def request(self, operation: str, *, deadline_s: float, cpu_s: float, **fields: Any) -> dict[str, Any]:
        """One question and its answer.

        Raises:
            TimeoutError: no answer after ``deadline_s``; the worker must then be killed.
            WorkerDied: it ended first, and is reaped.
        """
        self._num_requests += 1
        message = {"id": self._num_requests, "op": operation, "cpu_s": cpu_s, **fields}
        async with asyncio.timeout(deadline_s):
            try:
                await self._send(message)
                line = await self._stdout.readline()
            except (ConnectionResetError, BrokenPipeError):
                line = b""
        if not line.endswith(b"\n"):
            raise await self._death()
        answer: dict[str, Any] = json.loads(line)
        if answer["id"] != self._num_requests:
            raise WorkerDied("exited", f"{self._name} answered request {answer['id']} instead of {self._num_requests}")
        return answer

    async def kill(self) -> None:
        """End the process, its group and whatever else carries its tag; returns once it is reaped (no zombies)."""
        if self._process.returncode is None:  # its id may be another's after that
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._reap()

    async def _death(self) -> WorkerDied:
        """Why the answer did not come: read from the exit status, after killing what the worker left behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._process.wait()
        code = self._process.returncode
        await self.kill()
        if code is None:
            return WorkerDied("exited", f"{self._name} closed its output without an answer{self._printed()}")
        if code in (-signal.SIGPROF, -signal.SIGXCPU):
            return WorkerDied("cpu", f"{self._name} used up its CPU seconds")
        if code < 0:
            return WorkerDied("killed", f"{self._name} {how_it_ended(code)}{self._printed()}")
        return WorkerDied("exited", f"{self._name} {how_it_ended(code)} before it answered{self._printed()}")

    def _printed(self) -> str:
        return f"; it printed: {self.stderr_tail[-500:]}" if self._stderr_tail else ""

    async def _reap(self) -> None:
        kill_tagged(self._tag)
        async with asyncio.timeout(_REAP_DEADLINE_S):
            await self._process.wait()
        self._stderr_reader.cancel()
        await asyncio.wait([self._stderr_reader])
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            self._stderr_tail.extend(chunk.decode(errors="replace")[-4000:].splitlines())


async def _spawn(tag: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "headrace.rewards.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment({TAG_VARIABLE: tag}),
        start_new_session=True,
        limit=_LINE_LIMIT_BYTES,
    )


def kill_tagged(tag: str) -> None:
    """Kill processes that carry ``tag`` in their environment: children that left the worker's process group."""
    proc = Path("/proc")
    if not proc.is_dir():
        return
    needle = f"{TAG_VARIABLE}={tag}".encode()
    for entry in proc.iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except (OSError, ProcessLookupError):
            continue  # it ended meanwhile, or belongs to somebody else and is none of ours
