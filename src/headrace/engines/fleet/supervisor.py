"""Starts engines, lets them join, watches that they live, buries them, and starts them again while the budget lasts.

An engine joins in one of two ways. With a publish: it is there when the loop pauses the fleet, and is updated and
proved with the others. Between two publishes: where the trainer still holds what it published (or a copy is kept), the
engine gets those weights and is proved against them at once; where it does not, the engine waits. Publish and join
exclude each other (``sync_lock``), so that no engine is half way through the one when the other begins (failure 87).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from headrace.control.engine_states import EngineState, EngineStates, RestartBudget
from headrace.control.watchdog import DeadlineError, await_with_deadline
from headrace.daemon_thread import DaemonThread
from headrace.engines.errors import EngineError
from headrace.engines.fleet.member import Member, described, name_of
from headrace.errors import EngineLost, HeadraceError
from headrace.protocols import CatchUp, Engine, EngineCapabilities, WeightUpdate

if TYPE_CHECKING:
    from headrace.engines.fleet.fleet import FleetEngine

TICK_S = 1.0
"""Between two looks at deadlines, backoffs and health."""
BURIAL_S = 10.0
"""For a lost engine to let go of what it holds."""


class StartEngine(Protocol):
    """Makes the ``incarnation``-th engine (from 0) with this index; returns once it answers. Raises where it cannot."""

    def __call__(self, index: int, incarnation: int) -> Awaitable[Engine]: ...


class Supervisor:
    """Owns the members of one fleet."""

    def __init__(self, fleet: FleetEngine, start: StartEngine) -> None:
        config = fleet.config
        self._fleet = fleet
        self._start = start
        self.states = EngineStates(
            fleet.watchdog.now_s,
            budget=RestartBudget(
                max_restarts=config.max_restarts,
                window_s=config.restart_window_s,
                backoff_s=config.restart_backoff_s,
                max_backoff_s=max(60.0, config.restart_backoff_s),
            ),
            max_engine_lag=config.max_engine_lag,
            on_change=fleet.tally.state_changed,
        )
        self.members: dict[int, Member] = {}
        """Those that live, by index."""
        self.capabilities = EngineCapabilities()
        self.catch_up: CatchUp | None = None
        self.sync_lock = asyncio.Lock()
        self.begun = False
        self.is_ready = False
        self._first_starts: asyncio.Task[None] | None = None
        self._publishes = 0
        self._published = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._joining: set[Member] = set()
        self._num_added = 0
        self._buckets_thread: DaemonThread | None = None

    # -------------------------------------------------------------------------------------------- starts

    async def start_all(self) -> None:
        """Start all engines at once and return when each answers or has failed; concurrent callers share it."""
        if self._first_starts is None:
            self.begun = True
            indices = [self._next_index() for _ in range(self._fleet.config.num_engines)]
            self._first_starts = self._spawn(self._start_first(indices), "headrace-fleet-start")
        await asyncio.wait({self._first_starts})
        self._first_starts.result()

    async def _start_first(self, indices: list[int]) -> None:
        for index in indices:
            self.states.begin(index)
        await asyncio.gather(*(self._start_one(index, may_join=False) for index in indices))
        self.is_ready = True
        self._spawn(self._watch(), "headrace-fleet-watch")
        for member in self.members.values():
            if member.engine.version != self._fleet.version:  # else the canary proves it where it stands
                self.join_later(member)

    def add(self) -> int:
        index = self._next_index()
        self.states.begin(index)
        self._spawn(self._start_one(index), f"headrace-fleet-start-{index}")
        return index

    def _next_index(self) -> int:
        self._num_added += 1
        return self._num_added - 1

    async def _start_one(self, index: int, *, may_join: bool = True) -> None:
        incarnation = self.states.incarnation(index)
        self._fleet.tally.event(f"starting {name_of(index)} (start {incarnation + 1})", "num_starts")
        try:
            engine = await await_with_deadline(
                self._started(index, incarnation),
                watchdog=self._fleet.watchdog,
                waiter="fleet",
                on=name_of(index),
                what="its start",
                deadline_s=self._fleet.config.start_deadline_s,
            )
        except Exception as error:
            if self.states.state(index) is EngineState.STARTING:
                self._died(index, f"it did not start: {described(error)}")
            return
        member = Member(index, incarnation, engine, watchdog=self._fleet.watchdog, lose=self._lost)
        if self.states.state(index) is not EngineState.STARTING:  # it was asked to leave meanwhile
            await self._close(member)
            return
        self.members[index] = member
        self.capabilities = engine.capabilities
        self.states.started(index, engine.version)
        if may_join:
            self.join_later(member)

    async def _started(self, index: int, incarnation: int) -> Engine:
        return await self._start(index, incarnation)

    # --------------------------------------------------------------------------------------------- joins

    def join_later(self, member: Member) -> None:
        """Bring it to the published version and let it serve, as soon as that can be done."""
        if member not in self._joining:
            self._joining.add(member)
            self._spawn(self._join(member), f"headrace-fleet-join-{member.index}")

    async def _join(self, member: Member) -> None:
        try:
            while not member.is_lost and self.states.state(member.index) is EngineState.SYNCING:
                seen = self._publishes
                async with self.sync_lock:
                    if await self._catch_up(member):
                        break
                if seen == self._publishes:
                    await self._next_publish()
        except EngineLost:
            pass  # told where it was taken out
        except HeadraceError as error:  # it serves something else than it should: a wrong engine is worse than none
            self._fleet.fail(error)
        finally:
            self._joining.discard(member)
            self._fleet.dispatch()

    async def _catch_up(self, member: Member) -> bool:
        """True where it serves now."""
        if member.is_lost or self.states.state(member.index) is not EngineState.SYNCING:
            return True
        if self.catch_up is None:
            return False
        update = await self._from_trainer(self.catch_up.update(), "the published weights")
        if update is None or update.version != self._fleet.version:  # a publish has begun: it comes with that
            return False
        refusal = await self.sync(member, update)
        if refusal is not None:
            member.lose(f"it refuses weights {update.version}: {refusal}")
        return refusal is not None or self.states.state(member.index) is EngineState.SERVING

    async def sync(self, member: Member, update: WeightUpdate) -> HeadraceError | None:
        """Pause, update, prove, go on: one engine by itself. Returns why it refuses the update. Raises EngineLost, and
        SyncError where the proof fails."""
        deadline_s = self._fleet.config.sync_deadline_s
        await member.call(member.engine.pause("keep"), "pause", deadline_s)
        refusal = await self.update(member, update)
        if refusal is not None or member.is_lost:
            return refusal
        if self.catch_up is not None:
            proof = self.catch_up.prove(member.name, member.engine, update)
            try:
                proved = await self._from_trainer(proof, f"proof of {member.name}")
            except (EngineError, DeadlineError) as error:
                member.lose(f"proof of {update.version}: {described(error)}")
                raise EngineLost(f"{member.name} is lost: {member.why_lost}") from error
            if proved and not member.is_lost:
                self.states.proved(member.index, update.version)
        await member.call(member.engine.resume(), "resume", deadline_s)
        if member.is_lost:  # found by somebody else, while it was proved or went on
            raise EngineLost(f"{member.name} is lost: {member.why_lost}")
        self.states.serve(member.index)
        return None

    async def update(self, member: Member, update: WeightUpdate) -> HeadraceError | None:
        """Returns why it refuses, where it lives and says so; an engine that fails otherwise is taken out."""
        config, started_s = self._fleet.config, self._fleet.watchdog.now_s()
        what = f"update_weights to {update.version}"
        try:
            await member.ask(member.engine.update_weights(update), what, config.sync_deadline_s)
        except Exception as error:
            is_refusal = isinstance(error, HeadraceError) and not isinstance(error, DeadlineError)
            if is_refusal and not member.is_lost and await member.is_alive(config.health_deadline_s):
                assert isinstance(error, HeadraceError)
                return error
            member.lose(f"{what}: {described(error)}")
            return None
        finally:
            self._fleet.tally.span(member.name, "update_weights", started_s)
        if not member.is_lost:
            self.states.took(member.index, update.version)
        return None

    async def _from_trainer(self, call: Awaitable[Any], what: str) -> Any:
        return await await_with_deadline(
            call,
            watchdog=self._fleet.watchdog,
            waiter="fleet",
            on="trainer",
            what=what,
            deadline_s=self._fleet.config.sync_deadline_s,
        )

    async def shareable(self, update: WeightUpdate) -> WeightUpdate:
        """One that every engine can take: the buckets of a trainer of several processes can be made once only."""
        if update.buckets is None:
            return update
        if self._buckets_thread is None:
            self._buckets_thread = DaemonThread("headrace-fleet-buckets")
        buckets = update.buckets

        def collect() -> dict[str, Any]:
            return {name: tensor.detach().clone() for bucket in buckets() for name, tensor in bucket.items()}

        tensors = await self._from_trainer(self._buckets_thread.call(collect), "its weights, bucket by bucket")
        return WeightUpdate(version=update.version, tensors=tensors)

    def publish_ended(self) -> None:
        self._publishes += 1
        self._published.set()
        self._published = asyncio.Event()

    async def _next_publish(self) -> None:
        """Bounded by the loop: it publishes, or a deadline of its own ends the run."""
        await self._published.wait()

    # --------------------------------------------------------------------------------------- deaths and ends

    def _lost(self, member: Member, why: str) -> None:
        """A member is gone: its requests hand over what they have, and it is closed, beside everything else."""
        self.members.pop(member.index, None)
        self._spawn(
            self._bury(member, self._fleet.router.on_engine(member.index)), f"headrace-fleet-bury-{member.index}"
        )
        self._forget(member)
        self._died(member.index, why)

    def _died(self, index: int, why: str) -> None:
        delay_s = self.states.failed(index, why)
        then = "it is given up" if delay_s is None else f"it starts again in {delay_s:g} s"
        self._fleet.tally.event(f"{name_of(index)} is dead: {why}; {then}", "num_deaths")
        self._check_left()

    def _forget(self, member: Member) -> None:
        self._fleet.router.forget(member.index)
        self._fleet.tally.bury(member)

    def _check_left(self) -> None:
        if not self.states.left():
            self._fleet.fail(EngineError(f"no engine is left:\n{self._fleet.describe()}"))

    async def _bury(self, member: Member, request_ids: tuple[str, ...]) -> None:
        aborts = [asyncio.ensure_future(member.engine.abort(request_id)) for request_id in request_ids]
        if aborts:
            await asyncio.wait(aborts, timeout=TICK_S)
            for abort in aborts:
                abort.cancel()
            await asyncio.gather(*aborts, return_exceptions=True)
        await self._close(member)

    async def _close(self, member: Member) -> None:
        try:
            await member.ask(member.engine.close(), "its end", BURIAL_S)
        except Exception as error:  # it is out already; whoever made it sees what is left of it
            self._fleet.tally.event(f"{member.name} could not be closed: {described(error)}")

    async def drain(self, index: int) -> None:
        member = self.members.get(index)
        has_work = self.states.drain(index)
        if member is None or not has_work:
            if member is not None:
                await self._leave(member)
            return
        self._fleet.tally.event(f"{member.name} leaves: it ends {len(self._fleet.router.on_engine(index))} requests")
        deadline_s = self._fleet.config.drain_deadline_s
        until_s = self._fleet.watchdog.now_s() + deadline_s
        while not member.is_lost and self._fleet.router.on_engine(index) and self._fleet.watchdog.now_s() < until_s:
            await asyncio.sleep(min(TICK_S, deadline_s))
        if member.is_lost:
            return
        self.states.drained(index)
        await self._leave(member)

    async def _leave(self, member: Member) -> None:
        requests = self._fleet.router.on_engine(member.index)
        del self.members[member.index]
        member.why_lost = "it left the fleet"
        member.lost.set()
        self._forget(member)
        self._check_left()
        await self._bury(member, requests)

    # --------------------------------------------------------------------------------------------- watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for index in self.states.due():
                self.states.begin(index)
                self._spawn(self._start_one(index), f"headrace-fleet-start-{index}")
            now_s, config = self._fleet.watchdog.now_s(), self._fleet.config
            for member in list(self.members.values()):
                if now_s - member.health_asked_s >= config.health_every_s:
                    self._spawn(self._check(member), f"headrace-fleet-health-{member.index}")
            self._fleet.dispatch()

    async def _check(self, member: Member) -> None:
        if not await member.is_alive(self._fleet.config.health_deadline_s):
            member.lose("it does not say that it is well")

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fleet.fail(EngineError(f"the fleet failed in {task.get_name()}: {described(error)}"))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        members = list(self.members.values())
        for member in members:
            member.lost.set()
        await asyncio.gather(*(self._close(member) for member in members))
        if self._buckets_thread is not None:
            self._buckets_thread.stop()
