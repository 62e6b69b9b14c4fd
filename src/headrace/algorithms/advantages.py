"""Advantage estimators: rewards of episodes to an advantage for each trained token. Everything in float64.

Legend: G members of a group, T trained tokens of an episode (over all its samples, in order).
A new estimator is one function and one entry of :data:`ADVANTAGES`. Members are joined by their
:class:`~headrace.types.AttemptKey`, never by position (FAILURES.md 50, 51).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def group_centred(rewards_G: Tensor) -> Tensor:
    """R - mean: Dr. GRPO, arXiv 2503.20783, section 3.2. Equal rewards give exactly 0."""
    return torch.zeros_like(rewards_G) if _all_equal(rewards_G) else rewards_G - rewards_G.mean()


def leave_one_out(rewards_G: Tensor) -> Tensor:
    """R minus the mean of the others, (n R - sum R) / (n - 1): RLOO, arXiv 2402.14740."""
    if _all_equal(rewards_G):
        return torch.zeros_like(rewards_G)
    num_members = len(rewards_G)
    return (num_members * rewards_G - rewards_G.sum()) / (num_members - 1)


def _all_equal(values: Tensor) -> bool:
    return bool(values.min() == values.max())


# ---------------------------------------------------------------------- over the batch: episodes -> advantages [T]

EpisodeEstimator = Callable[[Sequence[EpisodeRewards]], list[Tensor]]
"""f(all episodes of the rollout batch, in any order) -> float64 [T] for each, in the same order."""


def within_groups(function: Callable[[Tensor], Tensor]) -> EpisodeEstimator:
    """Applies ``function`` to each group's rewards; each member's result is broadcast to its tokens."""

    def estimate(episodes: Sequence[EpisodeRewards]) -> list[Tensor]:
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
            values_G = function(torch.tensor([episodes[i].reward for i in indices], dtype=torch.float64))
            for i, value in zip(indices, values_G, strict=True):
                advantages[i] = value.expand(len(episodes[i].reward_T))
        return advantages

    return estimate


def returns(episodes: Sequence[EpisodeRewards]) -> list[Tensor]:
    """G_t = sum of the rewards from token t on (discount 1), no baseline: REINFORCE (Williams 1992)."""
    return [e.reward_T.flip(0).cumsum(0).flip(0) for e in episodes]


def batch_whitened(episodes: Sequence[EpisodeRewards]) -> list[Tensor]:
    """Returns whitened over all trained tokens of the rollout batch: REINFORCE++, arXiv 2501.03262."""
    return whiten(returns(episodes))


def group_centred_whitened(episodes: Sequence[EpisodeRewards]) -> list[Tensor]:
    """R - group mean, broadcast to the tokens, whitened over the batch: REINFORCE++-baseline, arXiv 2501.03262."""
    return whiten(within_groups(group_centred)(episodes))


def whiten(values: Sequence[Tensor]) -> list[Tensor]:
    """(x - mean) / (std + 1e-8) over all tokens of all tensors, unbiased std; exactly 0 where all are equal."""
    flat = torch.cat(list(values)) if values else torch.empty(0, dtype=torch.float64)
    if len(flat) == 0 or _all_equal(flat):
        return [torch.zeros_like(v) for v in values]
    mean = flat.mean()
    std = ((flat - mean).square().sum() / (len(flat) - 1)).sqrt()
    return [(v - mean) / (std + WHITEN_DELTA) for v in values]


def gae_advantages(episodes: Sequence[EpisodeRewards], *, gamma: float, gae_lambda: float) -> list[Tensor]:
    """GAE of each episode (values.py): PPO, arXiv 1707.06347, section 5. Raises ValueError where values are missing."""
    return [gae(e.reward_T, _values(e), gamma, gae_lambda) for e in episodes]


def gae_whitened(episodes: Sequence[EpisodeRewards], *, gamma: float, gae_lambda: float) -> list[Tensor]:
    """GAE whitened over all trained tokens of the rollout batch, as PPO is run on language models."""
    return whiten(gae_advantages(episodes, gamma=gamma, gae_lambda=gae_lambda))


def lambda_returns(episodes: Sequence[EpisodeRewards], *, gamma: float, gae_lambda: float) -> list[Tensor]:
    """G_t = A_t + V_t, from advantages before any whitening: what a critic learns. float64 [T] for each episode."""
    advantages = gae_advantages(episodes, gamma=gamma, gae_lambda=gae_lambda)
    return [advantage_T + _values(e) for advantage_T, e in zip(advantages, episodes, strict=True)]


def _values(episode: EpisodeRewards) -> Tensor:
    if episode.value_T is None:
        raise ValueError(f"the advantage of episode {episode.key} needs a critic's values, and there are none")
    return episode.value_T


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """``group_relative``: compares the members of a group, so that a group of size 1 is an error. ``needs_values``:
    reads a critic's values, and its function takes ``gamma`` and ``gae_lambda`` besides the episodes."""

    function: Callable[..., list[Tensor]]
    group_relative: bool
    needs_values: bool = False


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "group_normalised": AdvantageEstimator(within_groups(group_normalised), group_relative=True),
    "group_centred": AdvantageEstimator(within_groups(group_centred), group_relative=True),
    "leave_one_out": AdvantageEstimator(within_groups(leave_one_out), group_relative=True),
    "group_centred_whitened": AdvantageEstimator(group_centred_whitened, group_relative=True),
    "batch_whitened": AdvantageEstimator(batch_whitened, group_relative=False),
    "gae": AdvantageEstimator(gae_advantages, group_relative=False, needs_values=True),
    "gae_whitened": AdvantageEstimator(gae_whitened, group_relative=False, needs_values=True),
    "none": AdvantageEstimator(returns, group_relative=False),
}
