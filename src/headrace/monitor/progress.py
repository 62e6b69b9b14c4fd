"""Live progress in the terminal; one plain line a batch where there is none (logs, pipes).

A display must not end a run: whatever goes wrong in here is counted, and told once at the end.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.monitor.texts import duration, evaluation_text, name_of, number, reward_text
from headrace.protocols import Clock

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 40
_NUM_TIMES = 20
"""Batches whose median time the estimate of the rest rests on."""


class Progress:
    """What the loop tells the user. Thread-safe enough for one writer.

    Example::

        progress = Progress(num_batches=100, title="run mul-1")
        progress.start()
        progress.update({}, phase="generation")
        progress.update({"step": 1, "reward/mean": 0.4, "reward/std": 0.5, "reward/num": 64})
        progress.stop()

    With ``enabled`` off nothing but notes is printed.
    """

    def __init__(
        self,
        num_batches: int,
        *,
        title: str = "",
        enabled: bool = True,
        console: Console | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._num_batches, self._title, self._enabled, self._clock = num_batches, title, enabled, clock
        self._console = console if console is not None else Console(highlight=False)
        self._is_live = enabled and self._console.is_terminal
        self._live: Live | None = None
        self._metrics: dict[str, Any] = {}
        self._step = 0
        self._phase = ""
        self._phase_since_s = self._last_step_s = clock()
        self._durations_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._rewards: deque[float] = deque(maxlen=_NUM_BARS)
        self._alarms: list[str] = []
        self.num_errors = 0
        """Display failures so far."""
        self._last_error = ""

    def start(self) -> None:
        self._guard(self._start)

    def update(self, metrics: Mapping[str, Any], phase: str | None = None) -> None:
        """A finished batch, with ``step`` among its metrics, or (without) only a change of phase."""
        self._guard(lambda: self._update(metrics, phase))

    def note(self, text: str) -> None:
        """One line for the user to keep: an alarm, a checkpoint, an evaluation."""
        self._guard(lambda: self._console.print(Text(text), soft_wrap=True))

    def stop(self) -> None:
        """Leave the last state on the screen, and say whether the display itself failed."""
        live, self._live = self._live, None
        if live is not None:
            self._guard(live.stop)
        if self.num_errors:
            message = f"the progress display failed {self.num_errors} times (last: {self._last_error}); the run did not"
            self._guard(lambda: print(message, file=sys.stderr))

    # -------------------------------------------------------------------------------------- inside

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (Exception, SystemExit) as error:  # rich answers a closed pipe with SystemExit
            self.num_errors += 1
            self._last_error = f"{type(error).__name__}: {error}"

    def _start(self) -> None:
        self._phase_since_s = self._last_step_s = self._clock()
        if self._is_live:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2, transient=False)
            self._live.start()
        elif self._enabled and self._title:
            self._console.print(Text(self._title), soft_wrap=True)

    def _update(self, metrics: Mapping[str, Any], phase: str | None) -> None:
        if phase is not None and phase != self._phase:
            self._phase, self._phase_since_s = phase, self._clock()
        if "step" not in metrics:
            return
        now_s = self._clock()
        self._durations_s.append(number(metrics, "time/step_s") or now_s - self._last_step_s)
        self._last_step_s = now_s
        self._metrics, self._step = dict(metrics), int(metrics["step"])
        reward = number(metrics, "reward/mean")
        if reward is not None:
            self._rewards.append(reward)
        known = {name_of(a) for a in self._alarms}
        self._alarms = list(metrics.get("health/alarms") or ())
        if self._enabled and not self._is_live:
            self._console.print(Text(self._line()), soft_wrap=True)
        for alarm in self._alarms:
            # Told in full when it starts; after that the health line names it while it lasts.
            if name_of(alarm) not in known:
                self.note(f"health, batch {self._step}: {alarm}")
        evaluation = evaluation_text(metrics)
        if evaluation:
            self.note(f"batch {self._step}: held-out {evaluation}")

    def _line(self) -> str:
        parts = [f"batch {self._step}/{self._num_batches}", f"reward {reward_text(self._metrics)}"]
        parts += [f"{name} {value}" for name, value in self._rates()]
        if self._eta_s() is not None:
            parts.append(f"ETA {duration(self._eta_s())}")
        return "  ".join([*parts, f"health {self._health_text()}"])

    def _rates(self) -> list[tuple[str, str]]:
        found = []
        for name, key in (("generation", "rate/generated_tokens_per_s"), ("training", "rate/trained_tokens_per_s")):
            rate = number(self._metrics, key)
            if rate is not None:
                found.append((name, f"{rate:,.0f} tok/s"))
        if number(self._metrics, "staleness/mean") is not None:
            oldest = number(self._metrics, "staleness/max") or 0.0
            found.append(("staleness", f"{self._metrics['staleness/mean']:.2f}, at most {oldest:.0f}"))
        return found

    def _health_text(self) -> str:
        troubles = [name_of(a) for a in self._alarms]
        lost = (number(self._metrics, "sinks/failed") or 0) + (number(self._metrics, "sinks/dropped") or 0)
        if lost:
            troubles.append(f"sinks lost {lost:.0f} lines")
        return ", ".join(troubles) if troubles else "ok"

    def _eta_s(self) -> float | None:
        if not self._durations_s:
            return None
        return median(self._durations_s) * max(0, self._num_batches - self._step)

    def _render(self) -> RenderableType:
        """Called by rich's own refresh thread, where an exception would end the display in a traceback."""
        try:
            return self._panel()
        except Exception as error:
            self.num_errors += 1
            self._last_error = f"{type(error).__name__}: {error}"
            return Text(f"batch {self._step}/{self._num_batches}")

    def _panel(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._title or "headrace", style="bold"),
            ProgressBar(total=self._num_batches, completed=self._step, width=30),
            Text(f"batch {self._step}/{self._num_batches}"),
            Text(f"ETA {duration(self._eta_s())}", style="dim"),
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim", min_width=10)
        body.add_column()
        body.add_row("reward", Text.assemble((reward_text(self._metrics), "bold"), "  ", (self._sparkline(), "cyan")))
        for name, value in self._rates():
            body.add_row(name, value)
        waiting_s = self._clock() - self._phase_since_s
        if self._phase:
            body.add_row("now", Text(f"{self._phase} ({duration(waiting_s)})"))
        is_ok = self._health_text() == "ok"
        body.add_row("health", Text(self._health_text(), style="green" if is_ok else "bold red"))
        return Group(head, body)

    def _sparkline(self) -> str:
        if len(self._rewards) < 2 or not self._console.encoding.startswith("utf"):
            return ""
        finite = [r for r in self._rewards if math.isfinite(r)]
        low, high = min(finite, default=0.0), max(finite, default=0.0)
        scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
        return "".join(_BARS[round((r - low) * scale)] for r in finite)
