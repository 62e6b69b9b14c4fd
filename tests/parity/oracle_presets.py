"""The named algorithms from rewards to loss and gradient: advantage estimator + token term + aggregation.

Each returns ``Result``. A ``Rollout`` is a batch (whose own ``advantage`` is ignored) with rewards and group sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import oracle_advantages as adv
from oracle_core import Batch, Nested, Terms, added, reduce_terms
from oracle_losses import kl_loss
from oracle_objectives import ppo, reinforce


@dataclass(frozen=True)
class Rollout:
    batch: Batch
    rewards: list[float]
    group_sizes: list[int]
    """Sequences of one group stand next to each other."""
    greedy: list[float]
    """Reward of the greedy reply to each sequence's prompt (ReMax)."""
    values: Nested
    """The critic's value before each token (PPO)."""

    def groups(self) -> list[list[float]]:
        out, start = [], 0
        for size in self.group_sizes:
            out.append(self.rewards[start : start + size])
            start += size
        return out

    def lengths(self) -> list[int]:
        return [sum(row) for row in self.batch.mask]


@dataclass(frozen=True)
class Result:
    advantage: Nested
    loss: float
    gradient: Nested


def finish(batch: Batch, advantage: Nested, how: str, terms: Terms) -> Result:
    loss, gradient = reduce_terms(terms, batch.mask, how, batch.max_length)
    return Result(advantage, loss, gradient)


def from_groups(rollout: Rollout, estimator: str) -> Nested:
    """Advantages group by group, broadcast to tokens."""
    lengths, out, start = rollout.lengths(), [], 0
    for rewards in rollout.groups():
        if estimator == "opo":
            out += adv.opo(rewards, lengths[start : start + len(rewards)])
        else:
            out += getattr(adv, estimator)(rewards)
        start += len(rewards)
    return adv.broadcast(out, rollout.batch.mask)


def with_advantage(rollout: Rollout, advantage: Nested) -> Batch:
    return replace(rollout.batch, advantage=advantage)


def ppo_critic(
    rollout: Rollout, gamma: float = 1.0, lam: float = 0.95, beta: float = 0.0, whiten: bool = True
) -> Result:
    """PPO with a critic: KL-penalised token rewards, GAE, batch whitening (verl), clip 0.2, token mean."""
    batch = rollout.batch
    paid = adv.token_rewards(rollout.rewards, batch.old, batch.ref, batch.mask, beta)
    advantage = [adv.gae(r, v, m, gamma, lam)[0] for r, v, m in zip(paid, rollout.values, batch.mask, strict=True)]
    if whiten:
        advantage = adv.whiten(advantage, batch.mask)
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, "token_mean", ppo(batch))


def grpo(rollout: Rollout, beta: float = 0.04, how: str = "seq_mean_token_mean") -> Result:
    """arXiv 2402.03300: group mean and unbiased std (delta 1e-6), clip 0.2, + beta k3 in the loss."""
    advantage = from_groups(rollout, "group_mean_std")
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, how, added(ppo(batch), kl_loss(batch, "k3"), beta))


def dr_grpo(rollout: Rollout) -> Result:
    """arXiv 2503.20783: R - mean, sum over tokens / (B Lmax), no KL."""
    advantage = from_groups(rollout, "group_mean")
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, "seq_mean_token_sum_norm", ppo(batch))


def dapo(rollout: Rollout, max_length: int, buffer: int) -> Result:
    """arXiv 2503.14476: overlong shaping added to R, group mean and std, clip 0.2/0.28, token mean, no KL.

    Lengths for the shaping count trained tokens. Dynamic sampling happens before: ``has_signal``, on accuracies
    without the shaping.
    """
    shaped = [
        r + adv.overlong_shaping(n, max_length, buffer) for r, n in zip(rollout.rewards, rollout.lengths(), strict=True)
    ]
    advantage = from_groups(replace(rollout, rewards=shaped), "group_mean_std")
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, "token_mean", ppo(batch, 0.2, 0.28))


def bnpo_global(rollout: Rollout) -> Result:
    """TRL's BNPO made split-invariant: GRPO without KL under the GLOBAL token mean."""
    return grpo(rollout, beta=0.0, how="token_mean")


def policy_gradient(rollout: Rollout, advantage: Nested, how: str = "seq_mean_token_sum") -> Result:
    """-A log pi; the reply is one action in RLOO, ReMax, OPO and MaxRL, hence sum over tokens, mean over sequences."""
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, how, reinforce(batch))


def reinforce_raw(rollout: Rollout) -> Result:
    """REINFORCE without a baseline: A = R."""
    return policy_gradient(rollout, adv.broadcast(rollout.rewards, rollout.batch.mask))


def rloo(rollout: Rollout) -> Result:
    """arXiv 2402.14740."""
    return policy_gradient(rollout, from_groups(rollout, "rloo"))


def opo(rollout: Rollout) -> Result:
    """arXiv 2505.23585, exact on-policy: no ratio."""
    return policy_gradient(rollout, from_groups(rollout, "opo"))


def maxrl(rollout: Rollout) -> Result:
    """MaxRL: (R - mean)/mean."""
    return policy_gradient(rollout, from_groups(rollout, "maxrl"))


def remax(rollout: Rollout, beta: float = 0.1) -> Result:
    """arXiv 2310.10505, with the k1 penalty of pi_old to the reference in the token rewards."""
    b = rollout.batch
    return policy_gradient(rollout, adv.remax(rollout.rewards, rollout.greedy, b.old, b.ref, b.mask, beta))


def reinforce_pp(rollout: Rollout, beta: float = 0.1, gamma: float = 0.9) -> Result:
    """arXiv 2501.03262: whitened KL-penalised returns under PPO's clip, token mean."""
    b = rollout.batch
    advantage = adv.reinforce_pp(rollout.rewards, b.old, b.ref, b.mask, beta, gamma)
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, "token_mean", ppo(batch))


def reinforce_pp_baseline(rollout: Rollout, beta: float = 0.1) -> Result:
    """REINFORCE++-baseline: R - group mean, whitened over tokens; PPO's clip, k2 in the loss, token mean."""
    advantage = adv.reinforce_pp_baseline(rollout.groups(), rollout.batch.mask)
    batch = with_advantage(rollout, advantage)
    return finish(batch, advantage, "token_mean", added(ppo(batch), kl_loss(batch, "k2"), beta))
