"""One GPU, two users: a lease says who may hold its memory, and books what each hand-over moved (failures 84, 85).

One tenant holds at a time. A hand-over lets go first and takes then, so that both are never resident at once; between
the two nobody holds. Each half has a deadline and a name. What a tenant says is checked against what it holds: one that
"released" and kept its memory is found at the hand-over, not when the other runs out of it. After a half that failed or
hung, nobody knows who holds what, so the lease is broken for good and says why: the run ends with a reason rather than
with an allocator's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.control.watchdog import Watchdog, await_with_deadline
from headrace.errors import HeadraceError
from headrace.protocols import LendableEngine, LendableTrainer, WeightUpdate

MAX_RESIDUE = 0.1
"""Share of what a tenant held that it may keep when it lets go (contexts, small buffers)."""


class LeaseError(HeadraceError):
    """The memory was used by one that does not hold it, or a hand-over failed. The message says who and how much."""


class Tenant(Protocol):
    """Something that can let go of the device's memory and take it back."""

    async def release(self) -> None:
        """Return once it holds (next to) nothing there. What it was doing stands still."""
        ...

    async def acquire(self) -> None:
        """Take back what it let go of."""
        ...

    def held_bytes(self) -> int:
        """Of the device's memory, now."""
        ...


@dataclass(frozen=True, slots=True)
class EngineTenant:
    """An engine's side. ``weights`` makes what it gets when it comes back, out of memory that is not lent. It is paused
    then: whoever gave it the lease proves it (I6) and resumes it."""

    engine: LendableEngine
    weights: Callable[[], WeightUpdate]

    async def release(self) -> None:
        await self.engine.pause("keep")
        await self.engine.release()

    async def acquire(self) -> None:
        await self.engine.acquire()
        await self.engine.update_weights(self.weights())

    def held_bytes(self) -> int:
        return self.engine.held_bytes()


@dataclass(frozen=True, slots=True)
class TrainerTenant:
    """The trainer's side. ``on_trainer`` runs a function on its thread."""

    trainer: LendableTrainer
    on_trainer: Callable[[Callable[[], None]], Awaitable[None]]

    async def release(self) -> None:
        await self.on_trainer(self.trainer.offload)

    async def acquire(self) -> None:
        await self.on_trainer(self.trainer.onload)

    def held_bytes(self) -> int:
        return self.trainer.held_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """One hand-over. Bytes by tenant: before it, when the giver had let go, and after it."""

    giver: str | None
    taker: str
    before_bytes: Mapping[str, int]
    between_bytes: Mapping[str, int]
    after_bytes: Mapping[str, int]
    release_s: float
    acquire_s: float


class Lease:
    """Who may use the memory. Not thread-safe: the loop's thread owns it.

    Example::

        lease = Lease({"engine": engine, "trainer": trainer}, holder="engine", watchdog=watchdog, deadline_s=60.0)
        await lease.give("trainer")
        lease.check("trainer")
    """

    def __init__(
        self, tenants: Mapping[str, Tenant], *, holder: str | None, watchdog: Watchdog, deadline_s: float
    ) -> None:
        """``deadline_s``: for each half of a hand-over."""
        self._tenants = dict(tenants)
        self._holder = holder
        self._watchdog = watchdog
        self._deadline_s = deadline_s
        self._is_moving = False
        self._broken = ""
        self._hand_overs: list[HandOver] = []

    @property
    def holder(self) -> str | None:
        """None while it is handed over, and after a hand-over that failed."""
        return self._holder

    @property
    def hand_overs(self) -> Sequence[HandOver]:
        """The books, oldest first."""
        return tuple(self._hand_overs)

    def check(self, name: str) -> None:
        """Raises LeaseError unless ``name`` holds it: call it before the memory is used."""
        if self._broken:
            raise LeaseError(self._broken)
        if self._holder != name:
            owner = f"'{self._holder}' holds it" if self._holder else "nobody holds it, it is being handed over"
            raise LeaseError(f"'{name}' uses the device's memory without the lease: {owner}; give it over first")

    async def give(self, taker: str) -> HandOver | None:
        """Hand it over; None where ``taker`` holds it already. Raises LeaseError, also where one is under way."""
        if taker not in self._tenants:
            raise LeaseError(f"there is no tenant '{taker}'; known: {', '.join(sorted(self._tenants))}")
        if self._broken:
            raise LeaseError(self._broken)
        if self._is_moving:
            raise LeaseError(f"'{taker}' asks for the lease while it is being handed over; wait for that first")
        if taker == self._holder:
            return None
        self._is_moving, giver, self._holder = True, self._holder, None
        try:
            return await self._move(giver, taker)
        except BaseException as error:
            self._broken = f"the lease is broken: its hand-over from '{giver}' to '{taker}' failed: "
            self._broken += str(error) or "cancelled"
            if isinstance(error, Exception):
                raise LeaseError(self._broken) from error
            raise
        finally:
            self._is_moving = False

    async def _move(self, giver: str | None, taker: str) -> HandOver:
        before, started_s = self._held(), self._watchdog.now_s()
        if giver is not None:
            await self._bounded(self._tenants[giver].release(), giver, "its release of the memory")
        between, released_s = self._held(), self._watchdog.now_s()
        if giver is not None and between[giver] > MAX_RESIDUE * before[giver]:
            raise LeaseError(
                f"'{giver}' says that it let go, but holds {between[giver]:,} of {before[giver]:,} bytes: '{taker}' "
                "would run out of memory, or worse, not"
            )
        await self._bounded(self._tenants[taker].acquire(), taker, "its taking of the memory")
        self._holder = taker
        hand_over = HandOver(
            giver=giver,
            taker=taker,
            before_bytes=before,
            between_bytes=between,
            after_bytes=self._held(),
            release_s=released_s - started_s,
            acquire_s=self._watchdog.now_s() - released_s,
        )
        self._hand_overs.append(hand_over)
        return hand_over

    def _held(self) -> dict[str, int]:
        return {name: tenant.held_bytes() for name, tenant in self._tenants.items()}

    async def _bounded(self, call: Awaitable[None], on: str, what: str) -> None:
        await await_with_deadline(
            call, watchdog=self._watchdog, waiter="lease", on=on, what=what, deadline_s=self._deadline_s
        )
