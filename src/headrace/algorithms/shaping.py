"""What happens to rewards before an advantage: DAPO's filter and length penalty, per-token rewards, KL as a reward.

Legend: T tokens of a sample, N trained tokens (mask 1) of an episode. Everything in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from headrace.algorithms.advantages import EpisodeRewards
from headrace.algorithms.kl import KL_ESTIMATORS
from headrace.types import AttemptKey, Group, Sample

EpisodeSamples = dict[AttemptKey, list[int]]
"""Attempt -> indices of its samples in the batch, in the order of the episode's branches."""


def has_signal(group: Group) -> bool:
    """Dynamic sampling: True where the scored members do not all have one reward (DAPO, arXiv 2503.14476,
    section 3.2). The rewards are the raw ones: a length penalty must not rescue a group that is all right."""
    return len(set(group.rewards)) > 1


def overlong_penalty(num_tokens: int, max_length: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, arXiv 2503.14476, section 3.4: 0 up to ``max_length - buffer`` tokens, from
    there linearly to -1 at ``max_length``, and -1 beyond."""
    if num_tokens <= max_length - buffer:
        return 0.0
    if num_tokens <= max_length:
        return (max_length - buffer - num_tokens) / buffer
    return -1.0


def group_samples(samples: Iterable[Sample]) -> EpisodeSamples:
    """Joins samples to episodes by attempt key, whatever their order in the batch.

    Raises ValueError for a sample without a reward, a sample id that occurs twice, or two rewards of one episode.
    """
    episodes: EpisodeSamples = {}
    ids: list[str] = []
    rewards: dict[AttemptKey, float] = {}
    for index, sample in enumerate(samples):
        if sample.reward is None:
            raise ValueError(f"sample {sample.id} has no reward; only scored episodes enter a rollout batch (I14)")
        if rewards.setdefault(sample.key, sample.reward) != sample.reward:
            raise ValueError(
                f"sample {sample.id} has reward {sample.reward}, another sample of episode {sample.key} has "
                f"{rewards[sample.key]}: an episode has one reward"
            )
        episodes.setdefault(sample.key, []).append(index)
        ids.append(sample.id)
    if len(set(ids)) != len(ids):
        raise ValueError(f"sample {next(i for i in ids if ids.count(i) > 1)} occurs twice in the rollout batch")
    for indices in episodes.values():
        # Branch numbers close the id, so that by (length, text) branch 2 comes before branch 10.
        indices.sort(key=lambda i: (len(ids[i]), ids[i]))
    return episodes


def shape_rewards(samples: Sequence[Sample], max_length: int, overlong_buffer: int | None) -> list[float]:
    """Reward of each sample, its episode's overlong penalty added. An episode's length is its trained tokens, over
    all turns and branches; ``max_length`` and ``overlong_buffer`` are in tokens."""
    rewards = [0.0] * len(samples)
    for indices in group_samples(samples).values():
        penalty = 0.0
        if overlong_buffer is not None:
            num_tokens = sum(samples[i].num_trained for i in indices)
            penalty = overlong_penalty(num_tokens, max_length, overlong_buffer)
        for i in indices:
            reward = samples[i].reward
            assert reward is not None  # group_samples refused it
            rewards[i] = reward + penalty
    return rewards


def greedy_rewards(groups: Iterable[Group], max_length: int, overlong_buffer: int | None) -> dict[int, float]:
    """Group id -> reward of its greedy reply, shaped as the rewards it is compared with; without the groups that have
    none."""
    rewards = {}
    for group in groups:
        if group.baseline is not None and group.baseline.reward is not None:
            penalty = 0.0
            if overlong_buffer is not None:
                penalty = overlong_penalty(group.baseline.trace.num_policy_tokens, max_length, overlong_buffer)
            rewards[group.id] = group.baseline.reward + penalty
    return rewards


def kl_penalties(
    samples: Sequence[Sample],
    estimator: str,
    coefficient: float,
    proximal: Sequence[Tensor],
    reference: Sequence[Tensor],
) -> list[Tensor]:
    """-coefficient * KL at each trained token, float64 [trained tokens of the sample] for each sample. The policy is
    the proximal one: the rewards of a rollout batch are fixed before its first optimizer step."""
    penalties = []
    for sample, proximal_T, reference_T in zip(samples, proximal, reference, strict=True):
        # Selected by the mask before any arithmetic: what stands behind a mask may be NaN (FAILURES.md 58).
        selected = _trained(sample)
        policy_N, anchor_N = (_select(v, selected, sample) for v in (proximal_T, reference_T))
        penalties.append(-coefficient * KL_ESTIMATORS[estimator](policy_N, anchor_N))
    return penalties


def episode_rewards(
    samples: Sequence[Sample],
    rewards: Sequence[float],
    penalties: Sequence[Tensor] | None,
    *,
    greedy: Mapping[int, float] | None = None,
    values: Sequence[Tensor] | None = None,
) -> tuple[EpisodeSamples, list[EpisodeRewards]]:
    """Shaped rewards, per-token rewards and KL penalties of each episode, in the order of the returned mapping.

    ``samples[i].reward_T`` is part of the episode's reward already: it says where that reward falls, and the rest
    falls on the episode's last trained token, so that the sum over the tokens is the reward (FAILURES.md 65).
    ``greedy``: group id -> reward of its greedy reply. ``values``: of a critic, [T] for each sample; what stands
    behind a mask is not read (FAILURES.md 64).
    """
    episodes = group_samples(samples)
    results = []
    for key, indices in episodes.items():
        reward = rewards[indices[0]]
        placed_N = torch.cat([_token_rewards(samples[i]) for i in indices])
        if len(placed_N):
            placed_N[-1] += reward - float(placed_N.sum())
        if penalties is not None:
            penalty_N = torch.cat([penalties[i] for i in indices])
            reward, placed_N = reward + float(penalty_N.sum()), placed_N + penalty_N
        value_N = None
        if values is not None:
            value_N = torch.cat([_select(values[i], _trained(samples[i]), samples[i]) for i in indices])
        results.append(
            EpisodeRewards(
                key=key,
                reward=reward,
                reward_T=placed_N,
                greedy_reward=None if greedy is None else greedy.get(key.group),
                value_T=value_N,
            )
        )
    return episodes, results


def scatter(samples: Sequence[Sample], episodes: EpisodeSamples, advantages: Sequence[Tensor]) -> list[Tensor]:
    """Puts each episode's advantages [N] on the mask-1 tokens of its samples: float32 [T] each, 0 elsewhere."""
    out = [torch.zeros(len(sample.ids)) for sample in samples]
    for indices, advantages_N in zip(episodes.values(), advantages, strict=True):
        parts = torch.split(advantages_N, [samples[i].num_trained for i in indices])
        for i, part in zip(indices, parts, strict=True):
            out[i][_trained(samples[i])] = part.float()
    return out


def _trained(sample: Sample) -> Tensor:
    return torch.tensor(sample.mask, dtype=torch.bool)


def _select(values_T: Tensor, selected_T: Tensor, sample: Sample) -> Tensor:
    if values_T.shape != selected_T.shape:
        raise ValueError(f"sample {sample.id}: {tuple(values_T.shape)} entries for {len(sample.ids)} ids")
    return values_T.detach().to("cpu", torch.float64)[selected_T]


def _token_rewards(sample: Sample) -> Tensor:
    if sample.reward_T is None:
        return torch.zeros(sample.num_trained, dtype=torch.float64)
    if len(sample.reward_T) != len(sample.ids):
        raise ValueError(f"sample {sample.id}: reward_T has {len(sample.reward_T)} entries for {len(sample.ids)} ids")
    return torch.tensor(sample.reward_T, dtype=torch.float64)[_trained(sample)]
