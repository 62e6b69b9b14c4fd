"""``protocols.Engine`` over an actor that holds the real one, in another process or on another machine.

What an engine says without being asked to wait (version, stats, capabilities, checksums) comes with the replies: each
carries a :class:`Snapshot`, and the newest one counts, in whatever order they arrive. The version that the caller sees
can so be older than the engine's, never newer, and it is exact once update_weights has returned.

Weights do not travel in calls. ``send_weights`` hands an update to a carrier and returns what the other side needs to
find it (a manifest of JSON values); without it the update itself is the argument, as in one process and on Ray.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from headrace.cluster.actors import ActorDied, ActorHandle
from headrace.engines.errors import EngineError
from headrace.protocols import Engine, EngineCapabilities, EngineStats, WeightUpdate
from headrace.types import Generation, GenerationRequest, PolicyVersion

T = TypeVar("T")
SendWeights = Callable[[WeightUpdate], Awaitable[Any]]
ReceiveWeights = Callable[[Any], WeightUpdate]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An engine as it was when a reply was made."""

    number: int
    """Grows with each reply of the actor."""
    version: PolicyVersion
    stats: EngineStats
    checksums: Mapping[str, str] | None = None
    """None: as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What each method of an :class:`EngineActor` returns."""

    value: Any
    snapshot: Snapshot


@dataclass(kw_only=True)
class EngineActor:
    """The actor's object: an engine whose every answer says how the engine stands."""

    engine: Engine
    receive_weights: ReceiveWeights | None = None
    """Turns what ``send_weights`` gave into the update; None: it is the update."""
    _num_answers: int = field(default=0, init=False)

    async def describe(self) -> Answer:
        return self._answer(self.engine.capabilities, with_checksums=True)

    async def generate(self, request: GenerationRequest) -> Answer:
        return self._answer(await self.engine.generate(request))

    async def probe(self, requests: Sequence[GenerationRequest]) -> Answer:
        return self._answer(await self.engine.probe(requests))

    async def abort(self, request_id: str) -> Answer:
        await self.engine.abort(request_id)
        return self._answer(None)

    async def pause(self, mode: Literal["keep", "abort"]) -> Answer:
        await self.engine.pause(mode)
        return self._answer(None)

    async def resume(self) -> Answer:
        await self.engine.resume()
        return self._answer(None)

    async def update_weights(self, update: Any) -> Answer:
        received = update if self.receive_weights is None else self.receive_weights(update)
        await self.engine.update_weights(received)
        return self._answer(None, with_checksums=True)

    async def healthy(self) -> Answer:
        return self._answer(await self.engine.healthy())

    async def close(self) -> Answer:
        await self.engine.close()
        return self._answer(None)

    def _answer(self, value: Any, *, with_checksums: bool = False) -> Answer:
        self._num_answers += 1
        checksums = dict(self.engine.weight_checksums()) if with_checksums else None
        snapshot = Snapshot(
            number=self._num_answers, version=self.engine.version, stats=self.engine.stats(), checksums=checksums
        )
        return Answer(value=value, snapshot=snapshot)


class RemoteEngine:
    """An engine behind an :class:`EngineActor`. Made by :meth:`connect`.

    A cancelled ``generate`` cancels the call at the actor, which frees the request there. What the engine raises comes
    as RemoteError, an actor that is gone as ActorDied, both for the caller to handle as any engine's error.
    """

    def __init__(
        self, handle: ActorHandle, capabilities: EngineCapabilities, first: Snapshot, send_weights: SendWeights | None
    ) -> None:
        self._handle = handle
        self._capabilities = capabilities
        self._snapshot = first
        self._checksums = dict(first.checksums or {})
        self._send_weights = send_weights

    @classmethod
    async def connect(cls, handle: ActorHandle, *, send_weights: SendWeights | None = None) -> RemoteEngine:
        """Ask the actor what it is. Raises ActorDied where nobody is there; the wait is the caller's to bound."""
        answer = await handle.call("describe")
        if not isinstance(answer, Answer):
            raise EngineError(f"the actor answered {type(answer).__name__} to 'describe': it holds no EngineActor")
        return cls(handle, answer.value, answer.snapshot, send_weights)

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def version(self) -> PolicyVersion:
        return self._snapshot.version

    async def generate(self, request: GenerationRequest) -> Generation:
        generation: Generation = await self._call("generate", request)
        return generation

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return list(await self._call("probe", list(requests)))

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id)

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def update_weights(self, update: WeightUpdate) -> None:
        await self._call("update_weights", update if self._send_weights is None else await self._send_weights(update))

    async def healthy(self) -> bool:
        """False where the actor is gone; one that hangs does not answer."""
        try:
            return bool(await self._call("healthy"))
        except ActorDied:
            return False

    def stats(self) -> EngineStats:
        return self._snapshot.stats

    def weight_checksums(self) -> Mapping[str, str]:
        return self._checksums

    async def close(self) -> None:
        """Ask the engine to let go of what it holds, then end the actor."""
        try:
            await self._call("close")
        except ActorDied:  # it holds nothing any more
            pass
        finally:
            await self._handle.close()

    async def _call(self, method: str, *args: Any) -> Any:
        answer: Answer = await self._handle.call(method, *args)
        if answer.snapshot.number > self._snapshot.number:
            self._snapshot = answer.snapshot
        if answer.snapshot.checksums is not None:
            self._checksums = dict(answer.snapshot.checksums)
        return answer.value
