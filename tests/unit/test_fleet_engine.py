"""A fleet behind one engine, in virtual time: deaths, hangs, refusals, joins and leaves (I6, I7, I19; failures 87, 88,
89, 102, 106)."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from fleet_scripted import (
    NO_VERSION,
    V0,
    V1,
    MortalEngine,
    ReadyCatchUp,
    Yard,
    make_fleet,
    proved,
    publish,
    request,
    telling,
    text_of,
)

from headrace.control.engine_states import EngineState
from headrace.engines.errors import EngineError, RequestError
from headrace.errors import HeadraceError
from headrace.protocols import EngineStats, Fleet, WeightUpdate
from headrace.scripted import Reply, run_in_virtual_time
from headrace.types import Generation, PolicyVersion, VersionSpan

V2 = PolicyVersion(0, 2)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    def run(**parameters: Any) -> None:
        run_in_virtual_time(lambda: asyncio.wait_for(test(**parameters), 10_000.0))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    run.__wrapped__ = test  # pytest reads the parameters of the test itself
    return run


def at(when_s: float, what: Callable[[], Any]) -> None:
    asyncio.get_running_loop().call_at(when_s, what)


async def both(*calls: Awaitable[Generation]) -> list[Generation]:
    return list(await asyncio.gather(*calls))


# --------------------------------------------------------------------------------------------- the plain case


@virtual
async def test_requests_spread_and_nothing_serves_before_its_proof() -> None:
    """I6: without a proof a request waits; with it, engines share the work."""
    yard = Yard()
    fleet = make_fleet(yard)
    assert isinstance(fleet, Fleet)
    calls = [asyncio.ensure_future(fleet.generate(request(name))) for name in "abcd"]
    await asyncio.sleep(5.0)
    assert not any(engine.requests for engine in yard.engines.values())
    assert set(await fleet.unproved()) == {"engine-0", "engine-1"}
    await proved(fleet)
    assert await fleet.unproved() == {}
    assert [text_of(g) for g in await both(*calls)] == ["abcdef\0"] * 4
    await both(*(fleet.generate(request(name)) for name in "efgh"))
    assert [len(yard.engines[i, 0].requests) for i in (0, 1)] == [4 + 2, 2]  # the first four: to the first that served
    metrics = fleet.batch_metrics()
    assert metrics["wait/engine_no_engine_s"] + metrics["wait/engine_order_s"] == pytest.approx(20.0)
    assert fleet.batch_metrics()["wait/engine_order_s"] == 0.0
    assert fleet.capabilities.max_context == 4096
    assert fleet.stats().num_generated_tokens == 56
    await fleet.close()


@virtual
async def test_one_prompt_is_computed_on_one_engine() -> None:
    """Group affinity reaches the engines."""
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    await both(*(fleet.generate(request(f"x{i}", prefix_key="x")) for i in range(4)))
    assert sorted(len(e.requests) for e in yard.engines.values()) == [0, 4]


@virtual
async def test_room_is_what_engines_measure() -> None:
    """An engine under KV pressure gets no more; what waits is given out when something ended, and says why."""
    stats = EngineStats(num_running=1, kv_used_tokens=50, kv_total_tokens=100)
    yard = Yard(make=lambda index, incarnation: MortalEngine(telling("abc"), stats=stats))
    fleet = await proved(make_fleet(yard, num_engines=1, max_kv_pressure=0.8))
    calls = [fleet.generate(request(name, prompt=[1] * 10, max_new_tokens=10)) for name in "abc"]
    await both(*calls)
    # a: the engine is idle. b: 50 measured (a) + its own 20 <= 80. c: 50 + 20 (b, not measured) + 20 > 80.
    assert fleet.batch_metrics()["wait/engine_kv_pressure_s"] == pytest.approx(4.0)


@virtual
async def test_ids_are_unique() -> None:
    """Failure 103."""
    fleet = await proved(make_fleet(Yard()))
    first = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(1.0)
    with pytest.raises(RequestError, match="already in flight"):
        await fleet.generate(request("a"))
    assert text_of(await first) == "abcdef\0"


# ------------------------------------------------------------------------------------------- deaths in a reply


@pytest.mark.parametrize("die_at_s", [0.0, 0.5, 1.0, 2.5, 6.0, 6.9])
@virtual
async def test_a_reply_outlives_its_engine_token_by_token(die_at_s: float) -> None:
    """An episode goes on where its engine died: the same tokens, log-probabilities and versions as without the death,
    and none twice."""
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    at(die_at_s, lambda: yard.engines[0, 0].die())
    reply = await fleet.generate(request("a"))
    assert text_of(reply) == "abcdef\0"
    assert reply.request_id == "a"
    assert reply.logprobs == (-1.0,) * 7
    assert reply.version_spans == (VersionSpan(V0, 0, 7),)
    assert reply.finish_reason == "stop"
    num_known = max(0, math.ceil(die_at_s) - 1)  # a death at the moment of a token comes before it
    (rest,) = yard.engines[1, 0].requests
    assert rest.prompt_ids == (1, 2, 3, *map(ord, "abcdef"[:num_known]))
    assert rest.first_draw == num_known
    assert rest.sampling.max_new_tokens == 16 - num_known
    assert rest.seed == 7
    metrics = fleet.batch_metrics()
    assert metrics["fleet/num_deaths"] == 1.0
    assert metrics["fleet/num_continued"] == float(num_known > 0)
    assert metrics["fleet/num_begun_again"] == float(num_known == 0)


@virtual
async def test_tokens_before_and_after_a_death_carry_their_own_versions() -> None:
    """A death, then a publish, then a second death: three engines' tokens in one reply."""
    yard = Yard(text="abcdefgh")
    fleet = await proved(make_fleet(yard, num_engines=3, max_restarts=0))
    call = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(2.5)
    yard.engines[0, 0].die()
    await asyncio.sleep(0.1)
    await publish(fleet, V1)
    await asyncio.sleep(3.0)
    yard.engines[1, 0].die()
    reply = await call
    assert text_of(reply) == "abcdefgh\0"
    assert [span.version for span in reply.version_spans] == [V0, V1]
    assert reply.version_spans[-1].end == 9
    assert yard.engines[2, 0].requests[0].first_draw >= 4


@virtual
async def test_without_known_tokens_the_request_starts_again_with_its_seed() -> None:
    """And that is recorded."""
    yard = Yard(make=lambda i, n: MortalEngine(telling("abcdef"), tells_partial=False))
    fleet = await proved(make_fleet(yard))
    at(3.5, lambda: yard.engines[0, 0].die())
    assert text_of(await fleet.generate(request("a"))) == "abcdef\0"
    assert yard.engines[1, 0].requests == [request("a")]
    assert fleet.batch_metrics()["fleet/num_begun_again"] == 1.0
    assert next(s for s in fleet.spans if s[1] == "begun_again")[-1] == {"request": "a", "num_tokens": 0}  # type: ignore[attr-defined]


@virtual
async def test_stop_strings_are_not_continued() -> None:
    """One may have begun in the tokens that are known, and an engine looks at its own alone."""
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    at(3.5, lambda: yard.engines[0, 0].die())
    await fleet.generate(request("a", stop_strings=("de",)))
    assert yard.engines[1, 0].requests[0].first_draw == 0


@virtual
async def test_a_request_that_fails_on_a_healthy_engine_is_its_own_failure() -> None:
    """The engine stays; the caller learns why."""
    yard = Yard(make=lambda i, n: MortalEngine(Reply(error=EngineError("no such id"))))
    fleet = await proved(make_fleet(yard))
    with pytest.raises(EngineError, match="no such id"):
        await fleet.generate(request("a"))
    assert len(fleet.states.serving()) == 2
    assert await fleet.healthy()


@virtual
async def test_a_request_that_kills_engines_does_not_get_all_of_them() -> None:
    """One poisonous prompt must not end a run: after five deaths it fails, its tokens with it, and the rest goes on."""
    yard = Yard(make=lambda i, n: MortalEngine(telling("abcdefgh"), version=V0))
    fleet = await proved(make_fleet(yard, num_engines=8, max_restarts=0))

    async def kill_its_engine() -> None:
        while True:
            await asyncio.sleep(1.5)
            for index in range(8):
                if "poison" in fleet.router.on_engine(index):
                    yard.engines[index, 0].die()

    killer = asyncio.ensure_future(kill_its_engine())
    with pytest.raises(EngineError, match="request poison was on 5 engines that died") as caught:
        await fleet.generate(request("poison"))
    killer.cancel()
    assert caught.value.partial is not None and text_of(caught.value.partial) == "abcde"
    assert len(fleet.states.serving()) == 3
    assert text_of(await fleet.generate(request("good"))) == "abcdefgh\0"


@virtual
async def test_an_engine_that_hangs_is_found_by_its_health() -> None:
    """I19: it does not answer whether it lives; what it had is taken from it by abort, and goes on elsewhere."""
    yard = Yard(text="abcdef")
    fleet = await proved(make_fleet(yard, health_every_s=10.0, health_deadline_s=5.0))
    hanging = yard.engines[0, 0]
    hanging._script = lambda r: Reply(text="abc", duration_s=float("inf"))
    hanging.hang_on = {"healthy"}
    started_s = asyncio.get_running_loop().time()
    reply = await fleet.generate(request("a"))
    assert text_of(reply) == "abcdef\0"
    assert asyncio.get_running_loop().time() - started_s < 10.0 + 5.0 + 2.0 + 8.0
    assert hanging.is_closed


@virtual
async def test_an_engine_that_ignores_everything_costs_a_bounded_time() -> None:
    """It neither aborts nor closes: the request starts again, nothing waits for the dead."""
    yard = Yard()
    fleet = await proved(make_fleet(yard, health_every_s=10.0, health_deadline_s=5.0))
    hanging = yard.engines[0, 0]
    hanging._script = lambda r: Reply(text="abc", duration_s=float("inf"))
    hanging.hang_on = {"healthy", "abort", "close"}
    assert text_of(await fleet.generate(request("a"))) == "abcdef\0"
    assert asyncio.get_running_loop().time() < 30.0
    await asyncio.sleep(20.0)
    assert any("could not be closed" in event for event in fleet.events)  # type: ignore[attr-defined]


@virtual
async def test_a_caller_that_gives_up_leaves_nothing_behind() -> None:
    """Cancelled while it waits, and while it runs."""
    yard = Yard()
    fleet = make_fleet(yard)
    waiting = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(1.0)
    waiting.cancel()
    await asyncio.sleep(0.1)
    assert fleet.router.num_waiting == 0
    await proved(fleet)
    running = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(1.5)
    running.cancel()
    await asyncio.sleep(0.1)
    assert fleet.router.num_in_flight(0) == fleet.router.num_in_flight(1) == 0
    assert text_of(await fleet.generate(request("a"))) == "abcdef\0"


@virtual
async def test_abort_returns_what_there_is() -> None:
    """Waiting: nothing. Running: the tokens so far. After a death: those of both engines."""
    yard = Yard()
    fleet = make_fleet(yard)
    waiting = asyncio.ensure_future(fleet.generate(request("w")))
    await asyncio.sleep(1.0)
    await fleet.abort("w")
    await fleet.abort("unknown")
    empty = await waiting
    assert (empty.ids, empty.finish_reason) == ((), "abort")
    await proved(fleet)
    running = asyncio.ensure_future(fleet.generate(request("r")))
    await asyncio.sleep(2.5)
    yard.engines[0, 0].die()
    await asyncio.sleep(1.5)
    await fleet.abort("r")
    reply = await running
    assert (text_of(reply), reply.finish_reason) == ("abc", "abort")


# ------------------------------------------------------------------------------------------- deaths in a publish


@pytest.mark.parametrize("how", ["die", "hang"])
@pytest.mark.parametrize("call", ["pause", "update_weights", "probe", "resume"])
@virtual
async def test_a_publish_goes_on_without_an_engine_that_fails(call: str, how: str) -> None:
    """Failures 87, 106: whichever call it is that fails or hangs, the engine is taken out within its deadline, the
    others serve the new version, and the dead one comes back as a new incarnation that knows it."""
    yard = Yard()
    catch_up = ReadyCatchUp(V0)
    fleet = await proved(make_fleet(yard, catch_up=catch_up, sync_deadline_s=20.0))
    broken = yard.engines[1, 0]
    if how == "die":
        broken.die_on = {call}
    else:
        broken.hang_on = {call}
    catch_up.version = V1
    started_s = asyncio.get_running_loop().time()
    await fleet.pause("keep")
    await fleet.update_weights(WeightUpdate(version=V1, tensors={}))
    for name, engine in (await fleet.unproved()).items():
        try:
            await engine.probe([])
        except HeadraceError:
            continue
        fleet.proved(name, V1)
    await fleet.resume()
    assert asyncio.get_running_loop().time() - started_s <= (20.0 if how == "hang" else 0.0)
    assert fleet.states.serving() == (0,)
    assert fleet.version == V1
    await asyncio.sleep(5.0)
    assert fleet.states.serving() == (0, 1)
    assert catch_up.proved == ["engine-1"]
    replies = await both(fleet.generate(request("a")), fleet.generate(request("b")))
    assert [r.version_spans for r in replies] == [(VersionSpan(V1, 0, 7),)] * 2
    assert yard.engines[1, 1].served[0][1] == V1


@virtual
async def test_weights_that_every_engine_refuses_are_at_fault_themselves() -> None:
    """Else the fleet would start engines again and again for nothing."""
    yard = Yard(make=lambda i, n: MortalEngine(refuse=True))
    fleet = await proved(make_fleet(yard))
    await fleet.pause("keep")
    with pytest.raises(EngineError, match=r"every engine refuses weights 0\.1: these weights do not fit"):
        await fleet.update_weights(WeightUpdate(version=V1, tensors={}))
    assert not await fleet.healthy()
    assert len(yard.starts) == 2


@virtual
async def test_one_engine_that_refuses_is_taken_out() -> None:
    yard = Yard(make=lambda i, n: MortalEngine(refuse=i == 1, version=V0))
    fleet = await proved(make_fleet(yard, max_restarts=0))
    await publish(fleet, V1)
    assert fleet.states.serving() == (0,)
    assert "it refuses weights 0.1: these weights do not fit" in fleet.describe()


@virtual
async def test_update_needs_a_paused_fleet() -> None:
    fleet = await proved(make_fleet(Yard()))
    with pytest.raises(EngineError, match="paused"):
        await fleet.update_weights(WeightUpdate(version=V1, tensors={}))


@virtual
async def test_while_paused_requests_wait_and_say_so() -> None:
    """Wait causes: a publish is one."""
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    await fleet.pause("keep")
    call = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(3.0)
    await fleet.resume()
    await call
    assert fleet.batch_metrics()["wait/engine_paused_s"] == pytest.approx(3.0)
    assert ("router", "wait paused", 0.0, 3.0, {"request": "a"}) in fleet.spans  # type: ignore[attr-defined]


@virtual
async def test_pause_abort_ends_everything() -> None:
    """Those that run keep their tokens; those that wait have none."""
    yard = Yard(make=lambda i, n: MortalEngine(telling("abcdef"), stats=EngineStats(max_running=1)))
    fleet = await proved(make_fleet(yard, num_engines=1))
    calls = [asyncio.ensure_future(fleet.generate(request(name))) for name in "abc"]
    await asyncio.sleep(2.5)
    yard.engines[0, 0]._aborted["a"].set()  # the scripted engine leaves that to its test
    yard.engines[0, 0]._aborted["b"].set()
    await fleet.pause("abort")
    assert [(len(r.ids), r.finish_reason) for r in await both(*calls)] == [(2, "abort"), (2, "abort"), (0, "abort")]
    await fleet.resume()


# -------------------------------------------------------------------------------------------- restarts and joins


@virtual
async def test_a_restarted_engine_takes_no_traffic_before_its_proof() -> None:
    """Failure 88: it is up at once, and serves only after it got the published weights and was proved."""
    yard = Yard()
    catch_up = ReadyCatchUp(None)
    fleet = await proved(make_fleet(yard, catch_up=catch_up))
    yard.engines[0, 0].die()
    yard.engines[1, 0].die()
    call = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(30.0)
    assert [s[:2] for s in yard.starts[2:]] == [(0, 1), (1, 1)]
    assert all(fleet.states.state(i) is EngineState.SYNCING for i in (0, 1))
    assert yard.engines[0, 1].requests == []
    catch_up.version = V1
    await publish(fleet, V1)  # they are there when the next version is published
    assert (await call).version_spans == (VersionSpan(V1, 0, 7),)
    assert catch_up.proved == []  # the canary of the publish proved them


@virtual
async def test_all_engines_may_die_and_come_back_between_two_publishes() -> None:
    """The trainer still holds what it published: nobody waits for a publish that waits for rollouts."""
    yard = Yard()
    fleet = await proved(make_fleet(yard, catch_up=ReadyCatchUp(V0)))
    call = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(2.5)
    yard.engines[0, 0].die()
    yard.engines[1, 0].die()
    reply = await call
    assert text_of(reply) == "abcdef\0"
    assert sum(len(e.requests) for (_, n), e in yard.engines.items() if n == 1) == 1
    assert await fleet.healthy()


@virtual
async def test_a_late_joiner_is_never_given_the_next_version_early() -> None:
    """D9: the trainer has published inside itself, the fleet has not: those weights come with the fleet's publish."""
    yard = Yard()
    catch_up = ReadyCatchUp(V1)
    fleet = await proved(make_fleet(yard, catch_up=catch_up))
    yard.engines[1, 0].die()
    await asyncio.sleep(40.0)
    assert fleet.states.serving() == (0,)
    assert yard.engines[1, 1].version == NO_VERSION
    await publish(fleet, V1)
    assert fleet.states.serving() == (0, 1)


@virtual
async def test_a_proof_that_comes_too_late_counts_for_nothing() -> None:
    """The trainer moved on between the copy and its scores: the engine waits for the next publish."""
    yard = Yard()
    fleet = await proved(make_fleet(yard, catch_up=ReadyCatchUp(V0, verdict=False)))
    yard.engines[1, 0].die()
    await asyncio.sleep(40.0)
    assert fleet.states.state(1) is EngineState.SYNCING
    await publish(fleet, V1)
    assert fleet.states.serving() == (0, 1)


@virtual
async def test_an_engine_that_serves_something_else_stops_the_fleet() -> None:
    """I6: a wrong engine is worse than none. Every request ends with what the proof said."""
    yard = Yard()
    wrong = ReadyCatchUp(V0, verdict=HeadraceError("canary of version 0.0: engine-1 and trainer differ"))
    fleet = await proved(make_fleet(yard, catch_up=wrong))
    call = asyncio.ensure_future(fleet.generate(request("a", max_new_tokens=16)))
    at(1.5, lambda: yard.engines[1, 0].die())
    await call
    await asyncio.sleep(30.0)
    assert not await fleet.healthy()
    with pytest.raises(EngineError, match="engine-1 and trainer differ"):
        await fleet.generate(request("b"))


@virtual
async def test_the_restart_budget_ends_and_the_run_with_it() -> None:
    """Failure 89: each start is at its backoff, then the engine is given up; without any, requests end with the
    reasons."""
    yard = Yard(make=lambda i, n: MortalEngine(die_on=("healthy", "pause")))
    fleet = make_fleet(yard, num_engines=1, max_restarts=2, restart_backoff_s=4.0, catch_up=ReadyCatchUp(V0))
    await proved(fleet)
    call = asyncio.ensure_future(fleet.generate(request("a")))
    yard.engines[0, 0].die()
    with pytest.raises(EngineError, match=r"no engine is left:\nengine 0 is dead .*for good"):
        await call
    times = [when for _, _, when in yard.starts]
    assert [round(b - a) for a, b in itertools.pairwise(times)] == [4, 8]
    assert not await fleet.healthy()
    with pytest.raises(EngineError, match="no engine is left"):
        await fleet.pause("keep")


@virtual
async def test_an_engine_that_does_not_start_is_tried_again() -> None:
    """Its start has a deadline and a name."""
    attempts: list[int] = []

    async def start(index: int, incarnation: int) -> MortalEngine:
        attempts.append(incarnation)
        if incarnation == 0:
            await asyncio.Event().wait()
        if incarnation == 1:
            raise OSError("no such host")
        return MortalEngine(telling("abcdef"))

    fleet = make_fleet(start, num_engines=1, start_deadline_s=50.0, catch_up=ReadyCatchUp(V0))  # type: ignore[arg-type]
    assert text_of(await fleet.generate(request("a"))) == "abcdef\0"
    assert attempts == [0, 1, 2]
    events = "\n".join(fleet.events)  # type: ignore[attr-defined]
    assert "fleet waited 50.0 s on engine-0 for its start" in events
    assert "no such host" in events


@virtual
async def test_an_engine_joins_during_a_run() -> None:
    """It gets the published version, is proved, and takes work."""
    yard = Yard()
    fleet = await proved(make_fleet(yard, num_engines=1, catch_up=ReadyCatchUp(V0)))
    assert await fleet.add() == 1
    await asyncio.sleep(1.0)
    assert fleet.states.serving() == (0, 1)
    await both(fleet.generate(request("a")), fleet.generate(request("b")))
    assert [len(yard.engines[i, 0].requests) for i in (0, 1)] == [1, 1]


@virtual
async def test_a_publish_and_a_join_exclude_each_other() -> None:
    """Failure 87: a join that began before the pause ends first; one that comes during a publish waits for its end."""
    yard = Yard()
    order: list[str] = []

    class Slow(ReadyCatchUp):
        async def prove(self, name: str, engine: Any, update: WeightUpdate) -> bool:
            order.append("join begins")
            await asyncio.sleep(7.0)
            order.append("join ends")
            return True

    fleet = await proved(make_fleet(yard, num_engines=1, catch_up=Slow(V0)))
    await fleet.add()
    await asyncio.sleep(1.0)
    await fleet.pause("keep")
    order.append("paused")
    assert yard.engines[1, 0].log[-1] == "pause"
    await fleet.update_weights(WeightUpdate(version=V1, tensors={}))
    await fleet.add()
    await asyncio.sleep(3.0)
    await proved(fleet)
    await fleet.resume()
    assert order == ["join begins", "join ends", "paused"]
    assert fleet.states.serving() == (0, 1)
    assert fleet.states.state(2) is EngineState.SYNCING  # its catch-up has version 0.0 only
    await publish(fleet, V2)
    assert fleet.states.serving() == (0, 1, 2)


@virtual
async def test_a_draining_engine_ends_what_it_has_and_leaves() -> None:
    """Nothing new, weights still arrive, then it is closed and does not come back."""
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    calls = [asyncio.ensure_future(fleet.generate(request(name))) for name in "ab"]
    await asyncio.sleep(1.5)
    leaving = asyncio.ensure_future(fleet.drain(0))
    await asyncio.sleep(0.1)
    late = asyncio.ensure_future(fleet.generate(request("c")))
    await publish(fleet, V1)
    assert yard.engines[0, 0].version == V1
    assert [text_of(r) for r in await both(*calls, late)] == ["abcdef\0"] * 3
    await leaving
    assert [r.id for r in yard.engines[0, 0].requests] == ["a"]
    assert yard.engines[0, 0].is_closed
    assert fleet.states.state(0) is EngineState.DEAD
    await asyncio.sleep(200.0)
    assert len(yard.starts) == 2


@virtual
async def test_what_a_draining_engine_cannot_end_in_time_goes_on_elsewhere() -> None:
    """``drain_deadline_s``; the tokens are not lost."""
    yard = Yard(text="a" * 12)
    fleet = await proved(make_fleet(yard, drain_deadline_s=3.0))
    call = asyncio.ensure_future(fleet.generate(request("a")))
    await asyncio.sleep(1.5)
    await fleet.drain(0)
    assert text_of(await call) == "a" * 12 + "\0"
    assert yard.engines[1, 0].requests[0].first_draw >= 3


@virtual
async def test_the_last_engine_that_leaves_ends_the_fleet() -> None:
    fleet = await proved(make_fleet(Yard(), num_engines=1))
    await fleet.drain(0)
    with pytest.raises(EngineError, match="no engine is left"):
        await fleet.generate(request("a"))


# ----------------------------------------------------------------------------------------------------- the rest


@virtual
async def test_engines_change_weights_one_after_the_other_where_they_may_lag() -> None:
    """max_engine_lag = 1: while one is updated and proved, the other decodes; each token has its own version."""
    yard = Yard(text="a" * 20)
    updated: list[tuple[int, int]] = []

    class Slow(MortalEngine):
        async def update_weights(self, update: WeightUpdate) -> None:
            await asyncio.sleep(4.0)
            await super().update_weights(update)
            updated.append(tuple(len(e.served) for e in yard.engines.values()))  # type: ignore[arg-type]

    yard.make = lambda index, incarnation: Slow(telling("a" * 20))
    catch_up = ReadyCatchUp(V1)
    fleet = await proved(make_fleet(yard, max_engine_lag=1, catch_up=catch_up))
    calls = [asyncio.ensure_future(fleet.generate(request(n, max_new_tokens=32))) for n in "ab"]
    await asyncio.sleep(1.5)
    publishing = asyncio.ensure_future(publish(fleet, V1))
    await asyncio.sleep(5.0)
    late = asyncio.ensure_future(fleet.generate(request("c", max_new_tokens=32)))
    await publishing
    assert asyncio.get_running_loop().time() == pytest.approx(1.5 + 2 * 4.0)
    first, second, third = await both(*calls, late)
    # the first engine stood still from 1.5 s to 5.5 s, the second from 5.5 s to 9.5 s
    assert [(s.version, s.end) for s in first.version_spans] == [(V0, 1), (V1, 21)]
    assert [(s.version, s.end) for s in second.version_spans] == [(V0, 5), (V1, 21)]
    assert third.version_spans == (VersionSpan(V1, 0, 21),)
    assert catch_up.proved == ["engine-0", "engine-1"]


@virtual
async def test_an_evaluation_is_answered_by_its_version_alone() -> None:
    """A result that spans versions is invalid: while engines are at two versions, a pinned request waits."""
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    pinned = asyncio.ensure_future(fleet.generate(request("a", version=V1)))
    await asyncio.sleep(4.0)
    assert not pinned.done()
    await publish(fleet, V1)
    assert (await pinned).version_spans == (VersionSpan(V1, 0, 7),)
    assert fleet.batch_metrics()["wait/engine_version_s"] == pytest.approx(4.0)


@virtual
async def test_probes_and_checksums_are_an_engines() -> None:
    """The engine protocol in whole; without an engine, an error that says who is where."""
    yard = Yard()
    fleet = make_fleet(yard)
    assert fleet.weight_checksums() == {}
    assert await fleet.healthy()  # nothing has been started
    with pytest.raises(EngineError, match=r"no engine serves.*\nengine 0 is syncing"):
        await fleet.probe([request("p")])
    await proved(fleet)
    (reply,) = await fleet.probe([request("p", max_new_tokens=2)])
    assert reply.request_id == "p"
    yard.engines[0, 0].weight_checksums = lambda: {"w": "1"}  # type: ignore[method-assign]
    assert fleet.weight_checksums() == {"w": "1"}


@virtual
async def test_counters_outlive_their_engines() -> None:
    """Rates are differences: a sum that falls at a death would be a negative rate."""
    yard = Yard()
    fleet = await proved(make_fleet(yard, catch_up=ReadyCatchUp(V0)))
    await both(fleet.generate(request("a")), fleet.generate(request("b")))
    before = fleet.stats().num_generated_tokens
    yard.engines[0, 0].die()
    await asyncio.sleep(30.0)
    assert fleet.stats().num_generated_tokens == before == 14


@virtual
async def test_a_closed_fleet_ends_every_request() -> None:
    yard = Yard()
    fleet = await proved(make_fleet(yard))
    calls = [asyncio.ensure_future(fleet.generate(request(name))) for name in "ab"]
    await asyncio.sleep(1.0)
    await fleet.close()
    await fleet.close()
    assert all(engine.is_closed for engine in yard.engines.values())
    with pytest.raises(EngineError, match="closed"):
        await fleet.generate(request("c"))
    for call in calls:
        call.cancel()


@virtual
async def test_spans_say_where_each_second_went() -> None:
    """Per actor: each state of an engine, each request on it, each call of a publish."""
    yard = Yard(start_s=2.0)
    fleet = await proved(make_fleet(yard, num_engines=1))
    await fleet.generate(request("a"))
    await publish(fleet, V1)
    found = {(actor, what): (start, end) for actor, what, start, end, _ in fleet.spans}  # type: ignore[attr-defined]
    assert found["engine-0", "starting"] == (0.0, 2.0)
    assert found["engine-0", "generate"] == (2.0, 9.0)
    assert {("engine-0", "pause"), ("engine-0", "update_weights"), ("engine-0", "resume")} <= found.keys()


@virtual
async def test_a_fleet_that_is_closed_during_a_start_lets_go_of_it() -> None:
    """A server that was being started must not outlive the run; a burial that goes on is waited for, for a while."""
    let_go: list[str] = []

    async def start(index: int, incarnation: int) -> MortalEngine:
        if incarnation == 0:
            return MortalEngine(telling("abcdef"))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)
            let_go.append("the start")
            raise
        raise AssertionError

    fleet = await proved(make_fleet(start, num_engines=2))  # type: ignore[arg-type]
    dying = fleet.supervisor.members[0].engine
    assert isinstance(dying, MortalEngine)
    dying.die()
    await fleet.supervisor._check(fleet.supervisor.members[0])
    await asyncio.sleep(5.0)
    assert fleet.states.state(0) is EngineState.STARTING
    await fleet.close()
    assert let_go == ["the start"]
    assert dying.is_closed
