"""The report's section on what was trained against what was issued (I9; failure 98)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from headrace.monitor.report_issued import cumulative_gap, issued_against_trained, quantile
from headrace.monitor.run_data import RunData, StatusSummary, _count


def summary(lengths: dict[float, int], tasks: dict[str, int] | None = None, seconds: float = 1.0) -> StatusSummary:
    num = sum(lengths.values())
    return StatusSummary(
        num=num, lengths=Counter(lengths), durations=Counter({seconds: num}), tasks=Counter(tasks or {"t": num})
    )


def page(**statuses: StatusSummary) -> str:
    return issued_against_trained(RunData(Path("run"), statuses=dict(statuses)))


def test_a_run_that_drops_what_is_long_is_told_so() -> None:
    """Failure 98: 100 short ones trained, 50 long ones dropped as stale: their tokens and seconds stand beside."""
    text = page(trained=summary({10.0: 100}), stale=summary({200.0: 50}, seconds=30.0))
    assert "The run trains on other episodes than it issued" in text
    assert "at most 33.3% by length and 33.3% by time" in text
    assert (
        "all that were issued and ended</td><td class=n>150</td><td class=n>10</td><td class=n>10</td><td class=n>200"
        in text
    )


def test_a_run_that_trains_all_is_told_so() -> None:
    text = page(trained=summary({10.0: 100}))
    assert "Close to each other" in text
    assert "Every recorded episode of every task was trained." in text


def test_a_handful_of_episodes_is_no_evidence() -> None:
    """Below 50 trained episodes a gap is shown, not judged."""
    assert "Close to each other" in page(trained=summary({10.0: 49}), stale=summary({200.0: 49}))
    assert "other episodes" in page(trained=summary({10.0: 50}), stale=summary({200.0: 50}))


def test_tasks_that_are_never_trained_come_first() -> None:
    """By task: a task that always fails is starved, whatever the totals say. Names are shown, never interpreted."""
    text = page(
        trained=summary({5.0: 6}, {"easy": 4, "half": 2}),
        failed=summary({5.0: 5}, {"<b>hard</b>": 3, "half": 2}),
    )
    assert "of 3 (never: 1)" in text
    assert "<b>hard" not in text
    assert text.index("hard") < text.index("half</td>")
    assert "easy</td>" not in text


def test_nothing_trained_makes_no_section() -> None:
    assert page() == ""
    assert page(failed=summary({5.0: 3})) == ""


@pytest.mark.parametrize(
    ("first", "second", "gap"),
    [({1: 1}, {1: 7}, 0.0), ({1: 1}, {2: 1}, 1.0), ({1: 1, 2: 1}, {1: 1, 3: 1}, 0.5), ({}, {1: 1}, 0.0)],
)
def test_the_gap_is_that_of_the_cumulative_shares(
    first: dict[float, int], second: dict[float, int], gap: float
) -> None:
    assert cumulative_gap(first, second) == pytest.approx(gap)
    assert cumulative_gap(second, first) == pytest.approx(gap)


def test_quantiles_are_values_that_occurred() -> None:
    counts = {1.0: 1, 2.0: 8, 9.0: 1}
    assert [quantile(counts, q) for q in (0.1, 0.11, 0.5, 0.9, 0.91, 1.0)] == [1.0, 2.0, 2.0, 2.0, 9.0, 9.0]


def test_episodes_are_counted_at_two_digits() -> None:
    """So that a million episodes need no million entries."""
    statuses: dict[str, StatusSummary] = {}
    for seconds in (1.234, 1.239, 12.3):
        episode = {
            "status": "trained",
            "task_id": "t",
            "started_s": 0.0,
            "ended_s": seconds,
            "segment_sources": ["template", "policy"],
            "segment_lengths": [3, 1234],
        }
        _count(statuses, episode)
    found = statuses["trained"]
    assert found.durations == {1.2: 2, 12.0: 1}
    assert found.lengths == {1200.0: 3}
    assert (found.num, found.num_tokens, found.tasks) == (3, 3702, {"t": 3})
