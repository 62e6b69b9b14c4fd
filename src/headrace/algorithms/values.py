"""Values: GAE over an episode's trained tokens, and the critic's loss.

Legend: T trained tokens of an episode (over all its turns and samples, in order), N trained tokens of a micro-batch.
What stands between two turns (environment ids) has no place here: the state after a turn's last token is the one in
which the next turn's first token is sampled, and that is the value which bootstraps (FAILURES.md 64).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(reward_T: Tensor, value_T: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """A_t = sum over l of (gamma lambda)^l d_(t+l), d_t = r_t + gamma V_(t+1) - V_t: arXiv 1506.02438, equation 16.

    float64 [T]. Behind the last trained token the value is 0, also where the reply ran into its limit: its score is
    all that the episode will ever get.
    """
    if reward_T.shape != value_T.shape:
        raise ValueError(f"{len(value_T)} values for {len(reward_T)} trained tokens")
    rewards, values = reward_T.tolist(), value_T.tolist()
    advantages = [0.0] * len(rewards)
    following_value = following_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * following_value - values[t]
        advantages[t] = following_advantage = delta + gamma * gae_lambda * following_advantage
        following_value = values[t]
    return torch.tensor(advantages, dtype=torch.float64)


def value_loss(value_N: Tensor, old_N: Tensor, target_N: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """(1/2 max((V - G)^2, (clip(V, Vo - clip, Vo + clip) - G)^2), whether the clipped term is the larger): [N] each.

    ALGORITHMS.md, value loss; the clipping of PPO's public implementation. A token whose clipped term is the larger
    has no gradient: its value moved away from ``old_N`` further than ``clip`` and towards the target. Without
    ``clip``: 1/2 (V - G)^2.
    """
    plain_N = (value_N - target_N).square()
    if clip is None:
        return 0.5 * plain_N, torch.zeros_like(plain_N, dtype=torch.bool)
    clipped_N = (value_N.clamp(old_N - clip, old_N + clip) - target_N).square()
    return 0.5 * torch.maximum(plain_N, clipped_N), clipped_N.detach() > plain_N.detach()


def explained_variance(value_N: Tensor, target_N: Tensor) -> float | None:
    """1 - Var(G - V) / Var(G) over all tokens given; 1 is a perfect critic, 0 one that knows only the mean. None where
    the targets do not differ."""
    if len(target_N) < 2:
        return None
    value_N, target_N = value_N.double(), target_N.double()
    variance = float(target_N.var())
    return 1.0 - float((target_N - value_N).var()) / variance if variance > 0 else None
