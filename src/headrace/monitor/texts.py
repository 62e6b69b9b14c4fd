"""How metrics read in words: shared by the terminal and the report."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

_MAX_TEXT = 6000
"""Characters of one message or reply in a report; the rest is in the record."""


def number(metrics: Mapping[str, Any], name: str) -> float | None:
    """The metric as a float; None where it is missing, null or no number."""
    value = metrics.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def reward_interval(metrics: Mapping[str, Any]) -> tuple[float, float] | None:
    """95 % interval of the batch's mean reward: as recorded, else mean +- 1.96 std / sqrt(num)."""
    low, high = number(metrics, "reward/low"), number(metrics, "reward/high")
    if low is not None and high is not None:
        return low, high
    mean, std, num = (number(metrics, f"reward/{n}") for n in ("mean", "std", "num"))
    if mean is None or std is None or not num:
        return None
    half = 1.96 * std / math.sqrt(num)
    return mean - half, mean + half


def reward_text(metrics: Mapping[str, Any]) -> str:
    mean, interval = number(metrics, "reward/mean"), reward_interval(metrics)
    if mean is None:
        return "-"
    return f"{mean:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def evaluation_text(metrics: Mapping[str, Any]) -> str:
    """Held-out accuracies with intervals; empty where the batch was not evaluated."""
    parts = []
    for mode in ("sampled", "greedy"):
        mean = number(metrics, f"eval/{mode}_accuracy")
        if mean is not None:
            low, high = number(metrics, f"eval/{mode}_low"), number(metrics, f"eval/{mode}_high")
            interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
            parts.append(f"{mode} {mean:.3f}{interval}")
    exact = number(metrics, "eval/exact_format_accuracy")
    if exact is not None:
        parts.append(f"exact format {exact:.3f}")
    if parts and number(metrics, "eval/valid") == 0.0:
        parts.append("INVALID")
    return ", ".join(parts)


def duration(seconds: float | None) -> str:
    """'12 s', '3 min 20 s', '2 h 5 min'."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def name_of(alarm: str) -> str:
    """The check's name in a recorded alarm, ``"name: message"``."""
    return alarm.partition(":")[0]


def shown(value: Any, limit: int = _MAX_TEXT) -> str:
    """``value`` as HTML text: markup escaped, invisible and direction-changing characters spelled out, cut at
    ``limit`` characters."""
    text = str(value)
    cut = f" ... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
    return html.escape("".join(map(_visible, text[:limit]))) + cut


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return character
    return f"\\u{{{ord(character):x}}}"
