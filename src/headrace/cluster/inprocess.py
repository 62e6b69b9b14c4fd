"""Actors inside this process: one daemon thread each, called from asyncio.

A thread that hangs must never keep the interpreter alive nor block the event loop, which rules out
``concurrent.futures`` (its threads are joined at exit).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadActor:
    """Runs blocking calls one after another on a thread of its own.

    Example::

        trainer_thread = ThreadActor("trainer", setup=lambda: torch.set_num_threads(2))
        metrics = await trainer_thread.call(trainer.optim_step)

    ``setup`` runs once on the thread before the first call; torch's thread count, for one, is kept per thread.
    A call whose caller was cancelled still runs to its end: half an optimizer step is worse than a late one.
    """

    def __init__(self, name: str, *, setup: Callable[[], object] | None = None) -> None:
        self.name = name
        self._setup = setup
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.AbstractEventLoop, asyncio.Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"headrace-{name}", daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a call; the future ends with its result or its exception. The deadline is the caller's."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._calls.put((lambda: function(*args, **kwargs), loop, future))
        return future

    def close(self) -> None:
        """Let the thread end after the calls it has; never waits for it."""
        self._calls.put(None)

    def _run(self) -> None:
        setup_error: BaseException | None = None
        try:
            if self._setup is not None:
                self._setup()
        except BaseException as error:  # reported to whoever calls
            setup_error = error
        while (item := self._calls.get()) is not None:
            work, loop, future = item
            result: Any = None
            error: BaseException | None = setup_error
            if error is None:
                try:
                    result = work()
                except BaseException as raised:  # carried to the caller, whatever it is
                    error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the caller gave up waiting
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
