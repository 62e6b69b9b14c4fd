"""The real loop over a fleet whose engines die at every moment of a run, in virtual time: it goes on, nothing is lost
or trained twice, no token is stale or of unproved weights (I6, I7, I10, I19; failures 87, 88, 92)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fleet_scripted import NO_VERSION, MortalEngine, Yard
from loop_scripted import run_scripted, scripted_config

from headrace.config.fleet import FleetConfig
from headrace.control.watchdog import Watchdog
from headrace.engines.fleet.fleet import FleetEngine
from headrace.loop import EngineDied, Loop
from headrace.record.episodes import read_episodes
from headrace.record.spans import read_spans
from headrace.scripted import Reply, ScriptedThread
from headrace.types import GenerationRequest, PolicyVersion
from headrace.weights.canary import SyncError

TEXT = "abcdef"


def script(request: GenerationRequest) -> Reply:
    """Six tokens and the end; some requests take five times as long as others."""
    rest = TEXT[request.first_draw :]
    slow = 5.0 if request.seed % 4 == 0 else 1.0
    return Reply(text=rest, duration_s=slow * (len(rest) + 1))


def config(folder: Path, *, max_staleness: int, **fleet: Any) -> Any:
    rollout: dict[str, Any] = {"groups_per_batch": 2, "group_size": 2, "max_staleness": max_staleness}
    return scripted_config(
        folder,
        trainer={"num_batches": 5},
        rollout=rollout,
        engine={"weights": "copy"},
        fleet={"num_engines": 2, "sync_deadline_s": 30.0, "health_every_s": 5.0, "health_deadline_s": 5.0, **fleet},
    )


def thread() -> ScriptedThread:
    return ScriptedThread({"forward_backward": 6.0, "optim_step": 4.0, "publish": 1.0})


class Fleet:
    """Makes the fleet of a scripted run, and remembers its engines."""

    def __init__(self, fleet: FleetConfig, make: Callable[[int, int], MortalEngine] | None = None) -> None:
        self._fleet = fleet
        self.yard = Yard(make=make or (lambda i, n: MortalEngine(script, version=self.held(n))), start_s=2.0)
        self.version = PolicyVersion(0, 0)

    def held(self, incarnation: int) -> PolicyVersion:
        return self.version if incarnation == 0 else NO_VERSION

    def __call__(self, watchdog: Watchdog, version: PolicyVersion) -> FleetEngine:
        self.version = version
        return FleetEngine(self.yard, self._fleet, version=version, watchdog=watchdog)


def run(
    folder: Path,
    during: Callable[[Loop, Fleet], Coroutine[Any, Any, None]] | None = None,
    *,
    make: Callable[[int, int], MortalEngine] | None = None,
    max_staleness: int = 1,
    **options: Any,
) -> tuple[Loop, BaseException | None, float, Fleet]:
    settings = config(folder, max_staleness=max_staleness, **options)
    fleet = Fleet(settings.fleet, make)

    async def beside(loop: Loop) -> None:
        if during is not None:
            await during(loop, fleet)

    loop, error, took_s = run_scripted(settings, engine=fleet, thread=thread(), during=beside)
    return loop, error, took_s, fleet


def check_whole(loop: Loop, fleet: Fleet, *, max_staleness: int = 1) -> None:
    """All batches are trained; each trained reply is whole; no token is older than allowed; nothing served early."""
    loop.parts.record.ledger.check(full=True)
    summary = loop.parts.record.ledger.summary()
    assert summary["trained"] == 5 * 4
    trained = [e for e in read_episodes(loop.parts.record.run_dir.path) if e["status"] == "trained"]
    assert len(trained) == 5 * 4
    for episode in trained:
        assert episode["turns"][0]["reply"] == TEXT if "turns" in episode else True
        assert (
            sum(n for s, n in zip(episode["segment_sources"], episode["segment_lengths"], strict=True) if s == "policy")
            == 7
        )
        for _, _, number, _, _ in episode["version_spans"]:
            assert 0 <= episode["update"] - 1 - number <= max_staleness
    for engine in fleet.yard.engines.values():
        assert all(version.number >= 0 for _, version in engine.served)  # none was asked before it had a version


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_without_a_death_the_run_is_whole(tmp_path: Path, max_staleness: int) -> None:
    """The base case that the others are held against."""
    loop, error, _, fleet = run(tmp_path, max_staleness=max_staleness)
    assert error is None
    check_whole(loop, fleet, max_staleness=max_staleness)
    assert min(len(e.served) for e in fleet.yard.engines.values()) >= 8


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("tells_partial", [True, False])
def test_an_engine_may_die_at_any_moment(tmp_path: Path, tells_partial: bool, max_staleness: int) -> None:
    """kill -9 of one engine at 20 moments spread over the run: in replies, updates, proofs, restarts and waits."""
    for moment in range(0, 40, 2):

        async def kill(loop: Loop, fleet: Fleet, when_s: float = 1.1 + 2.7 * moment) -> None:
            await asyncio.sleep(when_s)
            for (index, _), engine in list(fleet.yard.engines.items()):
                if index == 0:
                    engine.die()

        fleet_of: list[Fleet] = []
        loop, error, took_s, fleet = run(
            tmp_path / str(moment),
            kill,
            make=lambda i, n: MortalEngine(
                script, version=PolicyVersion(0, 0) if n == 0 else NO_VERSION, tells_partial=tells_partial
            ),
            max_staleness=max_staleness,
        )
        fleet_of.append(fleet)
        assert error is None, f"moment {moment}: {error}"
        check_whole(loop, fleet, max_staleness=max_staleness)
        assert took_s < 400.0


@pytest.mark.parametrize("moment", range(0, 40, 5))
def test_all_engines_may_die_at_once(tmp_path: Path, moment: int) -> None:
    """A node is lost: both come back with the weights that the trainer still holds, or with the next publish."""

    async def kill(loop: Loop, fleet: Fleet) -> None:
        await asyncio.sleep(3.3 + 2.7 * moment)
        for engine in list(fleet.yard.engines.values()):
            engine.die()

    loop, error, _, fleet = run(tmp_path, kill)
    assert error is None
    check_whole(loop, fleet)


@pytest.mark.parametrize("call", ["pause", "update_weights", "probe", "resume", "generate"])
@pytest.mark.parametrize("how", ["die_on", "hang_on"])
def test_an_engine_may_fail_in_any_call(tmp_path: Path, how: str, call: str) -> None:
    """I19: it dies in it, or never answers; the run goes on within the deadline."""

    async def breaks(loop: Loop, fleet: Fleet) -> None:
        await asyncio.sleep(20.0)
        engine = fleet.yard.engines[1, 0]
        setattr(engine, how, {call, *({"healthy"} if how == "hang_on" else ())})

    loop, error, took_s, fleet = run(tmp_path, breaks)
    assert error is None
    check_whole(loop, fleet)
    assert took_s < 400.0
    assert any(incarnation == 1 for _, incarnation, _ in fleet.yard.starts)


def test_engines_that_die_again_and_again_end_the_run(tmp_path: Path) -> None:
    """Failure 89: the budget is spent, the run says why, and what was in flight is still in the books."""

    async def kill(loop: Loop, fleet: Fleet) -> None:
        while True:
            await asyncio.sleep(6.0)
            for engine in list(fleet.yard.engines.values()):
                engine.die()

    loop, error, _, _ = run(tmp_path, kill, max_restarts=1)
    assert isinstance(error, EngineDied)
    assert "no engine is left" in str(error)
    loop.parts.record.ledger.check(full=True)


def test_the_canary_names_the_engine_that_differs(tmp_path: Path) -> None:
    """I6: one of two engines serves other weights: the run stops before it serves anything, and says which."""

    def make(index: int, incarnation: int) -> MortalEngine:
        engine = MortalEngine(script)
        engine.probe_gap = 0.5 if index == 1 else 0.0
        return engine

    _, error, _, fleet = run(tmp_path, make=make)
    assert isinstance(error, SyncError)
    assert "canary of version 0.0: engine-1 and trainer log-probabilities differ by 5.00e-01" in str(error)
    assert fleet.yard.engines[1, 0].served == []


def test_a_restarted_engine_that_serves_something_else_stops_the_run(tmp_path: Path) -> None:
    """I6 holds for late joiners too."""

    def make(index: int, incarnation: int) -> MortalEngine:
        engine = MortalEngine(script, version=PolicyVersion(0, 0) if incarnation == 0 else NO_VERSION)
        engine.probe_gap = 0.5 * incarnation
        return engine

    async def kill(loop: Loop, fleet: Fleet) -> None:
        await asyncio.sleep(5.0)
        fleet.yard.engines[0, 0].die()

    _, error, _, fleet = run(tmp_path, kill, make=make)
    assert "engine-0 and trainer log-probabilities differ" in str(error)
    assert fleet.yard.engines[0, 1].served == []


def test_rarer_proofs_do_not_let_a_restarted_engine_serve_unproved(tmp_path: Path) -> None:
    """guards.canary_every = 100: those that were proved go on; one that comes back is proved by itself."""
    settings = config(tmp_path, max_staleness=1)
    settings = settings.model_copy(update={"guards": settings.guards.model_copy(update={"canary_every": 100})})
    fleet = Fleet(settings.fleet)

    async def kill(loop: Loop) -> None:
        await asyncio.sleep(30.0)
        fleet.yard.engines[0, 0].die()

    loop, error, _ = run_scripted(settings, engine=fleet, thread=thread(), during=kill)
    assert error is None
    check_whole(loop, fleet)
    log = fleet.yard.engines[0, 1].log
    assert "generate" in log
    assert log.index("probe") < log.index("generate")
    assert fleet.yard.engines[1, 0].log.count("probe") == 2  # at the start: cold and kept, then warm


def test_engines_that_lag_keep_decoding_during_a_publish(tmp_path: Path) -> None:
    """max_engine_lag = 1: the run is whole, and no token is older than max_staleness all the same."""

    async def kill(loop: Loop, fleet: Fleet) -> None:
        await asyncio.sleep(31.0)
        fleet.yard.engines[1, 0].die()

    loop, error, _, fleet = run(tmp_path, kill, max_engine_lag=1)
    assert error is None
    check_whole(loop, fleet)


def test_engines_join_and_leave_while_the_run_goes_on(tmp_path: Path) -> None:
    """One more at 10 s, the first one leaves at 25 s."""

    async def change(loop: Loop, fleet: Fleet) -> None:
        engine = loop.parts.engine
        assert isinstance(engine, FleetEngine)
        await asyncio.sleep(10.0)
        assert await engine.add() == 2
        await asyncio.sleep(15.0)
        await engine.drain(0)

    loop, error, _, fleet = run(tmp_path, change)
    assert error is None
    check_whole(loop, fleet)
    assert fleet.yard.engines[2, 0].served
    assert fleet.yard.engines[0, 0].is_closed
    spans = list(read_spans(loop.parts.record.run_dir.path))
    assert {"engine-2", "trainer", "engine"} <= {s["actor"] for s in spans}
