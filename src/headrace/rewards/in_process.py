"""A Python callable as a reward, in a thread of this process: for closures and lambdas that no worker can import.

A thread cannot be killed. Each call gets its own, with a deadline; one that hangs is left behind and counted, and
after ``MAX_STUCK_THREADS`` of them the reward gives up instead of filling the process with them (F120).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from headrace.rewards.base import (
    RewardBase,
    RewardFunction,
    ValueRange,
    call_arguments,
    function_parameters,
    to_score,
)
from headrace.types import Episode, ErrorClass, ScoreError, ScoreResult

MAX_STUCK_THREADS = 8


class CallableReward(RewardBase):
    """``function`` (plain or async, or what ``@headrace.reward`` made of it) as a reward.

    Example::

        CallableReward(lambda answer, task: float(answer == task.answer), name="same")
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        value_range: ValueRange | None = None,
        deadline_s: float = 10.0,
    ) -> None:
        if isinstance(function, RewardFunction):
            name, value_range, function = name or function.name, value_range or function.value_range, function.function
        super().__init__(name or str(getattr(function, "__name__", "reward")), value_range or (0.0, 1.0))
        self._function = function
        self._parameters = function_parameters(function, self.name)
        self._score_deadline_s = deadline_s
        self._num_stuck = 0

    @property
    def deadline_s(self) -> float:
        return self._score_deadline_s

    async def score(self, episode: Episode) -> ScoreResult:
        if self._num_stuck >= MAX_STUCK_THREADS:
            return self._error(
                ErrorClass.INFRASTRUCTURE,
                f"{self._num_stuck} calls of reward {self.name!r} hang in threads that cannot be killed; name it by "
                "'module:function', so that it runs in a worker process",
            )
        arguments = call_arguments(self._parameters, episode)
        try:
            async with asyncio.timeout(self._score_deadline_s) as limit:
                result = await self._call(arguments)
        except TimeoutError as error:
            if not limit.expired():
                return self._error(ErrorClass.EXCEPTION, f"TimeoutError: {error}")
            message = f"reward {self.name!r} gave no answer in {self._score_deadline_s:g} s"
            return self._error(ErrorClass.TIMEOUT, message)
        except MemoryError:
            return self._error(ErrorClass.MEMORY, f"reward {self.name!r} ran out of memory")
        except Exception as error:
            return self._error(ErrorClass.EXCEPTION, f"{type(error).__name__}: {error}")
        return to_score(result, self.value_range, self.name)

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**arguments)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        is_left_behind = False

        def finish(result: Any, error: Exception | None) -> None:
            if is_left_behind:
                self._num_stuck -= 1
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = self._function(**arguments)
            except Exception as raised:
                error = raised
            except BaseException as raised:  # SystemExit and the like end this thread, never the run
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=work, name=f"reward-{self.name}", daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:  # nobody waits any more, and the thread goes on
            if not done.done() or done.cancelled():
                is_left_behind = True
                self._num_stuck += 1
            raise

    def _error(self, error_class: ErrorClass, message: str) -> ScoreError:
        return ScoreError(error_class=error_class, message=message, reward=self.name)
