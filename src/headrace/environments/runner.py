"""Runs one episode: environment and engine in turn, ids recorded as they were sampled (I1).

Text is rendered to ids only for what the environment said. Before each further turn the whole conversation is
rendered once: where that begins with the ids the engine has already seen and sampled, the rest continues the
trace; where the template rewrote history (dropped reasoning, say), a new branch starts and both are trained.

Every wait on the engine or the environment has a deadline and a name (I19). What fails is an Outcome with a
reason, never a reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

from headrace.control.watchdog import DeadlineError, Watchdog, await_with_deadline
from headrace.errors import PartLost
from headrace.protocols import ChatEngine, ChatRequest, Clock, Engine, Environment, Renderer
from headrace.types import (
    AttemptKey,
    Episode,
    FinishReason,
    GenerationRequest,
    Message,
    Outcome,
    PolicyVersion,
    Sampling,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
)

T = TypeVar("T")
logger = logging.getLogger(__name__)

CLEAN_UP_DEADLINE_S = 10.0
"""For telling an engine to drop a request, and for closing the environment of a cancelled episode."""


def attempt_seed(run_seed: int, key: AttemptKey, turn: int = 0, stream: str = "rollout") -> int:
    """63-bit seed of one generation: a hash of what identifies it, so that a re-issued attempt draws the same."""
    text = f"{run_seed}/{stream}/{key.group}/{key.member}/{key.retry}/{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(kw_only=True)
class EpisodeRunner:
    """Plays episodes of the policy that ``engine`` serves. Stateless between episodes.

    Example::

        episode = await runner.run(AttemptKey(0, 3), task, sampling=Sampling(max_new_tokens=12))
    """

    engine: Engine | ChatEngine
    renderer: Renderer | None
    """None with an engine of text: messages go to it as they are, and the trace stays empty."""
    make_environment: Callable[[Task], Environment]
    watchdog: Watchdog
    clock: Clock
    run_seed: int
    max_turns: int = 1
    generation_deadline_s: float = 600.0
    episode_deadline_s: float = 1800.0
    _stopping: dict[Sampling, Sampling] = field(default_factory=dict, init=False)

    def stopping(self, sampling: Sampling) -> Sampling:
        """With the renderer's stop ids, where there is one. A run has two or three samplings and very many episodes."""
        if sampling not in self._stopping:
            own_stops = () if self.renderer is None else self.renderer.stop_ids
            self._stopping[sampling] = replace(sampling, stop_ids=tuple({*sampling.stop_ids, *own_stops}))
        return self._stopping[sampling]

    async def run(
        self,
        key: AttemptKey,
        task: Task,
        *,
        sampling: Sampling,
        stream: str = "rollout",
        version: PolicyVersion | None = None,
    ) -> Episode:
        """Play ``task`` to its end. Never raises for what the episode did; a dead engine is an outcome too.
        ``version``: the only one that may play it (a fleet's engines may be at two)."""
        play = _Play(runner=self, key=key, task=task, sampling=sampling, stream=stream, version=version)
        started_s = self.clock()
        issued_version = self.engine.version
        outcome, error = await play.to_end()
        return Episode(
            key=key,
            task=task,
            turns=tuple(play.turns),
            trace=Trace(segments=tuple(play.segments)),
            outcome=outcome,
            error=error,
            issued_version=issued_version,
            started_s=started_s,
            ended_s=self.clock(),
            policy_seed=attempt_seed(self.run_seed, key, stream=stream),
        )


class _EpisodeEnd(Exception):
    """Control flow inside one episode: it is over, with this outcome."""

    def __init__(self, outcome: Outcome, error: str | None = None) -> None:
        super().__init__(error or outcome.value)
        self.outcome = outcome
        self.error = error


class _Play:
    """The state of one running episode."""

    def __init__(
        self,
        *,
        runner: EpisodeRunner,
        key: AttemptKey,
        task: Task,
        sampling: Sampling,
        stream: str,
        version: PolicyVersion | None,
    ) -> None:
        self.runner = runner
        self.version = version
        self.key = key
        self.task = task
        self.stream = stream
        self.sampling = runner.stopping(sampling)
        self.turns: list[Turn] = []
        self.segments: list[Segment] = []
        self.history: list[Message] = []
        self._leaf = -1
        """Index of the segment that the next one continues."""
        self._leaf_ids: tuple[int, ...] = ()
        """All ids from the root to that segment."""

    async def to_end(self) -> tuple[Outcome, str | None]:
        """Plays, then closes the environment; one that cannot be closed is a leak, and the episode failed by it."""
        try:
            environment = self.runner.make_environment(self.task)
        except Exception as error:
            return Outcome.ENVIRONMENT_ERROR, self._environment_error("making", error)
        try:
            outcome, message = await self._turns(environment)
        except _EpisodeEnd as end:
            outcome, message = end.outcome, end.error
        except asyncio.CancelledError:
            await self._clean_up(f"environment {self.task.environment}", "close", environment.close())
            raise
        try:
            await self._environment_call("close", environment.close())
        except _EpisodeEnd as end:
            if not outcome.is_failure:
                return end.outcome, end.error
            return outcome, f"{message}; and then: {end.error}"
        return outcome, message

    async def _turns(self, environment: Environment) -> tuple[Outcome, str | None]:
        runner = self.runner
        started_s = runner.clock()
        observation = await self._environment_call(
            "reset", environment.reset(self.task, attempt_seed(runner.run_seed, self.key, stream="environment"))
        )
        for turn in range(runner.max_turns):
            self.history.extend(observation.messages)
            if observation.done:
                return self._last_outcome(), None
            if runner.clock() - started_s > runner.episode_deadline_s:
                return Outcome.TIMEOUT, f"the episode outlasted rollout.episode_deadline_s at turn {turn}"
            before_s = runner.clock()
            reply, finish_reason = await (self._chat(turn) if runner.renderer is None else self._generate(turn))
            generation_s = runner.clock() - before_s
            self.history.append({"role": "assistant", "content": reply})
            before_s = runner.clock()
            observation = await self._environment_call("step", environment.step(reply))
            self.turns.append(
                Turn(
                    reply=reply,
                    observation=observation.messages,
                    finish_reason=finish_reason,
                    generation_s=generation_s,
                    environment_s=runner.clock() - before_s,
                )
            )
        return (self._last_outcome() if observation.done else Outcome.TURN_LIMIT), None

    def _last_outcome(self) -> Outcome:
        truncated = bool(self.turns) and self.turns[-1].finish_reason == "length"
        return Outcome.TRUNCATED if truncated else Outcome.DONE

    async def _chat(self, turn: int) -> tuple[str, FinishReason]:
        """Of an engine of text. Giving up is hanging up: there is nothing to abort."""
        engine = cast(ChatEngine, self.runner.engine)
        request = ChatRequest(
            id=f"{self.stream}-{self.key}t{turn}",
            messages=tuple(self.history),
            sampling=self.sampling,
            seed=attempt_seed(self.runner.run_seed, self.key, turn, self.stream),
        )
        reply = await self._engine_call(engine.chat(request), turn)
        if reply.finish_reason == "abort":
            raise _EpisodeEnd(Outcome.CANCELLED, f"the engine aborted turn {turn}")
        return reply.text, reply.finish_reason

    async def _generate(self, turn: int) -> tuple[str, FinishReason]:
        runner, engine = self.runner, cast(Engine, self.runner.engine)
        assert runner.renderer is not None, "without a renderer the engine is one of text"
        self._render_prompt(turn, runner.renderer)
        max_context = engine.capabilities.max_context
        if max_context and len(self._leaf_ids) + self.sampling.max_new_tokens > max_context:
            raise _EpisodeEnd(
                Outcome.CONTEXT_LIMIT,
                f"turn {turn}: a prompt of {len(self._leaf_ids)} tokens and a reply of up to "
                f"{self.sampling.max_new_tokens} exceed the context of {max_context}",
            )
        request = GenerationRequest(
            id=f"{self.stream}-{self.key}t{turn}",
            prompt_ids=self._leaf_ids,
            sampling=self.sampling,
            seed=attempt_seed(runner.run_seed, self.key, turn, self.stream),
            prefix_key=f"{self.stream}-{self.key.group}-{turn}",
            version=self.version,
        )
        generation = await self._engine_call(engine.generate(request), turn, lambda: engine.abort(request.id))
        if generation.request_id != request.id:
            message = f"engine: it answered request {generation.request_id} where {request.id} was asked (D12)"
            raise _EpisodeEnd(Outcome.INFRASTRUCTURE_ERROR, message)
        if generation.finish_reason == "abort":
            raise _EpisodeEnd(Outcome.CANCELLED, f"the engine aborted turn {turn}")
        self._append(
            Segment(
                source=Source.POLICY,
                ids=generation.ids,
                parent=self._leaf,
                logprobs=generation.logprobs,
                version_spans=generation.version_spans,
                kept_ids=generation.kept_ids,
                routing=generation.routing,
            )
        )
        return runner.renderer.decode(generation.ids), generation.finish_reason

    async def _engine_call(
        self, call: Awaitable[T], turn: int, abort: Callable[[], Awaitable[None]] | None = None
    ) -> T:
        """``abort``: tells the engine that nobody waits any more."""
        runner = self.runner
        try:
            return await await_with_deadline(
                call,
                watchdog=runner.watchdog,
                waiter=f"episode {self.key}",
                on="engine",
                what=f"generation of turn {turn}",
                deadline_s=runner.generation_deadline_s,
            )
        except DeadlineError as error:
            if abort is not None:
                await self._clean_up("engine", "abort", abort())
            raise _EpisodeEnd(Outcome.TIMEOUT, str(error)) from error
        except asyncio.CancelledError:
            if abort is not None:
                await self._clean_up("engine", "abort", abort())
            raise
        except Exception as error:
            raise _EpisodeEnd(Outcome.INFRASTRUCTURE_ERROR, f"engine: {type(error).__name__}: {error}") from error

    def _render_prompt(self, turn: int, renderer: Renderer) -> None:
        """Extend the trace by what stands before the next reply; a rewritten prefix starts a new branch (I1)."""
        try:
            rendered = renderer.render(self.history)
        except Exception as error:  # prompts were checked at start: it is what the environment said
            raise _EpisodeEnd(
                Outcome.ENVIRONMENT_ERROR, self._environment_error(f"rendering turn {turn}", error)
            ) from error
        known = self._leaf_ids
        if self.segments and rendered[: len(known)] == known:
            if len(rendered) > len(known):
                self._append(Segment(source=Source.ENVIRONMENT, ids=rendered[len(known) :], parent=self._leaf))
            return
        self._leaf, self._leaf_ids = -1, ()
        self._append(Segment(source=Source.TEMPLATE, ids=rendered, parent=-1))

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self._leaf = len(self.segments) - 1
        self._leaf_ids = self._leaf_ids + segment.ids

    async def _environment_call(self, what: str, call: Awaitable[T]) -> T:
        runner = self.runner
        try:
            return await await_with_deadline(
                call,
                watchdog=runner.watchdog,
                waiter=f"episode {self.key}",
                on=f"environment {self.task.environment}",
                what=what,
                deadline_s=runner.episode_deadline_s,
            )
        except DeadlineError as error:
            raise _EpisodeEnd(Outcome.TIMEOUT, str(error)) from error
        except PartLost as error:  # its worker is gone, and the environment did nothing wrong
            raise _EpisodeEnd(Outcome.INFRASTRUCTURE_ERROR, self._environment_error(what, error)) from error
        except Exception as error:
            raise _EpisodeEnd(Outcome.ENVIRONMENT_ERROR, self._environment_error(what, error)) from error

    def _environment_error(self, what: str, error: Exception) -> str:
        return f"{what} of {self.task.environment}: {type(error).__name__}: {error}"

    async def _clean_up(self, on: str, what: str, call: Awaitable[None]) -> None:
        """The episode has ended already, for a reason that is told; what goes wrong here must not take its place."""
        try:
            await await_with_deadline(
                call,
                watchdog=self.runner.watchdog,
                waiter=f"episode {self.key}",
                on=on,
                what=what,
                deadline_s=CLEAN_UP_DEADLINE_S,
            )
        except Exception as error:
            logger.warning("episode %s, %s of %s: %s: %s", self.key, what, on, type(error).__name__, error)
