"""Actors that can stand in for each other: who takes the next piece of work, and what happens when one dies.

::

    starting --ready--> serving --dead--> starting ... until the place's restart budget is used up --> retired

A place whose actor died starts another in the background; work goes to the others meanwhile, or waits. Where every
place is retired, whoever waits hears why. Restarts back off, so that a machine that kills whatever starts on it is not
hammered; an actor that has served gives its place one restart back.

    who       waits for                 unblocked by             deadline
    member()  an actor that serves      a start, a retirement    the caller's ``deadline_s``
    a start   the actor's 'ready'       the actor, its death     ``start_deadline_s``, in the carrier
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace.cluster.actors import ActorDied, ActorHandle
from headrace.cluster.spec import ActorNotMade

Start = Callable[[int, int], Awaitable[ActorHandle]]
"""(index, incarnation) -> an actor that is ready. Raises ActorDied or ActorNotMade where it does not come up."""
Note = Callable[[str], None]

MAX_BACKOFF_S = 30.0
NUM_SERVED_FOR_CREDIT = 100
"""Pieces of work after which an actor gives its place one restart back."""


class PoolExhausted(ActorDied):
    """Every place of a role has used up its restarts."""


@dataclass(kw_only=True)
class Member:
    """An actor that serves, as its user sees it: hand it back through :meth:`ActorPool.done`."""

    index: int
    incarnation: int
    handle: ActorHandle
    num_open: int = 0
    num_served: int = 0


@dataclass(kw_only=True)
class _Place:
    index: int
    incarnation: int = 0
    num_restarts: int = 0
    member: Member | None = None
    retired: str | None = None
    starting: asyncio.Task[None] | None = field(default=None, repr=False)


class ActorPool:
    """``num_actors`` places of one ``role``. All methods belong to one event loop."""

    def __init__(
        self, role: str, num_actors: int, start: Start, *, max_restarts: int, backoff_s: float = 0.5, note: Note
    ) -> None:
        """``max_restarts``: of each place. ``note``: told of deaths, restarts and retirements, for a person."""
        self._role, self._start = role, start
        self._max_restarts, self._backoff_s, self._note = max_restarts, backoff_s, note
        self._places = [_Place(index=index) for index in range(num_actors)]
        self._changed = asyncio.Condition()
        self._is_started = False
        self._is_closed = False
        self.num_deaths = 0

    async def start(self) -> None:
        """Start every place. Raises the first failure once all have ended: nothing is left half started. A second call
        does nothing."""
        if self._is_started:
            return
        self._is_started = True
        results = await asyncio.gather(*(self._bring_up(place) for place in self._places), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    @property
    def members(self) -> tuple[Member, ...]:
        """Those that serve."""
        return tuple(place.member for place in self._places if place.member is not None)

    async def member(self, deadline_s: float) -> Member:
        """The least loaded actor that serves, waiting for one where none does. Its work is counted until :meth:`done`.

        Raises TimeoutError after ``deadline_s``, PoolExhausted where no place will ever serve again.
        """
        async with asyncio.timeout(deadline_s), self._changed:
            while not self.members:
                if self._is_closed:
                    raise ActorDied(f"the {self._role} workers were closed")
                reasons = [place.retired for place in self._places if place.retired is not None]
                if len(reasons) == len(self._places):
                    raise PoolExhausted(f"no {self._role} worker is left: {reasons[-1]}")
                await self._changed.wait()
            chosen = min(self.members, key=lambda member: (member.num_open, member.index))
            chosen.num_open += 1
            return chosen

    def done(self, member: Member) -> None:
        """A piece of work is over, however it went."""
        member.num_open -= 1
        member.num_served += 1
        place = self._places[member.index]
        if member.num_served % NUM_SERVED_FOR_CREDIT == 0 and place.num_restarts > 0 and place.member is member:
            place.num_restarts -= 1

    def died(self, member: Member, why: str) -> None:
        """``member`` is gone. Told for the same one twice, nothing more happens."""
        place = self._places[member.index]
        if place.member is not member or self._is_closed:
            return
        self.num_deaths += 1
        place.member = None
        place.starting = asyncio.get_running_loop().create_task(
            self._restart(place, member.handle, why), name=f"restart of {self._role} {member.index}"
        )

    async def close(self) -> None:
        """End every actor, those that are starting too. Idempotent."""
        self._is_closed = True
        starting = [place.starting for place in self._places if place.starting is not None]
        for task in starting:
            task.cancel()
        if starting:
            await asyncio.wait(starting)
        handles = [member.handle for member in self.members]
        for place in self._places:
            place.member = None
        await asyncio.gather(*(handle.close() for handle in handles), return_exceptions=True)
        await self._tell()

    # ---------------------------------------------------------------------------------------------- places

    async def _bring_up(self, place: _Place) -> None:
        handle = await self._start(place.index, place.incarnation)
        place.member = Member(index=place.index, incarnation=place.incarnation, handle=handle)
        await self._tell()

    async def _restart(self, place: _Place, dead: ActorHandle, why: str) -> None:
        await _closed(dead)
        while True:
            if place.num_restarts >= self._max_restarts:
                place.retired = (
                    f"{self._role} worker {place.index} was restarted {place.num_restarts} times, which is all that "
                    f"cluster.max_restarts allows; the last end: {why}"
                )
                self._note(place.retired)
                await self._tell()
                return
            backoff_s = min(self._backoff_s * 2**place.num_restarts, MAX_BACKOFF_S) if place.num_restarts else 0.0
            place.num_restarts += 1
            place.incarnation += 1
            self._note(f"{why} -- starting {self._role} worker {place.index} again ({place.num_restarts} of "
                       f"{self._max_restarts})")  # fmt: skip
            await asyncio.sleep(backoff_s)
            try:
                await self._bring_up(place)
                return
            except (ActorDied, ActorNotMade) as error:
                why = str(error)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _closed(handle: ActorHandle) -> None:
    """What is left of an actor that is dead, or counts as dead, is ended; that it cannot be told is no news."""
    await asyncio.gather(handle.close(), return_exceptions=True)
