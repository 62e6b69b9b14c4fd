"""One engine of a fleet, and the calls on it: each has a name and a deadline, and one that fails loses the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from headrace.control.watchdog import Watchdog, await_with_deadline
from headrace.engines.errors import EngineError
from headrace.errors import EngineLost
from headrace.protocols import Engine, EngineStats
from headrace.types import Generation, GenerationRequest, PolicyVersion

T = TypeVar("T")


class Member:
    """One incarnation of one engine. ``lose``: called once, with the reason, by whoever finds that it is gone."""

    def __init__(
        self, index: int, incarnation: int, engine: Engine, *, watchdog: Watchdog, lose: Callable[[Member, str], None]
    ) -> None:
        self.index = index
        self.incarnation = incarnation
        self.engine = engine
        self.lost = asyncio.Event()
        self.why_lost = ""
        self.health_asked_s = watchdog.now_s()
        self._watchdog = watchdog
        self._lose = lose
        self._last_stats = EngineStats()
        self._busy_s = 0.0

    @property
    def name(self) -> str:
        return name_of(self.index)

    @property
    def is_lost(self) -> bool:
        return self.lost.is_set()

    async def call(self, call: Awaitable[T], what: str, deadline_s: float) -> T:
        """Raises EngineLost where it fails or takes too long, after the engine was taken out."""
        try:
            return await self.ask(call, what, deadline_s)
        except Exception as error:
            self.lose(f"{what}: {described(error)}")
            raise EngineLost(f"{self.name} is lost: {what}: {described(error)}") from error

    async def ask(self, call: Awaitable[T], what: str, deadline_s: float) -> T:
        """A call whose failure is the caller's to judge."""
        return await await_with_deadline(
            call, watchdog=self._watchdog, waiter="fleet", on=self.name, what=what, deadline_s=deadline_s
        )

    def lose(self, why: str) -> None:
        if not self.is_lost:
            self.why_lost = why
            self.lost.set()
            self._lose(self, why)

    async def is_alive(self, deadline_s: float) -> bool:
        """What it says of itself; False also where it does not answer."""
        self.health_asked_s = self._watchdog.now_s()
        try:
            return await self.ask(self.engine.healthy(), "its health", deadline_s)
        except Exception:  # whatever it is: an engine that cannot say that it lives does not
            return False

    def stats(self) -> EngineStats:
        """The last ones that are known: a dead engine's counters still count."""
        if not self.is_lost:
            self._last_stats = self.engine.stats()
        return self._last_stats

    def busy_since_asked_s(self) -> float:
        """Seconds in which it computed since this was last asked."""
        stats = self.stats()
        before_s, self._busy_s = self._busy_s, stats.prefill_s + stats.decode_s
        return self._busy_s - before_s


class GuardedMember:
    """``protocols.Probed``: a member for its canary. A call on it that fails or hangs loses the engine, not the run."""

    def __init__(self, member: Member, deadline_s: float) -> None:
        self._member = member
        self._deadline_s = deadline_s

    @property
    def version(self) -> PolicyVersion:
        return self._member.engine.version

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return await self._member.call(self._member.engine.probe(requests), "probe", self._deadline_s)

    def weight_checksums(self) -> Mapping[str, str]:
        if self._member.is_lost:
            raise EngineLost(f"{self._member.name} is lost: {self._member.why_lost}")
        return self._member.engine.weight_checksums()


def name_of(index: int) -> str:
    """How an engine is called in messages, spans and metrics."""
    return f"engine-{index}"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def partial_of(error: BaseException) -> Generation | None:
    """The tokens that an engine had when it failed, where it could say so."""
    partial = error.partial if isinstance(error, EngineError) else getattr(error, "partial", None)
    return partial if isinstance(partial, Generation) else None
