"""The report's figures: which metrics go into which chart."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.monitor.charts import Series, legend, line_chart, moving_average, stacked_chart
from headrace.monitor.run_data import RunData, batch_of
from headrace.monitor.texts import number, reward_interval, shown

_SMOOTH = 7
"""Batches of the reward's moving average."""


def figures(run: RunData) -> str:
    """All charts that have data, the reward curve first."""
    parts = [
        _reward(run),
        _lines(run, "Reply length", "tokens that the policy sampled, by whether the reply was right",
               [("all", "episode/length_mean", 6), ("right", "episode/length_right_mean", 3),
                ("wrong", "episode/length_wrong_mean", 5)]),
        _lines(run, "Entropy", "nats a token, of the distribution that was sampled from",
               [("entropy", "policy/entropy_mean", 4)]),
        _lines(run, "Log-probability gap", "|trainer - engine| in nats, before the batch's first step; log scale",
               [("median", "policy/logprob_gap_p50", 1), ("95 %", "policy/logprob_gap_p95", 2),
                ("largest", "policy/logprob_gap_max", 5)], is_log=True),
        _lines(run, "Engine against trainer", "gap in nats of tokens that both scored with the same weights; log scale",
               [("canary, largest", "canary/max_gap", 6), ("99 % of trained tokens", "engine/gap_p99", 1),
                ("largest", "engine/gap_max", 2),
                ("99 % after a switch in flight", "engine/in_flight_gap_p99", 5)], is_log=True),
        _lines(run, "Shares", "of replies, groups and attempts",
               [("truncated replies", "episode/truncated_share", 2),
                ("groups without variance", "reward/zero_variance_share", 1),
                ("distinct replies in a group", "episode/distinct_reply_share", 3),
                ("attempts without score", "score/error_share", 5)], y_range=(0.0, 1.02)),
        _components(run),
        _times(run),
        _lines(run, "Throughput", "tokens a second while the phase computes",
               [("generation", "rate/generated_tokens_per_s", 1), ("training", "rate/trained_tokens_per_s", 2)]),
        _lines(run, "Staleness", "age of the trained tokens, in policy versions",
               [("mean", "staleness/mean", 1), ("largest", "staleness/max", 6)]),
        _lines(run, "Clipping", "share of trained tokens whose ratio was clipped or out of bounds",
               [("clipped low", "policy/clip_low_share", 1), ("clipped high", "policy/clip_high_share", 2),
                ("outside the trust bounds", "policy/ratio_outside_share", 5)]),
        _lines(run, "Gradient norm", "before clipping", [("gradient norm", "train/grad_norm", 1)]),
        _lines(run, "Loss", "its size means little in policy gradients; jumps do", [("loss", "train/loss", 6)]),
        _lines(run, "Learning rate", "at the batch's last step", [("learning rate", "train/learning_rate", 6)]),
    ]  # fmt: skip
    return f'<div class="charts">{"".join(parts)}</div>'


def _figure(title: str, caption: str, keys: Sequence[tuple[str, int]], svg: str, *, is_wide: bool = False) -> str:
    if not svg:
        return ""
    names = f'<div class="keys">{legend(keys)}</div>' if len(keys) > 1 else ""
    return (
        f"<figure{' class=wide' if is_wide else ''}><h3>{shown(title)}</h3>"
        f"<figcaption>{shown(caption)}</figcaption>{names}{svg}</figure>"
    )


def _marks(run: RunData) -> list[tuple[float, str]]:
    """Where a resume opened a new lineage."""
    found = []
    for before, after in zip(run.lines, run.lines[1:], strict=False):
        if before.get("lineage") != after.get("lineage"):
            found.append((float(batch_of(after)), f"resumed as lineage {after.get('lineage')}"))
    return found


def _reward(run: RunData) -> str:
    x, y = run.series("reward/mean")
    bounds = {batch_of(line): reward_interval(line) for line in run.lines}
    pairs = [bounds.get(int(batch)) or (value, value) for batch, value in zip(x, y, strict=True)]
    low, high = [p[0] for p in pairs], [p[1] for p in pairs]
    series = []
    keys = [("batch mean with 95 % interval", 1)]
    if x:
        is_smoothed = len(x) > _SMOOTH
        series.append(
            Series(name="reward", x=x, y=y, low=low, high=high, style="faint" if is_smoothed else "line", colour=1)
        )
        if is_smoothed:
            keys.append((f"mean of {_SMOOTH} batches", 1))
            series.append(Series(name=f"mean of {_SMOOTH} batches", x=x, y=moving_average(y, _SMOOTH), colour=1))
    for name, mode, colour in (("held-out, sampled", "sampled", 2), ("held-out, greedy", "greedy", 3)):
        ex, ey = run.series(f"eval/{mode}_accuracy")
        if ex:
            ends = [run.series(f"eval/{mode}_{end}")[1] for end in ("low", "high")]
            has_ends = all(len(end) == len(ex) for end in ends)
            series.append(
                Series(
                    name=name,
                    x=ex,
                    y=ey,
                    low=ends[0] if has_ends else (),
                    high=ends[1] if has_ends else (),
                    colour=colour,
                    style="dots",
                )
            )
            keys.append((name, colour))
    svg = line_chart(series, marks=_marks(run), width=1080, height=330)
    caption = "training reward by rollout batch, and held-out accuracy with 95 % intervals clustered by task"
    return _figure("Reward", caption, keys, svg, is_wide=True)


def _lines(
    run: RunData,
    title: str,
    caption: str,
    metrics: Sequence[tuple[str, str, int]],
    *,
    is_log: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    series = []
    for name, metric, colour in metrics:
        x, y = run.series(metric)
        if x:
            series.append(Series(name=name, x=x, y=y, colour=colour))
    svg = line_chart(series, is_log=is_log, y_range=y_range, marks=_marks(run))
    return _figure(title, caption, [(s.name, s.colour) for s in series], svg)


def _components(run: RunData) -> str:
    prefix = "reward/component/"
    names = sorted({name for line in run.lines for name in line if name.startswith(prefix)})[:6]
    metrics = [(name.removeprefix(prefix), name, i % 6 + 1) for i, name in enumerate(names)]
    return _lines(run, "Reward components", "mean of each named part, before weighting", metrics)


def _times(run: RunData) -> str:
    # With the loop's own three phases the bars add up to the batch; a phase's computing time may overlap others.
    parts = [("gather rollouts", "time/gather_s"), ("train", "time/train_s"), ("publish", "time/publish_s")]
    if not run.series("time/gather_s")[0]:
        parts = [("generation", "time/generation_s"), ("reward", "time/reward_s"), *parts[1:]]
    lines = [line for line in run.lines if any(number(line, key) is not None for _, key in parts)]
    present = [(name, key) for name, key in parts if any(number(line, key) is not None for line in lines)]
    values = [[number(line, key) or 0.0 for line in lines] for _, key in present]
    svg = stacked_chart([n for n, _ in present], [float(batch_of(line)) for line in lines], values)
    keys = [(name, i + 1) for i, (name, _) in enumerate(present)]
    return _figure("Time by phase", "seconds a batch", keys, svg)
