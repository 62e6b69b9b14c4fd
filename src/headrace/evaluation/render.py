"""Evaluation results as tables for the terminal (rich)."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from headrace.evaluation.result import Comparison, EvaluationResult, Mode
from headrace.evaluation.statistics import Interval


def result_table(results: Mapping[str, EvaluationResult], *, title: str = "Held-out evaluation") -> Table:
    """One row for each named result: sampled, greedy and exact-format accuracy with 95 % intervals, and the counts;
    where there is a gold standard, what it says of the sampled replies.

    What makes a result invalid is said in the caption: a table must not look better than its data.
    """
    table = Table(title=title, title_justify="left", caption_justify="left")
    has_gold = any(result.gold() is not None for result in results.values())
    for heading in ("", "policy", "sampled", "greedy", *(["gold"] if has_gold else []), "exact format", "scored"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    notes = []
    for name, result in results.items():
        mode: Mode = "sampled" if result.num_samples else "greedy"
        table.add_row(
            Text(name, style="bold"),
            ", ".join(map(str, result.versions)) or "-",
            _cell(result.accuracy("sampled")),
            _cell(result.accuracy("greedy")),
            *([_cell(result.gold())] if has_gold else []),
            _cell(result.exact_format(mode)),
            f"{result.num_scored}/{result.num_planned}",
            style=None if result.is_valid else "red",
        )
        notes += [f"INVALID {name}: {problem}" for problem in result.problems]
        if result.is_valid and result.errors:
            notes.append(f"{name}: {result.num_planned - result.num_scored} without score, excluded: {result.errors}")
    if notes:
        table.caption = Text("\n".join(notes), style="red")
    return table


def comparison_table(comparison: Comparison, first: str, second: str) -> Table:
    """Paired differences, ``second`` minus ``first``."""
    table = Table(title=f"{second} minus {first}, paired by task", title_justify="left", caption_justify="left")
    for heading in ("", "difference", "95 % interval", "p", "better", "worse", "tasks", "verdict"):
        table.add_column(heading, justify="left" if heading in ("", "verdict") else "right", no_wrap=True)
    rows = [("sampled", comparison.sampled), ("greedy", comparison.greedy)]
    rows += [("gold", comparison.gold)] if comparison.gold is not None else []
    for name, paired in rows:
        if paired is None:
            table.add_row(name, *["-"] * 6, "not measured on both sides")
            continue
        table.add_row(
            name,
            f"{paired.difference:+.3f}",
            f"[{paired.low:+.3f}, {paired.high:+.3f}]".replace("[", r"\["),
            f"{paired.p_value:.3g}",
            str(paired.num_better),
            str(paired.num_worse),
            str(paired.num_tasks),
            paired.verdict,
        )
    if comparison.problems:
        table.caption = Text("\n".join(f"INVALID {p}" for p in comparison.problems), style="red")
    return table


def _cell(interval: Interval | None) -> Text:
    return Text("-" if interval is None else str(interval))
