"""Conditions of the router that its other tests did not hold; found by ``make mutation``."""

from __future__ import annotations

from test_control_router import V0, Clock, idle, placed, work

from headrace.control.router import BLOCK_TOKENS, NUM_LENGTHS, EngineLoad, Router, WaitCause, prefixes


def test_a_later_block_is_named_by_its_own_tokens_too() -> None:
    one = list(range(2 * BLOCK_TOKENS))
    other = [*one[:BLOCK_TOKENS], *(t + 1 for t in one[BLOCK_TOKENS:])]
    assert prefixes(one, None)[0] == prefixes(other, None)[0]
    assert prefixes(one, None)[1] != prefixes(other, None)[1]


def test_what_was_not_looked_at_yet_waits_for_no_cause() -> None:
    router = Router(Clock())
    router.submit(work("a"))
    assert router.causes() == {}
    router.dispatch({})
    assert router.causes() == {WaitCause.NO_ENGINE: 1}


def test_work_that_was_given_back_has_its_old_place() -> None:
    """Whatever the order in which it comes back."""
    router = Router(Clock())
    for name in "abc":
        router.submit(work(name))
    assert placed(router, idle(0)) == {"a": 0, "b": 0, "c": 0}
    for name in "acb":
        router.requeue(work(name))
    assert list(placed(router, idle(1))) == ["a", "b", "c"]


def test_what_waits_keeps_its_cause_when_something_is_given_back_behind_it() -> None:
    router = Router(Clock())
    for name in "ab":
        router.submit(work(name))
    placed(router, idle(0))
    router.requeue(work("a"))
    router.dispatch({})
    router.requeue(work("b"))
    assert router.causes() == {WaitCause.NO_ENGINE: 1, WaitCause.ORDER: 1}


def test_affinity_is_given_up_for_a_difference_and_not_for_a_load() -> None:
    """Both engines have as much to do, so the one that knows the prompt is near enough."""
    router = Router(Clock(), max_imbalance=1)
    router.submit(work("known", group="g"))
    assert placed(router, idle(1)) == {"known": 1}
    for n in range(5):
        router.submit(work(f"left-{n}"))
        placed(router, idle(0))
    for n in range(4):
        router.submit(work(f"right-{n}"))
        placed(router, idle(1))
    assert (router.num_in_flight(0), router.num_in_flight(1)) == (5, 5)
    router.submit(work("again", group="g"))
    assert placed(router, idle(0, 1)) == {"again": 1}


def test_pressure_is_what_is_used_and_not_how_large_a_cache_is() -> None:
    router = Router(Clock())
    router.submit(work("a"))
    loads = {n: EngineLoad(version=V0, kv_used_tokens=used, kv_total_tokens=100) for n, used in ((0, 60), (1, 50))}
    assert placed(router, loads) == {"a": 1}


def test_an_engine_that_runs_more_than_it_was_given_has_no_room_to_spare() -> None:
    """Somebody else's requests take their part of its cache."""
    router = Router(Clock())
    router.submit(work("a"))
    assert placed(router, idle(0)) == {"a": 0}
    router.submit(work("b"))
    load = EngineLoad(version=V0, num_running=5, kv_used_tokens=85, kv_total_tokens=100)
    assert placed(router, {0: load}) == {} and router.causes() == {WaitCause.KV_PRESSURE: 1}


def test_no_reply_is_expected_to_be_longer_than_it_may_be() -> None:
    """Replies have had 50 tokens so far; this one may have 5."""
    router = Router(Clock())
    for n in range(NUM_LENGTHS):
        router.submit(work(f"long-{n}"))
        placed(router, idle(0))
        router.finish(f"long-{n}", 50)
    router.submit(work("a", prompt=10, new=5))
    assert placed(router, idle(0)) == {"a": 0}
    router.submit(work("b", prompt=10, new=5))
    load = EngineLoad(version=V0, num_running=1, kv_used_tokens=60, kv_total_tokens=100)
    assert placed(router, {0: load}) == {"b": 0}
