"""Intervals, paired comparison and pass@k."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.evaluation.statistics import accuracy_interval, paired_difference, pass_at_k, wilson


def simulated_coverage(num_tasks: int, num_samples: int, p: float, num_runs: int = 200) -> float:
    """Share of simulated evaluations whose interval holds the true accuracy; task difficulty is Beta distributed."""
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(num_runs):
        difficulty = generator.beta(2 * p, 2 * (1 - p), num_tasks)
        scores = [[float(x) for x in generator.random(num_samples) < q] for q in difficulty]
        interval = accuracy_interval(scores, num_resamples=500)
        hits += interval.low <= p <= interval.high
    return hits / num_runs


@pytest.mark.parametrize(
    ("num_tasks", "num_samples", "p"), [(9, 4, 0.3), (9, 4, 0.97), (16, 4, 0.85), (36, 4, 0.97), (100, 1, 0.3)]
)
def test_interval_covers_the_truth_for_clustered_tasks(num_tasks: int, num_samples: int, p: float) -> None:
    """F177: replies to one task are not independent; a 95 % interval that treats them so covers far less."""
    assert simulated_coverage(num_tasks, num_samples, p) >= 0.90


def test_interval_is_wider_than_one_that_ignores_tasks() -> None:
    """F177: 10 tasks with 100 equal replies each are 10 pieces of evidence, not 1000."""
    interval = accuracy_interval([[1.0] * 100] * 5 + [[0.0] * 100] * 5)
    low, high = wilson(0.5, 1000)
    assert interval.high - interval.low > 5 * (high - low)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_all_right_and_all_wrong_have_an_interval_with_width(value: float) -> None:
    """A bootstrap of equal scores has width 0; the interval falls back to Wilson's over the number of tasks."""
    interval = accuracy_interval([[value] * 4] * 12)
    assert (interval.low, interval.high) == pytest.approx(wilson(value, 12))
    assert interval.high - interval.low > 0.2


def test_interval_is_seeded() -> None:
    """I18: the same scores give the same interval."""
    scores = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert accuracy_interval(scores, seed=3) == accuracy_interval(scores, seed=3)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=1, max_size=12))
def test_interval_holds_its_mean_whatever_the_scores(scores: list[list[float]]) -> None:
    """Ragged tasks, one task, rewards outside [0, 1]: always low <= mean <= high, and the mean is over samples."""
    interval = accuracy_interval(scores, num_resamples=50)
    flat = [s for task in scores for s in task]
    assert interval.low <= interval.mean <= interval.high
    assert interval.mean == pytest.approx(math.fsum(flat) / len(flat), abs=1e-9)
    assert interval.num_samples == len(flat)


@pytest.mark.parametrize(
    ("scores", "message"), [([], "no tasks"), ([[1.0], []], "number 1 has no score"), ([[math.nan]], "not finite")]
)
def test_interval_refuses_missing_scores(scores: list[list[float]], message: str) -> None:
    """F176: a missing score is an error here, never a shorter denominator."""
    with pytest.raises(ValueError, match=message):
        accuracy_interval(scores)


def test_pairing_shows_a_gain_that_separate_intervals_hide() -> None:
    """F177: every task gains a little; task difficulty varies a lot."""
    before = [[i / 20] for i in range(20)]
    after = [[i / 20 + 0.04] for i in range(20)]
    paired = paired_difference(before, after)
    assert paired.verdict == "better"
    assert accuracy_interval(before).touches(accuracy_interval(after))
    assert paired.difference == pytest.approx(0.04)
    assert (paired.num_better, paired.num_worse) == (20, 0)
    assert paired_difference(after, before).verdict == "worse"


def test_paired_comparison_of_noise_claims_nothing_too_often() -> None:
    """F177: two evaluations of one policy are called different in at most about 5 % of cases."""
    generator = np.random.default_rng(0)
    claims = 0
    for _ in range(200):
        p = generator.random(30)
        a, b = ([[float(x) for x in generator.random(4) < q] for q in p] for _ in range(2))
        claims += paired_difference(a, b, num_resamples=300).verdict != "no difference shown"
    assert claims <= 20


def test_sign_flip_p_value_is_exact_for_few_tasks() -> None:
    """All of 5 tasks gain: 2 of 2^5 sign flips are as extreme."""
    paired = paired_difference([[0.0]] * 5, [[1.0]] * 5)
    assert paired.p_value == pytest.approx(2 / 32)
    assert paired.verdict == "no difference shown"
    assert paired_difference([[1.0]] * 5, [[1.0]] * 5).p_value == 1.0


def test_sign_flip_p_value_of_many_tasks_is_never_zero() -> None:
    """A drawn permutation test cannot promise more than 1 / (draws + 1)."""
    assert paired_difference([[0.0]] * 40, [[1.0]] * 40, num_resamples=200).p_value == pytest.approx(1 / 201)


def test_paired_comparison_needs_the_same_tasks() -> None:
    """A comparison of different task lists is an error."""
    with pytest.raises(ValueError, match="same tasks on both sides: 2 and 1"):
        paired_difference([[0.0], [1.0]], [[1.0]])
    with pytest.raises(ValueError, match="at least two tasks"):
        paired_difference([[0.0]], [[1.0]])


def test_pass_at_k_golden_values() -> None:
    """T33 and F175: without replacement."""
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(8, 2, 4) == pytest.approx(0.7857, abs=1e-4)
    assert pass_at_k(16, 0, 16) == 0.0
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 8), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(n: int, c: int, k: int) -> None:
    """F175: k above n gave 1.0 for zero right."""
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, c, k)
