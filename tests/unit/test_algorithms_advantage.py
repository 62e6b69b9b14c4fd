"""Advantages of a rollout batch: groups joined by id, exact zeros, masks, shaping. Legend: T tokens, N trained ones."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.algorithms import PRESETS, build_algorithm
from headrace.algorithms.advantages import ADVANTAGES, EpisodeRewards
from headrace.config.schema import AlgorithmConfig
from headrace.protocols import Algorithm
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Group,
    Outcome,
    PolicyVersion,
    RolloutBatch,
    Sample,
    Score,
    ScoreError,
    ScoreResult,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)

VERSION = PolicyVersion(0, 0)
GROUP_RELATIVE = [name for name in PRESETS if ADVANTAGES[PRESETS[name].advantage].group_relative]
WITHOUT_CRITIC = [name for name in PRESETS if not ADVANTAGES[PRESETS[name].advantage].needs_values]
CENTRED_ON_GROUP = ["grpo", "dr_grpo", "rloo", "gspo", "cispo"]
NO_BASELINE = ("reinforce", "topr")


def build(preset: str = "grpo", **options: Any) -> Algorithm:
    config = AlgorithmConfig.model_validate({"preset": preset, **options})
    return build_algorithm(config, asynchronous=False, max_new_tokens=20)


def sample(
    group: int, member: int, reward: float | None, num_trained: int = 3, branch: int = 0, **changes: Any
) -> Sample:
    """Two prompt ids, then ``num_trained`` trained ids with one environment id among them where there are two."""
    mask = [0, 0, *([1] * num_trained)]
    if num_trained > 1:
        mask.insert(3, 0)
    key = AttemptKey(group, member)
    fields: dict[str, Any] = {
        "id": f"{key}/{branch}",
        "key": key,
        "ids": tuple(range(len(mask))),
        "mask": tuple(mask),
        "behaviour_logprobs": (0.0,) * len(mask),
        "versions": (VERSION,) * len(mask),
        "reward": reward,
    }
    return Sample(**{**fields, **changes})


def batch_of(*samples: Sample) -> RolloutBatch:
    """With a greedy reply for each group, whose reward is that of the group's first sample."""
    first: dict[int, float | None] = {}
    for s in samples:
        first.setdefault(s.key.group, s.reward)
    groups = tuple(with_greedy(group, reward or 0.0) for group, reward in first.items())
    return RolloutBatch(index=0, groups=groups, samples=samples, version=VERSION)


def with_greedy(group: int, reward: float, num_tokens: int = 1) -> Group:
    """A group whose greedy reply, of ``num_tokens`` tokens, has ``reward``."""
    task = Task(id="t", messages=({"role": "user", "content": "?"},))
    reply = Segment(
        source=Source.POLICY,
        ids=(1,) * num_tokens,
        parent=0,
        logprobs=(0.0,) * num_tokens,
        version_spans=(VersionSpan(VERSION, 0, num_tokens),),
    )
    trace = Trace(segments=(Segment(source=Source.TEMPLATE, ids=(0,)), reply))
    baseline = Episode(
        key=AttemptKey(group, 99), task=task, turns=(), trace=trace, outcome=Outcome.DONE, score=Score(value=reward)
    )
    return Group(id=group, task=task, episodes=(), baseline=baseline)


def by_id(algorithm: Algorithm, *samples: Sample, **logprobs: Any) -> dict[str, Tensor]:
    values = algorithm.advantage(batch_of(*samples), **logprobs)
    return {s.id: v for s, v in zip(samples, values, strict=True)}


def trained(s: Sample, values_T: Tensor) -> list[float]:
    return values_T[torch.tensor(s.mask, dtype=torch.bool)].tolist()


# ------------------------------------------------------------------------------------------------ exact zeros


@pytest.mark.parametrize("reward", [0.35, 0.1, 1 / 3, 0.0, -7.7, 1e-9])
@pytest.mark.parametrize("num_members", [2, 3, 7])
@pytest.mark.parametrize("preset", WITHOUT_CRITIC)
def test_equal_rewards_give_exactly_zero(preset: str, num_members: int, reward: float) -> None:
    """FAILURES 48, 49: no residue passes for variance. REINFORCE alone has no baseline."""
    if preset == "maxrl":
        reward = abs(reward)
    samples = [sample(4, m, reward, num_trained=1 + m) for m in range(num_members)]
    for s, values_T in zip(samples, build(preset).advantage(batch_of(*samples)), strict=True):
        wanted = reward if preset in NO_BASELINE else 0.0
        assert trained(s, values_T) == [torch.tensor(wanted).item()] * s.num_trained


def test_a_residue_of_rewards_stays_small() -> None:
    """FAILURES 49: 0.1 + 0.2 and 0.3 differ in the last bit; that is no signal."""
    for preset in ("grpo", "reinforce++"):
        values = build(preset).advantage(batch_of(sample(0, 0, 0.1 + 0.2), sample(0, 1, 0.3), sample(0, 2, 0.3)))
        assert all(float(v.abs().max()) < 1e-6 for v in values)


# ------------------------------------------------------------------------------------------------- properties

rewards_strategy = st.lists(st.integers(-20, 20).map(lambda n: n / 10), min_size=2, max_size=6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(groups=st.lists(rewards_strategy, min_size=1, max_size=4), seed=st.integers(0, 2**16))
@pytest.mark.parametrize("preset", CENTRED_ON_GROUP)
def test_group_relative_properties(preset: str, groups: list[list[float]], seed: int) -> None:
    """FAILURES 48, 50, 51, 66: mean 0 in each group, the sign of R - mean, |A| bounded, joined by id in any order."""
    samples = [
        sample(10 * g, m, reward, num_trained=1 + (g + m) % 4)
        for g, rewards in enumerate(groups)
        for m, reward in enumerate(rewards)
    ]
    algorithm = build(preset)
    values = by_id(algorithm, *samples)
    for g, rewards in enumerate(groups):
        members = [trained(s, values[s.id]) for s in samples if s.key.group == 10 * g]
        mean = math.fsum(rewards) / len(rewards)
        assert all(len(set(tokens)) == 1 for tokens in members), "one advantage for each episode"
        firsts = [tokens[0] for tokens in members]
        assert sum(firsts) == pytest.approx(0.0, abs=1e-5)
        for reward, advantage in zip(rewards, firsts, strict=True):
            if abs(reward - mean) > 1e-9:
                assert (advantage > 0) == (reward > mean)
            assert preset in ("dr_grpo", "rloo") or abs(advantage) <= math.sqrt(len(rewards))
    shuffled = samples[:]
    random.Random(seed).shuffle(shuffled)
    for identity, values_T in by_id(algorithm, *shuffled).items():
        assert torch.equal(values_T, values[identity]), "the order of arrival moves nothing"


@pytest.mark.parametrize("preset", GROUP_RELATIVE)
def test_a_group_is_its_id_and_not_its_position(preset: str) -> None:
    """FAILURES 45, 50: groups of unequal size, interleaved. Each equals the group alone (whitening: up to scale)."""
    first = [sample(3, m, r) for m, r in enumerate((1.0, 0.0, 0.0))]
    second = [sample(9, m, r) for m, r in enumerate((0.0, 5.0))]
    mixed = [first[0], second[1], first[2], second[0], first[1]]
    values = by_id(build(preset), *mixed)
    alone = {**by_id(build(preset), *first), **by_id(build(preset), *second)}
    for group in (first, second):
        ratios = [float(values[s.id][2] / alone[s.id][2]) for s in group]
        assert ratios == pytest.approx([ratios[0]] * len(group), rel=1e-5)
        assert preset == "reinforce++_baseline" or ratios[0] == pytest.approx(1.0)


def test_opo_weighs_the_baseline_by_length() -> None:
    """I17: R = 1, 0, 4 of 1, 3 and 4 trained tokens (branches add up): baseline (1 + 0 + 16) / 8."""
    samples = [
        sample(0, 0, 1.0, num_trained=1),
        sample(0, 1, 0.0, num_trained=3),
        sample(0, 2, 4.0, num_trained=1, branch=0),
        sample(0, 2, 4.0, num_trained=3, branch=1),
    ]
    values = by_id(build("opo"), *samples)
    assert [trained(s, values[s.id])[0] for s in samples] == pytest.approx([-1.125, -2.125, 1.875, 1.875])


def test_maxrl_divides_by_the_mean_and_has_no_signal_at_mean_zero() -> None:
    """I17; FAILURES 66: no negative reward gets in, since a negative mean would turn the signs around."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0), sample(0, 3, 0.0), sample(1, 0, 0.0)]
    values = by_id(build("maxrl"), *samples, sample(1, 1, 0.0))
    assert [trained(s, values[s.id])[0] for s in samples] == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0])
    with pytest.raises(ValueError, match="none may be negative"):
        build("maxrl").advantage(batch_of(sample(0, 0, 1.0), sample(0, 1, -0.5)))


def test_biased_standard_deviation_divides_by_n() -> None:
    """I17: R = 3, 1: std of the population 1, of the sample sqrt(2)."""
    samples = [sample(0, 0, 3.0), sample(0, 1, 1.0)]
    values = by_id(build("grpo", advantage="group_normalised_biased"), *samples)
    assert [trained(s, values[s.id])[0] for s in samples] == pytest.approx([1 / (1 + 1e-6), -1 / (1 + 1e-6)])


def test_discount_reaches_back_from_each_reward() -> None:
    """I17: G_t = r_t + 0.5 G_{t+1} over rewards 1, 0, 2; whitened over the batch for REINFORCE++."""
    one = sample(0, 0, 3.0, reward_T=(0.0, 0.0, 1.0, 0.0, 0.0, 2.0))
    values = by_id(build("reinforce", discount=0.5), one)
    assert trained(one, values["g0m0/0"]) == pytest.approx([1.5, 1.0, 2.0])
    whitened = trained(one, by_id(build("reinforce++", discount=0.5), one)["g0m0/0"])
    assert whitened == pytest.approx([0.0, -1.0, 1.0])
    batch = RolloutBatch(index=0, groups=(with_greedy(0, 4.0),), samples=(one,), version=VERSION)
    assert trained(one, build("remax", discount=0.5).advantage(batch)[0]) == pytest.approx([-2.5, -3.0, -2.0])


def test_remax_compares_the_return_with_the_greedy_reply() -> None:
    """I17: return-to-go minus R(greedy) of the own group; groups of one are fine; the overlong penalty is on both."""
    samples = [sample(0, 0, 1.0), sample(1, 0, 0.25, num_trained=20), sample(1, 1, 1.0)]
    groups = (with_greedy(0, 0.5), with_greedy(1, 1.0, num_tokens=18))
    batch = RolloutBatch(index=0, groups=groups, samples=tuple(samples), version=VERSION)
    values = build("remax").advantage(batch)
    assert [trained(s, v)[0] for s, v in zip(samples, values, strict=True)] == pytest.approx([0.5, -0.75, 0.0])
    values = build("remax", overlong_buffer=4).advantage(batch)
    assert [trained(s, v)[0] for s, v in zip(samples, values, strict=True)] == pytest.approx([0.5, -1.25, 0.5])
    with pytest.raises(ValueError, match=r"g1m0: its group has no scored greedy reply"):
        build("remax").advantage(RolloutBatch(index=0, groups=groups[:1], samples=tuple(samples), version=VERSION))


def test_samples_of_other_streams_are_in_no_baseline() -> None:
    """DESIGN section 2: a supervised sample of the same group has no reward, no advantage, and moves nothing."""
    samples = [sample(0, 0, 1.0), sample(0, 7, None, stream="supervised"), sample(0, 1, 0.0)]
    algorithm = build("dr_grpo", overlong_buffer=4)
    values = by_id(algorithm, *samples)
    assert trained(samples[0], values["g0m0/0"])[0] == 0.5 and trained(samples[2], values["g0m1/0"])[0] == -0.5
    assert not values["g0m7/0"].any() and len(values["g0m7/0"]) == len(samples[1].ids)
    assert algorithm.shape_rewards(batch_of(*samples)) == [1.0, 0.0, 0.0]


def test_batch_scaling_is_not_per_group() -> None:
    """FAILURES 67: REINFORCE++ whitens over the batch: two groups of equal rewards still differ from each other."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 1.0), sample(1, 0, 0.0), sample(1, 1, 0.0)]
    values = by_id(build("reinforce++"), *samples)
    expected = 0.5 / math.sqrt(12 * 0.25 / 11)
    assert [trained(s, values[s.id])[0] for s in samples] == pytest.approx([expected] * 2 + [-expected] * 2, rel=1e-6)


def test_reinforce_baseline_whitens_what_is_centred_on_the_group() -> None:
    """I17: R - group mean is +-2 and +-1 here, over 3 tokens each; unbiased std over the 12 tokens."""
    samples = [sample(0, 0, 4.0), sample(0, 1, 0.0), sample(1, 0, 9.0), sample(1, 1, 7.0)]
    values = by_id(build("reinforce++_baseline"), *samples)
    std = math.sqrt(6 * (4 + 1) / 11)
    assert [trained(s, values[s.id])[0] for s in samples] == pytest.approx([2 / std, -2 / std, 1 / std, -1 / std])


def test_the_order_of_arrival_does_not_move_the_last_bit() -> None:
    """I18: sums are formed in the order of the attempt keys; these rewards sum to other floats in another order."""
    rewards = [0.1, 1e16, -1e16, 0.7]
    episodes = [
        EpisodeRewards(key=AttemptKey(0, m), reward=r, reward_T=torch.zeros(1).double()) for m, r in enumerate(rewards)
    ]
    for name in ("group_normalised", "group_centred", "leave_one_out"):
        forward = ADVANTAGES[name].function(episodes)
        backward = ADVANTAGES[name].function([episodes[i] for i in (3, 1, 0, 2)])
        assert [float(forward[i]) for i in (3, 1, 0, 2)] == [float(v) for v in backward]


def test_whitening_counts_tokens_and_not_samples() -> None:
    """I17: over all unmasked tokens of the rollout batch, unbiased: 1 token of 1.0 and 4 tokens of 0.0."""
    samples = [sample(0, 0, 1.0, num_trained=1), sample(0, 1, 0.0, num_trained=4)]
    values = by_id(build("reinforce++"), *samples)
    std = math.sqrt((0.8**2 + 4 * 0.2**2) / 4)
    assert trained(samples[0], values["g0m0/0"]) == pytest.approx([0.8 / std])
    assert trained(samples[1], values["g0m1/0"]) == pytest.approx([-0.2 / std] * 4)


@pytest.mark.parametrize("preset", WITHOUT_CRITIC)
def test_shape_dtype_and_masked_zeros(preset: str) -> None:
    """I2: float32, one entry per id, exactly 0 wherever the mask is 0; a sample without trained ids is all 0."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0, num_trained=5), sample(0, 2, 0.5, num_trained=0)]
    for s, values_T in zip(samples, build(preset).advantage(batch_of(*samples)), strict=True):
        assert values_T.dtype == torch.float32 and len(values_T) == len(s.ids)
        assert all(v == 0 for v, m in zip(values_T.tolist(), s.mask, strict=True) if not m)
        assert values_T.isfinite().all()


# ----------------------------------------------------------------------------------------- episodes and branches


def test_branches_share_one_advantage() -> None:
    """DESIGN section 2: the samples of one episode share its advantage and count once in the baseline."""
    samples = [sample(0, 0, 1.0, branch=0), sample(0, 0, 1.0, branch=1), sample(0, 1, 0.0), sample(0, 2, 0.0)]
    values = by_id(build("dr_grpo"), *samples)
    assert trained(samples[0], values["g0m0/0"]) == trained(samples[1], values["g0m0/1"])
    assert trained(samples[0], values["g0m0/0"])[0] == pytest.approx(1 - 1 / 3), "the mean of 3 episodes"


def test_returns_run_over_the_branches_in_order() -> None:
    """I17: per-token rewards fall where they were given, the rest on the last token; branch 10 comes after branch 2."""
    token_rewards = {2: (0.0, 0.0, 0.5), 10: (0.0, 9.0, 0.0)}  # the 9 stands behind a mask
    branches = [sample(0, 0, 2.0, num_trained=1, branch=b, reward_T=token_rewards[b]) for b in (10, 2)]
    masked_out = dataclasses.replace(branches[0], ids=(0, 1, 2), mask=(0, 0, 1))
    values = by_id(build("reinforce"), masked_out, branches[1])
    assert values["g0m0/2"].tolist() == [0, 0, 2.0]
    assert values["g0m0/10"].tolist() == [0, 0, 1.5]


def test_token_rewards_do_not_move_a_group_relative_advantage() -> None:
    """They are part of the reward already."""
    plain = [sample(0, 0, 1.0, num_trained=1), sample(0, 1, 0.0, num_trained=1)]
    placed = [dataclasses.replace(s, reward_T=(0.0, 0.0, 0.25)) for s in plain]
    a, b = (build().advantage(batch_of(*samples)) for samples in (plain, placed))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------ KL as a reward


def kl_batch() -> tuple[list[Sample], list[Tensor], list[Tensor]]:
    """Two episodes of 2 trained tokens; NaN stands wherever the mask is 0."""
    samples = [sample(0, 0, 1.0, num_trained=2), sample(0, 1, 0.0, num_trained=2)]
    nan = math.nan
    assert samples[0].mask == (0, 0, 1, 0, 1)
    policy = [torch.tensor([nan, nan, -1.0, nan, -2.0]), torch.tensor([nan, nan, -1.5, nan, -0.5])]
    anchor = [torch.tensor([nan, nan, -1.5, nan, -1.0]), torch.tensor([nan, nan, -1.0, nan, -0.5])]
    return samples, policy, anchor


def test_kl_in_the_reward_is_summed_for_groups_and_returned_for_tokens() -> None:
    """I17, FAILURES 58: R - beta * sum k1 within a group, return-to-go for token estimators, and no NaN from masks."""
    samples, policy, anchor = kl_batch()
    logprobs = {"proximal_logprobs": policy, "reference_logprobs": anchor}
    kl = {"coefficient": 0.1, "placement": "reward"}
    # sum k1: 0.5 - 1.0 = -0.5 and -0.5 + 0 = -0.5: the difference of rewards stays 1.
    values = by_id(build("rloo", kl=kl), *samples, **logprobs)
    assert trained(samples[0], values["g0m0/0"]) == pytest.approx([1.0, 1.0])
    values = by_id(build("reinforce", kl=kl), *samples, **logprobs)
    assert trained(samples[0], values["g0m0/0"]) == pytest.approx([1.05, 1.1])
    assert trained(samples[1], values["g0m1/0"]) == pytest.approx([0.05, 0.0])
    centred = by_id(build("dr_grpo", kl={**kl, "estimator": "k2"}), *samples, **logprobs)
    # sum k2: 0.125 + 0.5 and 0.125.
    assert trained(samples[0], centred["g0m0/0"]) == pytest.approx([(1 - 0.05) / 2] * 2)


def test_kl_in_the_reward_needs_both_logprobs_of_the_right_length() -> None:
    """FAILURES 51, 52: what is joined must fit."""
    samples, policy, anchor = kl_batch()
    algorithm = build("rloo", kl={"coefficient": 0.1})
    with pytest.raises(ValueError, match="needs the proximal and the reference"):
        algorithm.advantage(batch_of(*samples), proximal_logprobs=policy)
    with pytest.raises(ValueError, match=r"g0m1/0: .* for 5 ids"):
        algorithm.advantage(batch_of(*samples), proximal_logprobs=policy, reference_logprobs=[anchor[0], anchor[1][:4]])
    with pytest.raises(ValueError, match="1 lists of log-probabilities for 2 samples"):
        algorithm.advantage(batch_of(*samples), proximal_logprobs=policy, reference_logprobs=anchor[:1])


# ------------------------------------------------------------------------------------- truncation, overlong, filter


def test_truncated_replies_keep_their_place_and_train_nothing() -> None:
    """FAILURES 44, the documented policy: a truncated reply moves the baseline, its own advantage is exactly 0."""

    def values(reward: float, **options: Any) -> dict[str, Tensor]:
        samples = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, reward, truncated=True)]
        return by_id(build("dr_grpo", **options), *samples)

    masked = values(0.0, mask_truncated=True)
    assert not masked["g0m2/0"].any()
    assert float(masked["g0m0/0"][2]) == pytest.approx(1 - 1 / 3)
    assert float(values(1.0, mask_truncated=True)["g0m0/0"][2]) == pytest.approx(1 - 2 / 3)
    assert values(0.0)["g0m2/0"].any()


def test_mask_truncated_without_truncation_changes_nothing() -> None:
    """FAILURES 71: the option on, no reply truncated."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0)]
    a, b = (build("dapo", mask_truncated=on).advantage(batch_of(*samples)) for on in (True, False))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_overlong_penalty_counts_trained_tokens_of_the_episode() -> None:
    """I17: with 20 tokens and a buffer of 4, from 17 tokens on; the tokens of an episode's branches add up."""
    samples = [
        sample(0, 0, 1.0, num_trained=16),
        sample(0, 1, 1.0, num_trained=18),
        sample(0, 2, 0.0, num_trained=20),
        sample(0, 3, 0.5, num_trained=9, branch=0),
        sample(0, 3, 0.5, num_trained=10, branch=1),
    ]
    algorithm = build("dapo")
    assert algorithm.shape_rewards(batch_of(*samples)) == pytest.approx([1.0, 0.5, -1.0, -0.25, -0.25])
    assert build("grpo").shape_rewards(batch_of(*samples)) == [1.0, 1.0, 0.0, 0.5, 0.5]
    centred = by_id(build("dr_grpo", overlong_buffer=4), *samples)
    assert float(centred["g0m0/0"][2]) == pytest.approx(1 - (1 + 0.5 - 1 - 0.25) / 4)


def group_of(*scores: ScoreResult | None) -> Group:
    task = Task(id="t", messages=({"role": "user", "content": "?"},))
    return Group(
        id=5,
        task=task,
        episodes=tuple(
            Episode(key=AttemptKey(5, m), task=task, turns=(), trace=Trace(), outcome=Outcome.DONE, score=s)
            for m, s in enumerate(scores)
        ),
    )


def test_dynamic_sampling_keeps_groups_whose_scored_rewards_differ() -> None:
    """DAPO; I14: an error is not a reward, so it cannot make a group differ."""
    error = ScoreError(error_class=ErrorClass.TIMEOUT, message="late")
    right, wrong = Score(value=1.0), Score(value=0.0)
    dapo = build("dapo")
    assert dapo.keep_group(group_of(right, wrong, right))
    assert not dapo.keep_group(group_of(right, right))
    assert not dapo.keep_group(group_of(wrong, wrong, error))
    assert not dapo.keep_group(group_of(right, None, error))
    assert not dapo.keep_group(group_of(error))
    assert build("grpo").keep_group(group_of(right, right))
    assert build("dapo", dynamic_sampling=False).keep_group(group_of(right, right))


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("preset", GROUP_RELATIVE)
def test_a_group_of_one_is_an_error(preset: str) -> None:
    """DESIGN section 2: size 1 is an error for group-relative advantages; it names the group and the key to set."""
    with pytest.raises(ValueError, match=r"group 7 has one scored episode.*rollout\.min_group_size"):
        build(preset).advantage(batch_of(sample(0, 0, 1.0), sample(0, 1, 0.0), sample(7, 0, 1.0)))


def test_batch_relative_advantages_take_groups_of_one() -> None:
    """REINFORCE++ compares over the batch."""
    values = build("reinforce++").advantage(batch_of(sample(0, 0, 1.0), sample(1, 0, 0.0)))
    assert float(values[0][2]) > 0 > float(values[1][2])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ((sample(0, 0, 1.0), sample(0, 1, None)), "g0m1/0 has no reward"),
        ((sample(0, 0, 1.0), sample(0, 0, 1.0)), "g0m0/0 occurs twice"),
        ((sample(0, 0, 1.0), sample(0, 0, 0.5, branch=1)), "g0m0/1 has reward 0.5.*has 1.0"),
        ((sample(0, 0, 1.0), sample(0, 1, 1.0, reward_T=(0.0,))), "g0m1/0: reward_T has 1 entries for 6 ids"),
    ],
)
def test_bad_samples_are_named(samples: tuple[Sample, ...], message: str) -> None:
    """I14, FAILURES 51, 52."""
    with pytest.raises(ValueError, match=message):
        build().advantage(batch_of(*samples))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(rewards=rewards_strategy, extra=st.integers(-20, 20))
def test_excluded_members_move_nothing(rewards: list[float], extra: int) -> None:
    """FAILURES 44: a member without a score has no sample; another group's rewards do not move this group either."""
    assume(len(rewards) >= 2)
    samples = [sample(1, m, r) for m, r in enumerate(rewards)]
    others = [sample(2, 0, extra / 10), sample(2, 1, 0.0)]
    alone, together = by_id(build(), *samples), by_id(build(), *others, *samples)
    assert all(torch.equal(alone[i], together[i]) for i in alone)
