"""The watchdog: every wait has a name and a deadline, and a run without progress explains itself (I19).

A wait says who waits on whom for what, since when and until when. The watchdog keeps the open ones, the times between
signs of progress and the depths of queues; ``stalled()`` tells when nothing moved for max(stall_min_s, 10 x median
interval), and ``report()`` says what there is to say. Stacks of threads and asyncio tasks come from callbacks of the
loop: this module looks at nothing but its clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from headrace.errors import HeadraceError
from headrace.protocols import Clock

T = TypeVar("T")

STALL_FACTOR = 10.0
"""Median intervals without progress that make a stall."""
_NUM_INTERVALS = 101


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One open wait. Times are the watchdog's clock."""

    id: int
    waiter: str
    on: str
    what: str
    since_s: float
    deadline_s: float
    """Seconds that it may last."""

    def line(self, now_s: float) -> str:
        waited_s = now_s - self.since_s
        late = "  OVERDUE" if waited_s > self.deadline_s else ""
        return f"{self.waiter} waits on {self.on} for {self.what}: {waited_s:.1f} s of {self.deadline_s:g} s{late}"


class DeadlineError(HeadraceError):
    """A wait ran into its deadline. The message says who waited on whom for what, how long, and what to do."""

    def __init__(
        self, *, waiter: str, on: str, what: str, waited_s: float, deadline_s: float, advice: str = ""
    ) -> None:
        self.waiter, self.on, self.what = waiter, on, what
        self.waited_s, self.deadline_s = waited_s, deadline_s
        super().__init__(
            f"{waiter} waited {waited_s:.1f} s on {on} for {what}; the deadline is {deadline_s:g} s. "
            + (advice or f"Look at what {on} was doing, or raise the deadline of this wait if it was only slow.")
        )


class Watchdog:
    """Registry of waits and of progress. Its methods are called from the loop's thread.

    Example::

        with watchdog.waiting("trainer", "rollout", "batch 7", deadline_s=600):
            ...
    """

    def __init__(self, clock: Clock, stall_min_s: float) -> None:
        self._clock = clock
        self._stall_min_s = stall_min_s
        self._waits: dict[int, Wait] = {}
        self._waited_s: dict[tuple[str, str], float] = {}
        self._asked_s = clock()
        self._next_id = 0
        self._queues: dict[str, Callable[[], int]] = {}
        self._stacks: dict[str, Callable[[], str]] = {}
        self._last_progress_s = clock()
        self._last_progress = "start"
        self._intervals_s: deque[float] = deque(maxlen=_NUM_INTERVALS)

    def now_s(self) -> float:
        """The injected clock."""
        return self._clock()

    def begin(self, waiter: str, on: str, what: str, deadline_s: float) -> int:
        """Register a wait; returns its id for :meth:`end`."""
        self._next_id += 1
        self._waits[self._next_id] = Wait(
            id=self._next_id, waiter=waiter, on=on, what=what, since_s=self._clock(), deadline_s=deadline_s
        )
        return self._next_id

    def end(self, wait_id: int) -> None:
        """The wait is over, however it went. Raises KeyError for one that is not open."""
        wait = self._waits.pop(wait_id)
        self._book(wait, self._clock())

    def take_waited_s(self) -> dict[tuple[str, str], float]:
        """(kind of waiter, on whom) -> seconds that were waited since this was last asked, those of open waits too.
        The kind is the waiter's first word; waits that go on at the same time all count."""
        now_s = self._clock()
        for wait in self._waits.values():
            self._book(wait, now_s)
        waited_s, self._waited_s, self._asked_s = self._waited_s, {}, now_s
        return waited_s

    def _book(self, wait: Wait, until_s: float) -> None:
        key = (wait.waiter.partition(" ")[0], wait.on)
        self._waited_s[key] = self._waited_s.get(key, 0.0) + until_s - max(wait.since_s, self._asked_s)

    @contextmanager
    def waiting(self, waiter: str, on: str, what: str, deadline_s: float) -> Iterator[Wait]:
        wait_id = self.begin(waiter, on, what, deadline_s)
        try:
            yield self._waits[wait_id]
        finally:
            self.end(wait_id)

    def waits(self) -> tuple[Wait, ...]:
        """Open waits, oldest first."""
        return tuple(sorted(self._waits.values(), key=lambda w: (w.since_s, w.id)))

    def overdue(self) -> tuple[Wait, ...]:
        """Open waits past their deadline, oldest first."""
        now_s = self._clock()
        return tuple(w for w in self.waits() if now_s - w.since_s > w.deadline_s)

    def progress(self, what: str = "") -> None:
        """Something that counts was finished: a group, a step, a publish."""
        now_s = self._clock()
        self._intervals_s.append(now_s - self._last_progress_s)
        self._last_progress_s = now_s
        self._last_progress = what or "progress"

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._last_progress_s

    @property
    def stall_after_s(self) -> float:
        """Seconds without progress that make a stall: max(stall_min_s, 10 x median interval)."""
        if not self._intervals_s:
            return self._stall_min_s
        return max(self._stall_min_s, STALL_FACTOR * median(self._intervals_s))

    def stalled(self) -> bool:
        return self.idle_s > self.stall_after_s

    def watch_queue(self, name: str, depth: Callable[[], int]) -> None:
        """``depth()`` is asked when a report is made."""
        self._queues[name] = depth

    def watch_stacks(self, name: str, stacks: Callable[[], str]) -> None:
        """``stacks()`` (of threads, asyncio tasks, a worker process) is asked when a report is made."""
        self._stacks[name] = stacks

    def report(self) -> dict[str, Any]:
        """JSON values. A callback that raises is reported in its place: a report must come out of a sick run."""
        now_s = self._clock()
        return {
            "idle_s": now_s - self._last_progress_s,
            "stall_after_s": self.stall_after_s,
            "last_progress": self._last_progress,
            "waits": [
                {
                    "waiter": w.waiter,
                    "on": w.on,
                    "what": w.what,
                    "waited_s": now_s - w.since_s,
                    "deadline_s": w.deadline_s,
                    "overdue": now_s - w.since_s > w.deadline_s,
                }
                for w in self.waits()
            ],
            "queues": {name: _ask(depth) for name, depth in self._queues.items()},
            "stacks": {name: _ask(stacks) for name, stacks in self._stacks.items()},
        }

    def report_text(self) -> str:
        """The report for a person: who waits on whom, oldest work first."""
        now_s = self._clock()
        lines = [
            f"no progress for {now_s - self._last_progress_s:.1f} s (a stall after {self.stall_after_s:.1f} s); "
            f"last: {self._last_progress}",
            *(f"  {wait.line(now_s)}" for wait in self.waits()),
        ]
        if not self._waits:
            lines.append("  nobody waits: the loop itself is busy or blocked; see the stacks")
        lines += [f"  queue {name}: {_ask(depth)}" for name, depth in self._queues.items()]
        for name, stacks in self._stacks.items():
            lines += [f"  -- {name}", *(f"  {line}" for line in str(_ask(stacks)).splitlines())]
        return "\n".join(lines)


def _ask(callback: Callable[[], Any]) -> Any:
    try:
        return callback()
    except Exception as error:
        return f"could not be read: {type(error).__name__}: {error}"


async def await_with_deadline(
    awaitable: Awaitable[T],
    *,
    watchdog: Watchdog,
    waiter: str,
    on: str,
    what: str,
    deadline_s: float,
    advice: str = "",
) -> T:
    """Await with a name and a deadline. Raises DeadlineError when it passes, at once even where ``awaitable`` ignores
    its cancellation: it is cancelled and left behind, and whatever it still raises is consumed."""
    task = asyncio.ensure_future(awaitable)
    with watchdog.waiting(waiter, on, what, deadline_s) as wait:
        try:
            done, _ = await asyncio.wait({task}, timeout=deadline_s)
        except asyncio.CancelledError:
            _orphan(task)
            raise
        if not done:
            _orphan(task)
            waited_s = max(deadline_s, watchdog.now_s() - wait.since_s)
            raise DeadlineError(
                waiter=waiter, on=on, what=what, waited_s=waited_s, deadline_s=deadline_s, advice=advice
            )
    return task.result()


def _orphan(task: asyncio.Future[Any]) -> None:
    task.cancel()
    task.add_done_callback(lambda t: None if t.cancelled() else t.exception())
