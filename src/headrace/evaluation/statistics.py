"""Intervals, paired comparison and pass@k: pure functions of numbers, seeded, with numpy alone.

Replies to one task resemble each other, so the task is the unit that is drawn again: everything here is clustered by
task (FAILURES 177). Legend: R resample, N task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 4000
_EXACT_TASKS = 14
"""Up to so many differing tasks all 2^n sign flips are counted; above, they are drawn."""
_CHUNK = 4_000_000
"""Resample counts held at once, in numbers: 32 MB."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with a two-sided confidence interval. ``low <= mean <= high``."""

    mean: float
    low: float
    high: float
    level: float = 0.95
    num_tasks: int = 0
    num_samples: int = 0

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def touches(self, other: Interval) -> bool:
        """True where the two intervals share a point."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """How two result sets differ over the same tasks: ``difference`` is mean(b) - mean(a)."""

    difference: float
    low: float
    high: float
    p_value: float
    """Two-sided sign-flip permutation test of the per-task differences."""
    num_tasks: int
    num_better: int
    """Tasks on which b is above a."""
    num_worse: int
    level: float = 0.95

    @property
    def verdict(self) -> str:
        """'better', 'worse' or 'no difference shown': no claim inside the interval (FAILURES 177), nor from so few
        tasks that the sign-flip test cannot tell (a bootstrap of equal differences has no width at all)."""
        if self.p_value > 1 - self.level or self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if self.difference > 0 else "worse"

    def __str__(self) -> str:
        return (
            f"{self.difference:+.3f} [{self.low:+.3f}, {self.high:+.3f}], p = {self.p_value:.3g}, "
            f"{self.num_better} tasks better, {self.num_worse} worse, of {self.num_tasks}: {self.verdict}"
        )


def accuracy_interval(
    scores: Sequence[Sequence[float]],
    *,
    level: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    is_share: bool | None = None,
) -> Interval:
    """Interval of the mean score, by a bootstrap over tasks.

    Args:
        scores: for each task the scores of its samples (ragged is fine, empty is not).
        is_share: scores lie between 0 and 1 by their nature, as shares of right answers do; None: where these do.

    The estimate is sum of scores over number of scores. Its percentile interval (Efron 1979) is too short for few
    tasks, so it is stretched about the mean by sqrt(N / (N - 1)). A bootstrap cannot see beyond what was drawn: all
    right or all wrong gives width 0, and near 0 and 1 it covers badly (measured: 52 % instead of 95 % at 9 tasks and
    p = 0.97). For scores within [0, 1] the interval is therefore widened to Wilson's (1927, eq. of the score
    interval) at the effective number of samples p (1 - p) / variance(mean over tasks), which lies between the number
    of tasks and of samples; where the tasks do not vary it is the number of tasks.

    Raises:
        ValueError: no task, a task without score, or a score that is not finite.
    """
    sums_N, counts_N = _clusters(scores)
    num_tasks, num_samples = len(sums_N), int(counts_N.sum())
    mean = float(sums_N.sum() / counts_N.sum())
    tail = (1 - level) / 2
    low = high = mean
    if num_tasks > 1:
        means_R = _resampled_ratio(sums_N, counts_N, num_resamples, seed)
        quantiles = np.quantile(means_R, [tail, 1 - tail])
        stretch = math.sqrt(num_tasks / (num_tasks - 1))
        low = mean + (float(quantiles[0]) - mean) * stretch
        high = mean + (float(quantiles[1]) - mean) * stretch
    if is_share is None:
        is_share = all(0.0 <= s <= 1.0 for task in scores for s in task)
    if is_share:
        num_effective = _effective_samples(sums_N, counts_N, mean)
        wilson_low, wilson_high = wilson(mean, num_effective, level=level)
        low, high = max(0.0, min(low, wilson_low)), min(1.0, max(high, wilson_high))
    return Interval(
        mean=mean, low=min(low, mean), high=max(high, mean), level=level, num_tasks=num_tasks, num_samples=num_samples
    )


def wilson(share: float, num: float, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share of ``num`` trials; ``num`` may be an effective number."""
    if num <= 0:
        raise ValueError(f"an interval needs at least one trial, got {num}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    denominator = 1 + z * z / num
    centre = (share + z * z / (2 * num)) / denominator
    half = z * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num)) / denominator
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(
    scores_a: Sequence[Sequence[float]],
    scores_b: Sequence[Sequence[float]],
    *,
    level: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> PairedDifference:
    """Compare two result sets over the same tasks, in the same order: paired bootstrap and sign-flip test.

    Each task counts once, with the difference of its two mean scores. The interval is the percentile bootstrap over
    tasks, stretched by sqrt(N / (N - 1)) as in :func:`accuracy_interval`. The p-value is that of the sign-flip
    permutation test (Fisher 1935): exact up to 14 differing tasks, else over drawn flips with (hits + 1) / (draws + 1),
    so that it is never 0.

    Raises:
        ValueError: different numbers of tasks, fewer than two, or a task without score.
    """
    if len(scores_a) != len(scores_b):
        raise ValueError(f"a paired comparison needs the same tasks on both sides: {len(scores_a)} and {len(scores_b)}")
    sums_a_N, counts_a_N = _clusters(scores_a)
    sums_b_N, counts_b_N = _clusters(scores_b)
    delta_N = sums_b_N / counts_b_N - sums_a_N / counts_a_N
    num_tasks = len(delta_N)
    if num_tasks < 2:
        raise ValueError("a paired comparison needs at least two tasks: one task cannot show how tasks vary")
    means_R = _resampled_ratio(delta_N, np.ones(num_tasks), num_resamples, seed)
    tail = (1 - level) / 2
    quantiles = np.quantile(means_R, [tail, 1 - tail])
    mean, stretch = float(delta_N.mean()), math.sqrt(num_tasks / (num_tasks - 1))
    return PairedDifference(
        difference=mean,
        low=mean + (float(quantiles[0]) - mean) * stretch,
        high=mean + (float(quantiles[1]) - mean) * stretch,
        p_value=_sign_flip_p(delta_N, num_resamples, seed),
        num_tasks=num_tasks,
        num_better=int((delta_N > 0).sum()),
        num_worse=int((delta_N < 0).sum()),
        level=level,
    )


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: k above the number of samples (it cannot be estimated: FAILURES 175), or counts out of range.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@k: {num_correct} right of {num_samples} samples")
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples; sample at least k replies a task")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def _clusters(scores: Sequence[Sequence[float]]) -> tuple[FloatArray, FloatArray]:
    if not scores:
        raise ValueError("no tasks: there is nothing to average")
    for index, task in enumerate(scores):
        if len(task) == 0:
            raise ValueError(f"task number {index} has no score; a missing score must be excluded by name, not skipped")
        if not all(math.isfinite(s) for s in task):
            raise ValueError(f"task number {index} has a score that is not finite: {list(task)} (I14)")
    sums = np.array([math.fsum(task) for task in scores], dtype=np.float64)
    counts = np.array([len(task) for task in scores], dtype=np.float64)
    return sums, counts


def _resampled_ratio(sums_N: FloatArray, counts_N: FloatArray, num_resamples: int, seed: int) -> FloatArray:
    """sum / count of ``num_resamples`` draws of N tasks with replacement, as [R]."""
    num_tasks = len(sums_N)
    generator = np.random.default_rng(seed)
    parts, left = [], num_resamples
    while left > 0:
        rows = min(left, max(1, _CHUNK // num_tasks))
        drawn_RN = generator.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=rows).astype(np.float64)
        parts.append((drawn_RN @ sums_N) / (drawn_RN @ counts_N))
        left -= rows
    return np.concatenate(parts)


def _effective_samples(sums_N: FloatArray, counts_N: FloatArray, mean: float) -> float:
    """p (1 - p) over the cluster variance of the mean (linearised ratio estimator), within [tasks, samples]."""
    num_tasks, num_samples = len(sums_N), float(counts_N.sum())
    residuals_N = (sums_N - mean * counts_N) * num_tasks / num_samples
    variance = float(residuals_N @ residuals_N) / (num_tasks * (num_tasks - 1)) if num_tasks > 1 else 0.0
    if variance <= 0:
        return float(num_tasks)
    return min(max(mean * (1 - mean) / variance, float(num_tasks)), num_samples)


def _sign_flip_p(delta_N: FloatArray, num_resamples: int, seed: int) -> float:
    delta_N = delta_N[delta_N != 0]
    num = len(delta_N)
    if num == 0:
        return 1.0
    # Sums that are equal on paper may differ in the last bit; without slack the observed flip itself may not count.
    bound = abs(float(delta_N.sum())) * (1 - 1e-12)
    if num <= _EXACT_TASKS:
        bits = (np.arange(2**num)[:, None] >> np.arange(num)[None, :]) & 1
        return float((np.abs((1 - 2 * bits) @ delta_N) >= bound).mean())
    generator = np.random.default_rng(seed)
    hits, left = 0, num_resamples
    while left > 0:
        rows = min(left, max(1, _CHUNK // num))
        signs = generator.integers(0, 2, size=(rows, num)) * 2 - 1
        hits += int((np.abs(signs @ delta_N) >= bound).sum())
        left -= rows
    return (hits + 1) / (num_resamples + 1)
