"""The server, without vLLM: takes messages off a socket, steps the backend, sends tokens as they are sampled.

Two threads. The reader answers ``health`` itself, also while a step runs, and puts everything else into a queue; when
the client is gone, it ends the process at once, so that no server outlives its run. The main thread goes round::

    take what is in the queue (block if there is nothing else to do) -> admit -> step, unless paused

so pauses, aborts and updates fall between two steps, and each token is stamped with the one version that sampled it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from headrace.engines.vllm.server.backend import Backend, Step
from headrace.engines.vllm.wire import (
    LENGTH_BYTES,
    Message,
    ServerRequest,
    decode,
    encode,
    frame_length,
    from_wire,
)
from headrace.errors import HeadraceError
from headrace.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor

NO_VERSION = PolicyVersion(-1, -1)
"""Before the first weights came."""


class WeightsRead(Protocol):
    @property
    def version(self) -> PolicyVersion: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def checksums(self) -> Mapping[str, str]: ...


Read = TypeVar("Read", bound=WeightsRead)


class WeightReader(Protocol[Read]):
    """The receiving half of a carrier; ``headrace.weights`` has one."""

    def read(self, manifest: Mapping[str, Any]) -> Read | None:
        """The tensors of an update, all of them checked; None where it is the one that was committed last. Raises a
        HeadraceError for what does not fit, before anything was changed."""
        ...

    def commit(self, read: Read) -> None:
        """They are loaded: what comes next is checked against them."""
        ...

    @property
    def version(self) -> PolicyVersion | None: ...


class Connection:
    """Frames over one socket; sending is thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            self._socket.sendall(encode(message))

    def receive(self) -> Message | None:
        """The next message; None where the client is gone."""
        head = self._exactly(LENGTH_BYTES)
        if head is None:
            return None
        body = self._exactly(frame_length(head))
        return None if body is None else decode(body)

    def _exactly(self, num_bytes: int) -> bytes | None:
        chunks = bytearray()
        while len(chunks) < num_bytes:
            chunk = self._socket.recv(min(num_bytes - len(chunks), 1 << 20))
            if not chunk:
                return None
            chunks += chunk
        return bytes(chunks)


class Server(Generic[Read]):
    """Serves one client until it is gone. ``leave`` ends the process; tests put something else there."""

    def __init__(
        self,
        connection: Connection,
        backend: Backend,
        reader: WeightReader[Read],
        *,
        frozen: WeightReader[Read] | None = None,
        max_batch_size: int,
        recompute: bool,
        leave: Callable[[int], Any] = os._exit,
        rest: Callable[[], Any] = lambda: None,
    ) -> None:
        """``frozen``: of the weights under an adapter, which come once. ``rest`` is called before each wait for
        something to do."""
        self._connection = connection
        self._backend = backend
        self._reader = reader
        self._frozen = frozen
        self._max_batch_size = max_batch_size
        self._recompute = recompute
        self._leave = leave
        self._rest = rest
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._waiting: deque[ServerRequest] = deque()
        self._running: dict[int, list[int]] = {}
        """Handle -> how many tokens its prompt has, and how many were sampled."""
        self._counters: Counter[str] = Counter()
        self._times_s: dict[str, float] = {"prefill_s": 0.0, "decode_s": 0.0}
        self._is_paused = False
        self._broken = ""
        """Why the weights are of no version: an update failed half way."""
        self._step_started_s: float | None = None
        self._loaded: dict[str, str] = {}
        """Checksums of what was loaded last."""

    @property
    def _version(self) -> PolicyVersion:
        return self._reader.version or NO_VERSION

    def run(self) -> None:
        """Say that it is ready, then serve until the client is gone. An exception reaches the client, and is raised."""
        self._connection.send({"event": "ready", **asdict(self._backend.ready)})
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        try:
            while self._take_commands():
                if not self._is_paused and not self._broken:
                    self._admit()
                    if self._running:
                        self._step()
        except Exception:
            # A client that is gone cannot be told, and the reader has seen it too.
            with contextlib.suppress(OSError):
                self._connection.send({"event": "failed", "error": traceback.format_exc(limit=-3).strip()})
            raise

    # ------------------------------------------------------------------------------------------ reader

    def _read(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                if message.get("op") == "health":
                    started_s = self._step_started_s
                    busy_s = None if started_s is None else time.monotonic() - started_s
                    self._connection.send({"call": message["call"], "result": {"busy_s": busy_s}})
                else:
                    self._commands.put(message)
        except Exception:
            traceback.print_exc()
            self._leave(1)
        self._commands.put(None)
        self._leave(0)

    # -------------------------------------------------------------------------------------- main thread

    def _take_commands(self) -> bool:
        """Carry out what is in the queue; waits for a command where there is nothing else to do. False at the end."""
        can_work = not self._is_paused and not self._broken and bool(self._waiting or self._running)
        while True:
            if not can_work:
                self._rest()
            try:
                message = self._commands.get(block=not can_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            self._carry_out(message)
            can_work = True

    def _carry_out(self, message: Message) -> None:
        operation = message["op"]
        if operation == "submit":
            self._waiting += [from_wire(request) for request in message["requests"]]
        elif operation == "abort":
            self._abort(message["handles"])
        elif operation == "pause":
            self._is_paused = True
            self._answer(message, {})
        elif operation == "resume":
            self._is_paused = False
            self._answer(message, {})
        elif operation == "probe":
            self._probe(message)
        elif operation == "update":
            self._update(message, self._reader)
        elif operation == "frozen" and self._frozen is not None:
            self._update(message, self._frozen)
        else:
            raise ValueError(f"the client asked for {operation!r}, which this server does not know")

    def _answer(self, message: Message, result: Message) -> None:
        self._connection.send({"call": message["call"], "result": result})

    def _refuse(self, message: Message, error: str, kind: str) -> None:
        self._connection.send({"call": message["call"], "error": error, "kind": kind})

    def _abort(self, handles: list[int]) -> None:
        self._waiting = deque(request for request in self._waiting if request.handle not in handles)
        running = [handle for handle in handles if self._running.pop(handle, None) is not None]
        if running:
            self._backend.abort(running)

    def _admit(self) -> None:
        """First in, first out. vLLM's own queue stays empty, so that what waits starts under the version of its first
        step."""
        while self._waiting and len(self._running) < self._max_batch_size:
            request = self._waiting.popleft()
            self._backend.submit(request, self._version)
            self._running[request.handle] = [len(request.prompt_ids), 0]

    def _step(self) -> None:
        started_s = self._step_started_s = time.monotonic()
        step = self._backend.step()
        self._step_started_s = None
        took_s = time.monotonic() - started_s
        self._times_s["prefill_s" if step.num_prefill_tokens else "decode_s"] += took_s
        self._counters["num_decode_steps"] += not step.num_prefill_tokens
        self._counters["num_generated_tokens"] += len(step.tokens)
        self._counters["num_prefill_tokens"] += step.num_prefill_tokens
        self._counters["num_cached_prefix_tokens"] += step.num_cached_tokens
        for token in step.tokens:
            self._running[token.handle][1] += 1
        for handle in step.ended:
            del self._running[handle]
        self._send_step(step)

    def _send_step(self, step: Step) -> None:
        counters = {
            "num_running": len(self._running),
            "num_waiting": len(self._waiting),
            "max_running": self._max_batch_size,
            "kv_used_tokens": sum(sum(lengths) for lengths in self._running.values()),
            "kv_total_tokens": self._backend.ready.kv_total_tokens,
        }
        self._connection.send(
            {
                "event": "step",
                "version": self._version,
                "tokens": [[t.handle, t.id, t.logprob, t.kept_ids] for t in step.tokens],
                "ended": list(step.ended.items()),
                "counters": counters | self._counters | self._times_s,
            }
        )

    def _probe(self, message: Message) -> None:
        """Generate these alone: everything else is set aside, keys and values included, and goes on afterwards."""
        if self._broken:
            self._refuse(message, self._broken, "engine")
            return
        waiting, running, held = self._waiting, self._running, self._backend.hold()
        self._waiting, self._running = deque(from_wire(request) for request in message["requests"]), {}
        try:
            while self._waiting or self._running:
                self._admit()
                self._step()
        finally:
            self._backend.release(held)
            self._waiting, self._running = waiting, running
        self._answer(message, {})

    def _update(self, message: Message, reader: WeightReader[Read]) -> None:
        """All tensors are checked before the first is loaded. What fails after that leaves weights of no version, which
        are not served: the next complete update mends it."""
        if not self._is_paused:
            self._refuse(message, "update_weights needs a paused engine: await pause() first", "engine")
            return
        try:
            read = reader.read(message["manifest"])
        except HeadraceError as error:
            self._refuse(message, str(error), "update")
            return
        if read is None:  # the same update again
            self._answer(message, {})
            return
        try:
            self._backend.load(read.tensors, self._changed(read))
            served = self._backend.served(read.tensors)
            self._backend.drop_caches(recompute=self._recompute)
        except Exception as error:
            traceback.print_exc()
            self._broken = (
                f"loading weights {read.version} failed half way, so the engine holds weights of no version and serves "
                f"nothing until a complete update: {type(error).__name__}: {error}"
            )
            self._refuse(message, self._broken, "engine")
            return
        self._broken = ""
        reader.commit(read)
        self._loaded |= read.checksums
        if self._recompute:
            self._counters["num_prefill_tokens"] += sum(sum(lengths) for lengths in self._running.values())
        self._answer(message, {"checksums": {**read.checksums, **served.stale}, "num_unchecked": len(served.unchecked)})

    def _changed(self, read: Read) -> set[str]:
        """Names of the tensors that differ from those loaded last; all of them where it is not known what is there."""
        loaded = {} if self._broken else self._loaded
        return {name for name, digest in read.checksums.items() if loaded.get(name) != digest}
