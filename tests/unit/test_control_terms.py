"""Conditions of the control room that the tests of its rules did not hold; each was found by ``make mutation``."""

from __future__ import annotations

import random

import pytest

from headrace.control.books import FAILED, IN_FLIGHT, ISSUED, TRAINED, Books, BooksError
from headrace.control.checks import check_sample
from headrace.control.intervals import IntervalSet
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
