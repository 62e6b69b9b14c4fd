"""The embedded engine: in process, ids in, ids out, one model object shared with the trainer or copied from it.

Concurrency, in one place. Everything about requests (queue, rows, replies) belongs to the event loop. Everything about
tensors belongs to the compute thread (:mod:`headrace.engines.compute`). One task, the driver, goes round while there
is work and the engine is not paused::

    settle (let ready tasks submit) -> compact -> admit, if a row is free, else decode -> deliver

so a pause, an abort or an update falls between two steps, and each token is drawn under exactly one version. The
driver awaits one call of the compute thread at a time; a hung call is seen by the callers' deadlines (I19), and a call
that raises fails every request and all later ones.

Equal submissions in equal order give equal batches, hence equal bits (I18): admission is first in, first out, and
before a step the driver waits until the tasks that are ready have submitted what they will.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from headrace.config.engines import TransformersEngineConfig
from headrace.daemon_thread import DaemonThread
from headrace.engines.compute import Compute, Move, StepResult
from headrace.engines.errors import EngineError, RequestError
from headrace.engines.lane import Lane
from headrace.engines.packed import can_pack, drop_packed, num_packed_bytes, packed_view
from headrace.engines.request import Running, check_request
from headrace.engines.residence import Residence
from headrace.errors import HeadraceError
from headrace.model.routing import RouterShape, router_shape
from headrace.protocols import EngineCapabilities, EngineStats, WeightUpdate
from headrace.types import FinishReason, Generation, GenerationRequest, PolicyVersion

_SETTLE_ROUNDS = 3
"""Turns of the event loop without a submission after which the ready tasks count as heard. A task that has just been
woken by a reply needs one turn for itself and one for a task that it starts."""


class WeightCarrier(Protocol):
    """How weights reach the engine; ``headrace.weights`` has the carriers."""

    @property
    def model(self) -> nn.Module:
        """The model that the engine runs."""
        ...

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def broken(self) -> str:
        """Why the weights are of no version, so that nothing may be served by them; empty where they are of one."""
        ...

    def receive(self, update: WeightUpdate) -> None:
        """Switch to the update's weights and version: all of them, or none and a ``HeadraceError``. Where an update
        could be taken in part only, ``broken`` says so until a complete one came."""
        ...

    def checksums(self) -> dict[str, str]: ...

    def shares_storage_with(self, model: nn.Module) -> bool: ...

    def close(self) -> None:
        """Let go of what it came by; what was received stays."""
        ...


class TransformersEngine:
    """``protocols.Engine`` over a transformers causal language model with attention ``headrace``.

    ``vocab_size`` is the tokenizer's number of ids; ``decode`` turns reply ids into text and is needed for stop
    strings only. Call all methods from one event loop at a time.
    """

    def __init__(
        self,
        carrier: WeightCarrier,
        config: TransformersEngineConfig,
        *,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        record_routing: bool = False,
    ) -> None:
        """``record_routing``: each reply carries the experts that the routers chose (``Generation.routing``)."""
        model = _unwrapped(carrier.model)
        self._recorded = _routers_to_record(model) if record_routing else None
        self._carrier = carrier
        self._config = config
        self._vocab_size = vocab_size
        self._decode = decode
        self._max_context = _checked_context(model, config.max_context)
        self._view = _packed_view(model, config.packed_weights)
        self._compute = Compute(
            self._view,
            vocab_size=vocab_size,
            max_prefill_tokens=config.max_prefill_tokens,
            prefix_cache_tokens=config.prefix_cache_tokens,
            recorded=self._recorded,
        )
        self._residence = Residence(model)
        self._needs_weights = False
        """Its weights were released, and no update has come since."""
        num_threads = config.num_threads
        self._thread = DaemonThread(
            "headrace-engine", None if num_threads is None else lambda: torch.set_num_threads(num_threads)
        )
        self._lane = self._new_lane()
        self._by_id: dict[str, Running] = {}
        self._driver: asyncio.Task[None] | None = None
        self._paused = False
        self._num_probes = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._num_submitted = 0
        self._counters: Counter[str] = Counter()
        self._prefill_s = 0.0
        self._decode_s = 0.0

    # ------------------------------------------------------------------------------------------ protocol

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            logprobs=True,
            kept_ids=self._config.carry_kept_ids,
            routing_ids=self._recorded is not None,
            version_spans=True,
            in_flight_updates=True,
            max_context=self._max_context,
        )

    @property
    def version(self) -> PolicyVersion:
        return self._carrier.version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a reply. While the engine is paused, this waits for :meth:`resume`.

        Raises :class:`RequestError` for a request that cannot be served, :class:`EngineError` when the engine failed
        or is closed, before or during the call.
        """
        running = self._submit(request, self._lane)
        self._wake()
        try:
            # Cancelling the caller cancels the future, and the row is freed before the next step.
            return await running.future
        finally:
            del self._by_id[request.id]

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate these alone, on rows of their own, also while paused. Other requests are held meanwhile."""
        self._check_weights()
        lane = self._new_lane()
        self._num_probes += 1  # holds the driver
        submitted: list[Running] = []
        try:
            await self._quiet()
            submitted += [self._submit(request, lane) for request in requests]
            while await self._advance(lane):
                pass
            return [running.future.result() for running in submitted]
        except HeadraceError:
            raise
        except Exception as error:
            self._fail(error)
            raise EngineError(f"the engine failed during a probe: {_described(error)}") from error
        finally:
            for running in submitted:
                del self._by_id[running.request.id]
                if not running.future.cancel() and not running.future.cancelled():
                    running.future.exception()  # seen: it was raised above, or stands behind the one that was
            self._num_probes -= 1
            self._wake()

    async def abort(self, request_id: str) -> None:
        """End one request now with the tokens delivered so far, even while a step runs or hangs."""
        running = self._by_id.get(request_id)
        if running is not None:
            self._finish(running, "abort")

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Return once no step runs. ``abort`` also ends every request in flight, waiting ones included."""
        self._paused = True
        if mode == "abort":
            for running in list(self._by_id.values()):
                self._finish(running, "abort")
        await self._quiet()

    async def resume(self) -> None:
        self._check_serves()
        self._check_weights()
        self._paused = False
        self._wake()

    async def update_weights(self, update: WeightUpdate) -> None:
        """Switch versions; see the protocol. A refused update changes nothing and leaves the engine healthy."""
        self._check_alive()
        if self._residence.is_released:
            raise EngineError("update_weights on an engine whose memory was released: await acquire() first")
        if not self._paused or self._num_probes or self._is_driving():
            raise EngineError("update_weights needs a paused engine: await pause() first, so that no step is running")
        try:
            await self._thread.call(self._receive, update)
        except HeadraceError:
            raise
        except Exception as error:
            self._fail(error)
            raise EngineError(
                f"the engine failed while it took weights {update.version}: {_described(error)}"
            ) from error

    async def release(self) -> None:
        """Free weights, keys and values, and kept prompts. The engine must be paused and hold its own weights; requests
        in flight wait. See ``control/lease.py``."""
        self._check_alive()
        if not getattr(self._carrier, "owns_weights", True):
            raise EngineError("this engine shares the trainer's weights, and they are not its own to release")
        if not self._paused or self._num_probes or self._is_driving():
            raise EngineError("release needs a paused engine: await pause() first, so that no step is running")
        self._needs_weights = True
        await self._thread.call(self._release)

    async def acquire(self) -> None:
        """Room for the weights again. They are none until :meth:`update_weights`, and before it nothing is served."""
        self._check_alive()
        await self._thread.call(self._residence.acquire)

    def held_bytes(self) -> int:
        """Memory of weights, their laid-out copies, keys and values."""
        kept = self._compute.num_prefix_bytes() + num_packed_bytes(self._view)
        return self._residence.num_bytes() + self._lane.store.num_bytes() + kept

    async def healthy(self) -> bool:
        alive = self._failure is None and not self._is_closed and self._thread.is_alive
        return alive and not self._carrier.broken

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._lane.num_running,
            num_waiting=self._lane.num_waiting,
            max_running=self._config.max_batch_size,
            kv_used_tokens=self._lane.num_kv_tokens,
            kv_total_tokens=self._config.max_batch_size * self._max_context,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            **self._counters,
        )

    def weight_checksums(self) -> Mapping[str, str]:
        return self._carrier.checksums()

    def shares_storage_with(self, model: nn.Module) -> bool:
        """True where every parameter of ``model`` is the engine's own storage, so that they cannot differ."""
        return self._carrier.shares_storage_with(model)

    async def close(self) -> None:
        """End every request with an error. Never waits for the compute thread, which may hang."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_requests("the engine was closed", None)
        if self._driver is not None:
            self._driver.cancel()
        self._thread.stop()
        self._carrier.close()

    # -------------------------------------------------------------------------------------------- driver

    def _submit(self, request: GenerationRequest, lane: Lane) -> Running:
        self._check_serves()
        check_request(request, self._vocab_size, self._max_context, has_decode=self._decode is not None)
        if request.id in self._by_id:
            raise RequestError(f"request {request.id} is already in flight; ids must be unique")
        running = Running(request, asyncio.get_running_loop().create_future())
        self._by_id[request.id] = running
        lane.waiting.append(running)
        self._num_submitted += 1
        return running

    def _wake(self) -> None:
        """Start the driver where there is work that nothing holds."""
        has_work = bool(self._lane.waiting or self._lane.running)
        if has_work and not self._is_held() and not self._is_driving() and self._failure is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="headrace-engine-driver")

    def _is_held(self) -> bool:
        return self._paused or self._num_probes > 0 or self._is_closed

    def _is_driving(self) -> bool:
        return self._driver is not None and not self._driver.done()

    async def _quiet(self) -> None:
        """Wait until the driver, which must be held, has ended its step. Raises where the engine failed."""
        if self._driver is not None and not self._driver.done():
            await asyncio.wait({self._driver})
        self._check_alive()

    async def _drive(self) -> None:
        try:
            await self._settle()
            while not self._is_held() and await self._advance(self._lane):
                pass
        except asyncio.CancelledError as error:
            # By close(), or because the event loop ends: not the engine's failure, but nobody will go on with these.
            self._fail_requests("the event loop ended while it ran", error)
            raise
        except Exception as error:
            self._fail(error)

    async def _settle(self) -> None:
        """Return once ``_SETTLE_ROUNDS`` turns of the loop brought no new submission."""
        seen = -1
        while seen != self._num_submitted:
            seen = self._num_submitted
            for _ in range(_SETTLE_ROUNDS):
                await asyncio.sleep(0)

    async def _advance(self, lane: Lane) -> bool:
        """One call of the compute thread for ``lane``; False where it has nothing left to do."""
        moves = lane.compact()
        if lane.kv_is_stale and lane.running:
            await self._recompute(lane, moves)
        elif lane.can_admit():
            await self._admit(lane, moves)
        elif lane.running:
            await self._decode_step(lane, moves)
        else:
            return False
        lane.kv_is_stale = False
        if lane.num_running < len(lane.running):
            await self._settle()
        return True

    async def _recompute(self, lane: Lane, moves: list[Move]) -> None:
        sequences = [running.stored_ids for running in lane.running]
        num_tokens, duration_s = await self._thread.call(self._compute.recompute, lane.store, moves, sequences)
        self._counters["num_prefill_tokens"] += num_tokens
        self._prefill_s += duration_s

    async def _admit(self, lane: Lane, moves: list[Move]) -> None:
        first_row = len(lane.running)
        admitted, admissions, pinned = lane.admit()
        version = self.version
        result: StepResult = await self._thread.call(
            self._compute.admit, lane.store, moves, first_row, admissions, pinned
        )
        self._prefill_s += result.duration_s
        self._counters["num_prefill_tokens"] += result.num_prefill_tokens
        self._counters["num_cached_prefix_tokens"] += result.num_cached_tokens
        self._deliver(admitted, result, version)
        lane.part_lines(admitted)

    async def _decode_step(self, lane: Lane, moves: list[Move]) -> None:
        version = self.version
        result: StepResult = await self._thread.call(self._compute.decode, lane.store, moves, lane.decode_rows())
        self._decode_s += result.duration_s
        self._counters["num_decode_steps"] += 1
        self._deliver(lane.running, result, version)
        lane.part_lines(lane.running)

    def _deliver(self, rows: Sequence[Running], result: StepResult, version: PolicyVersion) -> None:
        draws = result.draws
        steps = zip(rows, draws.ids, draws.logprobs, draws.kept_ids, result.routing, strict=True)
        for running, token_id, logprob, kept_ids, routing in steps:
            if running.future.done():  # aborted or cancelled while the step ran
                continue
            running.append(token_id, logprob, kept_ids, version, routing)
            self._counters["num_generated_tokens"] += 1
            try:
                reason = running.finish_reason(self._decode)
            except Exception as error:
                self._fail_one(running, f"decoding its ids for stop strings failed: {_described(error)}", error)
                continue
            if reason is not None:
                self._finish(running, reason)

    def _prompt_key(self, request: GenerationRequest) -> Hashable:
        """Requests with equal keys share a prefill. Without a prefix cache, only members of one group do."""
        if self._config.prefix_cache_tokens:
            return (request.cache_salt, request.prompt_ids)
        group = ("request", request.id) if request.prefix_key is None else ("group", request.prefix_key)
        return (request.cache_salt, *group, request.prompt_ids)

    def _new_lane(self) -> Lane:
        return Lane(self._config.max_batch_size, self._prompt_key)

    # ------------------------------------------------------------------------------------ ends of requests

    def _finish(self, running: Running, reason: FinishReason) -> None:
        if not running.future.done():
            running.future.set_result(running.generation(reason, carry_kept_ids=self._config.carry_kept_ids))

    def _receive(self, update: WeightUpdate) -> None:
        self._carrier.receive(update)
        drop_packed(self._view)
        self._compute.drop_prefixes()
        # Set here, not by the waiter, who may have been cancelled: the driver cannot run before this call ends.
        self._lane.kv_is_stale = self._lane.kv_is_stale or self._config.kv_policy == "recompute"
        self._needs_weights = False

    def _release(self) -> None:
        self._residence.release()
        drop_packed(self._view)
        self._compute.drop_prefixes()
        self._lane.drop_store()

    def _check_weights(self) -> None:
        if self._needs_weights:
            raise EngineError("this engine's weights were released: acquire() and update_weights() come first")

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed")
        if self._failure is not None:
            raise EngineError(f"the engine failed earlier: {_described(self._failure)}") from self._failure

    def _check_serves(self) -> None:
        self._check_alive()
        if self._carrier.broken:
            raise EngineError(self._carrier.broken)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        self._fail_requests(f"an engine step failed: {_described(error)}", error)

    def _fail_requests(self, message: str, cause: BaseException | None) -> None:
        for running in self._by_id.values():
            if not running.future.done():
                self._fail_one(running, message, cause)

    def _fail_one(self, running: Running, message: str, cause: BaseException | None) -> None:
        failure = EngineError(f"request {running.request.id}: {message}")
        failure.__cause__ = cause
        failure.partial = running.generation("abort", carry_kept_ids=self._config.carry_kept_ids)
        running.future.set_exception(failure)


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _checked_context(model: Any, max_context: int | None) -> int:
    """Prompt plus reply, in tokens. Raises where attention of that length would not be the model's own."""
    config = model.config.get_text_config()
    limit = max_context or int(config.max_position_embeddings)
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and window < limit:
            raise EngineError(
                f"{type(model).__name__} has {name} = {window}, and the embedded engine attends over the whole "
                f"context, here {limit} tokens: they agree up to {window} tokens only; set engine.max_context = "
                f"{window}"
            )
    return limit


def _routers_to_record(model: Any) -> RouterShape:
    shape = router_shape(model)
    if shape is None:
        raise EngineError(
            f"record_routing: {type(model).__name__} has no routers that headrace knows, so there is nothing to record"
        )
    return shape


def _packed_view(model: nn.Module, wanted: bool | None) -> nn.Module:
    """What the engine runs: ``model`` itself, or a view of it with laid-out weights."""
    possible = all(can_pack(parameter) for parameter in model.parameters())
    if wanted and not possible:
        raise EngineError(
            "engine.packed_weights = true needs a float32 model on a CPU and a torch with oneDNN; leave the key out, "
            "and the engine takes it where it can"
        )
    return packed_view(model) if possible and wanted is not False else model


def _unwrapped(model: nn.Module) -> Any:
    """The transformers model inside a peft wrapper (its adapters stay in place), or the model itself."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()
