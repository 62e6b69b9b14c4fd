"""Which engine of a fleet gets which request, and why one waits (failures 98, 102, 103).

* Least loaded: the engine with the fewest requests in flight, then the lowest measured KV pressure, then the lowest
  index, so that equal submissions give equal choices.
* Affinity: an engine that has computed more of the request's prompt before (the prompt of its group, or the blocks
  that it begins with) is preferred, while it has at most ``max_imbalance`` requests more than the least loaded one.
* Limits are what engines measure, not a number that somebody guessed: an engine takes a request while the tokens in
  its KV cache, what it was given since, and the request's own expected need fit into ``max_kv_pressure`` of the cache,
  and while few requests wait for a place in its batch. One with nothing in flight takes any request: else one too
  large for the limit would wait for ever.
* Order: requests wait in the order of their first submission, and none overtakes another, so that long prompts do not
  starve. A request whose engine died keeps its place.

Nothing is lost: a request is waiting, on an engine, or gone because its caller finished or withdrew it.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.protocols import Clock
from headrace.types import PolicyVersion

BLOCK_TOKENS = 32
"""Prompts are compared in blocks of so many tokens."""
MAX_REMEMBERED = 4096
"""Prefixes that are remembered for each engine, least recently used first to go."""
NUM_LENGTHS = 16
"""Replies after which their mean length is believed; before, a reply may take all it was allowed."""


class WaitCause(StrEnum):
    """Why a request has no engine yet."""

    PAUSED = "paused"
    """The fleet publishes: nothing is given out."""
    NO_ENGINE = "no_engine"
    """No engine serves."""
    VERSION = "version"
    """No engine serves the one version that it was asked for (evaluation)."""
    KV_PRESSURE = "kv_pressure"
    """No engine has room in its KV cache."""
    FULL = "full"
    """Every engine that has room in its KV cache has its batch full."""
    ORDER = "order"
    """Something else waited before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What an engine that may take work measured last. 0 means that it cannot tell."""

    version: PolicyVersion
    num_running: int = 0
    """Requests that have keys and values in its cache."""
    max_running: int = 0
    """Requests that it can run at once."""
    kv_used_tokens: int = 0
    kv_total_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request as the router sees it. Ids are unique among those that it holds."""

    id: str
    num_prompt_tokens: int
    max_new_tokens: int
    prefixes: tuple[Hashable, ...] = ()
    """Names of what its prompt begins with, shortest first; see :func:`prefixes`."""
    version: PolicyVersion | None = None
    """Only an engine that serves this one will do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Give this work to this engine. ``waited_s``: by cause, without zeros."""

    id: str
    engine: int
    waited_s: Mapping[WaitCause, float]
    saved_prefixes: int
    """How many of its prefixes the engine had seen."""


def prefixes(prompt_ids: Sequence[int], group: Hashable | None, salt: Hashable = None) -> tuple[Hashable, ...]:
    """Names of the prompt's leading blocks, then of the prompt that its group shares."""
    names: list[Hashable] = []
    chain: Hashable = salt
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chain = hash((chain, *prompt_ids[start : start + BLOCK_TOKENS]))
        names.append(chain)
    if group is not None:
        names.append(("group", group, salt))
    return tuple(names)


@dataclass(slots=True)
class _Waiting:
    work: Work
    sequence: int
    since_s: float
    """Since when for the present cause."""
    cause: WaitCause | None = None
    waited_s: dict[WaitCause, float] = field(default_factory=dict)


class Router:
    """The queue and the choice. Not thread-safe: the loop's thread owns it.

    Example::

        router.submit(Work(id="a", num_prompt_tokens=8, max_new_tokens=16))
        router.dispatch({0: EngineLoad(version=v), 1: EngineLoad(version=v)})   # [Dispatch(id="a", engine=0, ...)]
        router.finish("a", num_new_tokens=5)
    """

    def __init__(
        self, clock: Clock, *, use_affinity: bool = True, max_imbalance: int = 16, max_kv_pressure: float = 0.9
    ) -> None:
        self._clock = clock
        self._use_affinity = use_affinity
        self._max_imbalance = max_imbalance
        self._max_kv_pressure = max_kv_pressure
        self._sequence = itertools.count()
        self._sequences: dict[str, int] = {}
        self._waiting: deque[_Waiting] = deque()
        self._behind = WaitCause.ORDER
        """Why all that waits, but the first, waits."""
        self._flying: dict[int, dict[str, Work]] = {}
        self._engine_of: dict[str, int] = {}
        self._remembered: dict[int, OrderedDict[Hashable, None]] = {}
        self._num_lengths = 0
        self._total_length = 0

    # ------------------------------------------------------------------------------------------ questions

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def num_in_flight(self, engine: int) -> int:
        return len(self._flying.get(engine, ()))

    def on_engine(self, engine: int) -> tuple[str, ...]:
        """Ids of the work that it was given and has not ended."""
        return tuple(self._flying.get(engine, ()))

    def causes(self) -> Mapping[WaitCause, int]:
        """How many wait, by why."""
        return Counter(w.cause for w in self._waiting if w.cause is not None)

    # ---------------------------------------------------------------------------------------- transitions

    def submit(self, work: Work) -> None:
        """Put it into the queue; work that was given back (:meth:`requeue`) keeps its first place."""
        if work.id in self._sequences:
            raise ValueError(f"work {work.id} is in the router already; ids must be unique (failure 103)")
        sequence = self._sequences[work.id] = next(self._sequence)
        cause = self._behind if self._waiting else None
        self._waiting.append(_Waiting(work, sequence, self._clock(), cause))

    def requeue(self, work: Work) -> None:
        """Its engine is gone and it goes on elsewhere, as ``work`` (with a longer prompt), in its old place."""
        engine = self._engine_of.pop(work.id)
        del self._flying[engine][work.id]
        waiting = _Waiting(work, self._sequences[work.id], self._clock(), self._behind)
        place = next((i for i, w in enumerate(self._waiting) if w.sequence > waiting.sequence), len(self._waiting))
        if place == 0 and self._waiting:
            self._note(self._waiting[0], self._behind)
        self._waiting.insert(place, waiting)

    def finish(self, work_id: str, num_new_tokens: int | None = None) -> None:
        """It ended, with so many tokens where that says how long replies are."""
        engine = self._engine_of.pop(work_id)
        del self._flying[engine][work_id], self._sequences[work_id]
        if num_new_tokens is not None:
            self._num_lengths += 1
            self._total_length += num_new_tokens

    def withdraw(self, work_id: str) -> None:
        """Its caller gave up while it waited."""
        self._waiting = deque(w for w in self._waiting if w.work.id != work_id)
        del self._sequences[work_id]

    def forget(self, engine: int) -> None:
        """The engine's caches are gone: nothing there is a reason to prefer it."""
        self._remembered.pop(engine, None)

    def dispatch(self, engines: Mapping[int, EngineLoad], *, is_paused: bool = False) -> list[Dispatch]:
        """Give out what may go now, in order. ``engines``: those that may take work. Takes no longer where many wait:
        what is behind the first that must wait is not looked at."""
        given: list[Dispatch] = []
        while self._waiting:
            first = self._waiting[0]
            choice = WaitCause.PAUSED if is_paused else self._choose(first.work, engines)
            if isinstance(choice, WaitCause):
                self._note(first, choice)
                break
            self._waiting.popleft()
            given.append(self._give(first, choice))
        behind = WaitCause.PAUSED if is_paused else WaitCause.ORDER
        if behind is not self._behind:
            self._behind = behind
            for waiting in itertools.islice(self._waiting, 1, None):
                self._note(waiting, behind)
        return given

    # ---------------------------------------------------------------------------------------------- inside

    def _choose(self, work: Work, engines: Mapping[int, EngineLoad]) -> int | WaitCause:
        if not engines:
            return WaitCause.NO_ENGINE
        right = [i for i, load in engines.items() if work.version is None or load.version == work.version]
        if not right:
            return WaitCause.VERSION
        roomy = [i for i in right if self._has_room(i, engines[i], work)]
        if not roomy:
            return WaitCause.KV_PRESSURE
        free = [i for i in roomy if not self._is_full(i, engines[i])]
        if not free:
            return WaitCause.FULL
        least = min(free, key=lambda i: self._rank(i, engines[i]))
        if not self._use_affinity:
            return least
        best = min(free, key=lambda i: (-self._num_known(i, work), self._rank(i, engines[i])))
        is_near = self.num_in_flight(best) - self.num_in_flight(least) <= self._max_imbalance
        return best if is_near else least

    def _rank(self, engine: int, load: EngineLoad) -> tuple[int, float, int]:
        pressure = load.kv_used_tokens / load.kv_total_tokens if load.kv_total_tokens else 0.0
        return self.num_in_flight(engine), pressure, engine

    def _has_room(self, engine: int, load: EngineLoad, work: Work) -> bool:
        flying = self._flying.get(engine)
        if not load.kv_total_tokens or not flying:
            return True
        needs = sum(self._need(w) for w in flying.values())
        num_unmeasured = max(0, len(flying) - load.num_running)
        expected = load.kv_used_tokens + needs * num_unmeasured / len(flying) + self._need(work)
        return expected <= self._max_kv_pressure * load.kv_total_tokens

    def _is_full(self, engine: int, load: EngineLoad) -> bool:
        """A few may wait inside, so that a place that becomes free is taken at once."""
        if not load.max_running:
            return False
        return self.num_in_flight(engine) >= load.max_running + max(1, load.max_running // 8)

    def _need(self, work: Work) -> float:
        """Tokens that it will have in the cache."""
        expected = float(work.max_new_tokens)
        if self._num_lengths >= NUM_LENGTHS:
            expected = min(expected, self._total_length / self._num_lengths)
        return work.num_prompt_tokens + expected

    def _num_known(self, engine: int, work: Work) -> int:
        """Leading prefixes that the engine has seen."""
        seen = self._remembered.get(engine, OrderedDict())
        return next((n for n in range(len(work.prefixes), 0, -1) if work.prefixes[n - 1] in seen), 0)

    def _note(self, waiting: _Waiting, cause: WaitCause) -> None:
        """Book the time since the last look under the cause that held then."""
        now_s = self._clock()
        if waiting.cause is not None:
            waiting.waited_s[waiting.cause] = waiting.waited_s.get(waiting.cause, 0.0) + now_s - waiting.since_s
        waiting.cause, waiting.since_s = cause, now_s

    def _give(self, waiting: _Waiting, engine: int) -> Dispatch:
        work = waiting.work
        if waiting.cause is not None:
            self._note(waiting, waiting.cause)
        num_known = self._num_known(engine, work)
        self._flying.setdefault(engine, {})[work.id] = work
        self._engine_of[work.id] = engine
        seen = self._remembered.setdefault(engine, OrderedDict())
        for name in work.prefixes:
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > MAX_REMEMBERED:
            seen.popitem(last=False)
        waited_s = {cause: s for cause, s in waiting.waited_s.items() if s > 0}
        return Dispatch(id=work.id, engine=engine, waited_s=waited_s, saved_prefixes=num_known)
