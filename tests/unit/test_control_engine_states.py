"""States of a fleet's engines: nobody serves unproved or stale weights, and restarts have a budget (I6, I7; failures
87, 88, 89)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.engine_states import Change, EngineState, EngineStates, RestartBudget, StateError
from headrace.types import PolicyVersion

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def serving(states: EngineStates, index: int = 0, version: PolicyVersion = V0) -> None:
    states.begin(index)
    states.started(index, version)
    states.proved(index, version)
    assert states.serve(index)


def test_an_engine_serves_only_after_its_proof() -> None:
    """I6: started, and even holding the right version, is not serving."""
    states = EngineStates(Clock())
    states.published(V0)
    assert states.begin(0) == 0
    assert states.state(0) is EngineState.STARTING
    states.started(0, V0)
    assert not states.serve(0)
    assert states.serving() == ()
    assert not states.is_proved(0)
    states.proved(0, V0)
    assert states.is_proved(0)
    assert states.serving() == ()
    assert states.serve(0)
    assert states.serving() == (0,)


def test_a_restarted_engine_knows_nothing_of_its_former_proof() -> None:
    """Failure 88: the proof belonged to the incarnation that died."""
    clock = Clock()
    states = EngineStates(clock, budget=RestartBudget(backoff_s=2.0))
    states.published(V0)
    serving(states)
    assert states.failed(0, "killed") == 2.0
    clock.now_s += 2.0
    assert states.begin(0) == 1
    assert states.incarnation(0) == 1
    assert states.version(0) is None
    states.started(0, V0)
    assert not states.is_proved(0)
    assert not states.serve(0)
    assert states.serving() == ()


def test_a_proof_of_another_version_than_it_holds_is_a_defect() -> None:
    """I6: what was proved is what it holds, or nothing was proved."""
    states = EngineStates(Clock())
    states.begin(0)
    states.started(0, V0)
    with pytest.raises(StateError, match=r"proved to serve 0\.1, but engine 0 is syncing"):
        states.proved(0, V1)


def test_a_proof_of_an_older_version_does_not_begin_service() -> None:
    """I6: proved, then given other weights before it served: it waits for the proof of those."""
    states = EngineStates(Clock(), max_engine_lag=1)
    states.published(V1)
    states.begin(0)
    states.started(0, V0)
    states.proved(0, V0)
    states.took(0, V1)
    assert not states.serve(0)
    states.proved(0, V1)
    assert states.serve(0)


def test_a_new_version_must_be_proved_again_or_follow_a_proof_of_this_incarnation() -> None:
    """I6, guards.canary_every: an engine that has passed a proof may go on without one; one that has not may not."""
    states = EngineStates(Clock())
    states.published(V0)
    serving(states)
    states.begin(1)
    states.started(1, V0)
    for index in (0, 1):
        states.took(index, V1)
    states.published(V1)
    assert not states.is_proved(0)
    assert states.serve(0)
    assert not states.serve(1)
    assert states.serving() == (0,)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_bound_on_lag_is_exact(lag: int) -> None:
    """I7, max_engine_lag: at the bound it serves, one beyond it does not."""
    states = EngineStates(Clock(), max_engine_lag=lag)
    states.published(V0)
    serving(states)
    states.published(PolicyVersion(0, lag))
    assert states.serving() == (0,)
    assert states.serve(0)
    states.published(PolicyVersion(0, lag + 1))
    assert states.serving() == ()
    assert not states.serve(0)
    states.took(0, PolicyVersion(0, lag + 1))
    assert states.serving() == (0,)


def test_lag_goes_on_across_lineages_and_nothing_serves_the_future() -> None:
    """I7: a resumed lineage goes on from the restored number; a version above the controller's is not served (D9)."""
    states = EngineStates(Clock(), max_engine_lag=1)
    states.published(PolicyVersion(1, 4))
    serving(states, version=PolicyVersion(0, 4))
    states.took(0, PolicyVersion(1, 5))
    assert states.serving() == ()


def test_lag_counts_while_it_waits_to_serve() -> None:
    """Failure 88: proved, but two publishes ago."""
    states = EngineStates(Clock())
    states.begin(0)
    states.started(0, V0)
    states.proved(0, V0)
    states.published(V1)
    assert not states.serve(0)
    assert states.state(0) is EngineState.SYNCING


def test_backoff_doubles_up_to_a_bound_and_the_budget_ends() -> None:
    """Failure 89: an engine that dies again and again is given up."""
    clock = Clock()
    states = EngineStates(
        clock, budget=RestartBudget(max_restarts=4, window_s=1000.0, backoff_s=1.0, max_backoff_s=5.0)
    )
    states.begin(0)
    delays = []
    for _ in range(5):
        delay_s = states.failed(0, "flaky")
        delays.append(delay_s)
        if delay_s is None:
            break
        assert states.due() == ()
        clock.now_s += delay_s
        assert states.due() == (0,)
        states.begin(0)
    assert delays == [1.0, 2.0, 4.0, 5.0, None]
    assert states.left() == ()
    assert states.due() == ()
    assert "for good" in states.line(0)
    with pytest.raises(StateError, match="cannot be started"):
        states.begin(0)


def test_the_window_forgets_old_deaths() -> None:
    """Failure 89: the budget is per window, bounds included."""
    clock = Clock()
    states = EngineStates(clock, budget=RestartBudget(max_restarts=1, window_s=10.0, backoff_s=1.0))
    states.begin(0)
    assert states.failed(0, "once") == 1.0
    clock.now_s += 1.0
    states.begin(0)
    clock.now_s += 9.0  # the first death is exactly as old as the window
    assert states.failed(0, "again") == 1.0
    clock.now_s += 1.0
    states.begin(0)
    clock.now_s += 8.0
    assert states.failed(0, "too soon") is None


def test_no_budget_means_the_first_death_is_the_last() -> None:
    """``max_restarts = 0``."""
    states = EngineStates(Clock(), budget=RestartBudget(max_restarts=0))
    states.begin(0)
    assert states.left() == (0,)
    assert states.failed(0, "gone") is None
    assert states.left() == ()


def test_a_draining_engine_takes_nothing_and_leaves_for_good() -> None:
    """Engines leave during a run: what it has goes on under new weights until it is done."""
    states = EngineStates(Clock())
    states.published(V0)
    serving(states)
    assert states.drain(0)
    assert states.drain(0)  # asked twice
    assert states.serving() == ()
    assert states.left() == ()
    assert states.holding() == (0,)  # it still samples: it must get new versions
    states.took(0, V1)
    states.proved(0, V1)
    assert not states.serve(0)
    states.drained(0)
    assert states.state(0) is EngineState.DEAD
    assert states.due() == ()
    assert states.holding() == ()


@pytest.mark.parametrize("moment", ["starting", "syncing", "dead"])
def test_an_engine_without_work_leaves_at_once(moment: str) -> None:
    """Nothing has to be ended, and no restart brings it back."""
    clock = Clock()
    states = EngineStates(clock)
    states.begin(0)
    if moment == "syncing":
        states.started(0, V0)
    if moment == "dead":
        states.failed(0, "crashed")
    assert not states.drain(0)
    assert states.state(0) is EngineState.DEAD
    clock.now_s += 1e6
    assert states.due() == ()
    assert states.left() == ()


def test_a_draining_engine_that_dies_does_not_start_again() -> None:
    """It was asked to leave."""
    states = EngineStates(Clock())
    states.published(V0)
    serving(states)
    states.drain(0)
    assert states.failed(0, "crashed") is None
    assert states.left() == ()


def test_states_that_a_publish_must_reach() -> None:
    """Failure 87: all that sample or will; not those that are starting, or dead."""
    states = EngineStates(Clock())
    states.published(V0)
    for index in range(5):
        states.begin(index)
    for index in (1, 2, 3, 4):
        states.started(index, V0)
    for index in (2, 3, 4):
        states.proved(index, V0)
        states.serve(index)
    states.drain(3)
    states.failed(4, "crashed")
    assert states.holding() == (1, 2, 3)
    assert states.state(0) is EngineState.STARTING
    assert states.left() == (0, 1, 2, 4)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda s: None, lambda s: s.took(0, V0)),
        (lambda s: None, lambda s: s.proved(0, V0)),
        (lambda s: None, lambda s: s.serve(0)),
        (lambda s: None, lambda s: s.begin(0)),
        (lambda s: s.started(0, V0), lambda s: s.started(0, V0)),
        (lambda s: s.started(0, V0), lambda s: s.drained(0)),
        (lambda s: s.failed(0, "x"), lambda s: s.failed(0, "y")),
        (lambda s: s.failed(0, "x"), lambda s: s.started(0, V0)),
        (lambda s: s.failed(0, "x"), lambda s: s.took(0, V0)),
    ],
)
def test_transitions_that_cannot_be_are_defects(make: object, call: object) -> None:
    """Each method says which states it may be called in."""
    states = EngineStates(Clock())
    states.begin(0)
    make(states)  # type: ignore[operator]
    with pytest.raises(StateError, match="engine 0"):
        call(states)  # type: ignore[operator]


def test_changes_are_told_with_their_times_and_reasons() -> None:
    """The timeline: each state as long as it lasted."""
    clock, changes = Clock(), list[Change]()
    states = EngineStates(clock, on_change=changes.append)
    states.begin(0)
    clock.now_s += 3.0
    states.started(0, V0)
    clock.now_s += 2.0
    states.failed(0, "kill -9")
    assert [(c.index, c.incarnation, c.old, c.new, c.at_s - c.since_s) for c in changes] == [
        (0, 0, EngineState.STARTING, EngineState.SYNCING, 3.0),
        (0, 0, EngineState.SYNCING, EngineState.DEAD, 2.0),
    ]
    assert changes[1].why == "kill -9"
    clock.now_s += 1.0
    states.begin(0)
    assert (changes[2].old, changes[2].new, changes[2].incarnation) == (EngineState.DEAD, EngineState.STARTING, 1)
    assert changes[2].why == "start number 2"


def test_what_a_person_reads() -> None:
    """State, for how long, which version, proved or not; why and until when it is dead."""
    clock = Clock()
    states = EngineStates(clock)
    states.begin(0)
    clock.now_s += 1.5
    assert states.text() == "engine 0 is starting for 1.5 s"
    states.started(0, V0)
    assert states.line(0) == "engine 0 is syncing for 0.0 s with version 0.0 (not proved)"
    states.proved(0, V0)
    assert states.line(0).endswith("with version 0.0 (proved)")
    states.failed(0, "it hung")
    clock.now_s += 0.25
    states.begin(1)
    assert states.text() == "engine 0 is dead for 0.2 s (it hung), starts in 0.8 s\nengine 1 is starting for 0.0 s"


OPERATIONS = ["begin", "started", "took", "proved", "serve", "publish", "fail", "drain", "drained", "wait"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_whatever_happens_only_proved_and_recent_weights_serve(operations: list[tuple[str, int, int]]) -> None:
    """I6, I7: after any sequence of events, an engine that may take work has passed a proof in this incarnation, holds
    a version at most ``max_engine_lag`` behind, and is neither starting, draining nor dead."""
    clock = Clock()
    states = EngineStates(clock, max_engine_lag=1, budget=RestartBudget(max_restarts=2, window_s=50.0))
    proved_since_begin: dict[int, bool] = {}
    published = 0
    states.published(PolicyVersion(0, 0))
    for name, index, number in operations:
        version = PolicyVersion(0, min(number, published))
        try:
            match name:
                case "begin":
                    states.begin(index)
                    proved_since_begin[index] = False
                case "started":
                    states.started(index, version)
                case "took":
                    states.took(index, version)
                case "proved":
                    states.proved(index, version)
                    proved_since_begin[index] = True
                case "serve":
                    states.serve(index)
                case "publish":
                    published += 1
                    states.published(PolicyVersion(0, published))
                case "fail":
                    states.failed(index, "x")
                case "drain":
                    states.drain(index)
                case "drained":
                    states.drained(index)
                case "wait":
                    clock.now_s += number * 10.0
        except (StateError, KeyError):
            continue  # refused: nothing may have changed
        finally:
            for engine in states.serving():
                held = states.version(engine)
                assert states.state(engine) is EngineState.SERVING
                assert held is not None
                assert published - held.number <= 1
                assert proved_since_begin[engine]
            assert set(states.serving()) <= set(states.holding())
            assert not set(states.due()) & set(states.holding())
            assert set(states.due()) <= set(states.left())
