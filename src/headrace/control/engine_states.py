"""What state each engine of a fleet is in, and which may take work (I6, I7; failures 87, 88, 89).

::

    begin -> STARTING -> started -> SYNCING -> serve -> SERVING -> drain -> DRAINING -> left -> DEAD (for good)
                 |                     |                   |                   |
                 +---------------------+----- failed ------+-------------------+--> DEAD -> begin, after a backoff

An engine serves once the version that it holds was proved (I6) and is at most ``max_engine_lag`` behind the
controller's. That it was told to load weights proves nothing; neither does that it once served: a restarted engine is a
new incarnation, of which nothing is known. ``guards.canary_every`` may make proofs rarer for one that serves already;
it never lets one begin without.

A dead engine starts again after a backoff that doubles with each death, at most ``max_restarts`` times within
``window_s``; then it is retired. Pure: the clock is injected, and whoever owns the engines does what this says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.protocols import Clock
from headrace.types import PolicyVersion


class EngineState(StrEnum):
    STARTING = "starting"
    """It was begun and has not answered yet. Bounded by ``fleet.start_deadline_s``."""
    SYNCING = "syncing"
    """It lives, and waits for weights or for the proof of them. No traffic. Each call on it is bounded by
    ``fleet.sync_deadline_s``; the wait for a publish by the deadlines of whoever publishes."""
    SERVING = "serving"
    """Its health is asked every ``fleet.health_every_s``; each request has its caller's deadline."""
    DRAINING = "draining"
    """It ends what it has and takes nothing new; then it leaves the fleet. Bounded by ``fleet.drain_deadline_s``."""
    DEAD = "dead"


class StateError(RuntimeError):
    """A transition that the rules do not allow: a defect of headrace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartBudget:
    """How often one engine may be started again."""

    max_restarts: int = 3
    """Within ``window_s``; 0: never."""
    window_s: float = 3600.0
    backoff_s: float = 1.0
    """Before the first restart of a window; doubles with each further one."""
    max_backoff_s: float = 60.0

    def delay_s(self, num_deaths: int) -> float | None:
        """Seconds until the restart after the ``num_deaths``-th death within the window; None: no more."""
        if num_deaths > self.max_restarts:
            return None
        return float(min(self.max_backoff_s, self.backoff_s * 2.0 ** (num_deaths - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One transition. ``since_s`` and ``at_s``: when the engine entered the old state, and when it left it."""

    index: int
    incarnation: int
    old: EngineState
    new: EngineState
    since_s: float
    at_s: float
    why: str


@dataclass(slots=True)
class _Engine:
    since_s: float
    state: EngineState = EngineState.STARTING
    incarnation: int = 0
    version: PolicyVersion | None = None
    proved: PolicyVersion | None = None
    """The newest version that this incarnation was proved to serve."""
    deaths_s: list[float] = field(default_factory=list)
    restart_at_s: float | None = None
    """Only ever set of a dead one, and never of one that leaves."""
    leaves: bool = False
    """It was asked to leave: it will not start again."""
    why: str = ""

    @property
    def is_retired(self) -> bool:
        return self.state is EngineState.DEAD and self.restart_at_s is None


class EngineStates:
    """The states of one fleet's engines, by index. Not thread-safe: the loop's thread owns it.

    Example::

        states = EngineStates(clock)
        states.begin(0)
        states.started(0, PolicyVersion(0, 0))
        states.proved(0, PolicyVersion(0, 0))
        states.serve(0)
        states.serving()                            # (0,)
    """

    def __init__(
        self,
        clock: Clock,
        *,
        budget: RestartBudget = RestartBudget(),
        max_engine_lag: int = 0,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        self._clock = clock
        self._budget = budget
        self._max_engine_lag = max_engine_lag
        self._on_change = on_change
        self._engines: dict[int, _Engine] = {}
        self._published: PolicyVersion | None = None

    # ------------------------------------------------------------------------------------------ questions

    def state(self, index: int) -> EngineState:
        return self._engines[index].state

    def incarnation(self, index: int) -> int:
        """0 for the first start of an engine, one more for each later one."""
        return self._engines[index].incarnation

    def version(self, index: int) -> PolicyVersion | None:
        """What it holds, proved or not; None where nothing is known."""
        return self._engines[index].version

    def is_proved(self, index: int) -> bool:
        """What it holds was proved."""
        engine = self._engines[index]
        return engine.version is not None and engine.proved == engine.version

    def serving(self) -> tuple[int, ...]:
        """Those that may take work now."""
        return tuple(i for i, e in self._engines.items() if e.state is EngineState.SERVING and self._is_recent(e))

    def holding(self) -> tuple[int, ...]:
        """Those that a new version must reach: they sample, or will."""
        live = (EngineState.SYNCING, EngineState.SERVING, EngineState.DRAINING)
        return tuple(i for i, e in self._engines.items() if e.state in live)

    def left(self) -> tuple[int, ...]:
        """Those that serve or may come to."""
        return tuple(i for i, e in self._engines.items() if not e.is_retired and not e.leaves)

    def due(self) -> tuple[int, ...]:
        """Dead engines whose backoff is over."""
        now_s = self._clock()
        return tuple(i for i, e in self._engines.items() if e.restart_at_s is not None and e.restart_at_s <= now_s)

    def line(self, index: int) -> str:
        """The engine's state for a person."""
        engine, now_s = self._engines[index], self._clock()
        text = f"engine {index} is {engine.state} for {now_s - engine.since_s:.1f} s"
        if engine.state is EngineState.DEAD:
            text += f" ({engine.why}), "
            text += "for good" if engine.restart_at_s is None else f"starts in {engine.restart_at_s - now_s:.1f} s"
        elif engine.version is not None:
            proof = "proved" if engine.proved == engine.version else "not proved"
            text += f" with version {engine.version} ({proof})"
        return text

    def text(self) -> str:
        """All of them, one line each."""
        return "\n".join(self.line(index) for index in self._engines)

    # ---------------------------------------------------------------------------------------- transitions

    def begin(self, index: int) -> int:
        """A new engine, or a dead one that is due, is being started; returns its incarnation."""
        engine = self._engines.get(index)
        if engine is None:
            self._engines[index] = _Engine(since_s=self._clock())
            return 0
        if engine.restart_at_s is None:
            raise StateError(f"engine {index} cannot be started: {self.line(index)}")
        engine.incarnation += 1
        engine.version = engine.proved = engine.restart_at_s = None
        self._enter(index, EngineState.STARTING, f"start number {engine.incarnation + 1}")
        return engine.incarnation

    def started(self, index: int, version: PolicyVersion) -> None:
        """It answers, and says that it holds ``version``."""
        engine = self._expect(index, EngineState.STARTING)
        engine.version = version
        self._enter(index, EngineState.SYNCING, "started")

    def took(self, index: int, version: PolicyVersion) -> None:
        """It was given the weights of ``version`` and said yes: no proof of anything."""
        self._expect(index, EngineState.SYNCING, EngineState.SERVING, EngineState.DRAINING).version = version

    def proved(self, index: int, version: PolicyVersion) -> None:
        """A canary has compared what it serves with the trainer's ``version`` (I6)."""
        engine = self._expect(index, EngineState.SYNCING, EngineState.SERVING, EngineState.DRAINING)
        if version != engine.version:
            raise StateError(f"engine {index} was proved to serve {version}, but {self.line(index)}")
        engine.proved = version

    def serve(self, index: int) -> bool:
        """Let it take work where the rules allow it; says whether they do. It begins with a proof of what it holds; one
        that serves may go on with a version that was not proved, since the caller decides how rare proofs are
        (guards.canary_every)."""
        engine = self._expect(index, EngineState.SYNCING, EngineState.SERVING, EngineState.DRAINING)
        if engine.state is EngineState.SYNCING:
            if not self.is_proved(index) or not self._is_recent(engine):
                return False
            self._enter(index, EngineState.SERVING, f"version {engine.version} is proved")
        return engine.state is EngineState.SERVING and self._is_recent(engine)

    def published(self, version: PolicyVersion) -> None:
        """The controller's version is now this."""
        self._published = version

    def drain(self, index: int) -> bool:
        """It takes nothing new and will leave; says whether it still has to end something."""
        engine = self._engines[index]
        engine.leaves = True
        if engine.state in (EngineState.SERVING, EngineState.DRAINING):
            if engine.state is EngineState.SERVING:
                self._enter(index, EngineState.DRAINING, "asked to leave")
            return True
        self._die(index, "asked to leave")
        return False

    def drained(self, index: int) -> None:
        """It has nothing left to end: it leaves."""
        self._expect(index, EngineState.DRAINING)
        self._die(index, "left the fleet")

    def failed(self, index: int, why: str) -> float | None:
        """It is gone, or as good as. Returns the seconds until it may start again; None: never."""
        engine = self._engines[index]
        if engine.state is EngineState.DEAD:
            raise StateError(f"engine {index} died twice: {self.line(index)}")
        now_s = self._clock()
        engine.deaths_s = [s for s in engine.deaths_s if now_s - s < self._budget.window_s] + [now_s]
        delay_s = None if engine.leaves else self._budget.delay_s(len(engine.deaths_s))
        engine.restart_at_s = None if delay_s is None else now_s + delay_s
        self._die(index, why)
        return delay_s

    # ---------------------------------------------------------------------------------------------- inside

    def _is_recent(self, engine: _Engine) -> bool:
        if self._published is None:
            return True
        assert engine.version is not None, "what serves was proved"
        return 0 <= self._published.number - engine.version.number <= self._max_engine_lag

    def _expect(self, index: int, *states: EngineState) -> _Engine:
        engine = self._engines[index]
        if engine.state not in states:
            raise StateError(f"{self.line(index)}; expected was {' or '.join(states)}")
        return engine

    def _die(self, index: int, why: str) -> None:
        if self._engines[index].state is not EngineState.DEAD:
            self._enter(index, EngineState.DEAD, why)
        if self._engines[index].leaves:
            self._engines[index].restart_at_s = None

    def _enter(self, index: int, state: EngineState, why: str) -> None:
        engine, now_s = self._engines[index], self._clock()
        change = Change(
            index=index,
            incarnation=engine.incarnation,
            old=engine.state,
            new=state,
            since_s=engine.since_s,
            at_s=now_s,
            why=why,
        )
        engine.state, engine.since_s, engine.why = state, now_s, why
        if self._on_change is not None:
            self._on_change(change)
