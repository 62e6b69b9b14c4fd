"""What an evaluation found: scores by task, what is missing, which policy version; and how two of them compare.

Only scores, errors and identities are stored; accuracies and intervals are derived from them each time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from headrace.errors import HeadraceError
from headrace.evaluation.statistics import Interval, PairedDifference, accuracy_interval, paired_difference, pass_at_k
from headrace.types import PolicyVersion

SCHEMA_VERSION = 1
GOLD = "gold"
"""Name of the component that holds the gold standard's value, where ``PROXY`` is beside it."""
PROXY = "reward"
"""Name of the component that holds the value that is trained on, where there is a gold standard."""
Mode = Literal["sampled", "greedy"]


class EvaluationError(HeadraceError, ValueError):
    """An evaluation that cannot be run, read or compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One planned episode of an evaluation. Without score, ``error`` says why."""

    score: float | None
    exact: bool | None = None
    """The stripped reply equals the answer, character for character; None where the task has no answer."""
    num_tokens: int = 0
    """Tokens that the policy sampled."""
    outcome: str = ""
    error: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    """Of the score; ``gold`` is the gold standard's value, where the run has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The attempts at one task."""

    task_id: str
    content_hash: str
    sampled: tuple[Attempt, ...] = ()
    greedy: Attempt | None = None

    def attempts(self, mode: Mode) -> tuple[Attempt, ...]:
        if mode == "sampled":
            return self.sampled
        return () if self.greedy is None else (self.greedy,)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Scores of one policy version on a set of tasks. Look at ``problems`` before believing a number."""

    tasks: tuple[TaskResult, ...]
    num_samples: int
    """Sampled replies planned for each task."""
    greedy: bool
    versions: tuple[PolicyVersion, ...]
    """The versions that sampled any token; more than one makes the result invalid."""
    max_error_share: float = 0.0
    """Largest share of planned episodes without score that leaves the result valid."""
    duration_s: float = 0.0

    @cached_property
    def num_planned(self) -> int:
        return len(self.tasks) * (self.num_samples + int(self.greedy))

    @cached_property
    def num_scored(self) -> int:
        return sum(a.score is not None for t in self.tasks for a in (*t.sampled, *t.attempts("greedy")))

    @cached_property
    def errors(self) -> dict[str, int]:
        """Why scores are missing: message -> number of episodes."""
        attempts = (a for t in self.tasks for a in (*t.sampled, *t.attempts("greedy")))
        return dict(Counter(a.error or "no score" for a in attempts if a.score is None).most_common())

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why this result must not be believed; empty for a valid one (FAILURES 176, 180)."""
        found = []
        if len(self.versions) > 1:
            found.append(
                f"its tokens come from {len(self.versions)} policy versions ({', '.join(map(str, self.versions))}); "
                "an evaluation needs one pinned version"
            )
        present = sum(len(t.sampled) + len(t.attempts("greedy")) for t in self.tasks)
        if present != self.num_planned:
            found.append(f"it holds {present} episodes, but {self.num_planned} were planned")
        missing = self.num_planned - self.num_scored
        if missing > self.max_error_share * self.num_planned:
            reasons = "; ".join(f"{num} x {reason}" for reason, num in list(self.errors.items())[:3])
            found.append(f"{missing} of {self.num_planned} planned episodes have no score ({reasons or 'not run'})")
        return tuple(found)

    @property
    def is_valid(self) -> bool:
        return not self.problems

    def accuracy(self, mode: Mode, *, level: float = 0.95) -> Interval | None:
        """Mean score over scored attempts, clustered by task; None where nothing was scored."""
        scores = [[a.score for a in t.attempts(mode) if a.score is not None] for t in self.tasks]
        scores = [task for task in scores if task]
        return accuracy_interval(scores, level=level) if scores else None

    def exact_format(self, mode: Mode, *, level: float = 0.95) -> Interval | None:
        """Share of scored attempts whose stripped reply is the answer and nothing else."""
        scored = [[a for a in t.attempts(mode) if a.score is not None] for t in self.tasks]
        exact = [[float(a.exact) for a in task if a.exact is not None] for task in scored]
        exact = [task for task in exact if task]
        return accuracy_interval(exact, level=level) if exact else None

    def component_scores(self, name: str, mode: Mode = "sampled") -> dict[str, list[float]]:
        """Task id -> the component's value in each scored attempt; tasks without any are left out."""
        scores = {
            t.task_id: [a.components[name] for a in t.attempts(mode) if a.score is not None and name in a.components]
            for t in self.tasks
        }
        return {task_id: values for task_id, values in scores.items() if values}

    def component(self, name: str, mode: Mode = "sampled", *, level: float = 0.95) -> Interval | None:
        """Mean of one component, clustered by task; None where no attempt has it."""
        scores = self.component_scores(name, mode)
        return accuracy_interval(list(scores.values()), level=level) if scores else None

    def gold_scores(self) -> dict[str, list[float]]:
        """Task id -> the gold standard's values of the sampled replies; empty where nothing was judged by one. A reward
        that merely is called gold is none: it has no proxy beside it."""
        return self.component_scores(GOLD) if self.component_scores(PROXY) else {}

    def gold(self, *, level: float = 0.95) -> Interval | None:
        """Mean of :meth:`gold_scores`, clustered by task."""
        scores = self.gold_scores()
        return accuracy_interval(list(scores.values()), level=level) if scores else None

    def pass_at_k(self, k: int, *, correct_from: float = 1.0) -> float:
        """Mean over tasks of the unbiased pass@k; a sample is right from score ``correct_from`` on.

        Raises:
            ValueError: a task has fewer than k scored samples, or there are no tasks.
        """
        if not self.tasks:
            raise ValueError("pass@k of an evaluation without tasks")
        shares = []
        for task in self.tasks:
            scores = [a.score for a in task.sampled if a.score is not None]
            shares.append(pass_at_k(len(scores), sum(s >= correct_from for s in scores), k))
        return sum(shares) / len(shares)

    def metrics(self) -> dict[str, float]:
        """Flat numbers for metrics.jsonl, named ``eval/...``; what was not measured is left out."""
        values: dict[str, float] = {
            "eval/num_planned": self.num_planned,
            "eval/num_scored": self.num_scored,
            "eval/valid": float(self.is_valid),
            "eval/duration_s": self.duration_s,
        }
        modes: tuple[Mode, ...] = ("sampled", "greedy")
        for mode in modes:
            interval = self.accuracy(mode)
            if interval is not None:
                values |= {f"eval/{mode}_accuracy": interval.mean}
                values |= {f"eval/{mode}_low": interval.low, f"eval/{mode}_high": interval.high}
        exact = self.exact_format("sampled") or self.exact_format("greedy")
        if exact is not None:
            values["eval/exact_format_accuracy"] = exact.mean
            values |= {"eval/exact_format_low": exact.low, "eval/exact_format_high": exact.high}
        return values

    def to_json(self) -> str:
        """JSON with a ``summary`` for people; :meth:`from_json` reads the rest."""
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        data["versions"] = [list(v) for v in self.versions]
        data["summary"] = {**self.metrics(), "problems": list(self.problems), "errors": self.errors}
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> EvaluationResult:
        """Read :meth:`to_json` back.

        Raises:
            EvaluationError: not JSON, not an evaluation, or of another schema version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise EvaluationError(f"this is not an evaluation result, nor any JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("tasks"), list):
            raise EvaluationError("this is not an evaluation result: it has no list 'tasks'")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise EvaluationError(
                f"evaluation result of schema version {version}; this headrace reads {SCHEMA_VERSION}"
            )
        return cls(
            tasks=tuple(_task_from(t) for t in data["tasks"]),
            num_samples=int(data["num_samples"]),
            greedy=bool(data["greedy"]),
            versions=tuple(PolicyVersion(*v) for v in data["versions"]),
            max_error_share=float(data["max_error_share"]),
            duration_s=float(data["duration_s"]),
        )


def _task_from(data: Mapping[str, Any]) -> TaskResult:
    return TaskResult(
        task_id=data["task_id"],
        content_hash=data["content_hash"],
        sampled=tuple(Attempt(**a) for a in data["sampled"]),
        greedy=None if data["greedy"] is None else Attempt(**data["greedy"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result b against result a on the same tasks; None where a mode was not measured on both sides."""

    sampled: PairedDifference | None
    greedy: PairedDifference | None
    gold: PairedDifference | None = None
    """By the gold standard, of sampled replies."""
    problems: tuple[str, ...] = ()
    """Why the two results should not be compared, where the caller allowed it all the same."""


def compare(a: EvaluationResult, b: EvaluationResult, *, allow_invalid: bool = False) -> Comparison:
    """Paired comparison by task. A task that lacks every score of a mode on one side is left out of that mode, which
    only ``allow_invalid`` or a result's own ``max_error_share`` permits.

    Raises:
        EvaluationError: different tasks (by content), or an invalid result without ``allow_invalid``.
    """
    problems = tuple(f"{side}: {p}" for side, r in (("first result", a), ("second result", b)) for p in r.problems)
    if problems and not allow_invalid:
        raise EvaluationError("an invalid evaluation cannot be compared. " + " | ".join(problems))
    hashes = {t.task_id: t.content_hash for t in b.tasks}
    unmatched = [t.task_id for t in a.tasks if hashes.get(t.task_id) != t.content_hash]
    if unmatched or len(a.tasks) != len(b.tasks):
        raise EvaluationError(
            f"the two results are not of the same tasks: {len(a.tasks)} and {len(b.tasks)} tasks, "
            f"{len(unmatched)} of the first without an equal twin (such as {unmatched[:3]}); evaluate both on one set"
        )
    return Comparison(
        sampled=_paired(_scores(a, "sampled"), _scores(b, "sampled")),
        greedy=_paired(_scores(a, "greedy"), _scores(b, "greedy")),
        gold=_paired(a.gold_scores(), b.gold_scores()),
        problems=problems,
    )


def _scores(result: EvaluationResult, mode: Mode) -> dict[str, list[float]]:
    return {t.task_id: [x.score for x in t.attempts(mode) if x.score is not None] for t in result.tasks}


def _paired(a: Mapping[str, list[float]], b: Mapping[str, list[float]]) -> PairedDifference | None:
    """Task id -> scores, on both sides."""
    both = [task_id for task_id, scores in a.items() if scores and b.get(task_id)]
    return paired_difference([a[i] for i in both], [b[i] for i in both]) if len(both) >= 2 else None
