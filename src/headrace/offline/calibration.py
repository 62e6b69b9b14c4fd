"""How far a reward model's probabilities can be believed: reliability bins, expected calibration error, a plot."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.evaluation.statistics import wilson
from headrace.record.files import write_atomically

NUM_BINS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Pairs whose confidence lies in [low, high): ``confidence`` and ``accuracy`` are their means, with Wilson's
    interval of the accuracy."""

    low: float
    high: float
    num: int
    confidence: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Reliability of held-out pairs."""

    bins: tuple[Bin, ...]
    """Those that hold a pair."""
    ece: float
    """Expected calibration error (Guo et al. 2017, eq. 3): mean of |accuracy - confidence| over pairs, by bins."""
    num: int


def calibrate(differences: Sequence[float], num_bins: int = NUM_BINS) -> Calibration:
    """From score(chosen) - score(rejected) of each held-out pair. The model says 'the better-scored side wins' with
    confidence sigmoid(|difference|), between 1/2 and 1; it is right where the difference is above 0, and half right
    at 0. Raises ValueError without pairs."""
    if not differences:
        raise ValueError("calibration needs at least one held-out pair")
    width = 0.5 / num_bins
    members: dict[int, list[tuple[float, float]]] = {}
    for d in differences:
        confidence = 1 / (1 + math.exp(-min(abs(d), 700.0)))
        right = 1.0 if d > 0 else 0.5 if d == 0 else 0.0
        place = min(int((confidence - 0.5) / width), num_bins - 1)
        members.setdefault(place, []).append((confidence, right))
    bins = []
    for place, pairs in sorted(members.items()):
        accuracy = sum(right for _, right in pairs) / len(pairs)
        low, high = wilson(accuracy, len(pairs))
        bins.append(
            Bin(
                low=0.5 + place * width,
                high=0.5 + (place + 1) * width,
                num=len(pairs),
                confidence=sum(c for c, _ in pairs) / len(pairs),
                accuracy=accuracy,
                accuracy_low=low,
                accuracy_high=high,
            )
        )
    ece = sum(b.num * abs(b.accuracy - b.confidence) for b in bins) / len(differences)
    return Calibration(bins=tuple(bins), ece=ece, num=len(differences))


def write_calibration(calibration: Calibration, folder: Path) -> None:
    """``calibration.json`` and ``calibration.png``."""
    write_atomically(folder / "calibration.json", json.dumps(asdict(calibration), indent=1).encode())
    write_atomically(folder / "calibration.png", _plot(calibration))


def _plot(calibration: Calibration) -> bytes:
    # Without pyplot: no global state and no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0.5, 1], [0.5, 1], color="#9aa0a6", linestyle="--", linewidth=1, label="perfectly calibrated")
    bins = calibration.bins
    below = [max(0.0, b.accuracy - b.accuracy_low) for b in bins]
    above = [max(0.0, b.accuracy_high - b.accuracy) for b in bins]
    x, y = [b.confidence for b in bins], [b.accuracy for b in bins]
    axes.errorbar(
        x, y, yerr=[below, above], fmt="o-", color="#2563c9", capsize=3, label="held-out pairs, 95 % interval"
    )
    for b in bins:
        axes.annotate(str(b.num), (b.confidence, b.accuracy), textcoords="offset points", xytext=(4, -12), fontsize=7)
    axes.set_xlim(0.48, 1.02)
    axes.set_xlabel("confidence that the better-scored reply wins")
    axes.set_ylabel("share of pairs where it did")
    axes.set_title(f"ECE {calibration.ece:.3f} over {calibration.num} pairs", loc="left", fontweight="bold")
    axes.legend(frameon=False, loc="best")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
