"""``protocols.Engine`` over one SGLang server.

What SGLang has under each name of the protocol (docs/sglang.md has the reasons):

    pause("abort"), and pause("keep") under recompute   /abort_request, until every reply is in; kept ones are asked for
                                                        again, prompt and reply so far as the prompt, after resume
    pause("keep") under keep                            /pause_generation in_place
    probe                                               as pause("keep") under recompute, for requests that an in_place
                                                        pause holds by way of /pause_generation retract
    update_weights                                      a folder of safetensors, /update_weights_from_disk, then
                                                        /model_info and /weights_checker: did they arrive?
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal

from headrace.config.engines import SglangEngineConfig
from headrace.engines.errors import EngineError, RequestError
from headrace.engines.http import HttpError
from headrace.engines.request import check_request
from headrace.engines.semantics import ONE_ID_BY_ONE, check_semantics
from headrace.engines.sglang.calls import SglangCalls, Tag
from headrace.engines.sglang.flight import Decode, Flight
from headrace.engines.sglang.start import Expected, check_server
from headrace.engines.sglang.weights import ServerWeights, WeightFolder, WeightsLost
from headrace.engines.sglang.wire import Part, generate_body, read_part
from headrace.errors import HeadraceError
from headrace.protocols import EngineCapabilities, EngineStats, WeightUpdate
from headrace.types import Generation, GenerationRequest, PolicyVersion

HEALTH_DEADLINE_S = 20.0
ABORT_AGAIN_S = 0.5
"""A request that is on its way to the server when others are aborted there is not among them: ask again."""
ABORT_DEADLINE_S = 60.0
"""For the server to hand back everything that runs there."""
SINGLE_ABORT_DEADLINE_S = 5.0
"""For one request; then its part is given up, and the reply ends with the parts before it."""
CLOSE_DEADLINE_S = 5.0
Memory = Literal["weights", "kv"]
_TAGS: Mapping[Memory, Tag] = {"weights": "weights", "kv": "kv_cache"}


class SglangEngine:
    """``protocols.Engine``. Call all methods from one event loop."""

    def __init__(
        self,
        config: SglangEngineConfig,
        calls: SglangCalls,
        folder: WeightFolder,
        initial: WeightUpdate,
        *,
        expected: Expected,
        vocab_size: int,
        decode: Decode | None = None,
        make_update_error: Callable[[str], HeadraceError] = EngineError,
    ) -> None:
        """``initial``: the weights to start with, written at the first call. ``expected``: with ``max_context``."""
        self._config = config
        self._calls = calls
        self._initial = initial
        self._expected = expected
        self._vocab_size = vocab_size
        self._decode = decode
        self._keeps = config.kv_policy == "keep"
        self._slots = asyncio.Semaphore(config.max_concurrent)
        self._control = asyncio.Lock()
        self._weights = ServerWeights(
            calls, folder, initial.version, deadline_s=config.update_deadline_s, make_update_error=make_update_error
        )
        self._start_task: asyncio.Task[None] | None = None
        self._released: set[Memory] = set()
        self._flights: dict[str, Flight] = {}
        self._is_held = False
        """Nothing but probes is sent."""
        self._is_paused_there = False
        """By an in_place pause."""
        self._counter = itertools.count()
        self._own_prefix = f"headrace-{uuid.uuid4().hex[:12]}"
        self._background: set[asyncio.Task[None]] = set()
        self._counts = {"num_generated_tokens": 0, "num_prefill_tokens": 0, "num_cached_prefix_tokens": 0}
        self._failure: EngineError | None = None
        self._is_closed = False

    # ------------------------------------------------------------------------------------------ protocol

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            logprobs=True,
            kept_ids=True,
            version_spans=True,
            in_flight_updates=True,
            max_context=self._expected.max_context,
        )

    @property
    def version(self) -> PolicyVersion:
        return self._weights.version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a reply. While the engine is paused, this waits for :meth:`resume`.

        Raises RequestError for a request that cannot be served, EngineError where the server failed.
        """
        await self.start()
        return await self._play(self._register(request))

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate these alone, also while paused. Requests that run are taken off the server for it, and go on
        afterwards with their keys and values computed anew."""
        await self.start()
        async with self._control:
            was_held, self._is_held = self._is_held, True
            try:
                await self._clear()
                return await self._probe(requests)
            finally:
                self._is_held = was_held
                self._wake()

    async def abort(self, request_id: str) -> None:
        """End one request now; its ``generate`` returns the tokens that the server hands back."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.is_aborted = True
        flight.wake.set()
        if flight.rid is None:
            return
        try:
            await self._calls.abort(flight.rid)
            await asyncio.wait_for(flight.returned.wait(), SINGLE_ABORT_DEADLINE_S)
        except (HttpError, TimeoutError):  # its part is given up: it may have been on its way to the scheduler
            if flight.call is not None:
                flight.call.cancel()

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Return once no step runs. ``abort`` also ends every request in flight, waiting ones included."""
        await self.start()
        async with self._control:
            self._is_held = True
            if mode == "abort":
                for flight in self._flights.values():
                    flight.is_aborted = True
            if mode == "keep" and self._keeps:
                await self._calls.pause("in_place")
                self._is_paused_there = True
            else:
                await self._clear()
            self._wake()

    async def resume(self) -> None:
        await self.start()
        async with self._control:
            if self._is_paused_there:
                await self._calls.resume()
                self._is_paused_there = False
            self._is_held = False
            self._wake()

    async def update_weights(self, update: WeightUpdate) -> None:
        """Switch versions; see the protocol. A refused update changes nothing, or ends the engine."""
        await self.start()
        async with self._control:
            if not self._is_held:
                raise EngineError("update_weights needs a paused engine: pause it first")
            await self._update(update)

    async def release(self, what: Sequence[Memory] = ("kv", "weights")) -> None:
        """Give memory back; the engine must be paused. Held requests keep no keys and values."""
        await self.start()
        async with self._control:
            if not self._is_held:
                raise EngineError("release needs a paused engine: pause it first")
            await self._clear()
            if "kv" in what:
                await self._calls.flush_cache()
            await self._calls.release_memory([_TAGS[name] for name in what])
            self._released.update(what)
            if "weights" in what:
                self._weights.are_there = False

    async def acquire(self, what: Sequence[Memory] = ("weights", "kv")) -> None:
        """Take it back. What the weights' memory holds then is nothing that was proved: update them next."""
        async with self._control:
            self._check_alive()
            await self._calls.resume_memory([_TAGS[name] for name in what])
            self._released.difference_update(what)

    async def healthy(self) -> bool:
        """The server's scheduler answers, paused or not, and nothing has failed. Starts what has not been started."""
        if self._is_closed or self._failure is not None:
            return False
        try:
            await self.start()
            await self._calls.server_info(deadline_s=HEALTH_DEADLINE_S)
        except EngineError:
            return False
        return True

    def stats(self) -> EngineStats:
        num_running = sum(flight.rid is not None for flight in self._flights.values())
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._flights) - num_running,
            max_running=self._config.max_concurrent,
            **self._counts,
        )

    def weight_checksums(self) -> Mapping[str, str]:
        """Of the bits in the files that the server has read. That it computes with them is what its own checksum, which
        must change with them, and the canary say."""
        return self._weights.checksums

    async def close(self) -> None:
        """End every request with an error, here and on the server. The server itself goes on: it is not ours."""
        if self._is_closed:
            return
        self._is_closed = True
        runs_there = any(flight.rid is not None for flight in self._flights.values())
        self._fail(EngineError("the engine was closed"))
        tasks = [t for t in (self._start_task, *self._background) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if runs_there:
            with contextlib.suppress(EngineError, TimeoutError):
                await asyncio.wait_for(self._calls.abort_all(), CLOSE_DEADLINE_S)
        await self._calls.close()
        self._weights.close()

    # --------------------------------------------------------------------------------------------- start

    async def start(self) -> None:
        """Once: check the server, give it the first weights, check what it means by a log-probability. Concurrent
        callers wait for the same start."""
        self._check_alive()
        if self._start_task is None:
            self._start_task = asyncio.create_task(self._start(), name="headrace-sglang-start")
            self._start_task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
        if not self._start_task.done():
            await asyncio.wait({self._start_task})  # a caller that gives up does not take the start with it
        self._check_alive()
        self._start_task.result()

    async def _start(self) -> None:
        try:
            await check_server(self._calls, self._expected, self._config.start_deadline_s)
            await self._update(self._initial, is_first=True)
            await check_semantics(self._probe, self._vocab_size, ONE_ID_BY_ONE)
        except EngineError as error:
            self._fail(error)
            raise
        except Exception as error:
            failure = EngineError(f"{self._calls.name} could not be started with: {type(error).__name__}: {error}")
            self._fail(failure)
            raise failure from error

    async def _update(self, update: WeightUpdate, *, is_first: bool = False) -> None:
        try:
            # What an in_place pause holds keeps its keys and values; the cache salt keeps all others off them.
            await self._weights.update(update, is_first=is_first, flush_cache=not self._is_paused_there)
        except WeightsLost as lost:
            self._fail(lost)
            raise

    # ------------------------------------------------------------------------------------------ requests

    def _register(self, request: GenerationRequest, *, is_probe: bool = False) -> Flight:
        self._check_alive()
        max_context = self._expected.max_context
        check_request(request, self._vocab_size, max_context, has_decode=self._decode is not None)
        sampling = request.sampling
        if sampling.is_truncated and sampling.top_k and sampling.top_p < 1:
            raise RequestError(
                f"request {request.id}: top_k = {sampling.top_k} with top_p = {sampling.top_p}: SGLang measures top-p "
                "over all ids, headrace over those that top-k left; use one of the two"
            )
        if request.id in self._flights:
            raise RequestError(f"request {request.id} is already in flight; ids must be unique")
        flight = self._flights[request.id] = Flight(request, is_probe=is_probe)
        flight.returned.set()
        return flight

    async def _probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        flights = [self._register(request, is_probe=True) for request in requests]
        return await _all(self._play(flight) for flight in flights)

    async def _play(self, flight: Flight) -> Generation:
        """Part after part, until the reply has ended."""
        try:
            while True:
                await self._allowed(flight)
                if flight.is_aborted:
                    return flight.generation("abort")
                part = await self._part(flight)
                if part is None:
                    continue
                reason = flight.add(part, self._decode)
                if reason is not None:
                    return flight.generation(reason)
        except EngineError as error:
            if flight.ids and error.partial is None:
                error.partial = flight.generation("abort")
            raise
        finally:
            del self._flights[flight.request.id]

    async def _allowed(self, flight: Flight) -> None:
        """Wait while the engine is paused."""
        self._check_alive()
        while self._is_held and not (flight.is_probe or flight.is_aborted):
            flight.wake.clear()
            await flight.wake.wait()
            self._check_alive()
        if self._released or not self._weights.are_there:
            raise EngineError("the engine has released memory, or holds no weights since: acquire it and update them")

    async def _part(self, flight: Flight) -> Part | None:
        """One call to the server; None where the engine was paused, or the request aborted, before it was made, or its
        part was given up."""
        async with self._slots:
            if flight.is_aborted or (self._is_held and not flight.is_probe):
                return None
            rid = f"{self._own_prefix}-{next(self._counter):012x}"  # of one length: SGLang aborts by prefix
            name = self._weights.names.name(self._weights.version)
            body = generate_body(flight.request, rid, flight.ids, name, flight.num_left)
            flight.rid, flight.is_taken_off = rid, False
            flight.returned.clear()
            flight.call = asyncio.create_task(self._calls.generate(body), name=f"headrace-sglang {rid}")
            try:
                await asyncio.wait({flight.call})
                return self._read(flight, len(body["input_ids"]))
            finally:
                if not flight.call.done() or flight.call.cancelled():
                    flight.call.cancel()
                    self._abort_later(rid)
                else:
                    flight.call.exception()  # seen, also where the caller has given up meanwhile
                flight.rid = flight.call = None
                flight.returned.set()

    def _read(self, flight: Flight, num_sent: int) -> Part | None:
        assert flight.call is not None
        if flight.call.cancelled():  # given up by abort, or by _fail
            self._check_alive()
            return None
        try:
            answer = flight.call.result()
        except HttpError as error:
            kind = RequestError if error.status == 400 else EngineError
            raise kind(f"request {flight.request.id}: {error}") from error
        part = read_part(answer, flight.request, num_sent, self._weights.names, self._vocab_size)
        self._counts["num_generated_tokens"] += len(part.ids)
        self._counts["num_prefill_tokens"] += part.num_prompt_tokens - part.num_cached_tokens
        self._counts["num_cached_prefix_tokens"] += part.num_cached_tokens
        return part

    def _wake(self) -> None:
        for flight in self._flights.values():
            flight.wake.set()

    def _abort_later(self, rid: str) -> None:
        """A caller gave up: tell the server, without making anybody wait. It notices by itself too, only later."""
        if self._is_closed:
            return

        async def tell() -> None:
            with contextlib.suppress(EngineError):
                await self._calls.abort(rid)

        task = asyncio.create_task(tell(), name=f"headrace-sglang abort {rid}")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # --------------------------------------------------------------------------------------------- pause

    async def _clear(self) -> None:
        """Take everything off the server: nothing of this engine runs there any more, and it is not paused."""
        if self._is_paused_there:
            # Paused in place, a running request cannot even be aborted: back into the queue with it, where it can.
            await self._calls.pause("retract")
            await self._ask_off()
            await self._calls.resume()
            self._is_paused_there = False
        until_s = asyncio.get_running_loop().time() + ABORT_DEADLINE_S
        while left := await self._ask_off():
            if asyncio.get_running_loop().time() > until_s:
                raise EngineError(
                    f"{self._calls.name} did not hand back {left} requests within {ABORT_DEADLINE_S:g} s of being "
                    "asked to abort them"
                )

    async def _ask_off(self) -> int:
        """Ask once, wait a little; returns how many still run there."""
        running = [flight for flight in self._flights.values() if flight.rid is not None]
        for flight in running:
            flight.is_taken_off = True
        if running:
            await self._calls.abort_all()
            waits = [asyncio.create_task(flight.returned.wait()) for flight in running]
            _, pending = await asyncio.wait(waits, timeout=ABORT_AGAIN_S)
            for wait in pending:
                wait.cancel()
        return sum(not flight.returned.is_set() for flight in running)

    # ----------------------------------------------------------------------------------------- failures

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure

    def _fail(self, failure: EngineError) -> None:
        """Every wait ends with it, and so does every later call. The first failure is the one that is told."""
        if self._failure is None:
            self._failure = failure
        for flight in self._flights.values():
            flight.wake.set()
            if flight.call is not None:
                flight.call.cancel()


async def _all(coroutines: Iterable[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """The results in order; where one fails, the others are cancelled first."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
