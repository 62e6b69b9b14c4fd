"""Importance correction between behaviour and proximal policy, rho = exp(proximal - behaviour), detached.

Legend: N trained tokens of a micro-batch. The weight multiplies the policy term alone, not KL or entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.algorithms.ratios import bounded_exp


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionWeights:
    """``weight_N`` of each token; ``rejected_N`` tokens train nothing and still count in the denominator."""

    weight_N: Tensor
    rejected_N: Tensor
    truncated_N: Tensor

    def apply(self, loss_N: Tensor) -> Tensor:
        """Selects, and does not multiply by 0: a rejected token may hold inf, and inf * 0 is NaN."""
        return torch.where(self.rejected_N, loss_N.new_zeros(()), self.weight_N * loss_N)


def truncated(log_rho_N: Tensor, low: float | None, high: float | None) -> CorrectionWeights:
    """min(rho, high); ``high`` None means no cap. Capped: truncated importance sampling (TIS). On the PPO objective
    it is decoupled PPO, rho * max(-r A, -clip(r) A) (arXiv 2110.00641, section 3; AReaL, arXiv 2505.24298)."""
    rho_N = bounded_exp(log_rho_N)
    if high is None:
        return CorrectionWeights(weight_N=rho_N, rejected_N=_none(rho_N), truncated_N=_none(rho_N))
    return CorrectionWeights(weight_N=rho_N.clamp(max=high), rejected_N=_none(rho_N), truncated_N=rho_N > high)


def masked(log_rho_N: Tensor, low: float | None, high: float | None) -> CorrectionWeights:
    """rho where low <= rho <= high, else 0: IcePop, masked importance sampling (arXiv 2510.18855)."""
    if low is None or high is None:
        raise ValueError("masked correction needs both bounds")
    rho_N = bounded_exp(log_rho_N)
    rejected_N = ~((rho_N >= low) & (rho_N <= high))
    return CorrectionWeights(weight_N=rho_N, rejected_N=rejected_N, truncated_N=_none(rho_N))


def _none(like_N: Tensor) -> Tensor:
    return torch.zeros_like(like_N, dtype=torch.bool)


CORRECTIONS: dict[str, Callable[[Tensor, float | None, float | None], CorrectionWeights] | None] = {
    "none": None,
    "truncated": truncated,
    "masked": masked,
    # The same weight under its other name: decoupled PPO leaves rho uncapped unless told otherwise.
    "decoupled": truncated,
}
"""Name -> f(log rho [N], low, high); None: no correction."""
