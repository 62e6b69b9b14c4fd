"""Terminal progress: what it says, on a terminal and in a log, and that it never raises."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from headrace.monitor.progress import Progress
from headrace.monitor.texts import duration, evaluation_text, reward_interval

LINE: dict[str, Any] = {
    "step": 3,
    "reward/mean": 0.4375,
    "reward/std": 0.5,
    "reward/num": 64,
    "rate/generated_tokens_per_s": 812.4,
    "rate/trained_tokens_per_s": 2104.0,
    "staleness/mean": 0.5,
    "staleness/max": 2.0,
    "time/step_s": 60.0,
}


def make(
    *, is_terminal: bool = False, now_s: list[float] | None = None, enabled: bool = True
) -> tuple[Progress, StringIO]:
    out, times = StringIO(), now_s or [0.0]
    console = Console(file=out, force_terminal=is_terminal, width=200, highlight=False)
    progress = Progress(10, title="run mul", enabled=enabled, console=console, clock=lambda: times[0])
    progress.start()
    return progress, out


def test_a_log_gets_one_plain_line_a_batch() -> None:
    """CI logs: reward with interval, rates by phase, staleness, ETA, health; no control codes."""
    progress, out = make()
    progress.update({}, phase="generation")
    progress.update(LINE)
    progress.stop()
    title, line = out.getvalue().splitlines()
    assert title == "run mul"
    assert line == (
        "batch 3/10  reward 0.438 [0.315, 0.560]  generation 812 tok/s  training 2,104 tok/s  "
        "staleness 0.50, at most 2  ETA 7 min 0 s  health ok"
    )


def test_a_terminal_shows_what_is_waited_for() -> None:
    """I19: the live display names the phase and how long it has lasted."""
    now_s = [0.0]
    progress, out = make(is_terminal=True, now_s=now_s)
    progress.update(LINE, phase="reward of 3 episodes")
    now_s[0] = 75.0
    progress.stop()
    assert "reward of 3 episodes (1 min 15 s)" in out.getvalue()
    assert "0.438 [0.315, 0.560]" in out.getvalue()


def test_an_alarm_is_told_in_full_once_and_named_while_it_lasts() -> None:
    """Health is on the screen, without repeating a paragraph each batch; model text is not read as markup."""
    progress, out = make()
    for step in (1, 2):
        progress.update(LINE | {"step": step, "health/alarms": ["truncation: 95% of [red]replies"]})
    progress.update(LINE | {"health/alarms": []})
    text = out.getvalue()
    assert text.count("health, batch 1: truncation: 95% of [red]replies") == 1
    assert text.count("health truncation") == 2
    assert text.rstrip().endswith("health ok")


def test_lost_sink_lines_and_evaluations_are_shown() -> None:
    """A sink that fails is seen; so is a held-out evaluation, and that it is invalid."""
    progress, out = make()
    evaluation = {"eval/sampled_accuracy": 0.5, "eval/sampled_low": 0.4, "eval/sampled_high": 0.6, "eval/valid": 0.0}
    progress.update(LINE | evaluation | {"sinks/failed": 2.0, "sinks/dropped": 1.0})
    assert "sinks lost 3 lines" in out.getvalue()
    assert "batch 3: held-out sampled 0.500 [0.400, 0.600], INVALID" in out.getvalue()


class ClosedPipe(StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("pipe is closed")


def test_a_broken_display_never_reaches_training_and_is_told_at_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """Display reasons end no run (`headrace train | head`), but they are not swallowed."""
    progress = Progress(10, title="t", console=Console(file=ClosedPipe(), force_terminal=False))
    progress.start()
    progress.update(LINE)
    progress.note("x")
    progress.stop()
    assert progress.num_errors >= 1
    assert f"the progress display failed {progress.num_errors} times" in capsys.readouterr().err


def test_metrics_of_the_wrong_type_are_no_error() -> None:
    """Null is how metrics.jsonl writes a number that is not finite."""
    progress, out = make()
    progress.update({"step": 1, "reward/mean": None, "staleness/mean": "x", "rate/generated_tokens_per_s": None})
    assert "batch 1/10  reward -" in out.getvalue()
    assert progress.num_errors == 0


def test_disabled_progress_prints_notes_only() -> None:
    """monitor.progress = false."""
    progress, out = make(enabled=False)
    progress.update(LINE)
    progress.note("checkpoint 10")
    progress.stop()
    assert out.getvalue() == "checkpoint 10\n"


def test_texts() -> None:
    """Recorded interval first; durations in a person's units."""
    assert reward_interval({"reward/mean": 0.5, "reward/low": 0.1, "reward/high": 0.9}) == (0.1, 0.9)
    assert reward_interval({"reward/mean": 0.5}) is None
    assert [duration(s) for s in (3.2, 200, 7500, None)] == ["3 s", "3 min 20 s", "2 h 5 min", "-"]
    assert evaluation_text({"reward/mean": 1.0}) == ""
