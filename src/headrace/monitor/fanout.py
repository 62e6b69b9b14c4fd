"""Feeds metrics to the sinks without ever making training wait or fail.

Each sink lives on a daemon thread of its own behind a bounded queue: it is made, used and closed there, since some
packages tie a run to the thread that started it. What happens to a sink:

==================  ========================================================================================
cannot start        :class:`SinkError` from :func:`build_sinks`, before any work
fails later         caught, counted, shown; disabled after ``MAX_FAILURES`` failures in a row
hangs               its queue fills, further lines are dropped and counted; shown as stalled
hangs at the end    :meth:`FanOut.close` waits for its deadline, then leaves the thread behind and says so
==================  ========================================================================================

metrics.jsonl is the truth: a dropped line can always be sent again from there.
"""

from __future__ import annotations

import contextlib
import difflib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from headrace.config.schema import MonitorConfig
from headrace.errors import HeadraceError
from headrace.monitor import sinks
from headrace.protocols import Clock, Sink

ENTRY_POINT_GROUP = "headrace.sinks"
MAX_FAILURES = 5
"""Failures in a row after which a sink is left alone."""
QUEUE_SIZE = 256
"""Lines that wait for a slow sink."""
START_DEADLINE_S = 120.0
STALLED_S = 60.0
"""A log call that has run for so long is shown as stalled."""

State = Literal["ok", "failing", "disabled", "stalled", "closed"]


class SinkError(HeadraceError):
    """A sink that cannot start: unknown, not installed, refused by its package, or too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkHealth:
    """How one sink fares. Counts are of lines."""

    name: str
    state: State
    num_logged: int
    num_failed: int
    num_dropped: int
    last_error: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.state in ("ok", "closed") and not self.num_failed and not self.num_dropped

    def __str__(self) -> str:
        text = f"sink {self.name}: {self.state}, {self.num_logged} lines logged"
        if self.num_failed:
            text += f", {self.num_failed} failed (last: {self.last_error})"
        elif self.last_error:
            text += f" ({self.last_error})"
        return text + (f", {self.num_dropped} dropped" if self.num_dropped else "")


class _Worker:
    """One sink, its thread and its queue."""

    def __init__(
        self, name: str, make: Callable[[], Sink], *, queue_size: int, max_failures: int, clock: Clock
    ) -> None:
        self.name = name
        self._make, self._max_failures, self._clock = make, max_failures, clock
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(queue_size)
        self._started = threading.Event()
        self._closing = threading.Event()
        self._start_error: BaseException | None = None
        self._busy_since_s: float | None = None
        self._num_logged = self._num_failed = self._num_dropped = self._num_in_a_row = 0
        self._last_error: str | None = None
        self._is_disabled = False
        self._thread = threading.Thread(target=self._run, name=f"sink {name}", daemon=True)
        self._thread.start()

    def wait_started(self, deadline_s: float) -> None:
        """Raises the sink's own start error, or SinkError after the deadline."""
        if not self._started.wait(deadline_s):
            raise SinkError(
                f"the sink '{self.name}' did not start within {deadline_s:g} s; is its server reachable? Take it out "
                "of monitor.sinks, or set it to work offline in monitor.sink_options"
            )
        if self._start_error is not None:
            raise self._start_error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._is_disabled:
            self._num_dropped += 1
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._num_dropped += 1

    def ask_to_close(self) -> None:
        self._closing.set()
        # The thread looks at the event after each line; where the queue is full it needs no nudge.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def join(self, deadline_s: float) -> None:
        # A sink that never started holds no lines: it closes itself, should it start after all.
        if self._started.is_set():
            self._thread.join(max(0.0, deadline_s))

    def health(self) -> SinkHealth:
        return SinkHealth(
            name=self.name,
            state=self._state(),
            num_logged=self._num_logged,
            num_failed=self._num_failed,
            num_dropped=self._num_dropped + self._num_abandoned(),
            last_error=self._last_error,
        )

    def _num_abandoned(self) -> int:
        """Queued lines that nobody will write any more."""
        if not self._is_disabled and not self._closing.is_set():
            return 0
        with self._queue.mutex:
            return sum(item is not None for item in self._queue.queue)

    def _state(self) -> State:
        busy_since_s = self._busy_since_s
        if self._is_disabled:
            return "disabled"
        if not self._thread.is_alive():
            return "closed"
        if busy_since_s is not None and (self._closing.is_set() or self._clock() - busy_since_s > STALLED_S):
            return "stalled"
        return "failing" if self._num_in_a_row else "ok"

    def _run(self) -> None:
        try:
            sink = self._make()
        except BaseException as error:  # Nothing stands above a thread: hand it to wait_started.
            self._start_error = error
            self._started.set()
            return
        self._started.set()
        try:
            self._serve(sink)
        finally:
            self._close(sink)

    def _serve(self, sink: Sink) -> None:
        while not self._is_disabled:
            try:
                item = self._queue.get(block=not self._closing.is_set())
            except queue.Empty:
                return
            if item is None:
                continue
            self._busy_since_s = self._clock()
            try:
                sink.log(*item)
            except BaseException as error:
                self._count_failure(error)
            else:
                self._num_logged += 1
                self._num_in_a_row = 0
            self._busy_since_s = None

    def _count_failure(self, error: BaseException) -> None:
        self._num_failed += 1
        self._num_in_a_row += 1
        self._last_error = f"{type(error).__name__}: {error}"
        if self._num_in_a_row >= self._max_failures:
            self._is_disabled = True

    def _close(self, sink: Sink) -> None:
        self._busy_since_s = self._clock()
        try:
            sink.close()
        except BaseException as error:
            self._num_failed += 1
            self._last_error = f"at close: {type(error).__name__}: {error}"
        self._busy_since_s = None


class FanOut:
    """All sinks of a run. Every method returns at once, except :meth:`close`, which has a deadline."""

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Sink]],
        *,
        queue_size: int = QUEUE_SIZE,
        max_failures: int = MAX_FAILURES,
        start_deadline_s: float = START_DEADLINE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        self._is_closed = False
        self._workers = [
            _Worker(name, make, queue_size=queue_size, max_failures=max_failures, clock=clock)
            for name, make in makers.items()
        ]
        try:
            for worker in self._workers:
                worker.wait_started(start_deadline_s)
        except BaseException:
            self.close(deadline_s=5.0)
            raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Queue the numbers of a line for every sink; what is not a number (alarm lists, texts) is left out."""
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float)) and k != "step"}
        for worker in self._workers:
            worker.log(step, numbers)

    def health(self) -> list[SinkHealth]:
        """One entry for each sink, in order."""
        return [worker.health() for worker in self._workers]

    def metrics(self) -> dict[str, float]:
        """Totals for metrics.jsonl; empty where there are no sinks."""
        entries = self.health()
        if not entries:
            return {}
        return {
            "sinks/failed": float(sum(e.num_failed for e in entries)),
            "sinks/dropped": float(sum(e.num_dropped for e in entries)),
            "sinks/disabled": float(sum(e.state == "disabled" for e in entries)),
        }

    def close(self, deadline_s: float = 15.0) -> list[SinkHealth]:
        """Let the sinks write what is queued, all within one deadline; returns their last health."""
        if not self._is_closed:
            self._is_closed = True
            ends_s = time.monotonic() + deadline_s
            for worker in self._workers:
                worker.ask_to_close()
            for worker in self._workers:
                worker.join(ends_s - time.monotonic())
        return self.health()


def build_sinks(config: MonitorConfig, run_dir: Path, run_name: str, resolved_config: Mapping[str, Any]) -> FanOut:
    """Start the sinks that ``config.sinks`` names; ``resolved_config`` must have its secrets redacted already.

    Third parties add sinks through the entry-point group ``headrace.sinks``: a callable
    ``(run_dir, run_name, config, **options) -> Sink``.

    Raises:
        SinkError: unknown or repeated names, options of a sink that is not on, a missing package, a failed start.
    """
    _check_names(config)
    makers = {
        name: _maker(name, run_dir, run_name, resolved_config, config.sink_options.get(name, {}))
        for name in config.sinks
    }
    return FanOut(makers)


def _check_names(config: MonitorConfig) -> None:
    known = [*sinks.BUILT_IN, *sorted(metadata.entry_points(group=ENTRY_POINT_GROUP).names)]
    for name in config.sinks:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(known)}"
            raise SinkError(f"monitor.sinks: there is no sink '{name}'{hint}")
        if config.sinks.count(name) > 1:
            raise SinkError(f"monitor.sinks names '{name}' twice; name it once")
    for name in config.sink_options:
        if name not in config.sinks:
            raise SinkError(
                f"monitor.sink_options.{name} has no effect: '{name}' is not in monitor.sinks "
                f"({_listed(config.sinks)}); add it there or remove the options (I20)"
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "which is empty"


def _maker(
    name: str, run_dir: Path, run_name: str, resolved_config: Mapping[str, Any], options: Mapping[str, Any]
) -> Callable[[], Sink]:
    def make() -> Sink:
        built_in = sinks.BUILT_IN.get(name)
        try:
            if built_in is not None:
                return built_in.factory(run_dir, run_name, resolved_config, **options)
            (entry_point,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
            sink: Sink = entry_point.load()(run_dir, run_name, resolved_config, **options)
            return sink
        except ModuleNotFoundError as error:
            if built_in is None or (error.name or "").split(".")[0] != built_in.package:
                raise SinkError(f"the sink '{name}' could not start: {error}") from error
            raise SinkError(
                f"the sink '{name}' needs the package {built_in.package}, which is not installed: "
                f"pip install 'headrace[{name}]'"
            ) from error
        except Exception as error:
            raise SinkError(
                f"the sink '{name}' could not start: {type(error).__name__}: {error}. Mend it, change "
                f"monitor.sink_options.{name}, or take it out of monitor.sinks"
            ) from error

    return make
