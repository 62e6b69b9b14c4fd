"""Conditions of the control room that the tests of its rules did not hold; each was found by ``make mutation``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.control.books import FAILED, IN_FLIGHT, ISSUED, TRAINED, Books, BooksError
from headrace.control.checks import GuardError, check_first_ratio, check_prefixes, check_sample
from headrace.control.cursor import TaskCursor
from headrace.control.engine_states import EngineStates
from headrace.control.intervals import IntervalSet
from headrace.control.ledger import Ledger
from headrace.control.samples import samples_from_episode
from headrace.types import (
    AttemptKey,
    Episode,
    Outcome,
    PolicyVersion,
    Score,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)


def test_an_interval_set_is_a_set() -> None:
    """I11: whatever the order in which groups close, the closed ones are known, and neighbours become one interval."""
    for seed in range(20):
        rng = random.Random(seed)
        values, kept = IntervalSet(), set()
        for _ in range(60):
            value = rng.randrange(30)
            values.add(value)
            kept.add(value)
            assert [v in values for v in range(-1, 31)] == [v in kept for v in range(-1, 31)]
            assert values.num_intervals == sum(v - 1 not in kept for v in kept)


# ------------------------------------------------------------------------------------------------------ books


def test_a_status_that_nothing_has_any_more_is_not_told() -> None:
    """I10: a count of zero is no status, in the summary and in an error."""
    books = Books()
    books.add("t", ISSUED)
    books.add("t", IN_FLIGHT)
    books.move("t", IN_FLIGHT, FAILED + "timeout")
    books.move("t", FAILED + "timeout", TRAINED)
    assert "failed:timeout" not in books.summary() and books.summary()["failed"] == 0
    books.add("t", ISSUED)
    with pytest.raises(BooksError, match=r"issued 2 != 1 trained \(off by 1\)"):
        books.check("test")


def test_books_without_any_end_say_nought() -> None:
    """I10: the message is complete where nothing at all became of what was issued."""
    books = Books()
    books.add("t", ISSUED, 3)
    with pytest.raises(BooksError, match=r"issued 3 != 0 \(off by 3\)"):
        books.check("test")


# ----------------------------------------------------------------------------------------------------- checks


def test_versions_of_three_spans_are_compared_each_with_its_own_tokens() -> None:
    """D4: a token of the third span is held against the third version."""
    versions = [PolicyVersion(0, n) for n in (1, 2, 3)]
    reply = Segment(
        source=Source.POLICY,
        ids=(5, 6, 7, 8, 9, 0),
        parent=0,
        logprobs=(-0.5,) * 6,
        version_spans=tuple(VersionSpan(v, 2 * n, 2 * n + 2) for n, v in enumerate(versions)),
    )
    episode = Episode(
        key=AttemptKey(0, 0),
        task=Task(id="t", messages=()),
        turns=(),
        trace=Trace(segments=(Segment(source=Source.TEMPLATE, ids=(1,)), reply)),
        outcome=Outcome.DONE,
        score=Score(value=1.0),
    )
    (sample,) = samples_from_episode(episode, "g", 1.0)
    check_sample(sample, episode, 3)
    assert sample.versions == (None, *(v for v in versions for _ in range(2)))


def one_reply(*logprobs: float, version: PolicyVersion | None = None) -> Episode:
    reply = Segment(
        source=Source.POLICY,
        ids=tuple(range(5, 5 + len(logprobs))),
        parent=0,
        logprobs=logprobs,
        version_spans=(VersionSpan(version or PolicyVersion(0, 1), 0, len(logprobs)),),
    )
    return Episode(
        key=AttemptKey(0, 0),
        task=Task(id="t", messages=()),
        turns=(),
        trace=Trace(segments=(Segment(source=Source.TEMPLATE, ids=(1, 2)), reply)),
        outcome=Outcome.DONE,
        score=Score(value=1.0),
    )


def test_one_prompt_may_have_many_replies() -> None:
    """I1: only the prompt that samples say they share is compared, and one that shares nothing with nobody."""
    (sample,) = samples_from_episode(one_reply(-0.5, -0.5), "g", 1.0)
    other_reply = replace(sample, ids=(1, 2, 9, 9))
    other_prompt = replace(sample, ids=(1, 3, 5, 6))
    check_prefixes([sample, other_reply, replace(other_prompt, prefix_key="")])
    with pytest.raises(GuardError, match="differ in their prompts"):
        check_prefixes([sample, other_prompt])


def test_a_sample_whose_id_has_no_number_is_refused_by_the_guard() -> None:
    """I1: and does not end as an error of Python's."""
    episode = one_reply(-0.5)
    (sample,) = samples_from_episode(episode, "g", 1.0)
    with pytest.raises(GuardError, match="A sample's id is"):
        check_sample(replace(sample, id="g0m0/last"), episode, 1)


def test_a_nan_is_told_as_what_it_is() -> None:
    """D4: carried faithfully it is no slip of the joining, but no log-probability either; on one side only it is."""
    for recorded, joined, message in [
        (math.nan, math.nan, "must be finite"),
        (math.nan, -0.5, "not the engine's"),
        (-0.5, math.nan, "not the engine's"),
    ]:
        episode = one_reply(recorded)
        (sample,) = samples_from_episode(episode, "g", 1.0)
        with pytest.raises(GuardError) as caught:
            check_sample(replace(sample, behaviour_logprobs=(0.0, 0.0, joined)), episode, 1)
        assert message in str(caught.value)


def test_the_first_ratio_has_a_bound_that_a_nan_does_not_pass() -> None:
    """I5: the bound itself is allowed; a batch without fresh tokens has nothing to check."""
    check_first_ratio({"max_ratio_error": 1e-3}, 1e-3, 0)
    check_first_ratio({}, 1e-3, 0)
    for error in (1.1e-3, math.nan):
        with pytest.raises(GuardError, match=r"max \|ratio - 1\|"):
            check_first_ratio({"max_ratio_error": error}, 1e-3, 0)


# ----------------------------------------------------------------------------------------- cursor, engine states


def test_a_seed_of_any_length_makes_an_order() -> None:
    """The hash that shuffles takes a key of at most 64 bytes."""
    cursor = TaskCursor(20, 10**80)
    assert sorted(cursor.task_index(i) for i in range(20)) == list(range(20))


def test_nothing_is_proved_of_an_engine_that_only_starts() -> None:
    """I6: not even that it holds no version."""
    states = EngineStates(lambda: 0.0)
    states.begin(0)
    assert not states.is_proved(0)


def test_an_engine_that_is_leaving_takes_no_work() -> None:
    """However recent what it holds."""
    states = EngineStates(lambda: 0.0)
    states.begin(0)
    states.started(0, PolicyVersion(0, 0))
    states.proved(0, PolicyVersion(0, 0))
    assert states.serve(0)
    assert states.drain(0)
    assert not states.serve(0)


# ------------------------------------------------------------------------------------------------------ ledger


def ledger_with(*keys: AttemptKey) -> Ledger:
    ledger = Ledger()
    ledger.open_lineage(0)
    ledger.issue(keys, "t", PolicyVersion(0, 0))
    return ledger


def test_a_status_that_no_attempt_of_a_task_has_is_not_counted() -> None:
    key = AttemptKey(0, 0)
    ledger = ledger_with(key)
    ledger.fail([key], "timeout")
    assert ledger.task_counts("t") == {"issued": 1, "failed:timeout": 1}


@pytest.mark.parametrize("full", [False, True])
def test_a_check_of_the_ledger_looks_at_its_books(full: bool) -> None:
    """I10: an attempt that is counted as issued and is nowhere."""
    ledger = ledger_with(AttemptKey(0, 0))
    ledger._books.add("t", ISSUED)
    with pytest.raises(BooksError, match="the books do not balance, all lineages"):
        ledger.check(full=full)


def spoil(ledger: Ledger) -> None:
    """The sums stay right, and the books of the tasks t and u are wrong."""
    ledger._books.add("t", ISSUED)
    ledger._books.add("u", ISSUED, -1)


def test_only_a_full_check_looks_at_what_nothing_touched() -> None:
    """What a step costs must not grow with the run: other tasks and the surviving chain are left to the full check."""
    ledger = ledger_with(AttemptKey(0, 0))
    ledger.issue([AttemptKey(1, 0)], "u", PolicyVersion(0, 0))
    ledger.check()
    spoil(ledger)
    ledger.check()
    with pytest.raises(BooksError, match="task t: issued 2"):
        ledger.check(full=True)

    ledger = ledger_with(AttemptKey(0, 0))
    ledger._surviving_issued += 1
    ledger.check()
    with pytest.raises(BooksError, match="surviving chain: issued 2, accounted for 1"):
        ledger.check(full=True)


TOUCHES: dict[str, Callable[[Ledger], None]] = {
    "issue": lambda ledger: ledger.issue([AttemptKey(2, 0)], "t", PolicyVersion(0, 0)),
    "fail": lambda ledger: ledger.fail([AttemptKey(0, 0)], "timeout"),
    "train": lambda ledger: ledger.train([AttemptKey(0, 0)], 1),
    "checkpoint": lambda ledger: ledger.checkpoint(1),
    "resume": lambda ledger: ledger.open_lineage(1, 0),
}


@pytest.mark.parametrize("what", TOUCHES)
def test_every_transition_is_looked_at_by_the_next_check(what: str) -> None:
    ledger = ledger_with(AttemptKey(0, 0))
    ledger.issue([AttemptKey(1, 0)], "u", PolicyVersion(0, 0))
    if what == "checkpoint":
        ledger.train([AttemptKey(0, 0)], 1)
        ledger.cut(1)
    ledger.check()
    TOUCHES[what](ledger)
    spoil(ledger)
    with pytest.raises(BooksError, match=r"task [tu]: issued"):
        ledger.check()


def test_cuts_are_in_order_and_need_a_run() -> None:
    """One update is cut again only after its checkpoint is complete."""
    with pytest.raises(BooksError, match="no lineage is open"):
        Ledger().cut(0)
    ledger = ledger_with(AttemptKey(0, 0))
    ledger.train([AttemptKey(0, 0)], 1)
    ledger.cut(5)
    for update in (4, 5):
        with pytest.raises(BooksError, match=f"checkpoint {update} is cut after update 1 and checkpoint 5"):
            ledger.cut(update)
    ledger.checkpoint(5)
    ledger.cut(5)


def test_a_group_that_got_a_retry_in_between_is_not_closed() -> None:
    """It had nothing in flight at one update; at the next one it has."""
    first, other = AttemptKey(0, 0), AttemptKey(1, 0)
    ledger = ledger_with(first, other)
    ledger.fail([first], "timeout")
    ledger.train([other], 1)
    again, third = first._replace(retry=1), AttemptKey(2, 0)
    ledger.issue([again, third], "t", PolicyVersion(0, 0))
    ledger.train([third], 2)
    ledger.fail([again], "timeout")
    assert not ledger.in_flight


def test_an_attempt_that_was_never_issued_is_told_so_in_an_open_group() -> None:
    ledger = ledger_with(AttemptKey(0, 0))
    with pytest.raises(BooksError, match="it was never issued"):
        ledger.fail([AttemptKey(0, 1)], "timeout")


def test_long_lists_of_attempts_are_cut_and_empty_ones_are_none() -> None:
    ledger = ledger_with(*(AttemptKey(0, member) for member in range(10)))
    with pytest.raises(BooksError, match=r"lost by the loop: g0m0, .*g0m7 and 2 more; unknown to the ledger: none"):
        ledger.check([])
    ledger = ledger_with(*(AttemptKey(0, member) for member in range(8)))
    with pytest.raises(BooksError, match=r"lost by the loop: g0m0, .*g0m7; unknown"):
        ledger.check([])
