"""Evaluation orchestration, its result, and comparing two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.render import comparison_table, result_table
from headrace.evaluation.result import EvaluationResult, compare
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Outcome,
    PolicyVersion,
    Score,
    ScoreError,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
    VersionSpan,
)

V1, V2 = PolicyVersion(0, 1), PolicyVersion(0, 2)
TASKS = [Task(id=f"t{i}", messages=({"role": "user", "content": f"{i} + 1 ="},), answer=str(i + 1)) for i in range(6)]


def episode(
    task: Task,
    reply: str = "",
    *,
    value: float | None = 1.0,
    version: PolicyVersion = V1,
    outcome: Outcome = Outcome.DONE,
    error: ScoreError | None = None,
) -> Episode:
    trace = Trace(
        segments=(
            Segment(source=Source.TEMPLATE, ids=(1,)),
            Segment(
                source=Source.POLICY,
                ids=(7, 2),
                parent=0,
                logprobs=(-0.1, -0.2),
                version_spans=(VersionSpan(version, 0, 2),),
            ),
        )
    )
    score = error if error is not None else (None if value is None else Score(value=value))
    return Episode(
        key=AttemptKey(0, 0), task=task, turns=(Turn(reply=reply),), trace=trace, outcome=outcome, score=score
    )


def run(
    make: Callable[[Task, int, bool], Episode], *, tasks: list[Task] = TASKS, **options: object
) -> EvaluationResult:
    async def run_episode(task: Task, sample: int, greedy: bool) -> Episode:
        await asyncio.sleep(0)
        return make(task, sample, greedy)

    settings = {"num_samples": 2, "greedy": True, "deadline_s": 30.0, "concurrency": 3} | options
    return asyncio.run(evaluate(tasks, run_episode, **settings))  # type: ignore[arg-type]


def test_accuracies_and_exact_format_come_from_every_planned_episode() -> None:
    """F180: n is in the metric, and sampled and greedy are kept apart."""
    result = run(
        lambda t, s, g: episode(t, f" {t.answer}\n" if g or s == 0 else f"It is {t.answer}.", value=float(g or s))
    )
    assert result.is_valid
    assert (result.num_planned, result.num_scored) == (18, 18)
    metrics = result.metrics()
    assert metrics["eval/sampled_accuracy"] == 0.5
    assert metrics["eval/greedy_accuracy"] == 1.0
    assert metrics["eval/exact_format_accuracy"] == 0.5
    assert metrics["eval/sampled_low"] < 0.5 < metrics["eval/sampled_high"]
    assert metrics["eval/valid"] == 1.0
    assert result.versions == (V1,)
    assert result.pass_at_k(2) == 1.0


def test_tokens_of_two_versions_make_the_result_invalid() -> None:
    """An evaluation is of one pinned policy version."""
    result = run(lambda t, s, g: episode(t, version=V2 if t.id == "t3" else V1))
    assert not result.is_valid
    assert "2 policy versions (0.1, 0.2)" in result.problems[0]
    assert result.metrics()["eval/valid"] == 0.0


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (lambda t: episode(t, error=ScoreError(error_class=ErrorClass.TIMEOUT, message="5 s")), "timeout: 5 s"),
        (lambda t: episode(t, value=None), "it was not judged"),
        (lambda t: episode(t, outcome=Outcome.INFRASTRUCTURE_ERROR), "infrastructure_error: no message"),
        (lambda t: episode(TASKS[0]), "joined wrongly"),
    ],
)
def test_an_episode_without_score_is_counted_and_makes_the_result_invalid(
    broken: Callable[[Task], Episode], reason: str
) -> None:
    """F176 and I14: a failed episode neither scores 0 nor leaves the denominator in silence."""
    result = run(lambda t, s, g: broken(t) if (t.id, s, g) == ("t2", 1, False) else episode(t))
    assert (result.num_planned, result.num_scored) == (18, 17)
    assert not result.is_valid
    assert "1 of 18 planned episodes have no score" in result.problems[0]
    assert reason in next(iter(result.errors))
    interval = result.accuracy("sampled")
    assert interval is not None and (interval.mean, interval.num_samples) == (1.0, 11)


def test_errors_within_the_allowed_share_are_reported_but_valid() -> None:
    """The caller may accept some errors; they stay visible."""

    def make(task: Task, sample: int, greedy: bool) -> Episode:
        if task.id == "t1" and greedy:
            raise ConnectionError("engine gone")
        return episode(task)

    result = run(make, max_error_share=0.1)
    assert result.is_valid
    assert result.errors == {"ConnectionError: engine gone": 1}


def test_a_hanging_episode_ends_with_the_deadline() -> None:
    """I19: the wait has a deadline; what was scored until then is kept, the rest is named."""

    async def run_episode(task: Task, sample: int, greedy: bool) -> Episode:
        if task.id == "t5":
            await asyncio.Event().wait()
        return episode(task)

    result = asyncio.run(evaluate(TASKS, run_episode, num_samples=1, greedy=False, deadline_s=0.05, concurrency=6))
    assert result.num_scored == 5
    assert result.errors == {"deadline of 0.05 s passed": 1}
    assert not result.is_valid


def test_cancelling_an_evaluation_ends_its_episodes() -> None:
    """Ctrl-C during an evaluation leaves no episode running."""
    ended = []

    async def run_episode(task: Task, sample: int, greedy: bool) -> Episode:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(task.id)
        raise AssertionError("unreachable")

    async def main() -> None:
        job = asyncio.create_task(
            evaluate(TASKS, run_episode, num_samples=1, greedy=False, deadline_s=30, concurrency=6)
        )
        for _ in range(5):
            await asyncio.sleep(0)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(main())
    assert sorted(ended) == [t.id for t in TASKS]


def test_concurrency_is_bounded() -> None:
    """No more episodes run at once than asked for."""
    running, peak = 0, 0

    async def run_episode(task: Task, sample: int, greedy: bool) -> Episode:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        return episode(task)

    asyncio.run(evaluate(TASKS, run_episode, num_samples=4, greedy=True, deadline_s=30, concurrency=4))
    assert peak == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": []}, "at least one held-out task"),
        ({"tasks": [TASKS[0], TASKS[0]]}, "have the id 't0'"),
        ({"num_samples": 0, "greedy": False}, "runs nothing"),
        ({"concurrency": 0}, "concurrency 0"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    """One clear error before any work starts."""
    with pytest.raises(ValueError, match=message):
        run(lambda t, s, g: episode(t), **options)


def test_json_round_trip_keeps_everything_and_shows_a_summary() -> None:
    """A result written by one command is compared by another."""
    result = run(lambda t, s, g: episode(t, value=float(s)))
    text = result.to_json()
    assert EvaluationResult.from_json(text) == result
    assert '"eval/sampled_accuracy": 0.5' in text
    with pytest.raises(ValueError, match="no list 'tasks'"):
        EvaluationResult.from_json("{}")


def test_compare_pairs_by_task_id_whatever_the_order() -> None:
    """Results are joined by id, never by position."""
    before = run(lambda t, s, g: episode(t, value=float(t.id == "t0")))
    after = run(lambda t, s, g: episode(t), tasks=TASKS[::-1])
    comparison = compare(before, after)
    assert comparison.sampled is not None and comparison.greedy is not None
    assert comparison.sampled.difference == pytest.approx(5 / 6)
    assert (comparison.greedy.num_better, comparison.greedy.num_worse) == (5, 0)


def test_compare_refuses_other_tasks_and_invalid_results() -> None:
    """A comparison over changed tasks, or with missing scores, would be a false claim."""
    good = run(lambda t, s, g: episode(t))
    other = [Task(id=t.id, messages=t.messages, answer="0") for t in TASKS]
    with pytest.raises(ValueError, match="6 of the first without an equal twin"):
        compare(good, run(lambda t, s, g: episode(t), tasks=other))
    with pytest.raises(ValueError, match="not of the same tasks: 6 and 5"):
        compare(good, run(lambda t, s, g: episode(t), tasks=TASKS[:5]))
    invalid = run(lambda t, s, g: episode(t, value=None) if g else episode(t))
    with pytest.raises(ValueError, match="second result: 6 of 18"):
        compare(good, invalid)
    allowed = compare(good, invalid, allow_invalid=True)
    assert allowed.greedy is None and allowed.problems


def test_tables_show_intervals_and_shout_invalid() -> None:
    """A table must not look better than its data."""
    good = run(lambda t, s, g: episode(t, value=float(t.id == "t0")))
    bad = run(lambda t, s, g: episode(t, version=V2 if g else V1))
    console = Console(file=StringIO(), width=150)
    console.print(result_table({"before": good, "after": bad}))
    console.print(comparison_table(compare(good, bad, allow_invalid=True), "before", "after"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0.167 [0.0" in text and "18/18" in text
    assert "INVALID after: its tokens come from 2 policy versions" in text
    assert "+0.833 │ [+" in text and "better" in text
