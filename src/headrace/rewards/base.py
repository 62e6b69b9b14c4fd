"""What every reward shares: the decorator, and the gate that turns a result into a Score or a classed error (I14)."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

from headrace.errors import ConfigError
from headrace.types import Episode, ErrorClass, Group, Score, ScoreError, ScoreResult

P = ParamSpec("P")
R = TypeVar("R")

ValueRange = tuple[float, float]

PARAMETERS = ("reply", "answer", "task", "episode")
"""What a reward function may ask for, by parameter name; ``answer`` is the reply, too."""


class RewardFunction(Generic[P, R]):
    """A function that judges a reply, with the range of its values. Made by :func:`reward`; still callable."""

    def __init__(self, function: Callable[P, R], value_range: ValueRange, name: str) -> None:
        self.function = function
        self.value_range = checked_range(value_range, name)
        self.name = name
        self.parameters = function_parameters(function, name)
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


@overload
def reward(function: Callable[P, R], /) -> RewardFunction[P, R]: ...
@overload
def reward(
    *, value_range: ValueRange = (0.0, 1.0), name: str | None = None
) -> Callable[[Callable[P, R]], RewardFunction[P, R]]: ...
def reward(
    function: Callable[P, R] | None = None, /, *, value_range: ValueRange = (0.0, 1.0), name: str | None = None
) -> RewardFunction[P, R] | Callable[[Callable[P, R]], RewardFunction[P, R]]:
    """Declare a function as a reward.

    Its parameters are filled by name: ``reply`` or ``answer`` (the policy's last words), ``task`` (a Task, whose
    ``answer`` is the reference), ``episode`` (all of it). It returns a number in ``value_range`` (bounds included),
    or a Score with named components. It may be ``async``.

    Example::

        @headrace.reward
        def exact(answer: str, task: Task) -> float:
            return float(answer.strip() == task.answer)

    Raises:
        ConfigError: for other parameters, or a range that is empty or not finite.
    """

    def decorate(function: Callable[P, R]) -> RewardFunction[P, R]:
        return RewardFunction(function, value_range, name or str(getattr(function, "__name__", "reward")))

    return decorate if function is None else decorate(function)


def function_parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """Names of the parameters of a reward function, each one of :data:`PARAMETERS`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r} is not a function that headrace can call: {error}") from error
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in required if p.name not in PARAMETERS or p.kind is p.POSITIONAL_ONLY]
    if unknown:
        raise ConfigError(
            f"reward {name!r} asks for {', '.join(unknown)}; a reward's parameters are filled by name and may be "
            f"{', '.join(PARAMETERS)}"
        )
    names = tuple(p.name for p in parameters if p.name in PARAMETERS and p.kind is not p.POSITIONAL_ONLY)
    if not names:
        raise ConfigError(f"reward {name!r} takes none of {', '.join(PARAMETERS)}: it would judge without looking")
    return names


def call_arguments(parameters: tuple[str, ...], episode: Episode) -> dict[str, Any]:
    """The arguments of a reward function for one episode."""
    values = {"reply": episode.reply, "answer": episode.reply, "task": episode.task, "episode": episode}
    return {name: values[name] for name in parameters}


def checked_range(value_range: ValueRange, name: str) -> ValueRange:
    low, high = (float(bound) for bound in value_range)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"reward {name!r} declares the range {value_range}; it must be (low, high), both finite")
    return low, high


# --------------------------------------------------------------------------------------- result to Score


def to_score(result: object, value_range: ValueRange, name: str) -> ScoreResult:
    """The gate of I14: a finite number in its declared range, looked at before anything is done to it (F135).

    True, None and text are not scores: a reward that returns them has a defect, and a guess would hide it. NaN is
    refused here, since ``max(0, min(1, nan))`` is 1.0 in Python.
    """
    if isinstance(result, ScoreError):
        return result
    value = result.value if isinstance(result, Score) else result
    if hasattr(value, "item") and not isinstance(value, (int, float)) and getattr(value, "shape", None) == ():
        value = value.item()  # a numpy scalar, or a tensor of one element
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        return invalid(name, f"returned {shown} of type {type(value).__name__}; a score is a number or a Score")
    if not math.isfinite(value):
        return invalid(name, f"returned {value}; a score must be finite")
    low, high = value_range
    if not low <= value <= high:
        return invalid(name, f"returned {value}, outside of its declared range [{low:g}, {high:g}]")
    return result if isinstance(result, Score) else Score(value=float(value))


def invalid(name: str, message: str) -> ScoreError:
    return ScoreError(error_class=ErrorClass.INVALID_SCORE, message=f"reward {name!r} {message}", reward=name)


def missing_answer(name: str, episode: Episode, why: str) -> ScoreError:
    """The task has nothing to compare with: a defect of the data, never of the policy."""
    return ScoreError(error_class=ErrorClass.MISSING_ANSWER, message=f"task {episode.task.id!r} {why}", reward=name)


def reward_name(type_name: str) -> str:
    """Short name of a reward type: of ``pkg.module:function`` and ``file.py:function`` the function's."""
    return re.sub(r"[^\w.+-]", "_", type_name.rpartition(":")[2])


class RewardBase:
    """What a reward needs to be one: a name, a range, ``score``. Groups are judged member by member."""

    def __init__(self, name: str, value_range: ValueRange = (0.0, 1.0)) -> None:
        self._name = name
        self._value_range = value_range

    @property
    def name(self) -> str:
        return self._name

    @property
    def value_range(self) -> ValueRange:
        return self._value_range

    @property
    def deadline_s(self) -> float:
        """The longest that one ``score`` call can take, its wait for a free worker included."""
        return 0.0

    async def start(self) -> None:
        """Start and self-test what judges (I15). Idempotent; ``score`` calls it where nobody has.

        Raises:
            RewardStartError: where the self-test fails; the reward must then not be used.
        """

    async def score(self, episode: Episode) -> ScoreResult:
        raise NotImplementedError

    async def score_group(self, group: Group) -> list[ScoreResult]:
        """One result for each episode of ``group``, in its order."""
        return [await self.score(episode) for episode in group.episodes]

    async def close(self) -> None:
        """End what :meth:`start` started."""


def error_fields(error: ScoreError) -> Mapping[str, str]:
    """A classed error as JSON fields."""
    return {"error_class": str(error.error_class), "message": error.message, "reward": error.reward}
