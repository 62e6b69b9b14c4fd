"""The carrier for one machine: an actor in a child process, reached over a socket pair that nobody else can find.

Its death is noticed at once, by the socket's end, and told with how it ended and its last words. Nothing gets lost on
the socket, so calls are sent once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.child_process import child_environment, how_it_ended
from headrace.cluster.actors import ActorDied, MessageHandle
from headrace.cluster.frames import frame, read_frame
from headrace.cluster.spec import ActorNotMade, ActorSpec
from headrace.cluster.wire import WireError, decode, encode

END_DEADLINE_S = 5.0
"""For a process whose socket was closed to end by itself; then it is killed."""
_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HEADRACE_HOME", "HF_HOME", "HF_HUB_OFFLINE")
_NUM_TAIL_LINES = 8
_TAIL_BYTES = 8192


class SubprocessActor:
    """``ActorHandle`` over a child process. Made by :meth:`start`."""

    def __init__(self, spec: ActorSpec, process: subprocess.Popen[bytes], ours: socket.socket, log: Path) -> None:
        self._spec, self._process, self._socket, self._log = spec, process, ours, log
        self._session = secrets.token_hex(8)
        self._handle = MessageHandle(spec.name, self._session, self._send, end=self._end)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, spec: ActorSpec, *, log: Path, deadline_s: float, inherited_fd: int | None = None
    ) -> SubprocessActor:
        """Start the process and wait until its object is made.

        ``log``: gets what it prints. ``inherited_fd``: an open descriptor that its factory gets under this name.

        Raises ActorNotMade where its factory fails, ActorDied where it ends or is not ready within ``deadline_s``;
        nothing is left running.
        """
        ours, theirs = socket.socketpair()
        try:
            process = _spawn(spec, theirs, inherited_fd, log)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        actor = cls(spec, process, ours, log)
        try:
            async with asyncio.timeout(deadline_s):
                await actor._wait_until_ready()
        except TimeoutError:
            await actor.close()
            raise ActorDied(
                f"actor {spec.name} was not ready after {deadline_s:g} s; {actor.last_words()}. Look there, or raise "
                "cluster.start_deadline_s"
            ) from None
        except BaseException:
            await actor.close()
            raise
        return actor

    @property
    def pid(self) -> int:
        return self._process.pid

    async def call(self, method: str, *args: Any) -> Any:
        return await self._handle.call(method, *args)

    async def is_alive(self) -> bool:
        return self._process.poll() is None and await self._handle.is_alive()

    async def close(self) -> None:
        await self._handle.close()

    def last_words(self) -> str:
        """The last lines that it printed, and where the rest is."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"its log {self._log} cannot be read: {error.strerror}"
        lines = [line[:300] for line in text.splitlines() if line.strip()]
        if not lines:
            return f"it printed nothing ({self._log})"
        return f"its last words ({self._log}):\n" + "\n".join(f"    {line}" for line in lines[-_NUM_TAIL_LINES:])

    # ------------------------------------------------------------------------------------------- the socket

    async def _wait_until_ready(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        spec = self._spec
        self._writer.write(
            frame(encode({"session": self._session, "factory": spec.factory, "options": dict(spec.options)}))
        )
        body = await read_frame(reader)
        if body is None:
            raise ActorDied(await self._death())
        answer: Mapping[str, Any] = decode(body)
        if "failed" in answer:
            raise ActorNotMade(spec, f"{answer['failed']} (log: {self._log})")
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name=f"actor {spec.name}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (body := await read_frame(reader)) is not None:
                self._handle.receive(decode(body))
        except WireError as error:
            self._handle.died(f"actor {self._spec.name} sent what cannot be read, and was ended: {error}")
            self._kill()
            return
        self._handle.died(await self._death())

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(encode(message)))

    # ---------------------------------------------------------------------------------------------- its end

    async def _death(self) -> str:
        """How it ended, once its socket has."""
        await self._ended(1.0)
        code = self._process.poll()
        how = "closed its socket, and still runs" if code is None else how_it_ended(code)
        self._kill()
        return f"actor {self._spec.name} (process {self.pid}) {how}; {self.last_words()}"

    async def _end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        self._socket.close()
        if not await self._ended(END_DEADLINE_S):
            self._kill()
            await self._ended(END_DEADLINE_S)

    async def _ended(self, deadline_s: float) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + deadline_s
        while self._process.poll() is None and loop.time() < until_s:
            await asyncio.sleep(0.01)
        return self._process.poll() is not None

    def _kill(self) -> None:
        """It and what it started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def _spawn(spec: ActorSpec, theirs: socket.socket, inherited_fd: int | None, log: Path) -> subprocess.Popen[bytes]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    fds = [theirs.fileno(), *([] if inherited_fd is None else [inherited_fd])]
    command = [sys.executable, "-P", "-m", "headrace.cluster.child", "--socket", str(theirs.fileno())]
    command += ["--parent", str(os.getpid()), *([] if inherited_fd is None else ["--inherit", str(inherited_fd)])]
    with log.open("ab") as file:
        try:
            return subprocess.Popen(
                command,
                pass_fds=fds,
                env=child_environment({"OMP_NUM_THREADS": str(spec.num_threads), **passed}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the run, which then closes its actors
            )
        except OSError as error:
            raise ActorDied(f"actor {spec.name} could not be started: {error.strerror}") from error
