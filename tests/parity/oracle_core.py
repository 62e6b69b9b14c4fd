"""Ground of the scalar oracle: the batch, the five aggregations and how token terms become a loss and a gradient.

Plain Python floats; nested lists ``[sequence][token]``. Notation of ALGORITHMS.md: ``new`` is the log-probability under
the current policy, ``old`` under the proximal one, ``roll`` under the behaviour policy mu, ``ref`` under the reference.

Every objective is a function ``f(batch, ..., live=None) -> Terms``. ``live`` are the log-probabilities through which
the gradient flows; whatever the paper detaches is computed from ``batch.new``. ``live`` defaults to ``batch.new``, and
``Terms.slope`` is the written derivative there. A central difference perturbs ``live`` alone, so detached parts stay
frozen by construction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Nested = list[list[float]]
Mask = list[list[int]]

AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum")


@dataclass(frozen=True)
class Batch:
    """What one optimizer step sees. Entries where ``mask`` is 0 hold garbage that must never matter."""

    new: Nested
    old: Nested
    roll: Nested
    ref: Nested
    advantage: Nested
    mask: Mask
    max_length: int

    def trained(self, i: int) -> list[int]:
        """Positions of sequence ``i`` that are trained."""
        return [t for t, m in enumerate(self.mask[i]) if m]

    def cells(self) -> list[tuple[int, int]]:
        """Every trained (sequence, token)."""
        return [(i, t) for i in range(len(self.mask)) for t in self.trained(i)]

    def sequence_advantage(self, i: int) -> float:
        """The advantage of a whole sequence: that of its first trained token. Sequence objectives need it constant."""
        return self.advantage[i][self.trained(i)[0]]


@dataclass(frozen=True)
class Terms:
    """Loss of each token and its derivative by the token's current log-probability; 0 where masked."""

    value: Nested
    slope: Nested


@dataclass(frozen=True)
class SequenceTerms:
    """Loss of each whole sequence, and its derivative by the log-probability of each of its tokens."""

    value: list[float]
    slope: Nested


def zeros(mask: Mask) -> Nested:
    return [[0.0] * len(row) for row in mask]


def per_token(batch: Batch, term: Callable[[int, int], tuple[float, float]]) -> Terms:
    """Evaluate ``term(sequence, token) -> (value, slope)`` on trained tokens only: masked ones are never read."""
    value, slope = zeros(batch.mask), zeros(batch.mask)
    for i, t in batch.cells():
        value[i][t], slope[i][t] = term(i, t)
    return Terms(value, slope)


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def clip(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def shares(mask: Mask, how: str, max_length: int) -> Nested:
    """What one unit of loss on a token adds to the aggregated loss.

    ``mask`` is the mask BEFORE any rejection (ALGORITHMS.md, denominator rule): a token rejected by a correction still
    counts. A sequence without any trained token is no sequence: it does not enter the number of sequences.
    """
    lengths = [sum(row) for row in mask]
    num_tokens = sum(lengths)
    num_sequences = sum(1 for n in lengths if n)
    out = zeros(mask)
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if m:
                out[i][t] = {
                    "token_mean": 1 / num_tokens,
                    "seq_mean_token_mean": 1 / (num_sequences * lengths[i]),
                    "seq_mean_token_sum": 1 / num_sequences,
                    "seq_mean_token_sum_norm": 1 / (num_sequences * max_length),
                    "token_sum": 1.0,
                }[how]
    return out


def reduce_terms(terms: Terms, mask: Mask, how: str, max_length: int) -> tuple[float, Nested]:
    """Aggregated loss and its gradient by each token's current log-probability."""
    share = shares(mask, how, max_length)
    cells = [(i, t) for i, row in enumerate(mask) for t, m in enumerate(row) if m]
    loss = math.fsum(terms.value[i][t] * share[i][t] for i, t in cells)
    gradient = zeros(mask)
    for i, t in cells:
        gradient[i][t] = terms.slope[i][t] * share[i][t]
    return loss, gradient


def reduce_sequences(terms: SequenceTerms, mask: Mask) -> tuple[float, Nested]:
    """Mean over the sequences that have a trained token."""
    rows = [i for i, row in enumerate(mask) if any(row)]
    loss = math.fsum(terms.value[i] for i in rows) / len(rows)
    gradient = [
        [s / len(rows) if m else 0.0 for s, m in zip(*pair, strict=True)]
        for pair in zip(terms.slope, mask, strict=True)
    ]
    return loss, gradient


def weighted(terms: Terms, weights: Nested) -> Terms:
    """Multiply by detached weights. A weight of 0 rejects the token; the denominators do not change."""

    def product(rows: Nested) -> Nested:
        return [[w * x if w else 0.0 for w, x in zip(*pair, strict=True)] for pair in zip(weights, rows, strict=True)]

    return Terms(product(terms.value), product(terms.slope))


def added(first: Terms, second: Terms, factor: float = 1.0) -> Terms:
    """``first + factor * second``."""

    def total(a: Nested, b: Nested) -> Nested:
        return [[x + factor * y for x, y in zip(*pair, strict=True)] for pair in zip(a, b, strict=True)]

    return Terms(total(first.value, second.value), total(first.slope, second.slope))
