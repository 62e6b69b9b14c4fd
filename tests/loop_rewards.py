"""Reward functions of the loop's tests; each runs in a worker process, as a user's function does."""

from __future__ import annotations

import math
import time
from typing import Any


def exact(answer: str, task: Any) -> float:
    return float(answer.strip() == task.answer)


def fails_on_some(answer: str, task: Any) -> float:
    """Raises for one reply in four or so, decided by the reply."""
    if sum(answer.encode()) % 4 == 0:
        raise ValueError(f"cannot read {answer!r}")
    return exact(answer, task)


def hangs_on_some(answer: str, task: Any) -> float:
    """Sleeps for ever for one reply in eight or so."""
    if sum(answer.encode()) % 8 == 0:
        time.sleep(3600)
    return exact(answer, task)


def hangs(answer: str, task: Any) -> float:
    time.sleep(3600)
    return 0.0


def nan_on_some(answer: str, task: Any) -> float:
    return math.nan if sum(answer.encode()) % 4 == 0 else exact(answer, task)


def too_large_on_some(answer: str, task: Any) -> float:
    return 7.0 if sum(answer.encode()) % 4 == 0 else exact(answer, task)


def always_raises(answer: str, task: Any) -> float:
    raise KeyError("no such thing")


def slow(answer: str, task: Any) -> float:
    time.sleep(0.005)
    return exact(answer, task)
