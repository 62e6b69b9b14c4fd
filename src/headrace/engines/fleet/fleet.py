"""``FleetEngine``: many engines behind one ``protocols.Engine``, so that a run outlives any of them.

::

    generate -> Router --(least loaded, affinity, room)--> member -> tokens
                  ^                                          | dies: what it had goes on elsewhere, in its old place
                  +------------------------------------------+
    pause, update_weights, resume -> all members that live; one that fails or hangs is taken out, and the rest go on

What may be decided without an engine at hand is decided by pure rules (``control/router.py``,
``control/engine_states.py``); starting, joining and burying engines is ``supervisor.py``. One asyncio loop owns all of
it. What waits for what:

    generate         a member with room                     a reply's end, a resume, a join   its caller's
                     the member's reply, or its death       the member, health checks         its caller's
    pause, update_   each member, all at once               the member                        fleet.sync_deadline_s
    weights, resume
    an engine that   its start                              the factory                       fleet.start_deadline_s
    joins            weights and proof: now where the       the trainer, the member           fleet.sync_deadline_s
                     trainer still holds what it published,
                     else with the next publish
    an engine that   its running replies                    their ends                        fleet.drain_deadline_s
    leaves

The run ends (:class:`EngineError` from every call) where no engine is left that serves or may start again, where every
engine refuses an update, and where a proof says that an engine serves other weights than it should: a wrong engine is
worse than none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from headrace.config.fleet import FleetConfig
from headrace.control.router import EngineLoad, Router, Work, prefixes
from headrace.control.watchdog import Watchdog
from headrace.engines.errors import EngineError, RequestError
from headrace.engines.fleet.flight import can_continue, joined, rest_of
from headrace.engines.fleet.member import GuardedMember, Member, described, partial_of
from headrace.engines.fleet.supervisor import StartEngine, Supervisor
from headrace.engines.fleet.tally import OnEvent, OnSpan, Tally
from headrace.errors import EngineLost, HeadraceError
from headrace.protocols import CatchUp, EngineCapabilities, EngineStats, Probed, WeightUpdate
from headrace.types import Generation, GenerationRequest, PolicyVersion

T = TypeVar("T")

RESCUE_S = 2.0
"""For a lost engine to hand over the tokens of one request."""
MAX_LOSSES = 4
"""Engines that one request may lose: it may be what kills them, and would take the whole fleet with it."""


@dataclass(slots=True)
class _Flight:
    """One request, from its submission to its end."""

    request: GenerationRequest
    placed: asyncio.Future[Member | None]
    """The member that takes it; None where it was aborted first."""
    parts: list[Generation] = field(default_factory=list)
    is_aborted: bool = False
    member: Member | None = None
    num_losses: int = 0

    @property
    def rest(self) -> GenerationRequest:
        return rest_of(self.request, self.parts)

    @property
    def work(self) -> Work:
        rest = self.rest
        return Work(
            id=rest.id,
            num_prompt_tokens=len(rest.prompt_ids),
            max_new_tokens=rest.sampling.max_new_tokens,
            prefixes=prefixes(rest.prompt_ids, self.request.prefix_key, rest.cache_salt),
            version=rest.version,
        )


class FleetEngine:
    """``protocols.Engine`` and ``protocols.Fleet``. Call all methods from one event loop."""

    def __init__(
        self,
        start: StartEngine,
        config: FleetConfig,
        *,
        version: PolicyVersion,
        watchdog: Watchdog,
        on_span: OnSpan | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        """``start(index, incarnation)`` makes an engine that answers; it may hold any weights, since none that were not
        proved are served. ``version``: what the trainer holds now. ``on_event``: told of deaths and joins."""
        self.config = config
        self.watchdog = watchdog
        self._version = version
        self.tally = Tally(watchdog.now_s, on_span, on_event)
        self.supervisor = Supervisor(self, start)
        self.states = self.supervisor.states
        self.states.published(version)
        self.router = Router(
            watchdog.now_s,
            use_affinity=config.routing == "affinity",
            max_imbalance=config.max_imbalance,
            max_kv_pressure=config.max_kv_pressure,
        )
        self._flights: dict[str, _Flight] = {}
        self._is_paused = False
        self._syncing: list[Member] = []
        """Those that take part in the publish that is going on."""
        self._failure: HeadraceError | None = None
        self._is_closed = False
        watchdog.watch_queue("requests without an engine", lambda: self.router.num_waiting)
        watchdog.watch_stacks("engines", self.describe)

    # ------------------------------------------------------------------------------------------ protocol

    @property
    def capabilities(self) -> EngineCapabilities:
        """Of the engines, which are of one kind. Before the first has started: nothing is promised."""
        return self.supervisor.capabilities

    @property
    def version(self) -> PolicyVersion:
        """The newest that was published to it."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a reply; waits for an engine that may take it. Engines that die meanwhile are made up for.

        Raises RequestError for a request that cannot be served, EngineError where no engine is left, and what the
        engine said where it failed this request and lives.
        """
        await self._ready()
        if request.id in self._flights:
            raise RequestError(f"request {request.id} is already in flight; ids must be unique")
        flight = _Flight(request, asyncio.get_running_loop().create_future())
        self._flights[request.id] = flight
        self.router.submit(flight.work)
        if self.router.num_waiting == 1:  # else it stands behind others
            self.dispatch()
        generation: Generation | None = None
        try:
            generation = await self._fly(flight)
            return generation
        finally:
            del self._flights[request.id]
            if flight.member is None:
                self.router.withdraw(request.id)
            else:
                self.router.finish(request.id, None if generation is None else len(generation.ids))
            self.dispatch()

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Of one engine that serves; the canary asks each by its name (:meth:`unproved`)."""
        await self._ready()
        for index in self.states.serving():
            member = self.supervisor.members[index]
            return await member.call(member.engine.probe(requests), "probe", self.config.sync_deadline_s)
        raise EngineError(f"no engine serves, so none can be probed:\n{self.describe()}")

    async def abort(self, request_id: str) -> None:
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.is_aborted = True
        if flight.member is not None:
            await flight.member.engine.abort(request_id)
        elif not flight.placed.done():
            flight.placed.set_result(None)

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Return once no engine decodes. Until :meth:`resume`, no engine joins. Where engines may lag, ``keep`` pauses
        none: each is paused for its own update."""
        await self._ready()
        if not self._is_paused:
            await self.supervisor.sync_lock.acquire()
            self._is_paused = True
            self._syncing = [self.supervisor.members[i] for i in self.states.holding()]
        if mode == "abort":
            for flight in self._flights.values():
                if flight.member is None and not flight.placed.done():
                    flight.placed.set_result(None)
                flight.is_aborted = True
        if mode == "abort" or not self._rolls:
            await self._on_all("pause", lambda member: member.engine.pause(mode))

    async def update_weights(self, update: WeightUpdate) -> None:
        """Every engine that lives takes them, all at once. One that fails is taken out; EngineError where all that
        live refuse, since then the update is at fault."""
        self._check_alive()
        if not self._is_paused:
            raise EngineError("update_weights needs a paused fleet: await pause() first")
        update = await self.supervisor.shareable(update)
        self._version = update.version
        self.states.published(update.version)
        refusals = await self._roll(update) if self._rolls else await self._update_all(update)
        live = [member for member in self._syncing if not member.is_lost]
        if refusals and len(refusals) == len(live):
            error = EngineError(f"every engine refuses weights {update.version}: {refusals[0][1]}")
            self.fail(error)
            raise error from refusals[0][1]
        for member, refusal in refusals:
            member.lose(f"it refuses weights {update.version}: {refusal}")
        self._check_alive()

    async def resume(self) -> None:
        """Engines that were proved take work again; others wait for their proof (supervisor.py)."""
        self._check_alive()
        if not self._is_paused:
            return
        if not self._rolls:
            await self._on_all("resume", lambda member: member.engine.resume())
        self._is_paused, syncing, self._syncing = False, self._syncing, []
        self.supervisor.sync_lock.release()
        for member in syncing:
            if not member.is_lost and not self.states.serve(member.index):
                self.supervisor.join_later(member)  # where it is still syncing
        self.supervisor.publish_ended()
        self.dispatch()

    async def healthy(self) -> bool:
        """An engine serves, or one may come to."""
        return not self._is_closed and self._failure is None and bool(self.states.left() or not self.supervisor.begun)

    def stats(self) -> EngineStats:
        """Sums over all engines that the fleet has had; what is there now, of those that live."""
        return self.tally.stats(self.supervisor.members.values(), self.router.num_waiting)

    def weight_checksums(self) -> Mapping[str, str]:
        """Of one engine that serves."""
        for index in self.states.serving():
            return self.supervisor.members[index].engine.weight_checksums()
        return {}

    async def close(self) -> None:
        """End every request with an error and let go of every engine; bounded."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_flights(EngineError("the fleet was closed"))
        await self.supervisor.close()

    # ------------------------------------------------------------------------------------- joins and leaves

    async def unproved(self) -> Mapping[str, Probed]:
        await self._ready()
        return {
            member.name: GuardedMember(member, self.config.sync_deadline_s)
            for index in self.states.holding()
            if not self.states.is_proved(index)
            and (member := self.supervisor.members[index]).engine.version == self._version
        }

    def proved(self, name: str, version: PolicyVersion) -> None:
        for index, member in self.supervisor.members.items():
            if member.name == name and not member.is_lost:
                self.states.proved(index, version)
                if not self._is_paused:
                    self.states.serve(index)
        self.dispatch()

    async def add(self) -> int:
        """Start one more engine; returns its index at once. It takes work once it was proved."""
        await self._ready()
        return self.supervisor.add()

    async def drain(self, index: int) -> None:
        """Let an engine leave: it takes nothing new, ends what it has (``fleet.drain_deadline_s``; the rest goes on
        elsewhere), and is closed. Returns when it is gone."""
        await self._ready()
        await self.supervisor.drain(index)

    def catch_up_by(self, catch_up: CatchUp) -> None:
        """How engines join between two publishes. Without, they wait for the next publish."""
        self.supervisor.catch_up = catch_up

    def batch_metrics(self) -> Mapping[str, float]:
        return self.tally.batch_metrics(self.supervisor.members.values(), len(self.states.serving()))

    def describe(self) -> str:
        """Who is in which state, and what waits for which cause: for a person."""
        causes = ", ".join(f"{num} x {cause}" for cause, num in self.router.causes().items())
        return self.states.text() + (f"\nrequests that wait: {causes}" if causes else "")

    # ------------------------------------------------------------------------------------------ requests

    def dispatch(self) -> None:
        """Give out what may go now."""
        if self._failure is not None or self._is_closed or not self.router.num_waiting:
            return
        members = {index: self.supervisor.members[index] for index in self.states.serving()}
        loads = {index: _load(member) for index, member in members.items()}
        for dispatch in self.router.dispatch(loads, is_paused=self._is_paused and not self._rolls):
            flight = self._flights[dispatch.id]
            flight.member = members[dispatch.engine]
            self.tally.waited(dispatch)
            flight.placed.set_result(flight.member)

    async def _fly(self, flight: _Flight) -> Generation:
        request = flight.request
        while True:
            member = await flight.placed
            if member is None:
                return joined(request, flight.parts, "abort")
            started_s = self.watchdog.now_s()
            try:
                part = await self._generate_on(member, flight.rest)
            finally:
                self.tally.span(member.name, "generate", started_s, request=request.id)
            if part is not None and (part.finish_reason != "abort" or flight.is_aborted or not member.is_lost):
                return joined(request, [*flight.parts, part], part.finish_reason)
            self._take_over(flight, part)
            if flight.is_aborted:
                return joined(request, flight.parts, "abort")

    def _take_over(self, flight: _Flight, part: Generation | None) -> None:
        """Its engine is gone: it goes on from the tokens that are known, or starts again with the same seed."""
        if part is not None and part.ids and can_continue(flight.request, flight.parts, part):
            flight.parts.append(part)
        flight.num_losses += 1
        if flight.num_losses > MAX_LOSSES:
            error = EngineError(
                f"request {flight.request.id} was on {flight.num_losses} engines that died, one after the other: it "
                "may be what kills them, so it is not given to another"
            )
            error.partial = joined(flight.request, flight.parts, "abort")
            raise error
        self.tally.cut_short(flight.request.id, sum(len(p.ids) for p in flight.parts))
        flight.member, flight.placed = None, asyncio.get_running_loop().create_future()
        self.router.requeue(flight.work)
        if self._failure is not None:
            flight.placed.set_exception(self._copy_of_failure())
        self.dispatch()

    async def _generate_on(self, member: Member, request: GenerationRequest) -> Generation | None:
        """The member's reply, whole where it ended; what it had where it died, None where that is not known."""
        if member.is_lost:
            return None
        call = asyncio.ensure_future(member.engine.generate(request))
        lost = asyncio.ensure_future(member.lost.wait())
        try:
            await asyncio.wait({call, lost}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # the supervisor has asked it for what it has
                await asyncio.wait({call}, timeout=RESCUE_S)
        finally:
            lost.cancel()
            if not call.done():
                call.cancel()
                call.add_done_callback(lambda c: c.cancelled() or c.exception())  # seen, whenever that is
        if not call.done():
            return None
        if call.cancelled():
            raise EngineError(f"request {request.id}: {member.name} gave it up without a word")
        error = call.exception()
        if error is None:
            return call.result()
        if isinstance(error, RequestError):
            raise error
        if not member.is_lost and await member.is_alive(self.config.health_deadline_s):
            raise error  # this request's own: the engine lives
        member.lose(described(error))
        return partial_of(error)

    # --------------------------------------------------------------------------------------------- sync

    @property
    def _rolls(self) -> bool:
        return self.config.max_engine_lag > 0

    async def _on_all(self, what: str, call: Callable[[Member], Awaitable[T]]) -> None:
        """At once on every member of this publish. Those that fail are taken out."""

        async def one(member: Member) -> None:
            started_s = self.watchdog.now_s()
            try:
                await member.call(call(member), what, self.config.sync_deadline_s)
            except EngineLost:
                return  # told where it was taken out
            finally:
                self.tally.span(member.name, what, started_s)

        await asyncio.gather(*(one(member) for member in self._syncing if not member.is_lost))
        self._check_alive()

    async def _update_all(self, update: WeightUpdate) -> list[tuple[Member, HeadraceError]]:
        """Returns who refuses, and why."""
        live = [member for member in self._syncing if not member.is_lost]
        answers = await asyncio.gather(*(self.supervisor.update(member, update) for member in live))
        return [(member, answer) for member, answer in zip(live, answers, strict=True) if answer is not None]

    async def _roll(self, update: WeightUpdate) -> list[tuple[Member, HeadraceError]]:
        """One after the other, each proved before it goes on, while the others decode."""
        refusals = []
        for member in self._syncing:
            try:
                refusal = await self.supervisor.sync(member, update)
            except EngineLost:
                continue
            if refusal is not None:
                refusals.append((member, refusal))
            self.dispatch()
        return refusals

    # ------------------------------------------------------------------------------------ what went wrong

    def fail(self, error: HeadraceError) -> None:
        """The fleet cannot go on: every request ends with ``error``, and so does every later call."""
        if self._failure is None and not self._is_closed:
            self._failure = error
            self._fail_flights(error)

    def _fail_flights(self, error: HeadraceError) -> None:
        for flight in self._flights.values():
            if not flight.placed.done():
                failure = EngineError(f"request {flight.request.id}: {error}")
                failure.partial = joined(flight.request, flight.parts, "abort")
                flight.placed.set_exception(failure)

    def _copy_of_failure(self) -> EngineError:
        """One exception object must not be raised by many tasks: its traceback would grow with each."""
        return EngineError(str(self._failure))

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineError("the fleet is closed")
        if self._failure is not None:
            raise self._copy_of_failure() from self._failure

    async def _ready(self) -> None:
        """The first call starts the engines; later ones wait for nothing."""
        self._check_alive()
        if not self.supervisor.is_ready:
            await self.supervisor.start_all()
            self._check_alive()


def _load(member: Member) -> EngineLoad:
    stats = member.stats()
    return EngineLoad(
        version=member.engine.version,
        num_running=stats.num_running,
        max_running=stats.max_running,
        kv_used_tokens=stats.kv_used_tokens,
        kv_total_tokens=stats.kv_total_tokens,
    )
