"""Learning rate as a function of the optimizer step, and of nothing else (F69, F115)."""

from __future__ import annotations

import math

from headrace.config.base import ScheduleConfig


def learning_rate(peak: float, schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """The rate of optimizer step ``step`` (the first is 0) in a run of ``num_steps`` steps.

    Warm-up rises linearly and reaches ``peak`` at its last step; with w warm-up steps, step s < w has
    peak * (s + 1) / w. After it linear and cosine fall towards peak * final_fraction, which they would reach at
    step ``num_steps``; so no step of the run has a rate of 0 unless the peak is. Steps beyond the end keep that rate.
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.type == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    remaining = 1 - progress if schedule.type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * remaining)
