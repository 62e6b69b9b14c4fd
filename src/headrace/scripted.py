"""Scripted parts and virtual time: the real loop over an engine, a trainer and a reward that do as they are told.

For tests of what happens when: who waits for whom, what a slow, hanging, lying or dying part does to a run. Nothing
sleeps: :func:`run_in_virtual_time` jumps to the next timer whenever every task waits, so an hour's deadline passes in
no time and each run is the same.

Example::

    engine = ScriptedEngine(lambda request: Reply(text="12", duration_s=3.0))

    async def ask() -> Generation:
        return await engine.generate(request)

    run_in_virtual_time(ask)                                # at once, and the loop's clock says 3.0
"""

from __future__ import annotations

import asyncio
import json
import math
import selectors
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch
from headrace.protocols import Algorithm, EngineCapabilities, EngineStats, Observation, WeightUpdate
from headrace.trainer.memory import MemoryUse
from headrace.types import (
    Episode,
    FinishReason,
    Generation,
    GenerationRequest,
    Group,
    Message,
    PolicyVersion,
    Sample,
    ScoreResult,
    Task,
    VersionSpan,
)

T = TypeVar("T")
LOGPROB = -1.0
"""Of every token, for engine and trainer alike."""
END = 0
"""The id that ends a turn."""
_ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}


# --------------------------------------------------------------------------------------------- virtual time


class Deadlock(RuntimeError):
    """Every task waits, and no timer would ever wake one of them."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the clock to where the wait would have ended."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            raise Deadlock("every task waits, and no timer would ever wake one of them (I19)")
        self.now_s += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps. Threads have no place in it: it never waits for them."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_in_virtual_time(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``main()`` to its end. The clock to inject is ``asyncio.get_running_loop().time``; it starts at 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())


# --------------------------------------------------------------------------------------------------- engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the engine answers to one request."""

    text: str = "1"
    """Its characters are its ids; the end-of-turn id follows where ``finish`` is ``stop``."""
    duration_s: float = 0.0
    """Spread over the tokens evenly; infinite: it never ends."""
    finish: FinishReason = "stop"
    logprob: float = LOGPROB
    error: Exception | None = None
    """Raised after ``duration_s`` instead of an answer."""


class ScriptedEngine:
    """``protocols.Engine`` that asks ``script`` for each reply, or sends ``script`` itself where it is a Reply.

    Each token carries the version that the engine served when its time came; a paused engine samples none.
    ``requests`` and ``log`` say what was asked of it, in order.
    """

    def __init__(
        self,
        script: Callable[[GenerationRequest], Reply] | Reply | None = None,
        *,
        capabilities: EngineCapabilities | None = None,
    ) -> None:
        self._script = script if callable(script) else (lambda request, reply=script or Reply(): reply)
        self.capabilities = capabilities or EngineCapabilities(in_flight_updates=True, kept_ids=True, max_context=4096)
        self.version = PolicyVersion(0, 0)
        self.is_healthy = True
        self.probe_gap = 0.0
        """Added to the log-probabilities of probes: weights that are not the trainer's."""
        self.requests: list[GenerationRequest] = []
        self.log: list[str] = []
        self.hang_on: set[str] = set()
        """Names of calls (pause, update_weights, resume, probe, healthy, abort, close) that never return."""
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._aborted: dict[str, asyncio.Event] = {}
        self._num_tokens = 0

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        reply = self._script(request)
        ids = [*map(ord, reply.text), *([END] if reply.finish == "stop" else [])][: request.sampling.max_new_tokens]
        aborted = self._aborted[request.id] = asyncio.Event()
        versions: list[PolicyVersion] = []
        while len(versions) < len(ids) and await self._next_token(aborted, reply.duration_s / len(ids)):
            versions.append(self.version)
        self._num_tokens += len(versions)
        if reply.error is not None:
            raise reply.error
        return Generation(
            request_id=request.id,
            ids=tuple(ids[: len(versions)]),
            logprobs=(reply.logprob,) * len(versions),
            version_spans=tuple(spans_of(versions)),
            finish_reason="abort" if len(versions) < len(ids) else reply.finish,
        )

    async def _next_token(self, aborted: asyncio.Event, duration_s: float) -> bool:
        """False where the request was aborted instead."""
        timeout_s = None if math.isinf(duration_s) else duration_s
        try:
            await asyncio.wait_for(aborted.wait(), timeout_s)
        except TimeoutError:
            await self._may_run.wait()
        return not aborted.is_set()

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        await self._call("probe")
        return [
            Generation(
                request_id=request.id,
                ids=(65,) * request.sampling.max_new_tokens,
                logprobs=(LOGPROB + self.probe_gap,) * request.sampling.max_new_tokens,
                version_spans=(VersionSpan(self.version, 0, request.sampling.max_new_tokens),),
                finish_reason="length",
            )
            for request in requests
        ]

    async def abort(self, request_id: str) -> None:
        await self._call("abort")
        if request_id in self._aborted:
            self._aborted[request_id].set()

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        await self._call("pause")
        self._may_run.clear()

    async def resume(self) -> None:
        await self._call("resume")
        self._may_run.set()

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call("update_weights")
        if self._may_run.is_set():
            raise RuntimeError("update_weights on a running engine")
        self.version = update.version

    async def healthy(self) -> bool:
        await self._call("healthy")
        return self.is_healthy

    def stats(self) -> EngineStats:
        return EngineStats(num_generated_tokens=self._num_tokens)

    def weight_checksums(self) -> Mapping[str, str]:
        return {}

    async def close(self) -> None:
        await self._call("close")

    async def _call(self, name: str) -> None:
        self.log.append(name)
        if name in self.hang_on:
            await asyncio.Event().wait()


def spans_of(versions: Sequence[PolicyVersion]) -> Iterator[VersionSpan]:
    """The spans of tokens that were sampled by these versions, one after the other."""
    start = 0
    for version, same in groupby(versions):
        end = start + len(list(same))
        yield VersionSpan(version, start, end)
        start = end


# ------------------------------------------------------------------------------------- trainer and its thread


class ScriptedTrainer:
    """``protocols.Trainer`` without a model: it counts, remembers what it was given, and raises where told to."""

    def __init__(self) -> None:
        self.version = PolicyVersion(0, 0)
        self.step = 0
        self.batches: list[tuple[Sample, ...]] = []
        """The samples of each forward_backward."""
        self.ratio_error = 0.0
        """What it says about fresh tokens (I5)."""
        self.errors: dict[str, Exception] = {}
        """Method name -> what its next call raises."""
        self.holds_published_weights = True
        self._last: dict[str, Tensor] = {}

    def set_lineage(self, lineage: int) -> None:
        self.version = PolicyVersion(lineage, self.version.number)

    def last_logprobs(self) -> dict[str, Tensor]:
        return self._last

    def forward(self, samples: Sequence[Sample], model: str = "policy") -> list[Tensor]:
        self._raise("forward")
        return [torch.tensor(sample.mask, dtype=torch.float32) * LOGPROB for sample in samples]

    def forward_backward(self, minibatch: Minibatch, algorithm: Algorithm) -> dict[str, float]:
        self._raise("forward_backward")
        self.batches.append(tuple(minibatch.samples))
        self._last = dict(zip((s.id for s in minibatch.samples), self.forward(minibatch.samples), strict=True))
        num_tokens = float(minibatch.totals.num_tokens)
        num_samples = float(len(minibatch.samples))
        return {"num_trained_tokens": num_tokens, "num_samples": num_samples, "max_ratio_error": self.ratio_error}

    def optim_step(self) -> dict[str, float]:
        self._raise("optim_step")
        self.step += 1
        self.holds_published_weights = False
        return {"grad_norm": 1.0, "learning_rate": 1.0, "num_empty_steps": 0.0}

    def memory(self) -> list[MemoryUse]:
        self._raise("memory")
        return [MemoryUse(peak=self.step << 30, forecast="there is no model")]

    def publish(self) -> WeightUpdate:
        self._raise("publish")
        self.version = PolicyVersion(self.version.lineage, self.version.number + 1)
        self.holds_published_weights = True
        return WeightUpdate(version=self.version)

    def save(self, path: Path) -> None:
        self.snapshot()(path)

    def snapshot(self) -> Callable[[Path], None]:
        state = json.dumps({"version": list(self.version), "step": self.step})

        def write(path: Path) -> None:
            self._raise("save")
            (path / "trainer.json").write_text(state)

        return write

    def restore(self, path: Path) -> None:
        state = json.loads((path / "trainer.json").read_text())
        self.version, self.step = PolicyVersion(*state["version"]), state["step"]

    def _raise(self, name: str) -> None:
        if name in self.errors:
            raise self.errors.pop(name)


class ScriptedThread:
    """Stands for a ``DaemonThread``: each call takes as many virtual seconds as ``duration_s`` says of its function's
    name; an infinite one never ends."""

    def __init__(self, duration_s: Mapping[str, float] | None = None) -> None:
        self.duration_s = dict(duration_s or {})
        self.calls: list[str] = []

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        name = getattr(function, "__name__", "call")
        self.calls.append(name)

        def run() -> None:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        duration_s = self.duration_s.get(name, 0.0)
        if not math.isinf(duration_s):
            loop.call_later(duration_s, run)
        return future

    def stop(self) -> None:
        """Nothing to stop."""


# --------------------------------------------------------------------------- reward, renderer and environment


class ScriptedReward:
    """``protocols.Reward`` that asks ``judge`` and takes ``duration_s(episode)`` for it."""

    name = "scripted"
    value_range = (0.0, 1.0)

    def __init__(
        self,
        judge: Callable[[Episode], ScoreResult],
        *,
        duration_s: Callable[[Episode], float] = lambda episode: 0.0,
        deadline_s: float = 10.0,
    ) -> None:
        self._judge, self._duration_s, self.deadline_s = judge, duration_s, deadline_s
        self.is_closed = False

    async def start(self) -> None:
        """Nothing to test."""

    async def score(self, episode: Episode) -> ScoreResult:
        duration_s = self._duration_s(episode)
        if math.isinf(duration_s):
            await asyncio.Event().wait()
        await asyncio.sleep(duration_s)
        return self._judge(episode)

    async def score_group(self, group: Group) -> list[ScoreResult]:
        return [await self.score(episode) for episode in group.episodes]

    async def close(self) -> None:
        self.is_closed = True


class ScriptedRenderer:
    """``protocols.Renderer`` with one id a character. ``rewrite`` changes the history before it is rendered, as chat
    templates do that drop earlier reasoning."""

    stop_ids = (END,)
    vocab_size = 1024

    def __init__(self, rewrite: Callable[[list[Message]], list[Message]] = lambda messages: messages) -> None:
        self._rewrite = rewrite

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids: list[int] = []
        for message in self._rewrite(list(messages)):
            ids += [_ROLES[message["role"]], *map(ord, message["content"]), END]
        return (*ids, _ROLES["assistant"])

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i > max(_ROLES.values()))


class ScriptedEnvironment:
    """``protocols.Environment`` that answers with ``observations``, one after the other; the last one ends it unless it
    says otherwise. An exception in the list is raised; ``hang_on`` and ``fail_on`` name calls."""

    def __init__(
        self,
        observations: Sequence[str | Observation | Exception] = (),
        *,
        hang_on: str = "",
        fail_on: str = "",
    ) -> None:
        self._observations = list(observations)
        self._hang_on, self._fail_on = hang_on, fail_on
        self.actions: list[str] = []
        self.num_closed = 0

    async def reset(self, task: Task, seed: int) -> Observation:
        await self._call("reset")
        return Observation(messages=task.messages)

    async def step(self, action: str) -> Observation:
        self.actions.append(action)
        await self._call("step")
        if not self._observations:
            return Observation(messages=(), done=True)
        answer = self._observations.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Observation):
            return answer
        return Observation(messages=({"role": "user", "content": answer},))

    async def close(self) -> None:
        self.num_closed += 1
        await self._call("close")

    async def _call(self, name: str) -> None:
        if name == self._hang_on:
            await asyncio.Event().wait()
        if name == self._fail_on:
            raise OSError(f"{name} failed as scripted")
