"""What the report is made of, read from a run's folder: also from one that is still written, or was killed.

What cannot be read is named in ``problems`` and shown in the report; the rest is used.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace.monitor.texts import number
from headrace.record.episodes import read_episodes
from headrace.record.files import RecordError
from headrace.record.ledger_store import Survival
from headrace.record.metrics import read_metrics
from headrace.record.run_dir import read_run_info

DEFAULT_NUM_EPISODES = 12
PHASES = ("early", "middle", "late")


class ReportError(HeadraceError):
    """There is nothing to report on."""


@dataclass(slots=True)
class StatusSummary:
    """Episodes of one ledger status: how many, how long (I9: what was trained against what was issued).

    The distributions are counted at two significant digits, so that their size does not grow with the run."""

    num: int = 0
    num_tokens: int = 0
    duration_s: float = 0.0
    tasks: Counter[str] = field(default_factory=Counter)
    lengths: Counter[float] = field(default_factory=Counter)
    """Policy tokens of an episode -> episodes."""
    durations: Counter[float] = field(default_factory=Counter)
    """Seconds of an episode -> episodes."""


@dataclass(slots=True)
class RunData:
    """A run as its files tell it."""

    path: Path
    info: Mapping[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    """Metrics lines that no resume took back, by batch."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """A sample, in the order of the run; each has ``phase`` added."""
    statuses: dict[str, StatusSummary] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def config(self) -> Mapping[str, Any]:
        found = self.info.get("config")
        return found if isinstance(found, Mapping) else {}

    def setting(self, *path: str, default: Any = None) -> Any:
        """A value of the resolved configuration by its dotted path's parts."""
        value: Any = self.config
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(batches, values) of a metric, where it was recorded."""
        found = [(batch_of(line), number(line, name)) for line in self.lines]
        kept = [(x, y) for x, y in found if y is not None]
        return [float(x) for x, _ in kept], [y for _, y in kept]


def load_run(run_dir: Path, *, with_episodes: bool = True) -> RunData:
    """Read a run's folder. Episodes are many: leave them out where they are not needed.

    Raises:
        ReportError: the folder holds neither run.json nor metrics.
    """
    run = RunData(run_dir)
    try:
        run.info = read_run_info(run_dir)
    except RecordError as error:
        run.problems.append(str(error))
    _read_lines(run)
    _read_evaluations(run)
    if not run.info and not run.lines:
        raise ReportError(f"{run_dir} holds no run: {'; '.join(run.problems)}")
    if with_episodes:
        _read_episodes(run)
    return run


def batch_of(line: Mapping[str, Any]) -> int:
    """Number of the published update that a metrics line or an episode is about."""
    value = number(line, "update")
    if value is None:
        value = number(line, "step")
    return 0 if value is None else int(value)


def _read_lines(run: RunData) -> None:
    try:
        for line in read_metrics(run.path):
            run.lines.append(line)
    except (RecordError, OSError) as error:
        run.problems.append(f"metrics were read up to here only: {error}")
    run.lines.sort(key=batch_of)


def _read_evaluations(run: RunData) -> None:
    """Put evaluations that stand in a file of their own (the one before the first batch) among the lines."""
    by_batch = {batch_of(line): line for line in run.lines}
    for file in sorted((run.path / "evaluations").glob("version-*.json")):
        try:
            summary = json.loads(file.read_text())["summary"]
            lineage, batch = (int(part) for part in file.stem.removeprefix("version-").split("."))
            metrics = {name: value for name, value in summary.items() if name.startswith("eval/")}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            run.problems.append(f"{file} cannot be read as an evaluation: {type(error).__name__}: {error}")
            continue
        if not Survival(run.path / "ledger").holds(lineage, batch):
            continue
        line = by_batch.get(batch)
        if line is None:
            by_batch[batch] = {"update": batch, "lineage": lineage, **metrics}
            run.lines.append(by_batch[batch])
        elif not any(name.startswith("eval/") for name in line):
            line.update(metrics)
    run.lines.sort(key=batch_of)


def _read_episodes(run: RunData) -> None:
    num_wanted = run.setting("monitor", "episodes_in_report", default=DEFAULT_NUM_EPISODES)
    sampler = _Sampler(max((batch_of(line) for line in run.lines), default=1), int(num_wanted))
    try:
        for episode in read_episodes(run.path):
            _count(run.statuses, episode)
            sampler.offer(episode)
    except (RecordError, OSError) as error:
        run.problems.append(f"episodes were read up to here only: {error}")
    run.episodes = list(sampler.chosen())


def _count(statuses: dict[str, StatusSummary], episode: Mapping[str, Any]) -> None:
    summary = statuses.setdefault(str(episode.get("status") or episode.get("outcome") or "unknown"), StatusSummary())
    num_tokens = num_policy_tokens(episode)
    duration_s = (number(episode, "ended_s") or 0.0) - (number(episode, "started_s") or 0.0)
    summary.num += 1
    summary.num_tokens += num_tokens
    summary.duration_s += duration_s
    summary.tasks[str(episode.get("task_id"))] += 1
    summary.lengths[_rounded(num_tokens)] += 1
    summary.durations[_rounded(duration_s)] += 1


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def num_policy_tokens(episode: Mapping[str, Any]) -> int:
    """Tokens that the policy sampled in a recorded episode."""
    sources, lengths = episode.get("segment_sources") or (), episode.get("segment_lengths") or ()
    return sum(length for source, length in zip(sources, lengths, strict=False) if source == "policy")


class _Sampler:
    """A seeded reservoir for each third of the run, so that the report shows how replies changed."""

    def __init__(self, last_batch: int, num_wanted: int) -> None:
        self._last_batch = max(1, last_batch)
        self._sizes = {p: num_wanted // 3 + (i < num_wanted % 3) for i, p in enumerate(PHASES)}
        self._kept: dict[str, list[tuple[int, dict[str, Any]]]] = {p: [] for p in PHASES}
        self._seen = dict.fromkeys(PHASES, 0)
        self._random = random.Random(0)

    def offer(self, episode: dict[str, Any]) -> None:
        batch = batch_of(episode)
        if self._last_batch > 9 and self._last_batch * 0.15 < batch < self._last_batch * 0.4:
            return  # neither the start nor the middle: leave the groups apart
        phase = PHASES[min(2, int(3 * max(0, batch - 1) / self._last_batch))]
        kept, size = self._kept[phase], self._sizes[phase]
        self._seen[phase] += 1
        item = (self._seen[phase], {**episode, "phase": phase})
        if len(kept) < size:
            kept.append(item)
        elif size and (slot := self._random.randrange(self._seen[phase])) < size:
            kept[slot] = item

    def chosen(self) -> Iterator[dict[str, Any]]:
        for phase in PHASES:
            for _, episode in sorted(self._kept[phase], key=lambda item: item[0]):
                yield episode
