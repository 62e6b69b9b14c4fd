"""Workers that stand in for each other: restarts within a budget, and what their users see (I14, I19, F89, F106)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import cluster_targets
import pytest

from headrace.cluster.actors import ActorDied, ActorHandle, InProcessHandle
from headrace.cluster.environments import EnvironmentWorkers
from headrace.cluster.pool import NUM_SERVED_FOR_CREDIT, ActorPool, PoolExhausted
from headrace.cluster.rewards import MAX_WORKERS_PER_SCORE, RemoteReward, RewardActor
from headrace.cluster.spec import ActorNotMade, ActorSpec
from headrace.errors import PartLost
from headrace.protocols import Observation
from headrace.rewards.base import RewardBase
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, ScoreResult, Task, Trace

TASK = Task(id="t", messages=({"role": "user", "content": "go"},), answer="x")


class Started:
    """A pool's factory: in-process actors, every one of which can be killed. ``fails``: starts that do not come up."""

    def __init__(self, make: Callable[[], Any], fails: dict[tuple[int, int], Exception] | None = None) -> None:
        self._make, self._fails = make, fails or {}
        self.started: list[tuple[int, int]] = []
        self.handles: dict[int, InProcessHandle] = {}

    async def __call__(self, index: int, incarnation: int) -> ActorHandle:
        self.started.append((index, incarnation))
        if (index, incarnation) in self._fails:
            raise self._fails[index, incarnation]
        self.handles[index] = InProcessHandle(f"w{index}", self._make())
        return self.handles[index]

    async def kill(self, index: int) -> None:
        await self.handles[index].close()


def with_pool(
    started: Started, use: Callable[[ActorPool], Awaitable[None]], *, num: int = 2, max_restarts: int = 3
) -> list[str]:
    """Run ``use`` on a started pool; returns what was noted."""
    notes: list[str] = []

    async def main() -> None:
        pool = ActorPool("test", num, started, max_restarts=max_restarts, backoff_s=0.0, note=notes.append)
        await pool.start()
        try:
            async with asyncio.timeout(20.0):
                await use(pool)
        finally:
            await pool.close()

    asyncio.run(main())
    return notes


def echo() -> cluster_targets.Echo:
    return cluster_targets.Echo()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_work_goes_to_the_least_loaded_and_a_dead_worker_is_replaced() -> None:
    started = Started(echo)

    async def use(pool: ActorPool) -> None:
        first, second, third = [await pool.member(1.0) for _ in range(3)]
        assert [first.index, second.index, third.index] == [0, 1, 0]
        pool.done(first)
        pool.died(second, "it was killed")
        pool.died(second, "told twice")
        await until(lambda: len(pool.members) == 2)
        assert sorted((m.index, m.incarnation) for m in pool.members) == [(0, 0), (1, 1)]
        assert pool.num_deaths == 1

    notes = with_pool(started, use)
    assert started.started == [(0, 0), (1, 0), (1, 1)]
    assert len(notes) == 1 and "it was killed" in notes[0]


def test_a_place_that_dies_too_often_is_retired_and_the_last_one_ends_the_waiting() -> None:
    """F89: no worker is restarted for ever; whoever waits for one hears why."""
    started = Started(echo)

    async def use(pool: ActorPool) -> None:
        for number in range(3):
            await until(lambda: len(pool.members) == 1)
            pool.died(pool.members[0], f"death {number}")
        with pytest.raises(PoolExhausted, match=r"no test worker is left: .*restarted 2 times.*the last end: death 2"):
            await pool.member(5.0)

    with_pool(started, use, num=1, max_restarts=2)
    assert started.started == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("kind", [ActorDied, ActorNotMade])
def test_a_start_that_fails_counts_as_a_restart(kind: type[Exception]) -> None:
    spec = ActorSpec(role="reward", index=0, incarnation=1, factory="x:y")
    error = ActorNotMade(spec, "no disk") if kind is ActorNotMade else ActorDied("no disk")
    started = Started(echo, {(0, 1): error})

    async def use(pool: ActorPool) -> None:
        pool.died(pool.members[0], "killed")
        assert (await pool.member(5.0)).incarnation == 2

    notes = with_pool(started, use, num=1)
    assert "no disk" in notes[1]


def test_a_first_start_that_fails_leaves_nothing_running() -> None:
    started = Started(echo, {(1, 0): ActorDied("no room")})

    async def main() -> None:
        pool = ActorPool("test", 2, started, max_restarts=3, note=lambda _: None)
        with pytest.raises(ActorDied, match="no room"):
            await pool.start()
        assert not await started.handles[0].is_alive()

    asyncio.run(main())


def test_waiting_for_a_worker_has_a_deadline() -> None:
    """I19."""
    never = asyncio.Event

    class Slow(Started):
        async def __call__(self, index: int, incarnation: int) -> ActorHandle:
            if incarnation:
                await never().wait()
            return await super().__call__(index, incarnation)

    async def use(pool: ActorPool) -> None:
        pool.died(pool.members[0], "killed")
        with pytest.raises(TimeoutError):
            await pool.member(0.01)

    with_pool(Slow(echo), use, num=1)


def test_work_that_goes_well_gives_a_restart_back() -> None:
    started = Started(echo)

    async def use(pool: ActorPool) -> None:
        for _ in range(4):  # more than the budget of one
            pool.died(pool.members[0], "killed")
            await until(lambda: len(pool.members) == 1)
            for _ in range(NUM_SERVED_FOR_CREDIT):
                pool.done(await pool.member(1.0))

    with_pool(started, use, num=1, max_restarts=1)
    assert len(started.started) == 5


# ---------------------------------------------------------------------------------------------- environments


async def play(workers: EnvironmentWorkers, task: Task, after_turn: Callable[[int], Awaitable[None]]) -> list[str]:
    """What the environment said in each turn."""
    environment = workers.make_environment(task)
    said = [(await environment.reset(task, 7)).messages[0]["content"]]
    done, turn = False, 0
    while not done:
        await after_turn(turn)
        turn += 1
        observation: Observation = await environment.step(f"a{turn}")
        said.append(observation.messages[0]["content"])
        done = observation.done
    await environment.close()
    return said


def test_an_episode_outlives_its_environment_worker() -> None:
    """The worker dies after each turn; the episode is played again up to there on another, word by word the same."""
    started = Started(cluster_targets.counting)

    async def use(pool: ActorPool) -> None:
        workers = EnvironmentWorkers(pool, worker_deadline_s=5.0)

        async def nothing(turn: int) -> None:
            pass

        async def kill(turn: int) -> None:
            if turn < 2:
                busy = next(m for m in pool.members if m.num_open)
                await started.kill(busy.index)

        undisturbed = await play(workers, TASK, nothing)
        assert undisturbed == ["7: ", "7: a1", "7: a1 a2", "7: a1 a2 a3"]
        assert await play(workers, TASK, kill) == undisturbed
        assert all(m.num_open == 0 for m in pool.members)
        for member in pool.members:
            assert await member.handle.call("num_open") == 0

    with_pool(started, use, max_restarts=5)


def test_an_environment_that_cannot_be_played_again_fails_and_says_why() -> None:
    """It would be another episode under the same seed."""
    started = Started(cluster_targets.counting)
    forgetful = Task(id="forgetful", messages=())

    async def use(pool: ActorPool) -> None:
        async def kill(turn: int) -> None:
            await started.kill(next(m for m in pool.members if m.num_open).index)

        with pytest.raises(PartLost, match="it draws on something besides task, seed and actions"):
            await play(EnvironmentWorkers(pool, worker_deadline_s=5.0), forgetful, kill)

    with_pool(started, use)


def test_an_episode_that_kills_every_worker_is_given_up() -> None:
    class Deadly:
        def __init__(self, own: list[InProcessHandle]) -> None:
            self._own = own

        async def reset(self, *_: Any) -> Observation:
            for handle in self._own:
                await handle.close()
            await asyncio.sleep(10)
            raise AssertionError

        async def close(self, *_: Any) -> None:
            pass

    handles: list[InProcessHandle] = []
    started = Started(lambda: Deadly(handles))

    async def use(pool: ActorPool) -> None:
        handles.extend(started.handles.values())

        async def start(index: int, incarnation: int) -> ActorHandle:
            handle = await Started.__call__(started, index, incarnation)
            handles.append(started.handles[index])
            return handle

        pool._start = start
        with pytest.raises(PartLost, match="lost 3 workers in a row"):
            await EnvironmentWorkers(pool, worker_deadline_s=5.0).make_environment(TASK).reset(TASK, 0)

    with_pool(started, use, num=1, max_restarts=10)


# --------------------------------------------------------------------------------------------------- rewards


class Judge(RewardBase):
    """Scores 1; ``hold`` keeps a score open until its worker is killed."""

    def __init__(self, hold: bool = False) -> None:
        super().__init__("judge")
        self._hold = hold

    @property
    def deadline_s(self) -> float:
        return 2.0

    async def score(self, episode: Episode) -> ScoreResult:
        if self._hold:
            await asyncio.sleep(3600)
        return Score(value=1.0)


EPISODE = Episode(key=AttemptKey(0, 0), task=TASK, turns=(), trace=Trace(), outcome=Outcome.DONE)


def scored(holds: list[bool], num: int = 1) -> ScoreResult:
    """The score of one episode where worker after worker holds it and is killed, as ``holds`` says."""
    makes = iter(holds)
    started = Started(lambda: RewardActor(Judge(next(makes))))
    result: list[ScoreResult] = []

    async def use(pool: ActorPool) -> None:
        remote = RemoteReward(Judge(), pool, "reward", worker_deadline_s=3.0)
        assert (remote.name, remote.value_range, remote.deadline_s) == ("judge", (0.0, 1.0), 15.0)
        waiting = asyncio.ensure_future(remote.score(EPISODE))
        for hold in holds:
            if hold:
                await until(lambda: any(m.num_open for m in pool.members))
                before = pool.num_deaths
                await asyncio.sleep(0.01)
                await started.kill(0)
                await until(lambda before=before: pool.num_deaths > before)
        result.append(await waiting)

    with_pool(started, use, num=num, max_restarts=10)
    return result[0]


def test_the_score_that_a_dead_worker_owed_comes_from_the_next() -> None:
    assert scored([True, True, False]) == Score(value=1.0)


def test_a_score_that_every_worker_dies_over_is_an_error_never_a_value() -> None:
    """I14."""
    result = scored([True] * MAX_WORKERS_PER_SCORE + [False])
    assert isinstance(result, ScoreError) and result.error_class is ErrorClass.INFRASTRUCTURE
    assert "3 reward workers died over one score" in result.message
