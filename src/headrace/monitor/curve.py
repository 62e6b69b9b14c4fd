"""The reward curve as a PNG, for a README or a message. matplotlib is imported inside, with its Agg back end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from headrace.monitor.charts import moving_average
from headrace.monitor.run_data import RunData, batch_of, load_run
from headrace.monitor.texts import reward_interval
from headrace.record.run_dir import write_atomically

_SMOOTH = 7


def write_curve_png(run_dir: Path, out: Path | None = None) -> Path:
    """Write the reward with its 95 % interval, and the held-out accuracies, to ``curve.png`` in the run's folder (or
    ``out``); returns the path.

    Raises:
        ReportError: there is no run in the folder.
    """
    # Without pyplot: no global state, no display, and no back end of the user's changed.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    run = load_run(run_dir, with_episodes=False)
    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_reward(axes, run)
    _draw_evaluations(axes, run)
    axes.set_xlabel("rollout batch")
    axes.set_ylabel("reward, accuracy")
    axes.set_title(str(run.info.get("name") or run_dir.resolve().name), loc="left", fontweight="bold", parse_math=False)
    axes.grid(True, color="#e2e3e0", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, "no batch was trained yet", ha="center", transform=axes.transAxes, color="#62686f")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    path = run_dir / "curve.png" if out is None else out
    write_atomically(path, buffer.getvalue())
    return path


def _draw_reward(axes: Any, run: RunData) -> None:
    x, y = run.series("reward/mean")
    if not x:
        return
    bounds = {batch_of(line): reward_interval(line) for line in run.lines}
    pairs = [bounds.get(int(batch)) or (value, value) for batch, value in zip(x, y, strict=True)]
    axes.fill_between(x, [p[0] for p in pairs], [p[1] for p in pairs], color="#2563c9", alpha=0.15, linewidth=0)
    is_smoothed = len(x) > _SMOOTH
    label = "training reward (95 % interval)"
    axes.plot(x, y, color="#2563c9", linewidth=1 if is_smoothed else 2, alpha=0.5 if is_smoothed else 1, label=label)
    if is_smoothed:
        axes.plot(x, moving_average(y, _SMOOTH), color="#2563c9", linewidth=2.2, label=f"mean of {_SMOOTH} batches")


def _draw_evaluations(axes: Any, run: RunData) -> None:
    for mode, colour in (("sampled", "#d1661b"), ("greedy", "#2b8a4b")):
        x, y = run.series(f"eval/{mode}_accuracy")
        if not x:
            continue
        low, high = (run.series(f"eval/{mode}_{end}")[1] for end in ("low", "high"))
        errors = None
        if len(low) == len(high) == len(x):
            errors = [[v - b for v, b in zip(y, low, strict=True)], [b - v for v, b in zip(y, high, strict=True)]]
        axes.errorbar(x, y, yerr=errors, fmt="o", color=colour, capsize=3, markersize=6, label=f"held-out, {mode}")
