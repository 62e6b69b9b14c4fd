"""Estimators of KL(policy || reference) from sampled tokens. One function for the KL that is logged and the KL that
is trained on (FAILURES.md 61). Legend: N trained tokens, any shape works.

Source: J. Schulman, "Approximating KL divergence" (2020). With d = l - lr, samples from the policy.
As a reward, k1 is the unbiased placement and k3 is biased. As a loss, the gradient of k1 has zero expectation on
policy, that of k2 is the gradient of the reverse KL, that of k3 is biased (arXiv 2512.21852).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.algorithms.ratios import MAX_LOG_RATIO


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """d: unbiased, may be negative."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """d^2 / 2."""
    return 0.5 * (logprobs_N - reference_N).square()


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d, never negative. d is clamped to [-20, 20] as a whole: were only the exponential clamped, the
    linear part would be left alone beyond the bound and push the policy further away from the reference."""
    difference_N = (reference_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_N.expm1() - difference_N


def k3_plus(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Value of k3, gradient of k2 (straight through)."""
    quadratic_N = k2(logprobs_N, reference_N)
    return k3(logprobs_N, reference_N).detach() + (quadratic_N - quadratic_N.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
"""Name -> f(policy log-probabilities [N], reference log-probabilities [N]) -> KL [N]."""
