"""Importance correction between behaviour and proximal policy, rho = exp(proximal - behaviour), detached.

Three parts: a weight (``CORRECTIONS``) at a level (``RHO_LEVELS``), rejections (veto, off-policy sequence masking), and
the batch's normaliser. Legend: N trained tokens of a micro-batch, E its episodes. The weight multiplies the policy term
alone, not KL or entropy. Sources: TIS, "Your efficient RL framework secretly brings you off-policy RL training"
(Yao et al. 2025); sequence and geometric levels, "When speed kills stability" (Liu et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.algorithms.ratios import bounded_exp, episode_means, episode_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionWeights:
    """``weight_N`` of each token; ``rejected_N`` tokens train nothing and still count in the denominator."""

    weight_N: Tensor
    rejected_N: Tensor
    truncated_N: Tensor

    def apply(self, loss_N: Tensor) -> Tensor:
        """Selects, and does not multiply by 0: a rejected token may hold inf, and inf * 0 is NaN."""
        return torch.where(self.rejected_N, loss_N.new_zeros(()), self.weight_N * loss_N)

    def reject(self, more_N: Tensor) -> CorrectionWeights:
        """These tokens too."""
        return replace(self, rejected_N=self.rejected_N | more_N)


# ------------------------------------------------------------------------------------------ rho at a level


def token_rho(log_rho_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    return log_rho_N


def sequence_rho(log_rho_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """The log-ratio of the whole episode: the sum over its tokens."""
    return episode_sums(log_rho_N, episode_index_N, num_episodes)[episode_index_N]


def geometric_rho(log_rho_N: Tensor, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """The mean over the episode's tokens; useful bounds lie close to 1."""
    return episode_means(log_rho_N, episode_index_N, num_episodes)[episode_index_N]


RHO_LEVELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "token": token_rho,
    "sequence": sequence_rho,
    "geometric": geometric_rho,
}
"""Name -> f(log rho of the tokens [N], episode index [N], E) -> log rho at that level, for each token [N]."""


# ------------------------------------------------------------------------------------------------ the weight


def unweighted(log_rho_N: Tensor, low: float | None, high: float | None) -> CorrectionWeights:
    """1 for every token: rejections alone."""
    return CorrectionWeights(
        weight_N=torch.ones_like(log_rho_N), rejected_N=_none(log_rho_N), truncated_N=_none(log_rho_N)
    )


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
        raise ValueError("masked and rejected corrections need both bounds")
    rho_N = bounded_exp(log_rho_N)
    rejected_N = ~((rho_N >= low) & (rho_N <= high))
    return CorrectionWeights(weight_N=rho_N, rejected_N=rejected_N, truncated_N=_none(rho_N))


def rejected(log_rho_N: Tensor, low: float | None, high: float | None) -> CorrectionWeights:
    """1 where low <= rho <= high, else 0: rejection without weighing, for an episode's level (Liu et al. 2025)."""
    weights = masked(log_rho_N, low, high)
    return replace(weights, weight_N=torch.ones_like(weights.weight_N))


def _none(like_N: Tensor) -> Tensor:
    return torch.zeros_like(like_N, dtype=torch.bool)


CORRECTIONS: dict[str, Callable[[Tensor, float | None, float | None], CorrectionWeights]] = {
    "none": unweighted,
    "truncated": truncated,
    "masked": masked,
    "rejected": rejected,
    # The same weight under its other name: decoupled PPO leaves rho uncapped unless told otherwise.
    "decoupled": truncated,
}
"""Name -> f(log rho [N] at its level, low, high)."""


# ------------------------------------------------------------------------------------------------ rejections


def vetoed(log_rho_N: Tensor, bound: float, episode_index_N: Tensor, num_episodes: int) -> Tensor:
    """All tokens of an episode in which any token has rho < ``bound``, bool [N] (Liu et al. 2025: 1e-4)."""
    below_N = (log_rho_N < math.log(bound)).to(log_rho_N.dtype)
    return episode_sums(below_N, episode_index_N, num_episodes)[episode_index_N] > 0


def off_policy_sequences(
    log_ratio_N: Tensor, advantages_N: Tensor, bound: float, episode_index_N: Tensor, num_episodes: int
) -> Tensor:
    """Tokens with A < 0 of episodes whose mean(lo - l) is above ``bound``, bool [N]: off-policy sequence masking
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1). ``log_ratio_N`` is l - lo of the tokens."""
    drift_N = -episode_means(log_ratio_N, episode_index_N, num_episodes)[episode_index_N]
    return (advantages_N < 0) & (drift_N > bound)


# ------------------------------------------------------------------------------------------ batch normaliser


def mean_weight(weights: CorrectionWeights, level: str, episode_index_N: Tensor, num_episodes: int) -> float:
    """Mean of the weights over the whole minibatch: of its tokens, or at an episode's level of its episodes.

    What is rejected does not count here: counted as 0, it would raise the weight of what is left (I17). 1 where
    nothing is left. Weights divided by it have mean 1.
    """
    kept_N = ~weights.rejected_N
    if level == "token":
        values = weights.weight_N[kept_N]
    else:
        kept_E = episode_sums(kept_N.double(), episode_index_N, num_episodes)
        sums_E = episode_sums(torch.where(kept_N, weights.weight_N, 0.0).double(), episode_index_N, num_episodes)
        values = sums_E[kept_E > 0] / kept_E[kept_E > 0]
    return float(values.double().mean()) if len(values) else 1.0
