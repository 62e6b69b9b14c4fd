"""The decorator, the gate of I14, in-process callables, and the weighted sum."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.protocols import Reward
from headrace.rewards.base import RewardBase, RewardFunction, reward, to_score
from headrace.rewards.composite import CompositeReward, Part
from headrace.rewards.in_process import MAX_STUCK_THREADS, CallableReward
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Group,
    Outcome,
    Score,
    ScoreError,
    ScoreResult,
    Task,
    Trace,
    Turn,
)


def episode(reply: str, answer: Any = "12", member: int = 0, **metadata: Any) -> Episode:
    task = Task(id="t", messages=({"role": "user", "content": "3 * 4?"},), answer=answer, metadata=metadata)
    return Episode(
        key=AttemptKey(0, member), task=task, turns=(Turn(reply=reply),), trace=Trace(), outcome=Outcome.DONE
    )


def judge(what: RewardBase, *episodes: Episode) -> list[ScoreResult]:
    async def run() -> list[ScoreResult]:
        try:
            return [await what.score(e) for e in episodes]
        finally:
            await what.close()

    return asyncio.run(run())


# ---------------------------------------------------------------------------------------------- decorator


def test_decorator_bare_and_with_a_range() -> None:
    @reward
    def exact(answer: str, task: Task) -> float:
        """Doc."""
        return float(answer == task.answer)

    @reward(value_range=(-1.0, 2.0), name="shifted")
    def other(episode: Episode, scale: float = 2.0) -> float:
        return scale * len(episode.turns)

    assert isinstance(exact, RewardFunction) and isinstance(other, RewardFunction)
    assert (exact.name, exact.value_range, exact.parameters) == ("exact", (0.0, 1.0), ("answer", "task"))
    assert (other.name, other.value_range, other.parameters) == ("shifted", (-1.0, 2.0), ("episode",))
    assert exact("12", episode("").task) == 1.0
    assert exact.__doc__ == "Doc."


def test_decorator_refuses_what_it_cannot_fill() -> None:
    """A misspelt parameter fails where the function is written, not at the thousandth score."""
    with pytest.raises(ConfigError, match="asks for gold;"):
        reward(lambda reply, gold: 1.0)
    with pytest.raises(ConfigError, match="takes none of"):
        reward(lambda: 1.0)
    for bad in ((1.0, 0.0), (0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ConfigError, match="declares the range"):
            reward(value_range=bad)(lambda reply: 1.0)


# --------------------------------------------------------------------------------------------------- gate


class Scalar:
    shape = ()

    def __init__(self, value: float) -> None:
        self.value_ = value

    def item(self) -> float:
        return self.value_


@pytest.mark.parametrize(
    "result",
    [math.nan, math.inf, -math.inf, 1.5, -0.1, True, None, "1.0", [1.0], 1j, Scalar(math.nan), Score(value=2.0)],
)
def test_what_is_no_score_is_a_classed_error(result: Any) -> None:
    """I14, F135: looked at before any clamp; max(0, min(1, nan)) would be 1.0."""
    error = to_score(result, (0.0, 1.0), "mine")
    assert isinstance(error, ScoreError)
    assert (error.error_class, error.reward) == (ErrorClass.INVALID_SCORE, "mine")
    assert "'mine'" in error.message


def test_what_is_a_score_passes() -> None:
    for result in (0, 1, 0.5, Scalar(0.5)):
        assert isinstance(to_score(result, (0.0, 1.0), "mine"), Score)
    score = Score(value=0.5, components={"a": 3.0})
    assert to_score(score, (0.0, 1.0), "mine") is score
    assert to_score(-2, (-2.0, 0.0), "mine") == Score(value=-2.0)
    error = ScoreError(error_class=ErrorClass.CRASH, message="x")
    assert to_score(error, (0.0, 1.0), "mine") is error


# -------------------------------------------------------------------------------------------- in process


def test_a_callable_is_a_reward() -> None:
    same = CallableReward(lambda answer, task: float(answer == task.answer), name="same")
    assert isinstance(same, Reward)
    assert [r.value for r in judge(same, episode("12"), episode("13")) if isinstance(r, Score)] == [1.0, 0.0]

    async def slow(reply: str) -> float:
        await asyncio.sleep(0)
        return 0.25

    assert judge(CallableReward(slow), episode("")) == [Score(value=0.25)]
    ranged = CallableReward(reward(value_range=(0, 9), name="nine")(lambda reply: 9))
    assert (ranged.name, ranged.value_range, judge(ranged, episode(""))) == ("nine", (0.0, 9.0), [Score(value=9.0)])


@pytest.mark.parametrize(
    ("raises", "error_class"),
    [
        (ValueError("boom"), ErrorClass.EXCEPTION),
        (TimeoutError("theirs"), ErrorClass.EXCEPTION),
        (MemoryError(), ErrorClass.MEMORY),
        (SystemExit(0), ErrorClass.EXCEPTION),
    ],
)
def test_what_a_callable_raises_is_a_classed_error(raises: BaseException, error_class: ErrorClass) -> None:
    """I14: an exception, even an exit with status 0, is never a value."""

    def fails(reply: str) -> float:
        raise raises

    (result,) = judge(CallableReward(fails), episode(""))
    assert isinstance(result, ScoreError) and result.error_class is error_class


def test_a_hanging_callable_ends_at_its_deadline_and_cannot_fill_the_process() -> None:
    """F120: a thread cannot be killed; the reward gives up after a fixed number of stuck ones."""
    release = threading.Event()

    def hangs(reply: str) -> float:
        release.wait(60)
        return 1.0

    stuck = CallableReward(hangs, deadline_s=0.01)
    try:
        *first, last = judge(stuck, *[episode("")] * (MAX_STUCK_THREADS + 1))
        assert {r.error_class for r in first if isinstance(r, ScoreError)} == {ErrorClass.TIMEOUT}
        assert len(first) == MAX_STUCK_THREADS
        assert isinstance(last, ScoreError) and last.error_class is ErrorClass.INFRASTRUCTURE
    finally:
        release.set()


# ------------------------------------------------------------------------------------------ weighted sum


def constant(name: str, value: Any, value_range: tuple[float, float] = (0.0, 1.0)) -> CallableReward:
    function: Callable[[str], Any] = lambda reply: value  # noqa: E731
    return CallableReward(function, name=name, value_range=value_range)


def test_the_sum_is_weighted_and_names_its_parts() -> None:
    part = constant("a", Score(value=0.5, components={"x": 1.0}))
    total = CompositeReward([Part(part, 2.0), Part(constant("b", 1.0), -0.5), Part(constant("c", 1.0), 0.0)])
    (result,) = judge(total, episode(""))
    assert result == Score(value=0.5, components={"a": 0.5, "a/x": 1.0, "b": 1.0, "c": 1.0})
    assert total.value_range == (-0.5, 2.0)


def test_one_part_without_a_score_leaves_no_sum() -> None:
    """I14, F132: an error never enters a sum, not even as 0."""
    total = CompositeReward([Part(constant("a", 1.0)), Part(constant("broken", math.nan))])
    (result,) = judge(total, episode(""))
    assert isinstance(result, ScoreError)
    assert (result.error_class, result.reward) == (ErrorClass.INVALID_SCORE, "broken")


def test_per_token_scores_are_summed_with_their_weights() -> None:
    a = constant("a", Score(value=1.0, value_T=(0.25, 0.75)))
    b = constant("b", Score(value=1.0, value_T=(1.0, 0.0)))
    (result,) = judge(CompositeReward([Part(a, 2.0), Part(b), Part(constant("c", 0.5))]), episode(""))
    assert isinstance(result, Score)
    assert (result.value, result.value_T) == (3.5, (1.5, 1.5))


def test_parts_need_different_names() -> None:
    with pytest.raises(ValueError, match="different names"):
        CompositeReward([Part(constant("a", 1.0)), Part(constant("a", 0.0))])


def test_group_scores_keep_their_order() -> None:
    """F51, F52: one result per member, in the members' order."""
    members = tuple(episode(str(i), member=i) for i in range(4))
    group = Group(id=0, task=members[0].task, episodes=members)
    by_reply = CompositeReward([Part(CallableReward(lambda reply: int(reply) / 10, name="r"))])
    results = asyncio.run(by_reply.score_group(group))
    assert [r.value for r in results if isinstance(r, Score)] == [0.0, 0.1, 0.2, 0.3]


def test_many_calls_at_once_of_a_plain_function_are_no_hang() -> None:
    """F120: only calls that outlast their deadline count as stuck, not those that are merely running."""
    import asyncio
    import threading

    from headrace.rewards.in_process import MAX_STUCK_THREADS, CallableReward
    from headrace.types import AttemptKey, Episode, Outcome, Score, Task, Trace, Turn

    num_calls = 4 * MAX_STUCK_THREADS
    barrier = threading.Barrier(num_calls)

    def slow(reply: str) -> float:
        barrier.wait(timeout=30)  # all of them run at the same time, or none returns
        return 1.0

    episode = Episode(
        key=AttemptKey(0, 0),
        task=Task(id="t", messages=({"role": "user", "content": "?"},)),
        turns=(Turn(reply="x"),),
        trace=Trace(),
        outcome=Outcome.DONE,
    )

    async def main() -> list[object]:
        reward = CallableReward(slow, deadline_s=30)
        return list(await asyncio.gather(*(reward.score(episode) for _ in range(num_calls))))

    assert all(isinstance(result, Score) for result in asyncio.run(main()))
