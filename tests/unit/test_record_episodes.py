"""Episodes, metrics and spans on disk: equal from both forms, dead branches told apart (I1, I11; failures 51, 179)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from headrace.record import episodes as episodes_module
from headrace.record.episodes import EpisodeWriter, episode_from_record, episode_record, read_episodes
from headrace.record.files import RecordError
from headrace.record.metrics import MetricsWriter, read_metrics
from headrace.record.spans import SpanWriter, busy_s, overlap_s, read_spans
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Outcome,
    PolicyVersion,
    Sample,
    Score,
    ScoreError,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
    VersionSpan,
)

TASK = Task(
    id="mul-3x4", messages=({"role": "user", "content": "3 * 4 = é"},), answer={"a": [12]}, metadata={"k": 1}, seed=3
)


def forked_trace() -> Trace:
    """Two branches share the first reply; versions change in the middle of it; ids are sampled from kept sets."""

    def reply(parent: int, *ids: int) -> Segment:
        spans = (VersionSpan(PolicyVersion(0, 4), 0, 1), VersionSpan(PolicyVersion(1, 5), 1, len(ids)))
        return Segment(
            source=Source.POLICY,
            ids=ids,
            parent=parent,
            logprobs=tuple(-1 / (3 * i) for i in ids),
            version_spans=spans,
            kept_ids=tuple((i, i + 1) for i in ids),
        )

    return Trace(
        segments=(
            Segment(source=Source.TEMPLATE, ids=(1, 2)),
            reply(0, 7, 8),
            Segment(source=Source.ENVIRONMENT, ids=(5,), parent=1),
            reply(2, 9, 3),
            Segment(source=Source.TEMPLATE, ids=(), parent=1),
            reply(4, 6, 2),
        )
    )


FULL = Episode(
    key=AttemptKey(4, 1, 2),
    task=TASK,
    turns=(Turn(reply="12", observation=({"role": "tool", "content": "ok"},), generation_s=0.5), Turn(reply="done")),
    trace=forked_trace(),
    outcome=Outcome.DONE,
    score=Score(value=1.0, components={"exact": 1.0}, value_T=(0.1,) * 6),
    issued_version=PolicyVersion(1, 4),
    started_s=1.25,
    ended_s=2.5,
    policy_seed=2**63 + 5,
)
FAILED = Episode(
    key=AttemptKey(5, 0),
    task=TASK,
    turns=(),
    trace=Trace(),
    outcome=Outcome.INFRASTRUCTURE_ERROR,
    error="the engine died",
)
UNJUDGED = Episode(
    key=AttemptKey(5, 1),
    task=TASK,
    turns=(Turn(reply="?"),),
    trace=Trace(segments=(Segment(source=Source.TEMPLATE, ids=(1,)),)),
    outcome=Outcome.DONE,
    score=ScoreError(error_class=ErrorClass.TIMEOUT, message="slow", reward="math"),
)


def branch_sample(number: int, ids: tuple[int, ...], mask: tuple[int, ...]) -> Sample:
    return Sample(
        id=f"g4m1r2/{number}",
        key=FULL.key,
        ids=ids,
        mask=mask,
        behaviour_logprobs=(0.0,) * len(ids),
        versions=(None,) * len(ids),
    )


SAMPLES = (
    branch_sample(0, (1, 2, 7, 8, 5, 9, 3), (0, 0, 1, 1, 0, 1, 1)),
    branch_sample(1, (1, 2, 7, 8, 6, 2), (0, 0, 0, 0, 1, 1)),
)


def records(lineage: int = 0, update: int = 1) -> Iterator[dict[str, object]]:
    yield episode_record(
        FULL,
        lineage=lineage,
        update=update,
        status="trained",
        samples=SAMPLES,
        trainer_logprobs=[[0, 0, -0.1, -0.2, 0, -0.3, -0.4], [0, 0, 0, 0, -0.5, -0.6]],
        advantages=[[0, 0, 1, 1, 0, 2, 2], [0, 0, 0, 0, 3, 3]],
    )
    yield episode_record(FAILED, lineage=lineage, update=update, status="failed:infrastructure_error")
    yield episode_record(UNJUDGED, lineage=lineage, update=update, status="failed:timeout")


def fork(run: Path, *updates: int | None) -> None:
    (run / "ledger").mkdir()
    for n, update in enumerate(updates):
        line = json.dumps({"kind": "lineage", "lineage": n, "checkpoint_update": update})
        (run / "ledger" / f"lineage-{n}.jsonl").write_text(line + "\n")


def test_per_token_values_land_on_their_trace_ids() -> None:
    """Failure 51: values of two samples that share a reply come back to the trace's places, joined by branch."""
    record = next(records())
    assert record["ids"] == [1, 2, 7, 8, 5, 9, 3, 6, 2]
    assert record["mask"] == [0, 0, 1, 1, 0, 1, 1, 1, 1]
    assert record["trainer_logprobs"] == [None, None, -0.1, -0.2, None, -0.3, -0.4, -0.5, -0.6]
    assert record["advantages"] == [None, None, 1, 1, None, 2, 2, 3, 3]


def test_values_that_do_not_fit_are_refused() -> None:
    """A list of another length is never cut or padded."""
    with pytest.raises(RecordError, match="1 values for 7 ids"):
        episode_record(FULL, lineage=0, update=1, status="trained", samples=SAMPLES[:1], advantages=[[1.0]])


@pytest.mark.parametrize("episode", [FULL, FAILED, UNJUDGED], ids=["full", "failed", "unjudged"])
@pytest.mark.parametrize("compacted", [False, True], ids=["jsonl", "parquet"])
def test_episode_comes_back_token_by_token(tmp_path: Path, episode: Episode, compacted: bool) -> None:
    """I1, replay: ids, sources, tree, versions, log-probabilities and kept ids, exact in both forms."""
    writer = EpisodeWriter(tmp_path / "episodes", 0)
    writer.add(episode_record(episode, lineage=0, update=1, status="trained"))
    if compacted:
        writer.compact(writer.rotate())
    writer.close()
    (record,) = read_episodes(tmp_path)
    assert episode_from_record(record) == episode


def test_both_forms_read_alike_and_in_order(tmp_path: Path) -> None:
    """Compaction changes the file, not what is read; later episodes go to a new segment."""
    writer = EpisodeWriter(tmp_path / "episodes", 0)
    for record in records():
        writer.add(record)
    writer.commit()
    before = list(read_episodes(tmp_path))
    writer.compact(writer.rotate())
    assert [p.suffix for p in (tmp_path / "episodes").glob("lineage*")] == [".parquet"]
    assert list(read_episodes(tmp_path)) == before
    for record in records(update=2):
        writer.add(record)
    writer.close()
    assert [r["update"] for r in read_episodes(tmp_path)] == [1, 1, 1, 2, 2, 2]


def test_a_kill_between_rename_and_removal_doubles_nothing(tmp_path: Path) -> None:
    """I11: with both forms there, each episode is read once, and the next compaction clears up."""
    writer = EpisodeWriter(tmp_path / "episodes", 0)
    for record in records():
        writer.add(record)
    writer.close()
    (segment,) = (tmp_path / "episodes").glob("*.jsonl")
    text = segment.read_bytes()
    writer.compact(writer.rotate())
    segment.write_bytes(text)
    (tmp_path / "episodes" / "lineage-0-000001.parquet.tmp").write_bytes(b"half")
    assert len(list(read_episodes(tmp_path))) == 3
    again = EpisodeWriter(tmp_path / "episodes", 0)
    again.compact(again.rotate())
    assert len(list(read_episodes(tmp_path))) == 3
    names = [p.name for p in (tmp_path / "episodes").iterdir() if not p.name.startswith(".")]
    assert names == ["lineage-0-000000.parquet"]


def test_full_disk_while_compacting_keeps_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure 143: a clear error, and the JSON lines still hold everything."""
    writer = EpisodeWriter(tmp_path / "episodes", 0)
    for record in records():
        writer.add(record)
    writer.commit()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(episodes_module, "fsync_file", full)
    with pytest.raises(RecordError, match=r"compacting episodes to .*the disk is full"):
        writer.compact(writer.rotate())
    assert len(list(read_episodes(tmp_path))) == 3
    assert not list((tmp_path / "episodes").glob("*.tmp"))


def test_episodes_of_a_dead_branch_are_told_apart(tmp_path: Path) -> None:
    """I11: lineage 1 started from checkpoint 1, so update 2 of lineage 0 is dead, whatever form it lies in."""
    for lineage, updates in ((0, (1, 2)), (1, (2, 3))):
        writer = EpisodeWriter(tmp_path / "episodes", lineage)
        for update in updates:
            for record in records(lineage, update):
                writer.add(record)
            if lineage == 0:
                writer.compact(writer.rotate())
        writer.close()
    fork(tmp_path, None, 1)
    assert [(r["lineage"], r["update"]) for r in read_episodes(tmp_path)][::3] == [(0, 1), (1, 2), (1, 3)]
    every = list(read_episodes(tmp_path, surviving=False))
    assert [r["survives"] for r in every][::3] == [True, False, True, True]


def test_odd_answers_are_written_as_text(tmp_path: Path) -> None:
    """A third party's answer type must not end the run."""
    task = Task(id="t", messages=(), answer=Fraction(1, 3), metadata={"k": {3}})
    odd = Episode(key=AttemptKey(0, 0), task=task, turns=(), trace=Trace(), outcome=Outcome.DONE)
    writer = EpisodeWriter(tmp_path / "episodes", 0)
    writer.add(episode_record(odd, lineage=0, update=1, status="trained"))
    writer.close()
    (record,) = read_episodes(tmp_path)
    assert (record["answer"], record["metadata"]) == ("1/3", {"k": "{3}"})


def test_a_run_without_episodes_reads_as_none(tmp_path: Path) -> None:
    """Readers meet a run that has just begun."""
    assert list(read_episodes(tmp_path)) == []
    assert list(read_metrics(tmp_path)) == []
    assert list(read_spans(tmp_path)) == []


def test_metrics_of_rolled_back_updates_are_recognisable(tmp_path: Path) -> None:
    """I11: one file for all lineages; the surviving chain has each update once."""
    for lineage, updates in ((0, (1, 2, 3)), (1, (3, 4))):
        writer = MetricsWriter(tmp_path / "metrics.jsonl", lineage)
        for update in updates:
            writer.log(update, 2 * update, {"reward": update / 8})
        writer.close()
    fork(tmp_path, None, 2)
    assert [(m["lineage"], m["update"]) for m in read_metrics(tmp_path)] == [(0, 1), (0, 2), (1, 3), (1, 4)]
    assert [m["reward"] for m in read_metrics(tmp_path, surviving=False)] == [0.125, 0.25, 0.375, 0.375, 0.5]


def test_metrics_stay_plain_json_when_a_number_is_not(tmp_path: Path) -> None:
    """Failure 58: a NaN is written as null and named, so that every reader can read the line."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl", 0)
    writer.log(1, 1, {"loss": math.nan, "norm": math.inf, "reward": 0.5, "note": "x"})
    with pytest.raises(RecordError, match="cannot be called step"):
        writer.log(2, 2, {"step": 3.0})
    writer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert line == {
        "update": 1, "step": 1, "lineage": 0, "loss": None, "norm": None, "reward": 0.5, "note": "x",
        "non_finite": {"loss": "nan", "norm": "inf"},
    }  # fmt: skip


def span(actor: str, start_s: float, end_s: float) -> dict[str, object]:
    return {"actor": actor, "start_s": start_s, "end_s": end_s}


@pytest.mark.parametrize(
    ("engine", "trainer", "overlap"),
    [
        ([(0, 10)], [(4, 6)], 2),
        ([(0, 4), (2, 6)], [(3, 5)], 2),  # own overlapping spans count once
        ([(0, 1), (2, 3)], [(1, 2)], 0),
        ([(0, 5), (6, 9)], [(1, 2), (4, 7), (8, 20)], 1 + 1 + 1 + 1),
        ([], [(0, 1)], 0),
    ],
)
def test_overlap_of_two_actors(
    engine: list[tuple[float, float]], trainer: list[tuple[float, float]], overlap: float
) -> None:
    """Issue 2, point 4: the record shows overlap of generation and training, and shows none where there is none."""
    spans = [span("engine", *s) for s in engine] + [span("trainer", *s) for s in trainer] + [span("other", 0, 99)]
    assert overlap_s(spans, "engine", "trainer") == overlap
    assert overlap_s(spans, "trainer", "engine") == overlap
    assert overlap_s(spans, "trainer", "trainer") == busy_s(spans, "trainer")


def test_spans_are_written_with_the_injected_clock(tmp_path: Path) -> None:
    """Who did what when, with what ids; a block that raises says so."""
    now = iter([1.0, 2.0, 3.0, 4.0])
    writer = SpanWriter(tmp_path / "spans", "loop", 2, lambda: next(now))
    with writer.span("trainer", "optim_step", update=3):
        pass
    with pytest.raises(ValueError, match="broke"), writer.span("engine", "decode"):
        raise ValueError("broke")
    with pytest.raises(ValueError, match="before its start"):
        writer.add("engine", "decode", 5.0, 4.0)
    writer.close()
    assert list(read_spans(tmp_path)) == [
        {"actor": "trainer", "what": "optim_step", "start_s": 1.0, "end_s": 2.0, "lineage": 2, "update": 3},
        {"actor": "engine", "what": "decode", "start_s": 3.0, "end_s": 4.0, "lineage": 2, "error": "ValueError"},
    ]
