"""What was trained against what was issued (I9): by length, by time, by task.

A run that drops what is late or fails what is long trains on another distribution than it sampled from (failure 98).
Nothing of that shows in a loss; it shows here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.monitor.run_data import RunData, StatusSummary
from headrace.monitor.texts import shown

TRAINED = "trained"
QUANTILES = (0.1, 0.5, 0.9, 0.99)
MAX_GAP = 0.1
"""Largest difference of two cumulative shares that is not marked."""
MIN_EPISODES = 50
"""Below, a gap is as likely chance."""
NUM_TASKS = 10


def issued_against_trained(run: RunData) -> str:
    """HTML; empty where nothing was trained."""
    trained = run.statuses.get(TRAINED)
    if trained is None or not trained.num:
        return ""
    rows = [_row("all that were issued and ended", run.statuses.values()), _row("trained", [trained])]
    for status, summary in sorted(run.statuses.items(), key=lambda item: -item[1].num):
        if status != TRAINED:
            rows.append(_row(status, [summary]))
    quantiles = [f"{q:.0%}" for q in QUANTILES]
    heads = ["episodes", "number", *(f"tokens {q}" for q in quantiles), *(f"seconds {q}" for q in quantiles)]
    return "<h2>Trained against issued</h2>" + _verdict(run, trained) + _table(heads, rows) + _tasks(run, trained)


def cumulative_gap(first: Mapping[float, int], second: Mapping[float, int]) -> float:
    """Largest difference of the two cumulative shares (Kolmogorov-Smirnov's distance), 0 to 1."""
    totals = sum(first.values()), sum(second.values())
    if not all(totals):
        return 0.0
    gap = share = other = 0.0
    for value in sorted({*first, *second}):
        share += first.get(value, 0) / totals[0]
        other += second.get(value, 0) / totals[1]
        gap = max(gap, abs(share - other))
    return gap


def quantile(counts: Mapping[float, int], share: float) -> float:
    """The smallest value that at least ``share`` of all are not above."""
    needed, seen = share * sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= needed:
            return value
    return 0.0


def _merged(counts: Iterable[Counter[float]]) -> Counter[float]:
    total: Counter[float] = Counter()
    for some in counts:
        total.update(some)
    return total


def _row(name: str, summaries: Iterable[StatusSummary]) -> list[str]:
    summaries = list(summaries)
    lengths, durations = _merged(s.lengths for s in summaries), _merged(s.durations for s in summaries)
    cells = [f"{quantile(lengths, q):g}" for q in QUANTILES] + [f"{quantile(durations, q):g}" for q in QUANTILES]
    return [shown(name), f"{sum(s.num for s in summaries):,}", *cells]


def _verdict(run: RunData, trained: StatusSummary) -> str:
    issued = list(run.statuses.values())
    parts, is_apart = [], False
    for name, gap in (
        ("length", cumulative_gap(_merged(s.lengths for s in issued), trained.lengths)),
        ("time", cumulative_gap(_merged(s.durations for s in issued), trained.durations)),
    ):
        is_apart |= gap > MAX_GAP and trained.num >= MIN_EPISODES
        parts.append(f"{gap:.1%} by {name}")
    verdict = (
        '<b class="bad">The run trains on other episodes than it issued</b>' if is_apart else "Close to each other"
    )
    return f"<p>{verdict}: the cumulative shares differ by at most {' and '.join(parts)}.</p>"


def _tasks(run: RunData, trained: StatusSummary) -> str:
    """The tasks whose episodes are trained least often."""
    issued: Counter[str] = Counter()
    for summary in run.statuses.values():
        issued.update(summary.tasks)
    share = {task: trained.tasks[task] / num for task, num in issued.items()}
    least = sorted((task for task in issued if share[task] < 1.0), key=lambda t: (share[t], -issued[t], t))
    if not least:
        return "<p>Every recorded episode of every task was trained.</p>"
    never = sum(share[task] == 0.0 for task in issued)
    rows = [[shown(t), f"{issued[t]:,}", f"{trained.tasks[t]:,}", f"{share[t]:.0%}"] for t in least[:NUM_TASKS]]
    note = f"<p>Tasks whose episodes were trained least, of {len(issued):,} (never: {never:,}):</p>"
    return note + _table(["task", "issued", "trained", "share"], rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` hold HTML; all columns but the first are aligned right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f"<{tag}{' class=n' if i else ''}>{v}</{tag}>" for i, v in enumerate(values))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="plain scroll"><table><tr>{cells("th", headings)}</tr>{body}</table></div>'
