"""The router: balance, affinity, room, order, and that nothing is lost (failures 98, 102, 103)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.router import MAX_REMEMBERED, EngineLoad, Router, WaitCause, Work, prefixes
from headrace.types import PolicyVersion

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def work(name: str, *, prompt: int = 10, new: int = 10, group: str | None = None, version: object = None) -> Work:
    names = () if group is None else (group,)
    return Work(id=name, num_prompt_tokens=prompt, max_new_tokens=new, prefixes=names, version=version)  # type: ignore[arg-type]


def idle(*engines: int, version: PolicyVersion = V0) -> Mapping[int, EngineLoad]:
    return {engine: EngineLoad(version=version) for engine in engines}


def placed(router: Router, engines: Mapping[int, EngineLoad], **options: bool) -> dict[str, int]:
    return {d.id: d.engine for d in router.dispatch(engines, **options)}


def test_the_least_loaded_engine_is_next() -> None:
    """Failure 102: requests spread evenly; ties go to the lowest index, so that equal runs make equal choices."""
    router = Router(Clock())
    for name in "abcde":
        router.submit(work(name))
    assert placed(router, idle(0, 1)) == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}
    router.finish("a")
    router.finish("c")
    router.submit(work("f"))
    assert placed(router, idle(0, 1)) == {"f": 0}
    assert (router.num_in_flight(0), router.num_in_flight(1)) == (2, 2)


def test_equal_counts_are_told_apart_by_measured_pressure() -> None:
    """Of two engines with as many requests, the one with more room in its cache is taken."""
    router = Router(Clock())
    router.submit(work("a"))
    loads = {
        0: EngineLoad(version=V0, kv_used_tokens=60, kv_total_tokens=100),
        1: EngineLoad(version=V0, kv_used_tokens=100, kv_total_tokens=200),
    }
    assert placed(router, loads) == {"a": 1}


def test_members_of_a_group_go_where_their_prompt_is() -> None:
    """Group affinity: the prompt is computed once; another group goes to the other engine."""
    router = Router(Clock())
    for group in "xy":
        for member in range(4):
            router.submit(work(f"{group}{member}", group=group))
    found = placed(router, idle(0, 1))
    assert [found[f"x{m}"] for m in range(4)] == [0] * 4
    assert [found[f"y{m}"] for m in range(4)] == [1] * 4


@pytest.mark.parametrize("imbalance", [0, 1, 3])
def test_affinity_gives_way_to_balance_exactly_at_the_bound(imbalance: int) -> None:
    """``max_imbalance`` requests more than the least loaded, not one more."""
    router = Router(Clock(), max_imbalance=imbalance)
    for member in range(imbalance + 2):
        router.submit(work(str(member), group="x"))
    found = placed(router, idle(0, 1))
    assert [found[str(m)] for m in range(imbalance + 2)] == [0] * (imbalance + 1) + [1]


def test_without_affinity_only_load_counts() -> None:
    """routing = "least_loaded"."""
    router = Router(Clock(), use_affinity=False)
    for name in ("a", "b"):
        router.submit(work(name, group="x"))
    assert placed(router, idle(0, 1)) == {"a": 0, "b": 1}


def test_the_longer_known_prefix_wins() -> None:
    """Prefix affinity: a second turn goes where the first one's blocks are, not where only the system prompt is."""
    router = Router(Clock())
    router.submit(Work(id="a", num_prompt_tokens=64, max_new_tokens=8, prefixes=("system", "first turn")))
    assert placed(router, idle(1)) == {"a": 1}
    router.submit(Work(id="b", num_prompt_tokens=64, max_new_tokens=8, prefixes=("system", "other")))
    assert placed(router, idle(0)) == {"b": 0}
    router.finish("a")
    router.submit(Work(id="c", num_prompt_tokens=96, max_new_tokens=8, prefixes=("system", "first turn", "second")))
    (dispatch,) = router.dispatch(idle(0, 1))
    assert (dispatch.engine, dispatch.saved_prefixes) == (1, 2)


def test_a_dead_engines_caches_are_forgotten() -> None:
    """A restarted engine has computed nothing."""
    router = Router(Clock())
    router.submit(work("a", group="x"))
    assert placed(router, idle(1)) == {"a": 1}
    router.finish("a")
    router.forget(1)
    router.submit(work("b", group="x"))
    assert placed(router, idle(0, 1)) == {"b": 0}
    router.forget(7)  # one that it never gave anything to


def test_what_is_remembered_is_bounded_and_least_recently_used_goes_first() -> None:
    """Memory is flat over a long run."""
    router = Router(Clock())
    for number in range(MAX_REMEMBERED):
        router.submit(work(f"w{number}", group=f"g{number}"))
        placed(router, idle(1))
        router.finish(f"w{number}")
    router.submit(work("again", group="g0"))  # used once more: now the newest
    placed(router, idle(1))
    router.submit(work("new", group="new"))
    placed(router, idle(1))
    for name, expected in (("g0", 1), ("g2", 1), ("g1", 0)):
        router.submit(work(f"probe-{name}", group=name))
        assert placed(router, {0: EngineLoad(version=V0), 1: EngineLoad(version=V0)})[f"probe-{name}"] == expected


def test_names_of_prompts_are_chains_of_whole_blocks() -> None:
    """Two prompts share the names of the blocks that they begin with, and no later one; salts and groups separate."""
    first = prefixes(range(70), "g")
    assert len(first) == 3
    assert prefixes([*range(64), 99], None) == first[:2]
    assert prefixes([1, *range(1, 64)], None)[1] != first[1]  # the second block is equal, what precedes it is not
    assert prefixes(range(64), None, "salt")[0] != first[0]
    assert prefixes(range(31), None) == ()
    assert len(prefixes(range(32), None)) == 1
    assert prefixes((1,), "g") == (("group", "g", None),) != prefixes((1,), "g", "salt")


# ------------------------------------------------------------------------------------------------------ room


def test_kv_pressure_holds_work_back_exactly_at_the_bound() -> None:
    """Measured tokens plus the request's own need fit into 0.9 of the cache, or it waits."""
    load = EngineLoad(version=V0, num_running=1, kv_used_tokens=70, kv_total_tokens=100)
    router = Router(Clock(), max_kv_pressure=0.9)
    router.submit(work("first", prompt=5, new=5))
    assert placed(router, {0: load}) == {"first": 0}
    router.submit(work("fits", prompt=15, new=5))
    assert placed(router, {0: load}) == {"fits": 0}
    router.finish("fits")
    router.submit(work("does not", prompt=15, new=6))
    assert placed(router, {0: load}) == {}
    assert router.causes() == {WaitCause.KV_PRESSURE: 1}


def test_what_was_given_since_the_measurement_counts() -> None:
    """A measurement is old by the time that a wave of requests is given out: 3 of 4 do not run yet."""
    router = Router(Clock(), max_kv_pressure=1.0)
    load = EngineLoad(version=V0, num_running=1, kv_used_tokens=20, kv_total_tokens=100)
    for number in range(6):
        router.submit(work(str(number), prompt=10, new=10))
    # 20 measured for the one that runs + 20 for each other + its own 20: the fifth makes 100, the sixth 120.
    assert len(placed(router, {0: load})) == 5
    assert router.num_waiting == 1


def test_an_idle_engine_takes_even_what_is_too_large() -> None:
    """Else it would wait for ever."""
    router = Router(Clock())
    router.submit(work("huge", prompt=500, new=500))
    router.submit(work("next"))
    assert placed(router, {0: EngineLoad(version=V0, kv_total_tokens=100)}) == {"huge": 0}
    assert router.causes() == {WaitCause.KV_PRESSURE: 1}


def test_the_mean_length_of_replies_is_believed_once_there_are_enough() -> None:
    """A reply may be long, but is expected to be as long as others were."""
    router = Router(Clock(), max_kv_pressure=1.0)
    load = {0: EngineLoad(version=V0, num_running=1, kv_used_tokens=50, kv_total_tokens=100)}
    for number in range(16):
        router.submit(work(f"early{number}"))
        placed(router, idle(0))
        router.finish(f"early{number}", 10)
    router.submit(work("held", prompt=0, new=0))
    placed(router, idle(0))
    router.submit(work("long", prompt=40, new=1000))
    assert placed(router, load) == {"long": 0}
    router.finish("long", 1000)
    router.submit(work("now", prompt=40, new=1000))
    assert placed(router, load) == {}  # the mean is 68 now


def test_fifteen_replies_are_not_enough() -> None:
    """Before, a reply may take all that it is allowed."""
    router = Router(Clock(), max_kv_pressure=1.0)
    for number in range(15):
        router.submit(work(f"early{number}"))
        placed(router, idle(0))
        router.finish(f"early{number}", 10)
    router.submit(work("held", prompt=0, new=0))
    placed(router, idle(0))
    router.submit(work("long", prompt=40, new=1000))
    assert placed(router, {0: EngineLoad(version=V0, num_running=1, kv_used_tokens=50, kv_total_tokens=100)}) == {}


@pytest.mark.parametrize(("rows", "taken"), [(1, 2), (8, 9), (16, 18), (64, 72)])
def test_a_full_batch_takes_a_few_that_wait_inside(rows: int, taken: int) -> None:
    """So that a place that becomes free is taken at once: an eighth, at least one."""
    router = Router(Clock())
    for number in range(200):
        router.submit(work(str(number)))
    assert len(placed(router, {0: EngineLoad(version=V0, max_running=rows)})) == taken
    assert router.causes()[WaitCause.FULL] == 1


def test_another_engine_with_room_is_taken_instead() -> None:
    """One engine under pressure does not hold work that another can take, affinity or not."""
    router = Router(Clock())
    router.submit(work("a", group="x"))
    placed(router, idle(0))
    router.submit(work("b", group="x"))
    full = EngineLoad(version=V0, num_running=1, kv_used_tokens=99, kv_total_tokens=100)
    assert placed(router, {0: full, 1: EngineLoad(version=V0)}) == {"b": 1}


def test_evaluation_gets_its_version_or_waits() -> None:
    """A result that spans versions is invalid, so a request may name its version."""
    router = Router(Clock())
    router.submit(work("pinned", version=V1))
    assert placed(router, {0: EngineLoad(version=V0)}) == {}
    assert router.causes() == {WaitCause.VERSION: 1}
    assert placed(router, {0: EngineLoad(version=V0), 1: EngineLoad(version=V1)}) == {"pinned": 1}


# ------------------------------------------------------------------------------------- order, causes, losses


def test_waiting_keeps_order_and_books_its_causes() -> None:
    """I19: each second without an engine has a cause; nobody overtakes."""
    clock = Clock()
    router = Router(clock)
    router.submit(work("a"))
    router.submit(work("b"))
    assert placed(router, {}) == {}
    assert router.causes() == {WaitCause.NO_ENGINE: 1, WaitCause.ORDER: 1}
    clock.now_s = 2.0
    assert placed(router, idle(0), is_paused=True) == {}
    assert router.causes() == {WaitCause.PAUSED: 2}
    clock.now_s = 5.0
    first, second = router.dispatch(idle(0))
    assert (first.id, first.waited_s) == ("a", {WaitCause.NO_ENGINE: 2.0, WaitCause.PAUSED: 3.0})
    assert (second.id, second.waited_s) == ("b", {WaitCause.ORDER: 2.0, WaitCause.PAUSED: 3.0})
    assert router.num_waiting == 0
    assert router.causes() == {}


def test_work_that_is_placed_at_once_waited_for_nothing() -> None:
    router = Router(Clock())
    router.submit(work("a"))
    (dispatch,) = router.dispatch(idle(0))
    assert dispatch.waited_s == {}


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    """Failure 98: long prompts are not starved by short ones that always fit."""
    router = Router(Clock())
    router.submit(work("running"))
    load = {0: EngineLoad(version=V0, num_running=1, kv_used_tokens=50, kv_total_tokens=100)}
    placed(router, load)
    router.submit(work("large", prompt=80))
    router.submit(work("small", prompt=1, new=1))
    assert placed(router, load) == {}
    router.finish("running")
    assert list(placed(router, {0: EngineLoad(version=V0, kv_total_tokens=100)})) == ["large"]


def test_work_of_a_dead_engine_goes_first_again() -> None:
    """It keeps the place of its first submission, whoever came since."""
    router = Router(Clock())
    for name in "ab":
        router.submit(work(name))
    placed(router, idle(0))
    router.submit(work("c"))
    assert router.on_engine(0) == ("a", "b")
    router.requeue(work("b"))
    router.requeue(work("a"))
    assert router.num_in_flight(0) == 0
    assert list(placed(router, idle(1))) == ["a", "b", "c"]


def test_ids_are_unique_until_they_end() -> None:
    """Failure 103: a client that retries must not run one request twice."""
    router = Router(Clock())
    router.submit(work("a"))
    with pytest.raises(ValueError, match="work a is in the router already"):
        router.submit(work("a"))
    placed(router, idle(0))
    with pytest.raises(ValueError, match="unique"):
        router.submit(work("a"))
    router.finish("a")
    router.submit(work("a"))
    router.withdraw("a")
    router.submit(work("a"))


def test_withdrawn_work_is_gone() -> None:
    router = Router(Clock())
    router.submit(work("a"))
    router.submit(work("b"))
    router.withdraw("a")
    assert router.num_waiting == 1
    assert placed(router, idle(0)) == {"b": 0}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "dispatch", "finish", "die", "withdraw"]), st.integers(0, 5)), max_size=80
    )
)
def test_nothing_is_lost_and_nobody_overtakes(operations: list[tuple[str, int]]) -> None:
    """Whatever happens: each id is waiting or on one engine, and what waits leaves in the order of its submission."""
    clock, router = Clock(), None
    router = Router(clock, max_imbalance=1)
    waiting: list[int] = []
    flying: dict[int, int] = {}
    loads = {
        e: EngineLoad(version=V0, num_running=1, max_running=3, kv_used_tokens=20 * e, kv_total_tokens=120)
        for e in range(2)
    }
    count = 0
    for name, number in operations:
        clock.now_s += 1.0
        if name == "submit":
            router.submit(work(str(count), prompt=number * 15, group=f"g{number % 2}"))
            waiting.append(count)
            count += 1
        elif name == "dispatch":
            given_out = router.dispatch({e: loads[e] for e in range(number % 3)})
            assert [int(d.id) for d in given_out] == waiting[: len(given_out)]
            for dispatch in given_out:
                flying[int(dispatch.id)] = dispatch.engine
            del waiting[: len(given_out)]
        elif name == "finish" and flying:
            ended = sorted(flying)[number % len(flying)]
            router.finish(str(ended), number)
            del flying[ended]
        elif name == "die":
            for lost in [w for w, e in flying.items() if e == number % 2]:
                router.requeue(work(str(lost)))
                del flying[lost]
                waiting.append(lost)
            router.forget(number % 2)
            waiting.sort()
        elif name == "withdraw" and waiting:
            router.withdraw(str(waiting.pop(number % len(waiting))))
        assert router.num_waiting == len(waiting)
        for engine in range(2):
            assert sorted(map(int, router.on_engine(engine))) == sorted(w for w, e in flying.items() if e == engine)
    while waiting or flying:  # it can always be emptied
        for dispatch in router.dispatch({0: EngineLoad(version=V0)}):
            flying[int(dispatch.id)] = 0
            waiting.remove(int(dispatch.id))
        for ended in list(flying):
            router.finish(str(ended))
            del flying[ended]


def test_a_long_queue_costs_nothing_to_look_at() -> None:
    """What is behind the first that waits is not looked at, however often something ends; its causes are right all the
    same."""
    clock = Clock()
    router = Router(clock)
    for number in range(5):
        router.submit(work(str(number)))
    placed(router, {})
    clock.now_s = 1.0
    router.submit(work("late"))
    assert router.causes() == {WaitCause.NO_ENGINE: 1, WaitCause.ORDER: 5}
    placed(router, {}, is_paused=True)
    router.submit(work("later"))
    assert router.causes() == {WaitCause.PAUSED: 7}
    clock.now_s = 3.0
    placed(router, {})
    assert router.causes() == {WaitCause.NO_ENGINE: 1, WaitCause.ORDER: 6}
    clock.now_s = 4.0
    found = {d.id: d.waited_s for d in router.dispatch(idle(0))}
    assert found["0"] == {WaitCause.NO_ENGINE: 2.0, WaitCause.PAUSED: 2.0}
    assert found["1"] == {WaitCause.ORDER: 2.0, WaitCause.PAUSED: 2.0}
    assert found["late"] == found["later"] == {WaitCause.PAUSED: 2.0, WaitCause.ORDER: 1.0}


def test_who_is_put_back_before_the_first_makes_it_wait_in_order() -> None:
    """The causes change places with the requests."""
    clock = Clock()
    router = Router(clock)
    router.submit(work("a"))
    placed(router, idle(0))
    router.submit(work("b"))
    placed(router, {})
    clock.now_s = 2.0
    router.requeue(work("a"))
    assert router.causes() == {WaitCause.ORDER: 2}
    placed(router, {})
    clock.now_s = 5.0
    first, second = router.dispatch(idle(0))
    assert (first.id, first.waited_s) == ("a", {WaitCause.NO_ENGINE: 3.0})
    assert (second.id, second.waited_s) == ("b", {WaitCause.NO_ENGINE: 2.0, WaitCause.ORDER: 3.0})
