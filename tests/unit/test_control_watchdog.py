"""The watchdog: every wait has a name and a deadline, a run without progress explains itself (I19; D11; failures 91,
97). Time is a number that the test moves; no test sleeps."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.control.watchdog import DeadlineError, Watchdog, await_with_deadline


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_stall_is_the_longer_of_the_minimum_and_ten_medians() -> None:
    """I19: no progress for max(5 min, 10 x median)."""
    clock = FakeClock()
    watchdog = Watchdog(clock, stall_min_s=300)
    clock.now_s += 300
    assert not watchdog.stalled()
    clock.now_s += 0.1
    assert watchdog.stalled()
    watchdog.progress("group")
    for interval_s in (60, 60, 60, 1000):
        clock.now_s += interval_s
        watchdog.progress("group")
    assert watchdog.stall_after_s == 600
    clock.now_s += 599
    assert not watchdog.stalled()
    clock.now_s += 2
    assert watchdog.stalled()
    watchdog.progress()
    assert (watchdog.stalled(), watchdog.idle_s) == (False, 0.0)


def test_report_says_who_waits_on_whom_oldest_first() -> None:
    """I19, failures 91, 97: names, ages, deadlines, queues and stacks, as JSON and as text."""
    clock = FakeClock()
    watchdog = Watchdog(clock, stall_min_s=10)
    watchdog.progress("batch 3")
    first = watchdog.begin("rollout", "engine", "turn 2 of g4m1", 60)
    clock.now_s += 70
    watchdog.begin("rollout", "reward math", "score of g5m0", 30)
    clock.now_s += 5
    watchdog.watch_queue("scored groups", lambda: 127)
    watchdog.watch_stacks("threads", lambda: "trainer: optim_step\nengine: decode")
    report = json.loads(json.dumps(watchdog.report()))
    assert [(w["on"], w["waited_s"], w["overdue"]) for w in report["waits"]] == [
        ("engine", 75.0, True),
        ("reward math", 5.0, False),
    ]
    assert report["queues"] == {"scored groups": 127}
    assert (report["idle_s"], report["last_progress"]) == (75.0, "batch 3")
    text = watchdog.report_text()
    assert "rollout waits on engine for turn 2 of g4m1: 75.0 s of 60 s  OVERDUE" in text
    assert text.index("engine for turn") < text.index("reward math")
    assert "queue scored groups: 127" in text
    assert "engine: decode" in text
    assert [w.on for w in watchdog.overdue()] == ["engine"]
    watchdog.end(first)
    assert watchdog.overdue() == ()
    with pytest.raises(KeyError):
        watchdog.end(first)


def test_report_comes_out_although_a_callback_is_broken() -> None:
    """I19: a report is asked for when things are sick; a broken part is said, not raised."""
    watchdog = Watchdog(FakeClock(), stall_min_s=10)
    watchdog.watch_queue("broken", lambda: 1 // 0)
    assert "ZeroDivisionError" in watchdog.report()["queues"]["broken"]
    assert "the loop itself is busy or blocked" in watchdog.report_text()


def test_a_wait_ends_with_its_block_however_that_ends() -> None:
    """No wait is left behind by an exception."""
    watchdog = Watchdog(FakeClock(), stall_min_s=10)
    with pytest.raises(RuntimeError, match="broke"), watchdog.waiting("a", "b", "c", 1):
        assert len(watchdog.waits()) == 1
        raise RuntimeError("broke")
    assert watchdog.waits() == ()


def run_with_deadline(watchdog: Watchdog, awaitable: object, deadline_s: float = 0.0) -> object:
    async def main() -> object:
        return await await_with_deadline(
            awaitable,  # type: ignore[arg-type]
            watchdog=watchdog,
            waiter="rollout",
            on="engine",
            what="turn 1",
            deadline_s=deadline_s,
        )

    return asyncio.run(main())


def test_result_and_error_come_through() -> None:
    """A wait that ends in time is invisible."""

    async def good() -> int:
        return 7

    async def bad() -> int:
        raise ValueError("the engine said no")

    watchdog = Watchdog(FakeClock(), stall_min_s=10)
    assert run_with_deadline(watchdog, good(), 60) == 7
    with pytest.raises(ValueError, match="the engine said no"):
        run_with_deadline(watchdog, bad(), 60)
    assert watchdog.waits() == ()


def test_deadline_names_who_waited_on_whom_for_what() -> None:
    """I19: one clear error, and the awaited work is cancelled."""
    ended = []

    async def hanging() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    watchdog = Watchdog(FakeClock(), stall_min_s=10)
    with pytest.raises(DeadlineError, match=r"rollout waited 0\.0 s on engine for turn 1; the deadline is 0 s\."):
        run_with_deadline(watchdog, hanging())
    assert ended == ["cancelled"]
    assert watchdog.waits() == ()


def test_deadline_holds_although_the_work_ignores_its_cancellation() -> None:
    """I19, failure 120: whoever swallows the cancellation does not keep the waiter, and its later error is consumed."""
    release = []

    async def stubborn() -> None:
        event = asyncio.Event()
        release.append(event)
        for _ in range(2):
            try:
                await event.wait()
            except asyncio.CancelledError:
                continue
        raise RuntimeError("much later")

    async def main() -> str:
        watchdog = Watchdog(FakeClock(), stall_min_s=10)
        try:
            await await_with_deadline(stubborn(), watchdog=watchdog, waiter="a", on="b", what="c", deadline_s=0.0)
        except DeadlineError:
            release[0].set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return "free"
        return "hung"

    assert asyncio.run(main()) == "free"


def test_cancelling_the_waiter_cancels_the_work() -> None:
    """No work goes on that nobody waits for."""
    ended = []

    async def hanging() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async def main() -> None:
        watchdog = Watchdog(FakeClock(), stall_min_s=10)
        waiter = asyncio.ensure_future(
            await_with_deadline(hanging(), watchdog=watchdog, waiter="a", on="b", what="c", deadline_s=60)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await asyncio.sleep(0)
        assert watchdog.waits() == ()

    asyncio.run(main())
    assert ended == ["ended"]


def test_seconds_waited_are_booked_by_who_waited_on_whom() -> None:
    """Wait causes: closed and open waits count, once each, and from the last question on."""
    clock = FakeClock()
    watchdog = Watchdog(clock, stall_min_s=300)
    first = watchdog.begin("episode g0m1", "engine", "generation of turn 0", 60)
    second = watchdog.begin("episode g0m2", "engine", "generation of turn 0", 60)
    clock.now_s += 2.0
    watchdog.begin("loop", "rollouts", "batch 0", 60)
    watchdog.end(first)
    clock.now_s += 3.0
    assert watchdog.take_waited_s() == {("episode", "engine"): 2.0 + 5.0, ("loop", "rollouts"): 3.0}
    clock.now_s += 1.0
    watchdog.end(second)
    clock.now_s += 1.0
    assert watchdog.take_waited_s() == {("episode", "engine"): 1.0, ("loop", "rollouts"): 2.0}
    assert watchdog.take_waited_s() == {("loop", "rollouts"): 0.0}
