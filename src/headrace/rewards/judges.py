"""What judges inside a worker process: mathematics, patterns, reasoning-gym, and functions of the user's.

A judge is named by a JSON object, so that it can be built on the other side of a pipe. Heavy imports happen when a
judge is loaded, never in the trainer's process.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import pickle
import re
import resource
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from headrace.config.references import load_reference
from headrace.errors import ConfigError
from headrace.rewards.base import RewardFunction, ValueRange, call_arguments, function_parameters, to_score
from headrace.rewards.math_text import UnreadableMath
from headrace.types import Episode, ErrorClass, Score, ScoreError, ScoreResult

JudgeSpec = Mapping[str, Any]
"""``{"kind": "math", ...options}``: see :func:`load_judge`."""


class Judge(Protocol):
    @property
    def value_range(self) -> ValueRange: ...

    def score(self, payload: Mapping[str, Any]) -> ScoreResult: ...


def load_judge(spec: JudgeSpec) -> Judge:
    """Build the judge that ``spec`` names: kind ``math``, ``pattern``, ``reasoning_gym`` or ``function``."""
    options = {key: value for key, value in spec.items() if key != "kind"}
    judge: Judge = _JUDGES[spec["kind"]](**options)
    return judge


class MathJudge:
    """Mathematical equivalence: payload ``gold`` and ``answer``, texts without boxes."""

    value_range: ValueRange = (0.0, 1.0)

    def __init__(self, relative_tolerance: float) -> None:
        from headrace.rewards.math_compare import UnreadableGold, equivalent

        self._equivalent = equivalent
        self._unreadable_gold = UnreadableGold
        self._relative_tolerance = relative_tolerance
        memory_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        self._suspicious_bytes = (_peak_address_space_bytes() + memory_bytes) / 2 if memory_bytes > 0 else math.inf

    def score(self, payload: Mapping[str, Any]) -> ScoreResult:
        unparsable = False
        try:
            equal = self._equivalent(payload["gold"], payload["answer"], relative_tolerance=self._relative_tolerance)
        except self._unreadable_gold as error:
            message = f"the reference answer {payload['gold']!r} cannot be compared with: {error}"
            return ScoreError(error_class=ErrorClass.MISSING_ANSWER, message=message)
        except (UnreadableMath, RecursionError):  # the second: brackets nested without end
            equal, unparsable = False, True
        if not equal:
            self._raise_if_memory_ran_out()
        return Score(value=float(equal), components={"unparsable": float(unparsable)})

    def _raise_if_memory_ran_out(self) -> None:
        """sympy's and math-verify's catch-alls swallow MemoryError and say "not equal". Numbers grow by doubling, so
        that a process that ran into its cap has used more than half of what it had."""
        if _peak_address_space_bytes() > self._suspicious_bytes:
            raise MemoryError


def _peak_address_space_bytes() -> int:
    """Largest address space of this process so far; 0 where the system does not say."""
    if sys.platform != "linux":
        return 0
    match = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match.group(1)) * 1024 if match else 0


class PatternJudge:
    """A regular expression of the user's against the whole text: payload ``text``. May backtrack without end."""

    value_range: ValueRange = (0.0, 1.0)

    def __init__(self, pattern: str, dot_matches_newline: bool) -> None:
        self._pattern = re.compile(pattern, re.DOTALL if dot_matches_newline else 0)

    def score(self, payload: Mapping[str, Any]) -> ScoreResult:
        return Score(value=float(self._pattern.fullmatch(payload["text"]) is not None))


class ReasoningGymJudge:
    """A generator's own ``score_answer``: payload ``answer`` and the task's ``reasoning_gym`` metadata."""

    value_range: ValueRange = (0.0, 1.0)

    def __init__(self) -> None:
        try:
            from reasoning_gym.factory import create_dataset
        except ImportError as error:
            raise ConfigError(
                "reward 'reasoning_gym' needs the reasoning-gym package: pip install 'headrace[environments]' "
                f"({error})"
            ) from error
        self._create = create_dataset
        self._dataset = lru_cache(maxsize=32)(self._make_dataset)
        self._entry = lru_cache(maxsize=256)(self._make_entry)

    def score(self, payload: Mapping[str, Any]) -> ScoreResult:
        source = payload["source"]
        key = json.dumps([source["dataset"], source["seed"], source["size"], source["options"]])
        entry = self._entry(key, source["index"]) if source["entry"] is None else source["entry"]
        value = self._dataset(key).score_answer(payload["answer"], entry)
        return to_score(value, self.value_range, "reasoning_gym")

    def _make_dataset(self, key: str) -> Any:
        name, seed, size, options = json.loads(key)
        return self._create(name, seed=seed, size=size, **options)

    def _make_entry(self, key: str, index: int) -> Any:
        """Made again as the task was: the generators draw item i with seed + i, and PYTHONHASHSEED is the same."""
        return self._dataset(key)[index]


class FunctionJudge:
    """A function of the user's, found by its reference: payload ``pickled`` (base64) holds the Episode.

    The pickle comes from our own parent process, never from a file or the network."""

    def __init__(self, reference: str, name: str) -> None:
        function = load_reference(reference, "reward")
        if isinstance(function, RewardFunction):
            self.value_range: ValueRange = function.value_range
            self._function: Callable[..., Any] = function.function
        elif callable(function):
            self.value_range, self._function = (0.0, 1.0), function
        else:
            raise ConfigError(f"reward {reference!r} is a {type(function).__name__}, not a function")
        self._name = name
        self._parameters = function_parameters(self._function, name)

    def score(self, payload: Mapping[str, Any]) -> ScoreResult:
        episode: Episode = pickle.loads(base64.b64decode(payload["pickled"]))
        result = self._function(**call_arguments(self._parameters, episode))
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return to_score(result, self.value_range, self._name)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


_JUDGES: dict[str, Callable[..., Any]] = {
    "math": MathJudge,
    "pattern": PatternJudge,
    "reasoning_gym": ReasoningGymJudge,
    "function": FunctionJudge,
}
