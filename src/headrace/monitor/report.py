"""report.html: one file that shows a run to a person, with nothing loaded from outside.

Replies are hostile: a model can write markup, scripts and text-direction tricks. Everything that comes from a run
passes ``texts.shown``, and the page's content security policy forbids scripts and every outside resource besides.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import resources
from importlib.metadata import version
from pathlib import Path

from headrace.monitor.curve import write_curve_png
from headrace.monitor.report_charts import figures
from headrace.monitor.report_episodes import sample_episodes
from headrace.monitor.report_issued import issued_against_trained
from headrace.monitor.run_data import RunData, batch_of, load_run
from headrace.monitor.texts import duration, name_of, number, reward_text, shown
from headrace.record.run_dir import write_atomically

__all__ = ["write_curve_png", "write_report"]


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of the run in ``run_dir`` to ``out`` (``report.html`` in the run's folder) and return its path.

    Works on a run that goes on, was killed, or is damaged: what could not be read is named at the top.

    Raises:
        ReportError: there is no run in the folder.
        RecordError: the report cannot be written.
    """
    run = load_run(run_dir)
    path = run_dir / "report.html" if out is None else out
    write_atomically(path, _page(run).encode())
    return path


def _page(run: RunData) -> str:
    style = resources.files("headrace.monitor").joinpath("report.css").read_text()
    title = shown(run.info.get("name") or run.path.resolve().name)
    sections = [
        _header(run, title),
        "".join(f'<div class="notice error">{shown(p)}</div>' for p in run.problems),
        _cards(run),
        _health(run),
        "<h2>Curves</h2>" + figures(run) if run.lines else '<div class="notice warn">No batch was trained yet.</div>',
        _evaluations(run),
        _books(run),
        issued_against_trained(run),
        sample_episodes(run),
        _setup(run),
    ]
    written = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title} - headrace report</title><style>{style}</style></head><body><main>"
        + "".join(sections)
        + f"<footer>Written by headrace {version('headrace')}, {written}, from run.json, metrics.jsonl and episodes/. "
        "Points and bars show their numbers when the pointer rests on them.</footer></main></body></html>\n"
    )


# ------------------------------------------------------------------------------------------------ summary


def _header(run: RunData, title: str) -> str:
    algorithm = (
        run.setting("algorithm", "preset") or run.setting("algorithm", "name") or run.setting("algorithm", "type")
    )
    facts = [
        f"model {shown(run.setting('model', 'path'))}" if run.setting("model", "path") else "",
        f"algorithm {shown(algorithm)}" if algorithm else "",
        f"tasks {shown(run.setting('tasks', 'type'))}" if run.setting("tasks", "type") else "",
        f"seed {shown(run.setting('seed'))}" if run.setting("seed") is not None else "",
    ]
    return f'<h1>{title}</h1><div class="dim">{" &middot; ".join(f for f in facts if f)}</div>'


def _cards(run: RunData) -> str:
    cards = [_evaluation_card(run, "sampled"), _evaluation_card(run, "greedy"), _exact_card(run)]
    rewards = [line for line in run.lines if number(line, "reward/mean") is not None]
    if rewards:
        first, last = number(rewards[0], "reward/mean"), number(rewards[-1], "reward/mean")
        cards.append(
            _card("Training reward", f"{first:.3f} &rarr; {last:.3f}", f"last batch {shown(reward_text(rewards[-1]))}")
        )
    gaps = run.series("engine/gap_p99")[1]
    if gaps:
        note = f"nats, the largest 99th percentile of {len(gaps)} batches"
        cards.append(_card("Engine against trainer", f"{max(gaps):.1e}", note))
    done, planned = max((batch_of(line) for line in run.lines), default=0), run.setting("trainer", "num_batches")
    cards.append(_card("Batches", f"{done}" + (f" of {planned}" if planned else ""), _timing(run)))
    if run.statuses:
        total = sum(s.num for s in run.statuses.values())
        cards.append(_card("Episodes recorded", f"{total:,}", f"{_num_tasks(run):,} different tasks"))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(label: str, value: str, note: str) -> str:
    return f'<div class="card"><span class="label">{label}</span><b>{value}</b><span class="sub">{note}</span></div>'


def _num_tasks(run: RunData) -> int:
    return len(set[str]().union(*(s.tasks for s in run.statuses.values())))


def _timing(run: RunData) -> str:
    times = [t for line in run.lines if (t := number(line, "time")) is not None]
    started = number(run.info, "created_unix_s")
    if not times:
        return "not begun"
    return f"{duration(max(times) - (started if started is not None else min(times)))} since the start"


def _evaluation_card(run: RunData, mode: str) -> str:
    lines = [line for line in run.lines if number(line, f"eval/{mode}_accuracy") is not None]
    if not lines:
        return ""
    first, last = (
        [number(line, f"eval/{mode}_{n}") for n in ("accuracy", "low", "high")] for line in (lines[0], lines[-1])
    )
    label = f"Held-out, {mode}"
    if len(lines) == 1:
        return _card(label, f"{first[0]:.3f}", f"{_bounds(first)}, batch {batch_of(lines[0])}")
    note = f"{_bounds(first)} &rarr; {_bounds(last)}"
    if None not in (*first, *last):
        touch = first[1] <= last[2] and last[1] <= first[2]  # type: ignore[operator]
        note += "<br>the intervals overlap" if touch else "<br>the intervals do not touch"
    return _card(label, f"{first[0]:.3f} &rarr; {last[0]:.3f}", note)


def _bounds(values: Sequence[float | None]) -> str:
    return f"[{values[1]:.3f}, {values[2]:.3f}]" if None not in values else "no interval"


def _exact_card(run: RunData) -> str:
    x, y = run.series("eval/exact_format_accuracy")
    if not x:
        return ""
    value = f"{y[0]:.3f} &rarr; {y[-1]:.3f}" if len(y) > 1 else f"{y[0]:.3f}"
    return _card("Held-out, exact format", value, "the reply is the answer and nothing else")


# ------------------------------------------------------------------------------------------------- tables


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric_from: int = 1) -> str:
    """``rows`` hold HTML; columns from ``numeric_from`` on are aligned right."""

    def kind(index: int) -> str:
        return ' class="n"' if index >= numeric_from else ""

    head = "".join(f"<th{kind(i)}>{h}</th>" for i, h in enumerate(headings))
    body = "".join(f"<tr>{''.join(f'<td{kind(i)}>{c}</td>' for i, c in enumerate(row))}</tr>" for row in rows)
    return f'<div class="plain scroll"><table><tr>{head}</tr>{body}</table></div>'


def _health(run: RunData) -> str:
    found: dict[str, list[tuple[int, str]]] = {}
    for line in run.lines:
        for alarm in line.get("health/alarms") or ():
            found.setdefault(name_of(str(alarm)), []).append((batch_of(line), str(alarm).partition(":")[2].strip()))
    if not run.lines:
        return ""
    if not found:
        return '<h2>Health</h2><p><b class="good">No alarm was raised.</b></p>'
    last_batch = batch_of(run.lines[-1])
    rows = []
    for name, seen in found.items():
        is_on = seen[-1][0] == last_batch
        state = '<b class="bad">at the end</b>' if is_on else "passed"
        rows.append([f"<b>{shown(name)}</b>", shown(seen[-1][1]), str(seen[0][0]), str(len(seen)), state])
    return "<h2>Health</h2>" + _table(["alarm", "what, where, what to do", "since batch", "batches", ""], rows, 2)


def _evaluations(run: RunData) -> str:
    rows = []
    for line in run.lines:
        if not any(name.endswith("_accuracy") and name.startswith("eval/") for name in line):
            continue
        cells = []
        for key, ends in (("sampled", "sampled"), ("greedy", "greedy"), ("exact_format", "exact_format")):
            values = [number(line, f"eval/{n}") for n in (f"{key}_accuracy", f"{ends}_low", f"{ends}_high")]
            interval = f' <span class="dim">{_bounds(values)}</span>' if None not in values else ""
            cells.append("-" if values[0] is None else f"{values[0]:.3f}{interval}")
        scored, planned = number(line, "eval/num_scored"), number(line, "eval/num_planned")
        counts = f"{scored:.0f}/{planned:.0f}" if scored is not None and planned is not None else "-"
        valid = '<b class="bad">INVALID</b>' if number(line, "eval/valid") == 0.0 else ""
        rows.append([str(batch_of(line)), *cells, counts, valid])
    if not rows:
        return ""
    heads = ["batch", "sampled", "greedy", "exact format", "scored / planned", ""]
    return "<h2>Held-out evaluation</h2>" + _table(heads, rows)


def _books(run: RunData) -> str:
    counts: dict[str, float] = {}
    for line in run.lines:
        found = {
            k.removeprefix("ledger/"): v for k in line if k.startswith("ledger/") and (v := number(line, k)) is not None
        }
        counts = found or counts
    parts = []
    if counts:
        terms = ("trained", "trained_uncommitted", "dropped", "failed", "in_flight")
        total = sum(counts.get(t, 0.0) for t in terms)
        is_balanced = total == counts.get("issued", 0.0)
        verdict = '<b class="good">balanced</b>' if is_balanced else '<b class="bad">NOT BALANCED</b>'
        sums = " + ".join(f"{counts.get(t, 0):,.0f} {t.replace('_', ' ')}" for t in terms)
        details = ", ".join(f"{shown(k)}: {v:,.0f}" for k, v in counts.items() if ":" in k)
        parts.append(
            f"<p>Attempts over all lineages: {counts.get('issued', 0):,.0f} issued = {sums} ({verdict})."
            + (f" <span class=dim>{details}</span>" if details else "")
            + "</p>"
        )
    if run.statuses:
        rows = [
            [shown(s), f"{d.num:,}", f"{len(d.tasks):,}", f"{d.num_tokens / d.num:.1f}", f"{d.duration_s / d.num:.2f}"]
            for s, d in sorted(run.statuses.items(), key=lambda item: -item[1].num)
        ]
        heads = ["recorded episodes", "number", "tasks", "mean reply tokens", "mean seconds"]
        parts.append(_table(heads, rows))
    return "<h2>Books</h2>" + "".join(parts) if parts else ""


def _setup(run: RunData) -> str:
    facts = {k: v for k, v in run.info.items() if k not in ("config", "name", "schema_version")}
    parts = []
    for label, value in (("Resolved configuration", run.config), ("Seeds, packages, hardware, data", facts)):
        if value:
            text = shown(json.dumps(value, indent=2, default=str), 40_000)
            parts.append(f"<details><summary>{label}</summary><pre>{text}</pre></details>")
    return "<h2>Set-up</h2>" + "".join(parts) if parts else ""
