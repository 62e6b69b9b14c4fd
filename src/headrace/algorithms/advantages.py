"""Advantage estimators: rewards of episodes to an advantage for each trained token. Everything in float64.

Legend: G members of a group, T trained tokens of an episode (over all its samples, in order).
A new estimator is one function and one entry of :data:`ADVANTAGES`. Members are joined by their
:class:`~headrace.types.AttemptKey`, never by position (FAILURES.md 50, 51).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headrace.algorithms.values import gae
from headrace.types import AttemptKey

STD_DELTA = 1e-6
"""Added to a group's standard deviation, as in ALGORITHMS.md's vectors (TRL and verl use 1e-4 and 1e-6)."""
WHITEN_DELTA = 1e-8
"""Added to the batch's standard deviation when whitening: rounding residue of equal returns must stay near 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRewards:
    """The rewards of one scored episode: ``reward`` is the whole, ``reward_T`` says where it falls (same sum)."""

    key: AttemptKey
    reward: float
    reward_T: Tensor
    """float64 [T]: per-token rewards, KL penalties, and at the last token what is left of the episode's reward."""
    greedy_reward: float | None = None
    """Reward of the greedy reply to the same task."""
    value_T: Tensor | None = None
    """float64 [T]: a critic's values, at behaviour time, of the states in which the tokens were sampled."""


# ------------------------------------------------------------------ within a group: rewards [G] -> advantages [G]


def group_normalised(rewards_G: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6), unbiased std: GRPO, arXiv 2402.03300, section 4.1.2.

    Equal rewards give exactly 0: they are compared, not subtracted, since the mean of equal floats need not be that
    float. The variance takes two passes; E[R^2] - E[R]^2 of equal rewards is rounding residue (FAILURES.md 48, 49).
    """
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    std = (centred_G.square().sum() / (len(rewards_G) - 1)).sqrt()
    return centred_G / (std + STD_DELTA)


def group_normalised_biased(rewards_G: Tensor) -> Tensor:
    """As :func:`group_normalised` with the standard deviation of the population, as numpy's and some GRPO's is."""
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (centred_G.square().mean().sqrt() + STD_DELTA)


def group_centred(rewards_G: Tensor) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783, section 3.2. Equal rewards give exactly 0."""
    return torch.zeros_like(rewards_G) if _all_equal(rewards_G) else rewards_G - rewards_G.mean()


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """R minus the mean of the others, (n R - sum R) / (n - 1): RLOO, arXiv 2402.14740."""
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    num_members = len(rewards_G)
    return (num_members * rewards_G - rewards_G.sum()) / (num_members - 1)


def mean_normalised(rewards_G: Tensor) -> Tensor:
    """(R - mean) / mean, 0 where the mean is 0: MaxRL, arXiv 2602.02710. Raises ValueError for a negative reward: a
    negative mean would turn every sign around (FAILURES.md 66)."""
    if bool((rewards_G < 0).any()):
        raise ValueError(
            f"rewards {rewards_G.tolist()}: advantage 'mean_normalised' divides by their mean, so none may be "
            "negative; use rewards from 0 up, or another advantage"
        )
    return torch.zeros_like(rewards_G) if _all_equal(rewards_G) else (rewards_G - rewards_G.mean()) / rewards_G.mean()


def length_weighted(rewards_G: Tensor, lengths_G: Tensor) -> Tensor:
    """R - sum(L R) / sum(L), L the trained tokens of an episode: OPO's optimal baseline, arXiv 2505.23585,
    section 3.2."""
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    return rewards_G - (lengths_G * rewards_G).sum() / lengths_G.sum()


def _all_equal(values: Tensor) -> bool:
    return bool(values.min() == values.max())


# ---------------------------------------------------------------------- over the batch: episodes -> advantages [T]


class EpisodeEstimator(Protocol):
    """f(all episodes of the rollout batch, in any order) -> float64 [T] for each, in the same order.

    ``discount``: of later rewards. ``gae_lambda``: of later surprises. Estimators that know neither ignore them."""

    def __call__(
        self, episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0
    ) -> list[Tensor]: ...


def within_groups(
    function: Callable[[Tensor], Tensor] | Callable[[Tensor, Tensor], Tensor], *, with_lengths: bool = False
) -> EpisodeEstimator:
    """Applies ``function`` to each group's rewards (and lengths, in trained tokens); each member's result is broadcast
    to its tokens. What falls where within an episode has no part in it, and so no discount either."""

    def estimate(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
        members: dict[int, list[int]] = {}
        for index, episode in enumerate(episodes):
            members.setdefault(episode.key.group, []).append(index)
        advantages: list[Tensor] = [torch.empty(0)] * len(episodes)
        for group, indices in members.items():
            if len(indices) < 2:
                raise ValueError(
                    f"group {group} has one scored episode ({episodes[indices[0]].key}): a group-relative advantage "
                    "compares the members of a group; set rollout.min_group_size to 2 or more"
                )
            # Sorted, so that the order of arrival cannot move the last bit of a mean.
            indices.sort(key=lambda i: episodes[i].key)
            arguments = [torch.tensor([episodes[i].reward for i in indices], dtype=torch.float64)]
            if with_lengths:
                arguments.append(torch.tensor([len(episodes[i].reward_T) for i in indices], dtype=torch.float64))
            values_G = function(*arguments)
            for i, value in zip(indices, values_G, strict=True):
                advantages[i] = value.expand(len(episodes[i].reward_T))
        return advantages

    return estimate


def returns(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
    """G_t = r_t + discount * G_{t+1}, no baseline: REINFORCE (Williams 1992)."""
    results = []
    for episode in episodes:
        total, backwards = 0.0, []
        for reward in reversed(episode.reward_T.tolist()):
            total = reward + discount * total
            backwards.append(total)
        results.append(torch.tensor(backwards[::-1], dtype=torch.float64))
    return results


def batch_whitened(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
    """Returns whitened over all trained tokens of the rollout batch: REINFORCE++, arXiv 2501.03262."""
    return whiten(returns(episodes, discount))


def greedy_centred(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
    """G_t - R(greedy reply to the same task): ReMax, arXiv 2310.10505, algorithm 2."""
    results = []
    for episode, returns_T in zip(episodes, returns(episodes, discount), strict=True):
        if episode.greedy_reward is None:
            raise ValueError(f"episode {episode.key}: its group has no scored greedy reply (Group.baseline)")
        results.append(returns_T - episode.greedy_reward)
    return results


def group_centred_whitened(
    episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0
) -> list[Tensor]:
    """R - group mean, broadcast to the tokens, whitened over the batch: REINFORCE++-baseline, arXiv 2501.03262."""
    return whiten(within_groups(group_centred)(episodes))


def gae_advantages(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
    """GAE of each episode (values.py): PPO, arXiv 1707.06347, section 5. Raises ValueError where values are missing."""
    return [gae(episode.reward_T, _values(episode), discount, gae_lambda) for episode in episodes]


def gae_whitened(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
    """GAE whitened over all trained tokens of the rollout batch, as PPO is run on language models."""
    return whiten(gae_advantages(episodes, discount, gae_lambda))


def lambda_returns(episodes: Sequence[EpisodeRewards], discount: float = 1.0, gae_lambda: float = 1.0) -> list[Tensor]:
    """G_t = A_t + V_t, from advantages before any whitening: what a critic learns. float64 [T] for each episode."""
    advantages = gae_advantages(episodes, discount, gae_lambda)
    return [advantage_T + _values(episode) for advantage_T, episode in zip(advantages, episodes, strict=True)]


def _values(episode: EpisodeRewards) -> Tensor:
    if episode.value_T is None:
        raise ValueError(f"the advantage of episode {episode.key} needs a critic's values, and there are none")
    return episode.value_T


def whiten(values: Sequence[Tensor]) -> list[Tensor]:
    """(x - mean) / (std + 1e-8) over all tokens of all tensors, unbiased std; exactly 0 where all are equal."""
    flat = torch.cat(list(values)) if values else torch.empty(0, dtype=torch.float64)
    if len(flat) == 0 or _all_equal(flat):
        return [torch.zeros_like(v) for v in values]
    mean = flat.mean()
    std = ((flat - mean).square().sum() / (len(flat) - 1)).sqrt()
    return [(v - mean) / (std + WHITEN_DELTA) for v in values]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """What an estimator is, and what it asks for."""

    function: EpisodeEstimator
    group_relative: bool = False
    """Compares the members of a group, so that a group of size 1 is an error."""
    discounts: bool = False
    """Works on returns, so that ``algorithm.discount`` has an effect."""
    needs_greedy: bool = False
    """Compares with a greedy reply."""
    needs_values: bool = False
    """Reads a critic's values; its discount and lambda are the critic's too (``critic.gamma``, ``.gae_lambda``)."""
    refuses_negative: bool = False
    """Takes rewards from 0 up only."""


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "group_normalised": AdvantageEstimator(within_groups(group_normalised), group_relative=True),
    "group_normalised_biased": AdvantageEstimator(within_groups(group_normalised_biased), group_relative=True),
    "group_centred": AdvantageEstimator(within_groups(group_centred), group_relative=True),
    "group_centred_whitened": AdvantageEstimator(group_centred_whitened, group_relative=True),
    "leave_one_out": AdvantageEstimator(within_groups(leave_one_out), group_relative=True),
    "length_weighted": AdvantageEstimator(within_groups(length_weighted, with_lengths=True), group_relative=True),
    "mean_normalised": AdvantageEstimator(within_groups(mean_normalised), group_relative=True, refuses_negative=True),
    "greedy_centred": AdvantageEstimator(greedy_centred, discounts=True, needs_greedy=True),
    "batch_whitened": AdvantageEstimator(batch_whitened, discounts=True),
    "gae": AdvantageEstimator(gae_advantages, needs_values=True),
    "gae_whitened": AdvantageEstimator(gae_whitened, needs_values=True),
    "none": AdvantageEstimator(returns, discounts=True),
}
