"""Episodes on disk, token by token: written as JSON lines, compacted to Parquet at checkpoints, read alike from both.

A record is flat. ``ids`` are the ids of all trace segments one after the other (``segment_lengths``,
``segment_sources`` and ``segment_parents`` cut them up again); lists with one entry for each of them are ``logprobs``
(the engine's, null where not sampled), ``trainer_logprobs``, ``advantages`` and ``mask`` (null, or 0, where not
trained). ``update`` is the update that trained the episode or, where none did, the one that was next when it was
closed; with ``lineage`` it says whether a resume took it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.record.files import RecordError, clear_errors, disk_error, fsync_file, fsync_folder
from headrace.record.ledger_store import Survival
from headrace.record.segments import SegmentWriter, read_segment
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Outcome,
    PolicyVersion,
    Sample,
    Score,
    ScoreError,
    ScoreResult,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
    VersionSpan,
)

_NAME = re.compile(r"(lineage-(\d+)-(\d+))\.(jsonl|parquet)$")
Values = Sequence[Sequence[float]]
"""For each sample one value for each of its ids."""


def episode_record(
    episode: Episode,
    *,
    lineage: int,
    update: int,
    status: str,
    samples: Sequence[Sample] = (),
    trainer_logprobs: Values | None = None,
    advantages: Values | None = None,
) -> dict[str, Any]:
    """The record of an episode. ``status``: as the ledger says it, ``trained``, ``dropped:<reason>`` or
    ``failed:<class>``. ``trainer_logprobs`` and ``advantages`` are aligned with ``samples``."""
    segments = episode.trace.segments
    task = episode.task
    masks = _over_trace(episode, samples, [s.mask for s in samples])
    return {
        "lineage": lineage,
        "update": update,
        "status": status,
        "group": episode.key.group,
        "member": episode.key.member,
        "retry": episode.key.retry,
        "task_id": task.id,
        "task_hash": task.content_hash,
        "environment": task.environment,
        "task_seed": task.seed,
        "messages": _plain(task.messages),
        "answer": _plain(task.answer),
        "metadata": _plain(task.metadata),
        "outcome": str(episode.outcome),
        "error": episode.error,
        "reward": episode.reward,
        "score": _score_record(episode.score),
        "turns": [_turn_record(t) for t in episode.turns],
        "policy_seed": episode.policy_seed,
        "issued_version": list(episode.issued_version),
        "started_s": episode.started_s,
        "ended_s": episode.ended_s,
        "segment_sources": [str(s.source) for s in segments],
        "segment_parents": [s.parent for s in segments],
        "segment_lengths": [len(s.ids) for s in segments],
        "version_spans": [
            [index, *span.version, span.start, span.end]
            for index, segment in enumerate(segments)
            for span in segment.version_spans
        ],
        "ids": [i for s in segments for i in s.ids],
        "logprobs": [x for s in segments for x in (s.logprobs or [None] * len(s.ids))],
        "kept_ids": _kept_ids(segments),
        "mask": [int(m or 0) for m in masks],
        "trainer_logprobs": _over_trace(episode, samples, trainer_logprobs) if trainer_logprobs is not None else None,
        "advantages": _over_trace(episode, samples, advantages) if advantages is not None else None,
    }


def episode_from_record(record: dict[str, Any]) -> Episode:
    """The Episode that a record was made of, token by token (replay, viewer)."""
    return Episode(
        key=AttemptKey(record["group"], record["member"], record["retry"]),
        task=Task(
            id=record["task_id"],
            messages=tuple(record["messages"]),
            answer=record["answer"],
            environment=record["environment"],
            seed=record["task_seed"],
            metadata=record["metadata"],
        ),
        turns=tuple(Turn(**{**t, "observation": tuple(t["observation"])}) for t in record["turns"]),
        trace=_trace(record),
        outcome=Outcome(record["outcome"]),
        score=_score(record["score"]),
        error=record["error"],
        issued_version=PolicyVersion(*record["issued_version"]),
        started_s=record["started_s"],
        ended_s=record["ended_s"],
        policy_seed=record["policy_seed"],
    )


class EpisodeWriter:
    """The one writer of a lineage's episodes: JSON lines that :meth:`compact` turns into Parquet at checkpoints."""

    def __init__(self, path: Path, lineage: int) -> None:
        self._path = path
        self._lineage = lineage
        with clear_errors(path, "opening"):
            path.mkdir(parents=True, exist_ok=True)
            for aside in path.glob("*.tmp"):
                aside.unlink()
        taken = [int(m[3]) for f in path.iterdir() if (m := _NAME.match(f.name)) and int(m[2]) == lineage]
        self._number = max(taken, default=-1) + 1
        self._writer: SegmentWriter | None = None

    def add(self, record: dict[str, Any]) -> None:
        """Buffer a record of :func:`episode_record`."""
        if self._writer is None:
            self._writer = SegmentWriter(self._path / f"lineage-{self._lineage}-{self._number:06d}.jsonl")
            self._number += 1
        self._writer.append(record)

    def commit(self) -> None:
        """Make what was added durable. Raises RecordError (disk full and the like)."""
        if self._writer is not None:
            self._writer.commit()

    def rotate(self) -> list[Path]:
        """End the segment that is being written; returns every segment of JSON lines, for :meth:`compact`."""
        self.close()
        return sorted(self._path.glob("lineage-*.jsonl"))

    @staticmethod
    def compact(segments: Sequence[Path]) -> None:
        """Turn closed segments of JSON lines, those of dead lineages too, into Parquet. Slow, so it may run on another
        thread while new segments are written. A kill leaves either form whole."""
        for file in segments:
            if file.with_suffix(".parquet").exists():  # a kill came before the JSON lines were removed
                with clear_errors(file, "removing"):
                    file.unlink()
            else:
                _compact_file(file)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_episodes(run_path: Path, *, surviving: bool = True) -> Iterator[dict[str, Any]]:
    """Records of the run in folder ``run_path``, in the order they were written, from both forms. ``surviving``:
    without those that a resume took back; with False they come too, told apart by the added key ``survives``."""
    survival = Survival(run_path / "ledger")
    for file, kind in _segment_files(run_path / "episodes"):
        for record in read_segment(file) if kind == "jsonl" else _read_parquet(file):
            record["survives"] = survival.holds(record["lineage"], record["update"])
            if record["survives"] or not surviving:
                yield record


def _segment_files(path: Path) -> list[tuple[Path, str]]:
    """Each segment once, in order; Parquet where both forms are there (a rename makes it whole)."""
    found: dict[tuple[int, int], tuple[Path, str]] = {}
    if path.is_dir():
        for file in sorted(path.iterdir()):  # "jsonl" sorts before "parquet", which so replaces it
            if match := _NAME.match(file.name):
                found[int(match[2]), int(match[3])] = (file, match[4])
    return [found[key] for key in sorted(found)]


def _compact_file(file: Path) -> None:
    from headrace.record.episode_table import write_parquet

    final = file.with_suffix(".parquet")
    aside = file.with_suffix(".parquet.tmp")
    try:
        write_parquet(read_segment(file), aside)
        fsync_file(aside)
        aside.rename(final)
        fsync_folder(file.parent)
        file.unlink()
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise disk_error(final, "compacting episodes to", error) from error


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    from headrace.record.episode_table import read_parquet

    yield from read_parquet(file)


def _over_trace(episode: Episode, samples: Sequence[Sample], values: Sequence[Sequence[Any]] | None) -> list[Any]:
    """Values of trained ids, moved from the samples' places to the trace's; None where nothing is trained."""
    segments = episode.trace.segments
    starts = [0]
    for segment in segments:
        starts.append(starts[-1] + len(segment.ids))
    flat: list[Any] = [None] * starts[-1]
    branches = list(episode.trace.branches()) if samples else []
    for sample, sample_values in zip(samples, values or (), strict=True):
        if len(sample_values) != len(sample.ids):
            raise RecordError(f"sample {sample.id}: {len(sample_values)} values for {len(sample.ids)} ids")
        position = 0
        for index in branches[int(sample.id.rpartition("/")[2])]:
            for offset in range(len(segments[index].ids)):
                if sample.mask[position]:
                    flat[starts[index] + offset] = sample_values[position]
                position += 1
    return flat


def _kept_ids(segments: Sequence[Segment]) -> list[list[int] | None] | None:
    if all(s.kept_ids is None for s in segments):
        return None
    return [None if k is None else list(k) for s in segments for k in (s.kept_ids or [None] * len(s.ids))]


def _plain(value: Any) -> Any:
    """JSON values: a third party's odd answer type is written as text rather than ending the run."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _turn_record(turn: Turn) -> dict[str, Any]:
    return {
        "reply": turn.reply,
        "observation": _plain(turn.observation),
        "finish_reason": turn.finish_reason,
        "generation_s": turn.generation_s,
        "environment_s": turn.environment_s,
    }


def _score_record(score: ScoreResult | None) -> dict[str, Any] | None:
    if isinstance(score, Score):
        value_T = None if score.value_T is None else list(score.value_T)
        return {"value": score.value, "components": dict(score.components), "value_T": value_T}
    if isinstance(score, ScoreError):
        return {"error_class": str(score.error_class), "message": score.message, "reward": score.reward}
    return None


def _score(record: dict[str, Any] | None) -> ScoreResult | None:
    if record is None:
        return None
    if "error_class" in record:
        return ScoreError(**{**record, "error_class": ErrorClass(record["error_class"])})
    value_T = record["value_T"]
    return Score(
        value=record["value"],
        components=record["components"],
        value_T=None if value_T is None else tuple(value_T),
    )


def _trace(record: dict[str, Any]) -> Trace:
    spans: dict[int, list[VersionSpan]] = {}
    for index, lineage, number, start, end in record["version_spans"]:
        spans.setdefault(index, []).append(VersionSpan(PolicyVersion(lineage, number), start, end))
    segments = []
    position = 0
    for index, length in enumerate(record["segment_lengths"]):
        end = position + length
        source = Source(record["segment_sources"][index])
        is_policy = source is Source.POLICY
        kept = record["kept_ids"][position:end] if record["kept_ids"] is not None and is_policy else [None]
        segments.append(
            Segment(
                source=source,
                ids=tuple(record["ids"][position:end]),
                parent=record["segment_parents"][index],
                logprobs=tuple(record["logprobs"][position:end]) if is_policy else (),
                version_spans=tuple(spans.get(index, ())),
                kept_ids=None if None in kept else tuple(tuple(k) for k in kept if k is not None),
            )
        )
        position = end
    return Trace(segments=tuple(segments))
