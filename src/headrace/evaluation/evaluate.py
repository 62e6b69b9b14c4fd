"""Run an evaluation: plan every episode, run them with bounded concurrency and one deadline, account for each.

The engine, the environment and the reward stay with the caller, who hands in ``run_episode``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from headrace.evaluation.result import Attempt, EvaluationError, EvaluationResult, TaskResult
from headrace.protocols import Clock
from headrace.types import Episode, PolicyVersion, Score, ScoreError, Task

RunEpisode = Callable[[Task, int, bool], Awaitable[Episode]]
"""(task, sample number, greedy) -> a judged episode. Seeds derive from the task and the sample number."""

_GRACE_S = 5.0
"""After the deadline, cancelled episodes get so long to end; those that do not are named and left behind."""


class _Slot(NamedTuple):
    task: int
    sample: int
    greedy: bool


async def evaluate(
    tasks: Sequence[Task],
    run_episode: RunEpisode,
    *,
    num_samples: int,
    greedy: bool,
    deadline_s: float,
    concurrency: int,
    max_error_share: float = 0.0,
    clock: Clock = time.monotonic,
) -> EvaluationResult:
    """Score ``num_samples`` sampled replies and, where asked, one greedy reply for each task.

    Every planned episode ends up in the result, with a score or with the reason why there is none: an exception, a
    failed outcome, a reward error, or the deadline of the whole evaluation. Nothing is dropped from a denominator in
    silence: missing scores beyond ``max_error_share`` make the result invalid (FAILURES 176, 180).

    Raises:
        EvaluationError: no tasks, tasks that share an id, nothing to run, or a bound below 1.
    """
    _check_plan(tasks, num_samples, greedy, concurrency, deadline_s)
    plan = [_Slot(t, s, False) for t in range(len(tasks)) for s in range(num_samples)]
    plan += [_Slot(t, 0, True) for t in range(len(tasks))] if greedy else []
    gate = asyncio.Semaphore(concurrency)
    versions: set[PolicyVersion] = set()

    async def attempt(slot: _Slot) -> Attempt:
        async with gate:
            episode = await run_episode(tasks[slot.task], slot.sample, slot.greedy)
        versions.update(episode.trace.versions)
        return _judge(tasks[slot.task], episode)

    started_s = clock()
    running = {slot: asyncio.create_task(attempt(slot), name=f"evaluation episode {slot}") for slot in plan}
    try:
        await asyncio.wait(running.values(), timeout=deadline_s)
    finally:
        # Also on cancellation from outside: no episode may outlive its evaluation.
        stuck = await _cancel([t for t in running.values() if not t.done()])
    attempts = {slot: _collect(future, deadline_s, future in stuck) for slot, future in running.items()}
    return EvaluationResult(
        tasks=tuple(
            TaskResult(
                task_id=task.id,
                content_hash=task.content_hash,
                sampled=tuple(attempts[_Slot(index, s, False)] for s in range(num_samples)),
                greedy=attempts[_Slot(index, 0, True)] if greedy else None,
            )
            for index, task in enumerate(tasks)
        ),
        num_samples=num_samples,
        greedy=greedy,
        versions=tuple(sorted(versions)),
        max_error_share=max_error_share,
        duration_s=clock() - started_s,
    )


def _check_plan(tasks: Sequence[Task], num_samples: int, greedy: bool, concurrency: int, deadline_s: float) -> None:
    if not tasks:
        raise EvaluationError("an evaluation needs at least one held-out task; the task source has none")
    if num_samples < 0 or concurrency < 1 or deadline_s <= 0:
        raise EvaluationError(
            f"evaluation: num_samples {num_samples} must be at least 0, concurrency {concurrency} at least 1, "
            f"deadline_s {deadline_s} above 0"
        )
    if num_samples == 0 and not greedy:
        raise EvaluationError("an evaluation of 0 samples without greedy runs nothing; set num_samples or greedy")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise EvaluationError(
                f"two held-out tasks have the id {task.id!r}; results are joined by it: make ids differ"
            )
        seen.add(task.id)


async def _cancel(tasks: list[asyncio.Task[Attempt]]) -> set[asyncio.Task[Attempt]]:
    """Cancel and wait a little; returns those that ignored it."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return set()
    _, pending = await asyncio.wait(tasks, timeout=_GRACE_S)
    return pending


def _collect(future: asyncio.Task[Attempt], deadline_s: float, is_stuck: bool) -> Attempt:
    if is_stuck:
        return Attempt(score=None, error=f"deadline of {deadline_s:g} s passed, and the episode ignored cancellation")
    if future.cancelled():
        return Attempt(score=None, error=f"deadline of {deadline_s:g} s passed")
    error = future.exception()
    if error is not None:
        return Attempt(score=None, error=f"{type(error).__name__}: {error}")
    return future.result()


def _judge(task: Task, episode: Episode) -> Attempt:
    num_tokens, outcome = episode.trace.num_policy_tokens, str(episode.outcome)
    if episode.task.content_hash != task.content_hash:
        error = f"the episode is of task {episode.task.id!r}, not of {task.id!r}: joined wrongly"
        return Attempt(score=None, num_tokens=num_tokens, outcome=outcome, error=error)
    if episode.outcome.is_failure:
        error = f"{outcome}: {episode.error or 'no message'}"
        return Attempt(score=None, num_tokens=num_tokens, outcome=outcome, error=error)
    if not isinstance(episode.score, Score):
        score = episode.score
        error = f"{score.error_class}: {score.message}" if isinstance(score, ScoreError) else "it was not judged"
        return Attempt(score=None, num_tokens=num_tokens, outcome=outcome, error=error)
    exact = None if task.answer is None else episode.reply.strip() == str(task.answer).strip()
    return Attempt(
        score=float(episode.score.value),
        exact=exact,
        num_tokens=num_tokens,
        outcome=outcome,
        components=dict(episode.score.components),
    )
