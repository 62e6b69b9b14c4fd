"""Token choices that look at a whole minibatch, so that no split into micro-batches can move them (FAILURES.md 55).

They are made once, before the minibatch's first pass, from the current policy's log-probabilities. Legend: N trained
tokens of the minibatch, in the order of their sample's id, which is also how ties are broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionInput:
    """What a choice may read. Nothing carries gradient."""

    advantages_N: Tensor
    logprobs_N: Tensor
    log_ratio_N: Tensor
    """To the behaviour policy, l - lb, whatever the ratio's anchor."""
    clipped_N: Tensor
    """bool: the objective's own bound acts on the token."""
    names_N: Sequence[str]
    """A name for each token, the same in every run: what a random choice is drawn from."""
    fraction: float = 0.0
    low: float = 0.0
    high: float = 0.0
    threshold: float = 0.0


def covariances(advantages_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """(A - mean A) (l - mean l) of each token, means over the minibatch (arXiv 2505.22617, equation 9)."""
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def clip_cov(x: SelectionInput) -> Tensor:
    """A random ``fraction`` of all tokens, at least one, drawn from those with covariance strictly between ``low`` and
    ``high`` that the ratio's clip leaves alone (Clip-Cov, arXiv 2505.22617, equation 10)."""
    covariance_N = covariances(x.advantages_N, x.logprobs_N)
    candidates = ((covariance_N > x.low) & (covariance_N < x.high) & ~x.clipped_N).nonzero()[:, 0].tolist()
    candidates.sort(key=lambda i: blake2b(x.names_N[i].encode(), digest_size=8).digest())
    return _chosen(candidates[: _num_chosen(x)], x)


def kl_cov(x: SelectionInput) -> Tensor:
    """The ``fraction`` of all tokens, at least one, with the largest covariance (KL-Cov, arXiv 2505.22617,
    equation 12)."""
    order_N = covariances(x.advantages_N, x.logprobs_N).sort(descending=True, stable=True).indices
    return _chosen(order_N[: _num_chosen(x)].tolist(), x)


def m2po(x: SelectionInput) -> Tensor:
    """The tokens with the largest squared log-ratio, as few as leave the others a mean square of at most ``threshold``
    (second-moment trust policy optimisation, arXiv 2510.01161, section 4)."""
    squares_N, order_N = x.log_ratio_N.double().square().sort(stable=True)
    counts_N = torch.arange(1, len(squares_N) + 1, device=squares_N.device)
    num_kept = int((squares_N.cumsum(0) / counts_N <= x.threshold).sum())  # the means grow along the order
    return _chosen(order_N[num_kept:].tolist(), x)


def _num_chosen(x: SelectionInput) -> int:
    return max(1, int(x.fraction * len(x.names_N)))


def _chosen(places: list[int], x: SelectionInput) -> Tensor:
    chosen_N = torch.zeros_like(x.clipped_N)
    chosen_N[places] = True
    return chosen_N


@dataclass(frozen=True, slots=True)
class Selection:
    """A choice, its options with their defaults, and what happens to the chosen tokens: the policy term becomes 0, or
    with ``penalises`` the option ``penalty`` times |l - lo| is added to it."""

    function: Callable[[SelectionInput], Tensor]
    options: Mapping[str, float]
    penalises: bool = False


SELECTIONS: dict[str, Selection | None] = {
    "none": None,
    "clip_cov": Selection(clip_cov, {"fraction": 2e-4, "low": 1.0, "high": 5.0}),
    "kl_cov": Selection(kl_cov, {"fraction": 2e-4, "penalty": 1.0}, penalises=True),
    "m2po": Selection(m2po, {"threshold": 0.04}),
}
