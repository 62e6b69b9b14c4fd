"""report.html and curve.png: complete, escaped, self-contained, and there for broken runs too."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headrace.monitor.charts import Series, line_chart, moving_average, stacked_chart, tick_text
from headrace.monitor.report import write_curve_png, write_report
from headrace.monitor.run_data import ReportError, load_run
from headrace.monitor.texts import shown
from headrace.record.episodes import EpisodeWriter, episode_record
from headrace.record.files import write_json_atomically
from headrace.record.metrics import MetricsWriter
from headrace.record.segments import SegmentWriter
from headrace.types import (
    AttemptKey,
    Episode,
    Outcome,
    PolicyVersion,
    Score,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
    VersionSpan,
)

HOSTILE = "<img src=x onerror=alert(1)></pre></style><script>alert(2)</script>\"'&\u202e"


def line(update: int, **extra: Any) -> dict[str, Any]:
    return {
        "time": 1e9 + 10 * update,
        "reward/mean": min(1.0, 0.1 * update),
        "reward/std": 0.4,
        "reward/num": 32,
        "policy/entropy_mean": 1.0 / (update + 1),
        "policy/logprob_gap_p95": 1e-6,
        "time/generation_s": 5.0,
        "time/train_s": 4.0,
        "health/alarms": [],
    } | extra


def episode(update: int, member: int, reply: str, **task: Any) -> Episode:
    n = 3
    policy = Segment(
        source=Source.POLICY,
        ids=(5,) * n,
        parent=0,
        logprobs=(-0.1,) * n,
        version_spans=(VersionSpan(PolicyVersion(0, update - 1), 0, n),),
    )
    return Episode(
        key=AttemptKey(update, member),
        task=Task(**{"id": f"t{update}", "messages": ({"role": "user", "content": "3 * 4 ="},), "answer": "12"} | task),
        turns=(Turn(reply=reply),),
        trace=Trace(segments=(Segment(source=Source.TEMPLATE, ids=(1,)), policy)),
        outcome=Outcome.DONE,
        score=Score(value=float(member % 2), components={"exact": float(member % 2)}),
        started_s=10.0,
        ended_s=12.5,
    )


def write_run(path: Path, lines: list[dict[str, Any]], episodes: list[Episode] = [], **info: Any) -> Path:  # noqa: B006
    path.mkdir(parents=True, exist_ok=True)
    config = {"model": {"path": "tiny"}, "trainer": {"num_batches": 12}, "monitor": {"episodes_in_report": 6}}
    write_json_atomically(path / "run.json", {"schema_version": 1, "name": "mul", "config": config} | info)
    metrics = MetricsWriter(path / "metrics.jsonl", 0)
    for update, metrics_line in enumerate(lines, 1):
        metrics.log(update, update, metrics_line)
    metrics.close()
    writer = EpisodeWriter(path / "episodes", 0)
    for one in episodes:
        writer.add(episode_record(one, lineage=0, update=one.key.group, status="trained"))
    writer.commit()
    writer.close()
    return path


class Page(HTMLParser):
    """What a browser would make of the page: its elements, attributes and text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.html = path.read_text()
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def report(path: Path) -> Page:
    return Page(write_report(path))


def test_report_shows_summary_curves_evaluations_and_episodes(tmp_path: Path) -> None:
    """What was run, before and after with intervals, curves, books, health, samples."""
    before = {"eval/sampled_accuracy": 0.2, "eval/sampled_low": 0.1, "eval/sampled_high": 0.35}
    after = {"eval/sampled_accuracy": 0.9, "eval/sampled_low": 0.85, "eval/sampled_high": 0.95, "eval/valid": 1.0}
    books = {"ledger/issued": 40, "ledger/trained": 32, "ledger/in_flight": 8, "ledger/dropped": 0, "ledger/failed": 0}
    lines = [line(1, **before), *(line(u) for u in range(2, 12)), line(12, **after, **books)]
    lines[4]["health/alarms"] = ["truncation: 95% of replies"]
    page = report(write_run(tmp_path / "r", lines, [episode(u, m, f"reply {u}") for u in (1, 6, 12) for m in (0, 1)]))
    for text in (
        "0.200 → 0.900",
        "the intervals do not touch",
        "12 of 12",
        "40 issued = 32 trained",
        "balanced",
        "truncation",
        "95% of replies",
        "reply 1",
        "reply 12",
        "Entropy",
        "Log-probability gap",
        "Time by phase",
        "3 tokens",
        "model tiny",
    ):
        assert text in page.text
    assert "NOT BALANCED" not in page.text and "INVALID" not in page.text
    assert page.html.count("<svg") == 4


def test_report_loads_nothing_from_outside_and_runs_no_script(tmp_path: Path) -> None:
    """Self-contained: no address, no reference, a policy that forbids scripts besides."""
    page = report(write_run(tmp_path / "r", [line(1), line(2)], [episode(1, 0, "x")]))
    assert not page.attributes & {"src", "href", "srcset", "data", "action"}
    assert not {"script", "link", "img", "iframe", "object", "base"} & page.tags
    assert "://" not in page.html and "url(" not in page.html and "@import" not in page.html
    assert "default-src 'none'; style-src 'unsafe-inline'" in page.html


def test_hostile_text_stays_text_wherever_it_stands(tmp_path: Path) -> None:
    """Model output, task text, names and messages are all somebody else's: none becomes markup."""
    attempt = episode(1, 0, HOSTILE, id=HOSTILE, messages=({"role": HOSTILE, "content": HOSTILE},), answer=HOSTILE)
    record = episode_record(attempt, lineage=0, update=1, status=f"failed:{HOSTILE}")
    record |= {"error": HOSTILE, "outcome": HOSTILE}
    record["score"] = {"value": 0.0, "components": {HOSTILE: 0.5}, "value_T": None}
    path = tmp_path / "r"
    metrics = line(1) | {"health/alarms": [f"{HOSTILE}: {HOSTILE}"], f"reward/component/{HOSTILE}": 0.5}
    metrics |= {f"ledger/dropped:{HOSTILE}": 1, "ledger/issued": 1, "ledger/dropped": 1}
    write_run(path, [metrics, metrics], name=HOSTILE, config={"model": {"path": HOSTILE}, HOSTILE: HOSTILE})
    writer = SegmentWriter(path / "episodes" / "lineage-0-000001.jsonl")
    writer.append(record)
    writer.commit()
    writer.close()
    page = report(path)
    assert page.text.count("<script>alert(2)</script>") >= 12
    assert not {"script", "img"} & page.tags
    assert not [name for name in page.attributes if name.startswith("on")]
    assert page.html.count("</style>") == 1
    assert "\u202e" not in page.html and "\\u{202e}" in page.html


def test_shown_spells_out_what_cannot_be_seen_and_cuts() -> None:
    """Direction changes, lone surrogates and control characters neither hide nor break the file."""
    assert shown("a\u202eb\x00\ud800\n\u200b") == "a\\u{202e}b\\u{0}\\u{d800}\n\\u{200b}"
    assert shown("<" * 10, limit=2) == "&lt;&lt; ... (8 more characters)"
    assert shown("12 = 36 ✓ 日本") == "12 = 36 ✓ 日本"


def test_a_run_without_batches_has_a_report(tmp_path: Path) -> None:
    """Killed at once, or not begun."""
    page = report(write_run(tmp_path / "r", []))
    assert "No batch was trained yet." in page.text and "0 of 12" in page.text


def test_a_killed_run_reports_up_to_its_last_complete_line(tmp_path: Path) -> None:
    """I11: the torn last line of a kill -9 is no error; values that were not finite leave gaps."""
    path = write_run(tmp_path / "r", [line(1), line(2, **{"train/loss": math.nan}), line(3)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 4, "lineage": 0, "rew')
    page = report(path)
    assert "3 of 12" in page.text
    assert "notice error" not in page.html


def test_damage_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    """A line that no kill can make: said at the top, not swallowed."""
    path = write_run(tmp_path / "r", [line(1), line(2)], [episode(1, 0, "x")])
    with (path / "metrics.jsonl").open("a") as file:
        file.write("garbage\n")
    (path / "run.json").unlink()
    page = report(path)
    assert "metrics.jsonl, line 3 is not JSON" in page.text
    assert "has no run.json" in page.text
    assert "Curves" in page.text


def test_a_folder_without_a_run_is_one_clear_error(tmp_path: Path) -> None:
    """One sentence that says what to do, and no file."""
    with pytest.raises(ReportError, match=r"holds no run.*give the folder of a run"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_lines_that_a_resume_took_back_are_gone_and_the_resume_is_marked(tmp_path: Path) -> None:
    """I11: the curve is that of the surviving lineage."""
    path = write_run(tmp_path / "r", [line(u) for u in (1, 2, 3, 4)])
    for lineage, checkpoint in ((0, None), (1, 2)):
        ledger = SegmentWriter(path / "ledger" / f"lineage-{lineage}.jsonl")
        ledger.append({"kind": "lineage", "lineage": lineage, "checkpoint_update": checkpoint})
        ledger.commit()
        ledger.close()
    metrics = MetricsWriter(path / "metrics.jsonl", 1)
    metrics.log(3, 3, line(3, **{"reward/mean": 0.77}))
    metrics.close()
    assert load_run(path).series("reward/mean") == ([1.0, 2.0, 3.0], [0.1, 0.2, 0.77])
    assert "resumed as lineage 1" in report(path).text


def test_evaluations_in_files_of_their_own_are_found(tmp_path: Path) -> None:
    """The evaluation before the first batch has no metrics line; where there is one, the line counts."""
    path = write_run(tmp_path / "r", [line(1), line(2, **{"eval/sampled_accuracy": 0.5})])
    (path / "evaluations").mkdir()
    for version, accuracy in (("0.0", 0.25), ("0.2", 0.99)):
        summary = {"eval/sampled_accuracy": accuracy, "problems": []}
        write_json_atomically(path / "evaluations" / f"version-{version}.json", {"summary": summary})
    (path / "evaluations" / "version-0.1.json").write_text("{}")
    run = load_run(path)
    assert run.series("eval/sampled_accuracy") == ([0.0, 2.0], [0.25, 0.5])
    assert run.problems and "version-0.1.json cannot be read" in run.problems[0]
    assert "0.250 → 0.500" in report(path).text


def test_overlapping_and_invalid_evaluations_are_said_to_be_so(tmp_path: Path) -> None:
    """F177: no claim inside the interval; an invalid result is shouted."""
    low = {"eval/sampled_accuracy": 0.3, "eval/sampled_low": 0.2, "eval/sampled_high": 0.5}
    high = {"eval/sampled_accuracy": 0.6, "eval/sampled_low": 0.45, "eval/sampled_high": 0.7, "eval/valid": 0.0}
    page = report(write_run(tmp_path / "r", [line(1, **low), line(2, **high)]))
    assert "the intervals overlap" in page.text
    assert "INVALID" in page.text


def test_books_that_do_not_balance_are_shouted(tmp_path: Path) -> None:
    """I10 in the report."""
    page = report(write_run(tmp_path / "r", [line(1, **{"ledger/issued": 9, "ledger/trained": 8})]))
    assert "NOT BALANCED" in page.text


def test_samples_come_from_early_middle_and_late_and_are_the_same_each_time(tmp_path: Path) -> None:
    """A seeded reservoir: six of 120 episodes, two for each part of the run."""
    episodes = [episode(u, m, f"reply {u}-{m}") for u in range(1, 31) for m in range(4)]
    path = write_run(tmp_path / "r", [line(u) for u in range(1, 31)], episodes)
    run = load_run(path)
    assert [e["phase"] for e in run.episodes] == ["early"] * 2 + ["middle"] * 2 + ["late"] * 2
    assert run.episodes == load_run(path).episodes
    assert [e["update"] <= 5 for e in run.episodes] == [True, True, False, False, False, False]
    assert run.statuses["trained"].num == 120
    assert run.statuses["trained"].num_tokens == 360


def test_curve_png_is_a_png_with_and_without_data(tmp_path: Path) -> None:
    """Also where a name looks like mathematics to matplotlib."""
    evaluation = {"eval/greedy_accuracy": 0.5, "eval/greedy_low": 0.4, "eval/greedy_high": 0.6}
    path = write_run(tmp_path / "a", [line(u, **evaluation) for u in range(1, 12)], name="$x_{")
    empty = write_run(tmp_path / "b", [])
    images = [write_curve_png(p).read_bytes() for p in (path, empty)]
    assert all(image.startswith(b"\x89PNG\r\n") for image in images)
    assert len(images[0]) > len(images[1]) > 5000
    assert images[0] == write_curve_png(path).read_bytes()


def test_charts_leave_gaps_and_survive_odd_values() -> None:
    """Constant, single, not finite, zero on a log axis, huge."""
    gap = line_chart([Series(name="a", x=[1, 2, 3, 4], y=[1.0, math.nan, 2.0, 3.0])])
    assert gap.count("<polyline") == 2 and "nan" not in gap
    assert line_chart([Series(name="a", x=[1], y=[math.nan])]) == ""
    assert line_chart([]) == "" and stacked_chart([], [], []) == ""
    for y in ([0.0, 0.0], [5.0, 5.0], [-1e9, 1e9], [1e-300, 1.0]):
        assert "nan" not in line_chart([Series(name="a", x=[1, 2], y=y)])
    log = line_chart([Series(name="a", x=[1, 2, 3], y=[0.0, 1e-6, 1e-3])], is_log=True)
    assert "1e-06" in log and "nan" not in log
    assert "&lt;b&gt;" in line_chart([Series(name="<b>", x=[1, 2], y=[1, 2])])
    assert stacked_chart(["a"], list(range(1000)), [[1.0] * 1000]).count("<rect") <= 120


def test_chart_numbers() -> None:
    """A centred mean does not lag; labels stay short."""
    assert moving_average([0.0, 3.0, 6.0, 3.0], 3) == [1.5, 3.0, 4.0, 4.5]
    assert [tick_text(v) for v in (0, 0.25, 5000, 2.5e6, 3e-6)] == ["0", "0.25", "5k", "2.5M", "3e-06"]
