"""Conditions of the watchdog that its other tests did not hold; found by ``make mutation``. Virtual time, no sleeps."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest
from test_control_watchdog import FakeClock

from headrace.control.watchdog import DeadlineError, Watchdog, await_with_deadline
from headrace.scripted import run_in_virtual_time


def wait(watchdog: Watchdog, work: Awaitable[object], **more: str) -> Awaitable[object]:
    return await_with_deadline(work, watchdog=watchdog, waiter="a", on="b", what="c", deadline_s=5.0, **more)


def test_progress_and_advice_have_words_of_their_own() -> None:
    watchdog = Watchdog(FakeClock(), stall_min_s=300)
    watchdog.progress()
    assert watchdog.report()["last_progress"] == "progress"
    watchdog.progress("batch 7")
    assert watchdog.report()["last_progress"] == "batch 7"
    parts = {"waiter": "a", "on": "b", "what": "c", "waited_s": 1.0, "deadline_s": 1.0}
    look = "Look at what b was doing, or raise the deadline of this wait if it was only slow."
    assert str(DeadlineError(**parts)).endswith(look)
    assert str(DeadlineError(**parts, advice="Call somebody.")).endswith("the deadline is 1 s. Call somebody.")


def test_fast_progress_makes_no_early_stall() -> None:
    clock = FakeClock()
    watchdog = Watchdog(clock, stall_min_s=300)
    for _ in range(5):
        clock.now_s += 1.0
        watchdog.progress()
    assert watchdog.stall_after_s == 300


@pytest.mark.parametrize(("moved_s", "waited"), [(0.0, "5.0"), (9.0, "9.0")])
def test_the_seconds_that_are_told_are_the_longer_ones(moved_s: float, waited: str) -> None:
    """The injected clock may lag behind the loop's, or run ahead while the loop was blocked."""
    clock = FakeClock()

    async def hanging() -> None:
        clock.now_s += moved_s
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(DeadlineError, match=rf"a waited {waited} s on b"):
            await wait(Watchdog(clock, 10), hanging())

    run_in_virtual_time(main)


def left_behind(end: Callable[[Watchdog, Awaitable[object]], Awaitable[None]], *, raises: bool) -> list[str]:
    """What became of work that nobody waits for any more, and what the loop had to say about it."""
    said: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append("cancelled")
            if raises:
                raise ValueError("nobody wants to know") from None
            raise

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: said.append(str(context["message"])))
        await end(Watchdog(FakeClock(), 10), work())
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
        said.append("end")

    run_in_virtual_time(main)
    return said


async def too_late(watchdog: Watchdog, work: Awaitable[object]) -> None:
    with pytest.raises(DeadlineError):
        await wait(watchdog, work)


async def given_up(watchdog: Watchdog, work: Awaitable[object]) -> None:
    waiter = asyncio.ensure_future(wait(watchdog, work))
    await asyncio.sleep(1.0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("end", [too_late, given_up])
def test_work_that_nobody_waits_for_is_cancelled_and_its_error_consumed(
    end: Callable[[Watchdog, Awaitable[object]], Awaitable[None]], raises: bool
) -> None:
    """Before the loop itself ends, and without a word about exceptions that were never retrieved."""
    assert left_behind(end, raises=raises) == ["cancelled", "end"]
