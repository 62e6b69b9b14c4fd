"""The client: ``protocols.Engine`` over a vLLM server in another process, or on a thread of this one.

One asyncio task reads what the server sends. Tokens come as they are sampled, each step's with the version that
sampled them, so an abort returns at once with what has been sampled, also where the server hangs. Stop strings are
looked for here, with the run's own decoder. A server that dies fails everything in flight with its exit code or signal
and its last words; nothing is started again behind the run's back.

The server starts with the first call, gets the trainer's weights like any later update, and must pass
:mod:`headrace.engines.semantics` before it serves anything. Requests that are submitted in one turn of the event
loop travel in one message, so that they start in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from headrace.config.engines import VllmEngineConfig
from headrace.daemon_thread import DaemonThread
from headrace.engines.errors import EngineError, RequestError
from headrace.engines.request import Running, check_request
from headrace.engines.semantics import check_semantics
from headrace.engines.vllm.launch import Host, Launch
from headrace.engines.vllm.wire import (
    LENGTH_BYTES,
    Message,
    Ready,
    WireError,
    decode,
    encode,
    frame_length,
    to_wire,
    version_from_wire,
)
from headrace.errors import HeadraceError
from headrace.protocols import EngineCapabilities, EngineStats, WeightUpdate
from headrace.types import FinishReason, Generation, GenerationRequest, PolicyVersion

T = TypeVar("T")

MAX_TEMPERATURE = 2.0
CALL_DEADLINE_S = 1800.0
"""For the answer to a pause, probe or update, where the caller set no shorter one."""
HEALTH_DEADLINE_S = 20.0
DEATH_DEADLINE_S = 5.0
"""For a server that hung up to be gone, so that its exit code is known."""
_SETTLE_ROUNDS = 3
"""Turns of the event loop without a submission after which the ready tasks count as heard."""


class WeightSender(Protocol):
    """The sending half of a carrier; ``headrace.weights.carrier`` says more."""

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> dict[str, Any]:
        """Put all tensors where the server finds them; returns the manifest that says where. Blocks."""
        ...

    def transfer(self) -> None:
        """What must run while the server takes them. Blocks for a bounded time."""
        ...

    def latest(self) -> WeightUpdate | None:
        """What it published last, for other engines too; None where it has nothing to give yet."""
        ...

    def close(self) -> None: ...


class FrozenSender(WeightSender, Protocol):
    """Of weights that travel once."""

    def release(self) -> None:
        """Give the memory back: the server has taken them."""
        ...


@dataclass(frozen=True, slots=True)
class Frozen:
    """The weights under an adapter: they travel once, before the first version, and are part of each."""

    sender: FrozenSender
    update: WeightUpdate


class VllmEngine:
    """``protocols.Engine``. Call all methods from one event loop."""

    def __init__(
        self,
        config: VllmEngineConfig,
        sender: WeightSender,
        initial: WeightUpdate,
        launch: Launch,
        *,
        frozen: Frozen | None = None,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_context: int,
        make_update_error: Callable[[str], HeadraceError] = EngineError,
    ) -> None:
        """``initial``: the weights to start with, where ``sender`` published none yet; its tensors are read when the
        server is up. ``launch`` starts it, see ``engines.vllm.launch``. ``frozen``: with an adapter, what ``initial``
        and later updates do not bring.
        ``max_context``: of the model, where the configuration sets none."""
        self._config = config
        self._sender = sender
        self._initial = initial
        self._frozen = frozen
        self._frozen_checksums: dict[str, str] = {}
        self._launch = launch
        self._vocab_size = vocab_size
        self._decode = decode
        self._max_context = config.max_context or max_context
        self._make_update_error = make_update_error
        self._server: Host | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._start_task: asyncio.Task[None] | None = None
        self._reader_task: asyncio.Task[None] | None = None
        self._flush_task: asyncio.Task[None] | None = None
        self._thread = DaemonThread("headrace-weights")
        self._ready: asyncio.Future[Ready] | None = None
        self._version = initial.version
        self._checksums: Mapping[str, str] = {}
        self._handles = itertools.count()
        self._calls: dict[int, asyncio.Future[Message]] = {}
        self._by_handle: dict[int, Running] = {}
        self._by_id: dict[str, int] = {}
        self._unsent: list[tuple[int, GenerationRequest]] = []
        self._counters: Mapping[str, Any] = {}
        self._failure: EngineError | None = None
        self._is_paused = False
        self._is_closed = False

    # ------------------------------------------------------------------------------------------ protocol

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            logprobs=True, kept_ids=True, version_spans=True, in_flight_updates=True, max_context=self._max_context
        )

    @property
    def version(self) -> PolicyVersion:
        return self._version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a reply. While the engine is paused, this waits for :meth:`resume`.

        Raises RequestError for a request that cannot be served, EngineError where the server failed, before or during
        the call.
        """
        await self.start()
        handle = self._register(request)
        self._unsent.append((handle, request))
        if self._flush_task is None or self._flush_task.done():
            self._flush_task = asyncio.create_task(self._flush(), name="headrace-vllm-submit")
        return await self._reply(handle)

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate these alone, also while paused; everything else is held meanwhile."""
        await self.start()
        return await self._probe(requests)

    async def abort(self, request_id: str) -> None:
        """End one request now with the tokens that came so far, also where the server hangs."""
        handle = self._by_id.get(request_id)
        if handle is not None:
            self._abort([handle])

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Return once no step runs. ``abort`` also ends every request in flight, waiting ones included."""
        await self.start()
        if mode == "abort":
            self._abort(list(self._by_handle))
        self._send_unsent()
        await self._call("pause")
        self._is_paused = True

    async def resume(self) -> None:
        await self.start()
        await self._call("resume")
        self._is_paused = False

    async def update_weights(self, update: WeightUpdate) -> None:
        """Switch versions; see the protocol. A refused update changes nothing and leaves the engine healthy."""
        await self.start()
        await self._update(update)

    async def healthy(self) -> bool:
        """The server lives, answers, and has not failed. Starts it where it has not been started."""
        if self._is_closed or self._failure is not None:
            return False
        try:
            await self.start()
            await self._call("health", deadline_s=HEALTH_DEADLINE_S)
        except EngineError:
            return False
        return True

    def stats(self) -> EngineStats:
        return EngineStats(**self._counters)

    def weight_checksums(self) -> Mapping[str, str]:
        """Of the bits that the server read and loaded at the last update. Where one of its modules was found to compute
        with something else, that is said in place of the checksum."""
        return self._checksums

    async def close(self) -> None:
        """End every request with an error, hang up, and wait a bounded time for the server to be gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail(EngineError("the engine was closed"))
        for task in (self._start_task, self._reader_task, self._flush_task):
            if task is not None:
                task.cancel()
        if self._server is not None:
            if self._writer is not None:
                self._writer.transport.abort()
            else:
                self._server.socket.close()
            await self._server.end()
        self._thread.stop()
        self._sender.close()
        if self._frozen is not None:
            self._frozen.sender.close()

    # --------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Once: start the server, send it the first weights, check what it means by a log-probability. Concurrent
        callers wait for the same start."""
        self._check_alive()
        if self._start_task is None:
            self._start_task = asyncio.create_task(self._start(), name="headrace-vllm-start")
            self._start_task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        if not self._start_task.done():
            # A caller that gives up does not take the start with it.
            await asyncio.wait({self._start_task})
        self._check_alive()
        self._start_task.result()

    async def _start(self) -> None:
        try:
            self._server = self._launch()
            reader, self._writer = await asyncio.open_unix_connection(sock=self._server.socket)
            self._ready = asyncio.get_running_loop().create_future()
            self._reader_task = asyncio.create_task(self._read(reader), name="headrace-vllm-reader")
            ready = await self._within(self._ready, "to load the model", self._config.start_deadline_s)
            self._check_ready(ready)
            await self._call("pause")
            await self._send_frozen()
            await self._update(self._sender.latest() or self._initial, is_first=True)
            await check_semantics(self._probe, self._vocab_size)
            await self._call("resume")
        except EngineError as error:
            self._fail(error)
            raise
        except Exception as error:
            failure = EngineError(f"the vLLM engine could not be started: {type(error).__name__}: {error}")
            self._fail(failure)
            raise failure from error

    async def _send_frozen(self) -> None:
        if self._frozen is None:
            return
        manifest = await self._thread.call(self._frozen.sender.send, self._frozen.update, None)
        result = await self._call("frozen", manifest=manifest)
        self._frozen_checksums = result["checksums"]
        self._frozen.sender.release()

    def _check_ready(self, ready: Ready) -> None:
        problems = []
        if ready.max_context < self._max_context:
            problems.append(f"its context is {ready.max_context} tokens, {self._max_context} are needed")
        if ready.vocab_size < self._vocab_size:
            problems.append(f"its model has {ready.vocab_size} ids, the tokenizer {self._vocab_size}: another model?")
        if problems:
            raise EngineError("the vLLM server does not fit the run: " + "; ".join(problems))

    # --------------------------------------------------------------------------------------------- calls

    async def _call(self, operation: str, *, deadline_s: float = CALL_DEADLINE_S, **fields: Any) -> Message:
        """Send and wait for the answer. Raises EngineError where it is one, or the server is gone."""
        self._check_alive()
        number = next(self._handles)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"op": operation, "call": number, **fields})
            answer: Message = await self._within(future, f"to answer '{operation}'", deadline_s)
        finally:
            del self._calls[number]
        if "error" in answer:
            make = self._make_update_error if answer["kind"] == "update" else EngineError
            raise make(f"the vLLM server refused '{operation}': {answer['error']}")
        result: Message = answer["result"]
        return result

    async def _within(self, awaitable: Awaitable[T], what: str, deadline_s: float) -> T:
        """Every wait on the server has a name and a deadline (I19)."""
        try:
            return await asyncio.wait_for(awaitable, deadline_s)
        except TimeoutError as error:
            assert self._server is not None
            raise EngineError(
                f"the vLLM server took more than {deadline_s:g} s {what}; {self._server.how_it_ended()}"
            ) from error

    async def _update(self, update: WeightUpdate, *, is_first: bool = False) -> None:
        if update.version < self._version:
            raise self._make_update_error(
                f"weights {update.version} are older than the engine's {self._version}; an engine never goes back"
            )
        if update.manifest is not None:
            result = await self._call("update", manifest=update.manifest)
        else:
            manifest = await self._thread.call(self._sender.send, update, None if is_first else self._version)
            transfer = self._thread.call(self._sender.transfer)
            result, _ = await asyncio.gather(self._call("update", manifest=manifest), transfer)
        self._version = update.version
        if result:  # else it is the update that it has already
            self._checksums = self._frozen_checksums | result["checksums"]

    async def _probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        handles = [self._register(request) for request in requests]
        messages = [to_wire(request, handle) for request, handle in zip(requests, handles, strict=True)]
        call = asyncio.create_task(self._call("probe", requests=messages), name="headrace-vllm-probe")
        try:
            await call
            return [await self._by_handle[handle].future for handle in handles]
        finally:
            call.cancel()
            for handle in handles:
                self._forget(handle)

    # ------------------------------------------------------------------------------------------ requests

    def _register(self, request: GenerationRequest) -> int:
        self._check_alive()
        check_request(request, self._vocab_size, self._max_context, has_decode=self._decode is not None)
        sampling = request.sampling
        if sampling.is_truncated and not sampling.top_k:
            raise RequestError(
                f"request {request.id}: top_p = {sampling.top_p} without top_k: vLLM tells the kept ids of a bounded "
                "number only; set top_k too"
            )
        if sampling.temperature > MAX_TEMPERATURE:
            raise RequestError(
                f"request {request.id}: temperature is {sampling.temperature}; vLLM takes {MAX_TEMPERATURE} at most"
            )
        if request.id in self._by_id:
            raise RequestError(f"request {request.id} is already in flight; ids must be unique")
        handle = next(self._handles)
        self._by_handle[handle] = Running(request, asyncio.get_running_loop().create_future())
        self._by_id[request.id] = handle
        return handle

    async def _reply(self, handle: int) -> Generation:
        running = self._by_handle[handle]
        try:
            return await running.future
        finally:
            if running.future.cancelled():  # the caller gave up
                self._tell_abort([handle])
            self._forget(handle)

    def _forget(self, handle: int) -> None:
        running = self._by_handle.pop(handle, None)
        if running is not None:
            del self._by_id[running.request.id]
            if not running.future.cancel() and not running.future.cancelled():
                running.future.exception()  # seen

    async def _flush(self) -> None:
        """Send what was submitted, once the ready tasks have submitted what they will."""
        num_seen = -1
        while num_seen != len(self._unsent):
            num_seen = len(self._unsent)
            for _ in range(_SETTLE_ROUNDS):
                await asyncio.sleep(0)
        self._send_unsent()

    def _send_unsent(self) -> None:
        requests = [to_wire(r, handle) for handle, r in self._unsent if handle in self._by_handle]
        self._unsent.clear()
        if requests:
            self._send({"op": "submit", "requests": requests})

    def _abort(self, handles: list[int]) -> None:
        for handle in handles:
            self._finish(self._by_handle[handle], "abort")
        self._tell_abort(handles)

    def _tell_abort(self, handles: list[int]) -> None:
        self._unsent = [(handle, request) for handle, request in self._unsent if handle not in handles]
        if handles and self._failure is None and not self._is_closed:
            self._send({"op": "abort", "handles": handles})

    @staticmethod
    def _finish(running: Running, reason: FinishReason) -> None:
        if not running.future.done():
            running.future.set_result(running.generation(reason, carry_kept_ids=True))

    # -------------------------------------------------------------------------------------------- wire

    def _send(self, message: Message) -> None:
        assert self._writer is not None
        self._writer.write(encode(message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the server is gone."""
        try:
            while True:
                head = await reader.readexactly(LENGTH_BYTES)
                self._receive(decode(await reader.readexactly(frame_length(head))))
        except (asyncio.IncompleteReadError, ConnectionError):
            assert self._server is not None
            await self._server.ended(DEATH_DEADLINE_S)
            self._fail(EngineError(f"the vLLM server is gone: {self._server.how_it_ended()}"))
        except (WireError, LookupError, TypeError, ValueError) as error:
            self._fail(EngineError(f"the vLLM server sent what cannot be read: {type(error).__name__}: {error}"))

    def _receive(self, message: Message) -> None:
        if "call" in message:
            future = self._calls.get(message["call"])
            if future is not None and not future.done():
                future.set_result(message)
        elif message["event"] == "step":
            self._deliver(message)
        elif message["event"] == "ready":
            fields = {name: message[name] for name in Ready.__dataclass_fields__}
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(Ready(**fields))
        elif message["event"] == "failed":
            self._fail(EngineError(f"the vLLM server failed: {message['error']}"))
        else:
            raise WireError(f"an event {message['event']!r}")

    def _deliver(self, message: Message) -> None:
        version = version_from_wire(message["version"])
        self._counters = {name: message["counters"].get(name, 0) for name in EngineStats.__dataclass_fields__}
        ended = dict(message["ended"])
        for handle, token_id, logprob, kept_ids in message["tokens"]:
            running = self._by_handle.get(handle)
            if running is None or running.future.done():  # aborted or cancelled meanwhile
                continue
            running.append(token_id, logprob, None if kept_ids is None else tuple(kept_ids), version)
            if running.request.sampling.stop_strings and handle not in ended:
                self._look_for_stop(handle, running)
        for handle, reason in ended.items():
            if handle in self._by_handle:
                self._finish(self._by_handle[handle], reason)

    def _look_for_stop(self, handle: int, running: Running) -> None:
        try:
            reason = running.finish_reason(self._decode)
        except Exception as error:
            failure = EngineError(f"request {running.request.id}: decoding its ids for stop strings failed: {error}")
            failure.__cause__ = error
            running.future.set_exception(failure)
            self._tell_abort([handle])
            return
        if reason is not None:
            self._finish(running, reason)
            self._tell_abort([handle])

    # ----------------------------------------------------------------------------------------- failures

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def _fail(self, failure: EngineError) -> None:
        """Every wait ends with it, and so does every later call. The first failure is the one that is told."""
        if self._failure is None:
            self._failure = failure
        for future in (self._ready, *self._calls.values()):
            if future is not None and not future.done():
                future.set_exception(EngineError(str(failure)))
                future.exception()  # seen, whoever waits
        for running in self._by_handle.values():
            if not running.future.done():
                error = EngineError(f"request {running.request.id}: {failure}")
                error.partial = running.generation("abort", carry_kept_ids=True)
                running.future.set_exception(error)
        if self._server is not None and not self._is_closed:
            with contextlib.suppress(OSError):
                self._server.kill()
