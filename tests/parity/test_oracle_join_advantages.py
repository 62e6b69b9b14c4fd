"""Every advantage's and preset's vector of the blind oracle, by the implementation in float64, to 1e-9 (I17)."""

from __future__ import annotations

from typing import Any

import oracle_cases as cases
import pytest
import torch
from join_support import advantages, assert_close, build, fields_of, flat, leaves, nest, rollout_batch, run
from oracle_core import Nested
from oracle_inputs import BATCH, ROLLOUT, TOKEN_BATCH
from oracle_vectors import EXPECTED

from headrace.algorithms import advantages as adv
from headrace.algorithms import shaping
from headrace.types import AttemptKey, Episode, Group, Outcome, Score, Task, Trace

MASK = BATCH.mask
K1 = {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}


@pytest.fixture
def exact_whitening(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle whitens without a delta; headrace adds 1e-8 to the standard deviation."""
    monkeypatch.setattr(adv, "WHITEN_DELTA", 0.0)


# ----------------------------------------------------------------------------------------------- within a group

GROUP_ESTIMATORS = {
    "group_mean_std": "group_normalised",
    "group_mean_std_biased": "group_normalised_biased",
    "group_mean_std_delta": "group_normalised",
    "group_mean": "group_centred",
    "leave_one_out": "leave_one_out",
    "maxrl_advantage": "mean_normalised",
}


def estimate(estimator: str, rewards: list[float]) -> list[float]:
    """Of one group whose episodes have one token each."""
    episodes = [
        adv.EpisodeRewards(key=AttemptKey(0, m), reward=r, reward_T=torch.tensor([r], dtype=torch.float64))
        for m, r in enumerate(rewards)
    ]
    return [float(values_T) for values_T in adv.ADVANTAGES[estimator].function(episodes)]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_group_estimators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: groups of mixed, equal and zero rewards.

    Named deviations: a group of one is an error (the oracle follows verl: mean 0, std 1), and MaxRL takes no negative
    reward at all (the oracle refuses a negative mean).
    """
    if name == "group_mean_std_delta":
        monkeypatch.setattr(adv, "STD_DELTA", 1e-2)
    for kind, rewards in cases.GROUPS.items():
        refusal = "has one scored episode" if kind == "one" else None
        if name == "maxrl_advantage" and kind == "mixed":
            refusal = "none may be negative"
        if refusal is None:
            assert_close(estimate(GROUP_ESTIMATORS[name], rewards), EXPECTED[name][kind], kind)
        else:
            with pytest.raises(ValueError, match=refusal):
                estimate(GROUP_ESTIMATORS[name], rewards)


def test_opo() -> None:
    """I17: the baseline is weighed by length."""
    rewards, lengths = torch.tensor(cases.GROUPS["mixed"]).double(), torch.tensor([4, 1, 7, 2, 11]).double()
    assert_close(adv.length_weighted(rewards, lengths).tolist(), EXPECTED["opo_advantage"])


# ----------------------------------------------------------------------------------------------- over the batch


def whitened(values: Nested) -> Nested:
    lengths = [sum(row) for row in MASK]
    return nest(torch.cat(adv.whiten(torch.split(flat(values, MASK), lengths))), MASK)


def test_whitening(monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: over all trained tokens, unbiased, without and with the delta."""
    assert_close(whitened(TOKEN_BATCH.advantage), EXPECTED["whiten_delta_1e-8"])
    monkeypatch.setattr(adv, "WHITEN_DELTA", 0.0)
    assert_close(whitened(TOKEN_BATCH.advantage), EXPECTED["whiten"])


def test_remax_advantage() -> None:
    """I17: the KL-penalised return less the greedy reply's reward."""
    assert_close(advantages(build(preset="remax", kl=K1), ROLLOUT), EXPECTED["remax_advantage"])


def test_reinforce_plus_plus_advantage(monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: discounted KL-penalised returns, whitened without and with the delta."""
    algorithm = build(preset="reinforce++", kl=K1, discount=0.9)
    assert_close(advantages(algorithm, ROLLOUT), EXPECTED["reinforce_pp_advantage_delta_1e-8"])
    monkeypatch.setattr(adv, "WHITEN_DELTA", 0.0)
    assert_close(advantages(algorithm, ROLLOUT), EXPECTED["reinforce_pp_advantage"])


def test_reinforce_plus_plus_baseline_advantage(exact_whitening: None) -> None:
    """I17: R less the group's mean, whitened over the batch."""
    found = advantages(build(preset="reinforce++_baseline"), ROLLOUT)
    assert_close(found, EXPECTED["reinforce_pp_baseline_advantage"])


# ------------------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_as_a_reward(estimator: str) -> None:
    """I17: -0.1 KL at each trained token of the proximal policy, the reward at the last."""
    samples = rollout_batch(ROLLOUT).samples
    penalties = shaping.kl_penalties(samples, estimator, 0.1, leaves(BATCH.old, MASK), leaves(BATCH.ref, MASK))
    _, episodes = shaping.episode_rewards(samples, ROLLOUT.rewards, penalties)
    found_N = torch.cat([episode.reward_T for episode in episodes])
    assert_close(nest(found_N, MASK), EXPECTED[f"kl_reward_{estimator}"])


def test_overlong() -> None:
    """I17: DAPO's punishment below, within and above its buffer."""
    found = [shaping.overlong_penalty(n, 20, 8) for n in (1, 12, 13, 17, 20, 21, 40)]
    assert_close(found, EXPECTED["overlong"])


def test_dynamic_sampling() -> None:
    """I17: rewards of 0 and 1 as in the paper. Named deviation: a group of equal rewards between them is dropped too,
    since its advantages are 0; the oracle keeps it for its mean accuracy of 0.5."""
    task = Task(id="t", messages=({"role": "user", "content": "?"},))

    def group_of(rewards: list[float]) -> Group:
        episodes = tuple(
            Episode(
                key=AttemptKey(0, m), task=task, turns=(), trace=Trace(), outcome=Outcome.DONE, score=Score(value=r)
            )
            for m, r in enumerate(rewards)
        )
        return Group(id=0, task=task, episodes=episodes)

    found = [int(build(preset="dapo").keep_group(group_of(r))) for r in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0])]
    assert found == EXPECTED["dynamic_sampling"][:3]
    assert EXPECTED["dynamic_sampling"][3] == 1 and not shaping.has_signal(group_of([0.5, 0.5]))


# ------------------------------------------------------------------------------------------------------ presets

# Vector -> composition, and max_new_tokens
PRESETS: dict[str, tuple[dict[str, Any], int]] = {
    "preset_grpo": ({"preset": "grpo", "kl": {"coefficient": 0.04}}, 6),
    "preset_dr_grpo": ({"preset": "dr_grpo"}, 6),
    "preset_dapo": ({"preset": "dapo", "overlong_buffer": 3}, 4),
    "preset_bnpo_global": ({"preset": "bnpo"}, 6),
    "preset_reinforce": ({"preset": "reinforce"}, 6),
    "preset_rloo": ({"preset": "rloo"}, 6),
    "preset_opo": ({"preset": "opo"}, 6),
    "preset_maxrl": ({"preset": "maxrl"}, 6),
    "preset_remax": ({"preset": "remax", "kl": {"coefficient": 0.1}}, 6),
    "preset_reinforce_pp": ({"preset": "reinforce++", "kl": {"coefficient": 0.1}, "discount": 0.9}, 6),
    "preset_reinforce_pp_baseline": ({"preset": "reinforce++_baseline", "kl": {"coefficient": 0.1}}, 6),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name: str, exact_whitening: None) -> None:
    """I17: from rewards to advantages, loss and gradient; where a KL is on it goes where the preset puts it."""
    config, max_new_tokens = PRESETS[name]
    algorithm = build(max_new_tokens, **config)
    found_advantages = advantages(algorithm, ROLLOUT)
    loss, gradient, _ = run(algorithm, BATCH, fields_of(BATCH, advantages_N=flat(found_advantages, MASK)))
    found = {"advantage": found_advantages, "loss": loss, "gradient": gradient}
    assert_close(found, EXPECTED[name], name)


JOINED = {
    *GROUP_ESTIMATORS,
    *PRESETS,
    *(f"kl_reward_{estimator}" for estimator in ("k1", "k2", "k3")),
    "opo_advantage",
    "whiten",
    "whiten_delta_1e-8",
    "remax_advantage",
    "reinforce_pp_advantage",
    "reinforce_pp_advantage_delta_1e-8",
    "reinforce_pp_baseline_advantage",
    "overlong",
    "dynamic_sampling",
}
