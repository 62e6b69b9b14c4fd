"""From steps to figures, and from rounds to medians and ratios: what versus_trl.py reports, as plain arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from versus_sides import has_reached

Step = Mapping[str, float]


def rates(steps: Sequence[Step], num_warm_up: int) -> dict[str, float]:
    """Sums over the steps after the warm-up, divided once: wall seconds reach from the end of the last warm-up step
    to the end of the last step, so that nothing between two steps (data, books, logging) is left out."""
    counted = steps[num_warm_up:]
    started_s = steps[num_warm_up - 1]["end_s"] if num_warm_up else 0.0
    wall_s = counted[-1]["end_s"] - started_s

    def total(name: str) -> float:
        return sum(step[name] for step in counted)

    num_samples, generated = total("num_samples"), total("num_tokens")
    generation_s, training_s = total("generation_s"), total("training_s")
    # headrace's canary generates a few tokens that nobody trains on; its generation_s has their time, too
    trained = sum(step.get("num_trained_tokens", step["num_tokens"]) for step in counted)
    figures = {
        "samples_per_s": num_samples / wall_s,
        "tokens_per_s": trained / wall_s,
        "generation_tokens_per_s": generated / generation_s,
        "training_tokens_per_s": trained / training_s,
        "tokens_per_sample": trained / num_samples,
        "step_s": wall_s / len(counted),
        "generation_s": generation_s / len(counted),
        "training_s": training_s / len(counted),
        "other_s": (wall_s - generation_s - training_s) / len(counted),
    }
    if "forward_s" in counted[0]:
        for name in ("forward_s", "backward_and_step_s"):
            figures[name] = total(name) / len(counted)
    return figures


def time_to_level(steps: Sequence[Step], level: float) -> dict[str, float | bool]:
    """Seconds and steps until the mean reward of three successive steps is above ``level``; where it never is, those
    of the whole run, with ``reached`` false."""
    rewards = [step["reward"] for step in steps]
    num_steps = next((n for n in range(1, len(steps) + 1) if has_reached(rewards[:n], level)), None)
    last = len(steps) if num_steps is None else num_steps
    seconds = steps[last - 1]["end_s"]
    return {"seconds": seconds, "num_steps": last, "reached": num_steps is not None, "step_s": seconds / last}


def summary(rounds: Sequence[Mapping[str, Any]], target: float) -> dict[str, Any]:
    """Rounds with their ratios, medians of both, and the verdict. The ratio says how many times faster headrace is."""
    is_timed = "seconds" in rounds[0]["trl"]
    ratios = [_time_ratio(r) if is_timed else _speed_ratio(r, "samples_per_s") for r in rounds]
    known = [ratio for ratio in ratios if ratio is not None]
    ratio = statistics.median(known) if len(known) == len(ratios) else None
    result: dict[str, Any] = {
        "rounds": [{**r, "ratio": value} for r, value in zip(rounds, ratios, strict=True)],
        "median": {side: _medians([r[side] for r in rounds]) for side in ("headrace", "trl")},
        "ratio": ratio,
        "target": target,
        "met": ratio is not None and ratio >= target,
    }
    if not is_timed:
        names = ("tokens_per_s", "generation_tokens_per_s", "training_tokens_per_s")
        result["token_ratios"] = {n: statistics.median(_speed_ratio(r, n) for r in rounds) for n in names}
    memory = [r["headrace"]["peak_memory_bytes"] / r["trl"]["peak_memory_bytes"] for r in rounds]
    result["peak_memory_ratio"] = statistics.median(memory)
    return result


def _speed_ratio(one_round: Mapping[str, Any], name: str) -> float:
    return float(one_round["headrace"][name] / one_round["trl"][name])


def _time_ratio(one_round: Mapping[str, Any]) -> float | None:
    """None where headrace did not get there. Where TRL alone did not, a lower bound: its whole run."""
    if not one_round["headrace"]["reached"]:
        return None
    return float(one_round["trl"]["seconds"] / one_round["headrace"]["seconds"])


def _medians(figures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = [n for n, v in figures[0].items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return {name: statistics.median(figure[name] for figure in figures) for name in names}
