"""What a fleet tells about itself: spans, events, counters that outlive the engines that made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from headrace.control.engine_states import Change
from headrace.control.router import Dispatch, WaitCause
from headrace.engines.fleet.member import Member, name_of
from headrace.protocols import Clock, EngineStats

OnSpan = Callable[..., None]
"""(actor, what, start_s, end_s, **ids), as ``SpanWriter.add``."""
OnEvent = Callable[[str], None]

_OF_NOW = frozenset({"num_running", "num_waiting", "max_running", "kv_used_tokens", "kv_total_tokens"})
"""Statistics that are no counters."""
_COUNTED = ("num_deaths", "num_starts", "num_continued", "num_begun_again")


class Tally:
    """``on_event``: told of starts and deaths, for a person."""

    def __init__(self, clock: Clock, on_span: OnSpan | None, on_event: OnEvent | None) -> None:
        self._clock = clock
        self._on_span = on_span
        self._on_event = on_event
        self._counts: Counter[str] = Counter()
        self._waited_s: dict[WaitCause, float] = {}
        self._of_the_dead = EngineStats()

    def event(self, text: str, count: str | None = None) -> None:
        if count is not None:
            self._counts[count] += 1
        if self._on_event is not None:
            self._on_event(text)

    def span(self, actor: str, what: str, start_s: float, **ids: Any) -> None:
        """Until now."""
        if self._on_span is not None:
            self._on_span(actor, what, start_s, self._clock(), **ids)

    def state_changed(self, change: Change) -> None:
        """On the timeline, each state as long as it lasted."""
        ids = {"incarnation": change.incarnation, "then": str(change.new), "why": change.why}
        self.span(name_of(change.index), str(change.old), change.since_s, **ids)

    def waited(self, dispatch: Dispatch) -> None:
        now_s = self._clock()
        for cause, waited_s in dispatch.waited_s.items():
            self._waited_s[cause] = self._waited_s.get(cause, 0.0) + waited_s
            self.span("router", f"wait {cause}", now_s - waited_s, request=dispatch.id)

    def cut_short(self, request_id: str, num_tokens: int) -> None:
        """A request lost its engine: it goes on with so many tokens, or starts again with the same seed."""
        how = "num_continued" if num_tokens else "num_begun_again"
        self._counts[how] += 1
        self.span("fleet", how.removeprefix("num_"), self._clock(), request=request_id, num_tokens=num_tokens)

    def bury(self, member: Member) -> None:
        """Its counters go on counting."""
        counters = {name: value for name, value in _values(member.stats()).items() if name not in _OF_NOW}
        added = {name: getattr(self._of_the_dead, name) + value for name, value in counters.items()}
        self._of_the_dead = replace(self._of_the_dead, **added)

    def stats(self, members: Iterable[Member], num_waiting: int) -> EngineStats:
        """Sums over all engines that there have been; what is there now, of ``members``."""
        total = _values(self._of_the_dead)
        for member in members:
            for name, value in _values(member.stats()).items():
                total[name] += value
        total["num_waiting"] += num_waiting
        return EngineStats(**total)

    def batch_metrics(self, members: Iterable[Member], num_serving: int) -> Mapping[str, float]:
        """Since this was last asked: deaths and starts, for how long requests had no engine and why, and for how long
        each engine computed."""
        counts, self._counts = self._counts, Counter()
        waited_s, self._waited_s = self._waited_s, {}
        metrics = {"fleet/num_serving": float(num_serving)}
        metrics |= {f"fleet/{name}": float(counts[name]) for name in _COUNTED}
        metrics |= {f"wait/engine_{cause}_s": waited_s.get(cause, 0.0) for cause in WaitCause}
        return metrics | {f"busy/{member.name}_s": member.busy_since_asked_s() for member in members}


def _values(stats: EngineStats) -> dict[str, Any]:
    return {f.name: getattr(stats, f.name) for f in fields(EngineStats)}
