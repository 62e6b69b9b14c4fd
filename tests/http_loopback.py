"""A small HTTP/1.1 server on a free port of 127.0.0.1, in the test's own event loop, for scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any
    """Decoded JSON; None where there was no body."""


@dataclass(frozen=True)
class Answer:
    body: Any = None
    """JSON; a str goes as plain text."""
    status: int = 200
    headers: Mapping[str, str] | None = None


class HangUp(Exception):
    """Close the connection without an answer."""


Handler = Callable[[Request], Awaitable[Answer]]


class Loopback:
    """``handler`` is cancelled where its client hangs up."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[asyncio.Task[None]] = set()
        self.url = ""

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await _read(reader)) is not None:
                answer = asyncio.ensure_future(self._handler(request))
                gone = asyncio.ensure_future(reader.read(1))
                try:
                    await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
                    if not answer.done():
                        return
                    gone.cancel()  # before the client can send its next request, whose first byte this would take
                    await asyncio.gather(gone, return_exceptions=True)
                    _write(writer, _told(answer))
                    await writer.drain()
                finally:
                    for waiting in (answer, gone):
                        waiting.cancel()
                    await asyncio.gather(answer, gone, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, HangUp):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


@contextmanager
def in_thread(serving: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """The address of a server that runs in a thread of its own, for tests of what runs an event loop itself."""
    started: Future[str] = Future()
    ended = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        async with serving() as url:
            started.set_result(url)
            await ended.wait()

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(asyncio.run, serve())
        served.add_done_callback(lambda done: None if started.done() else started.set_exception(done.exception()))
        try:
            yield started.result(timeout=10)
        finally:
            loops[0].call_soon_threadsafe(ended.set)
            served.result(timeout=10)


@asynccontextmanager
async def loopback(handler: Handler) -> AsyncIterator[str]:
    """The server's address."""
    server = Loopback(handler)
    await server.open()
    try:
        yield server.url
    finally:
        await server.close()


def _told(answer: asyncio.Future[Answer]) -> Answer:
    """What a handler raised is told as a server's own failure, so that a test shows it."""
    error = answer.exception()
    if error is None or isinstance(error, HangUp):
        return answer.result()
    return Answer({"error": {"message": f"{type(error).__name__}: {error}"}}, 500)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, urlsplit(target).path, headers, json.loads(data) if data else None)


def _write(writer: asyncio.StreamWriter, answer: Answer) -> None:
    is_text = isinstance(answer.body, str)
    data = b"" if answer.body is None else answer.body.encode() if is_text else json.dumps(answer.body).encode()
    headers = {
        "Content-Type": "text/plain" if is_text else "application/json",
        "Content-Length": str(len(data)),
        **(answer.headers or {}),
    }
    lines = [f"HTTP/1.1 {answer.status} .", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
