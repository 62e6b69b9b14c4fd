"""One daemon thread that runs blocking calls for asyncio, in order.

``concurrent.futures`` joins its threads when the interpreter exits, so one hung step would keep a dead run alive for
ever. This runner's thread is a daemon and is never joined: whoever waits sets the deadline (I19).

Caller and runner take turns computing, so each lets go of its OpenMP workers before the other's turn (openmp.py).
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from headrace.openmp import release_workers

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThread:
    """Runs calls one after the other on a thread of its own.

    ``initialise`` runs first, on the thread (for what torch keeps per thread, such as its number of threads).
    """

    def __init__(self, name: str, initialise: Callable[[], None] | None = None) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._initialise = initialise
        self._initialise_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue ``function(*args, **kwargs)``; the future of the running loop gets its result or its exception. A call
        whose caller gave up still runs to its end: half an optimizer step is worse than a late one."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                if self._initialise_error is not None:
                    raise self._initialise_error
                result = function(*args, **kwargs)
            except BaseException as caught:  # handed to the waiter, whatever it is
                error = caught
            release_workers()
            # A closed loop has no waiter left to be told.
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)

        release_workers()
        self._jobs.put(job)
        return future

    def stop(self) -> None:
        """End the thread after the calls already queued. Never waits: a hung call would hold the caller too."""
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._initialise is not None:
                self._initialise()
        except BaseException as error:  # handed to every caller
            self._initialise_error = error
        while (job := self._jobs.get()) is not None:
            job()


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the waiter was cancelled meanwhile
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception):
        future.set_exception(error)
    else:  # StopIteration and exits cannot travel in a future as they are
        future.set_exception(RuntimeError(f"a call on a daemon thread ended with {error!r}"))
