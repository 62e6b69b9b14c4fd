"""Calls of actors: executed once, answered or dead, whatever happens to the messages (I11, I19; failures 103, 106)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.cluster.actors import (
    ActorDied,
    ActorHandle,
    ActorHost,
    InProcessHandle,
    Message,
    MessageHandle,
    RemoteError,
)
from headrace.scripted import run_in_virtual_time


class Counter:
    """Adds up; remembers what was done to it."""

    def __init__(self) -> None:
        self.total, self.num_calls, self.num_cancelled = 0, 0, 0

    def add(self, number: int) -> int:
        self.num_calls += 1
        self.total += number
        return self.total

    async def slow(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return "done"

    def fail(self) -> None:
        raise ValueError("as asked")

    def _secret(self) -> None: ...


class Lossy:
    """A handle and a host that lose, delay, double and reorder each other's messages."""

    def __init__(self, target: object, seed: int = 0, *, loss: float = 0.3, delay_s: float = 0.5) -> None:
        self._rng, self._loss, self._delay_s = random.Random(seed), loss, delay_s
        self.sent: list[Message] = []
        self.host = ActorHost("s", target, lambda m: self._carry(m, lambda m: self.handle.receive(m)))
        self.handle = MessageHandle("counter", "s", self._to_host, resend_s=1.0)

    def _to_host(self, message: Message) -> None:
        self.sent.append(message)
        self._carry(message, lambda m: self.host.receive(m))

    def _carry(self, message: Message, deliver: Callable[[Message], None]) -> None:
        for _ in range(self._rng.choice((1, 1, 2))):
            if self._rng.random() >= self._loss:
                asyncio.get_running_loop().call_later(self._rng.random() * self._delay_s, deliver, message)


def both(target: object) -> list[ActorHandle]:
    return [InProcessHandle("counter", target), Lossy(target, loss=0.0).handle]


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        return await main()

    return run_in_virtual_time(body)


@pytest.mark.parametrize("which", [0, 1])
def test_a_call_returns_what_the_method_returns(which: int) -> None:
    """The same contract in process and by messages: results, errors, and no private methods."""

    async def main() -> None:
        handle = both(Counter())[which]
        assert await handle.is_alive()
        assert await handle.call("add", 3) == 3
        assert await handle.call("slow", 2.0) == "done"
        with pytest.raises((ValueError, RemoteError), match="as asked"):
            await handle.call("fail")
        for name in ("_secret", "total", "missing"):
            with pytest.raises((AttributeError, RemoteError), match="no public method"):
                await handle.call(name)

    run(main)


@pytest.mark.parametrize("which", [0, 1])
def test_a_closed_actor_is_dead_for_open_and_later_calls(which: int) -> None:
    """Failure 106: the death of an actor is told as that, not as something else."""

    async def main() -> None:
        handle = both(Counter())[which]
        open_call = asyncio.ensure_future(handle.call("slow", 100.0))
        await asyncio.sleep(1.0)
        await handle.close()
        await handle.close()
        with pytest.raises(ActorDied, match="was closed"):
            await open_call
        with pytest.raises(ActorDied, match="was closed"):
            await handle.call("add", 1)
        assert not await handle.is_alive()

    run(main)


@pytest.mark.parametrize("which", [0, 1])
def test_a_cancelled_call_is_cancelled_at_the_actor(which: int) -> None:
    """I19: who gives up a wait leaves no work behind."""

    async def main() -> None:
        counter = Counter()
        handle = both(counter)[which]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.call("slow", 100.0), 5.0)
        await asyncio.sleep(1.0)
        assert counter.num_cancelled == 1

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_every_call_is_executed_once_over_a_lossy_transport(seed: int) -> None:
    """Failure 103: a call that was repeated because its answer got lost is not done twice."""

    async def main() -> None:
        counter = Counter()
        lossy = Lossy(counter, seed)
        results = await asyncio.gather(*(lossy.handle.call("add", 1) for _ in range(30)))
        assert sorted(results) == list(range(1, 31)) and counter.num_calls == 30
        assert len(lossy.sent) > 30, "nothing was lost"
        await asyncio.sleep(100.0)
        assert counter.num_calls == 30, "a late copy was executed"
        for _ in range(5):  # what is settled is told with the next calls
            await lossy.handle.call("add", 0)
        assert lossy.host.num_remembered <= 5

    run(main)


def test_replies_are_forgotten_while_a_long_call_runs() -> None:
    """Failure 105: what is settled is told call by call, not by the floor alone, which one long call holds down."""

    async def main() -> None:
        lossy = Lossy(Counter(), loss=0.0)
        long_call = asyncio.ensure_future(lossy.handle.call("slow", 1000.0))
        for _ in range(50):
            await lossy.handle.call("add", 1)
        assert lossy.host.num_remembered <= 1
        assert not long_call.done()
        long_call.cancel()

    run(main)


def test_a_lost_cancellation_is_made_up_for_by_the_next_message() -> None:
    """The floor tells again what a lost message told."""

    async def main() -> None:
        counter = Counter()
        host = ActorHost("s", counter, lambda m: handle.receive(m))
        lose = []
        handle = MessageHandle("counter", "s", lambda m: None if lose else host.receive(m))
        call = asyncio.ensure_future(handle.call("slow", 100.0))
        await asyncio.sleep(1.0)
        lose.append(1)
        call.cancel()
        await asyncio.sleep(1.0)
        lose.clear()
        assert counter.num_cancelled == 0
        await handle.call("add", 1)
        await asyncio.sleep(0.0)
        assert counter.num_cancelled == 1

    run(main)


def test_a_late_copy_of_a_cancelled_call_is_not_started() -> None:
    """A call whose first copy arrives after its caller has given up."""

    async def main() -> None:
        counter, held = Counter(), []
        host = ActorHost("s", counter, lambda m: handle.receive(m))
        handle = MessageHandle(
            "counter", "s", lambda m: held.append(m) if m.get("method") == "slow" else host.receive(m)
        )
        call = asyncio.ensure_future(handle.call("slow", 1.0))
        await asyncio.sleep(1.0)
        call.cancel()
        await handle.call("add", 1)
        host.receive(held[0])
        await asyncio.sleep(10.0)
        assert counter.num_cancelled == 0 and not host._running and host.num_remembered <= 1

    run(main)


def test_a_restarted_actor_ignores_its_predecessors_calls() -> None:
    """Failure 88: what was meant for one incarnation does nothing to the next, and the old handle hears of it."""

    async def main() -> None:
        counter = Counter()
        host = ActorHost("second", counter, lambda m: handle.receive(m))
        handle = MessageHandle("counter", "first", lambda m: host.receive(m), resend_s=1.0)
        with pytest.raises(ActorDied, match="another incarnation"):
            await handle.call("add", 1)
        assert counter.num_calls == 0 and not await handle.is_alive()

    run(main)


def test_close_ends_the_actor_once() -> None:
    """``end`` belongs to the carrier, and the first reason of a death stands."""
    ended: list[int] = []

    async def main() -> None:
        async def end() -> None:
            ended.append(1)

        handle = MessageHandle("counter", "s", lambda m: None, end=end)
        handle.died("the process ended with status -9")
        await handle.close()
        await handle.close()
        with pytest.raises(ActorDied, match="status -9"):
            await handle.call("add", 1)

    run(main)
    assert ended == [1]


def test_a_closed_host_cancels_what_runs() -> None:
    """Whoever ends an actor ends its work."""

    async def main() -> None:
        counter = Counter()
        lossy = Lossy(counter, loss=0.0)
        call = asyncio.ensure_future(lossy.handle.call("slow", 100.0))
        await asyncio.sleep(5.0)
        lossy.host.close()
        await asyncio.sleep(5.0)
        assert counter.num_cancelled == 1
        call.cancel()

    run(main)
