"""GAE, value targets, value loss and the whole of ``ppo_critic`` against the scalar oracle, in float64 to 1e-9 (I17).

The oracle's vectors hold 12 digits and more; its inputs hold episodes with masked tokens inside, at the start and at
the end, whose slots carry garbage. Legend: N trained tokens of all episodes.
"""

from __future__ import annotations

from typing import Any

import oracle_advantages
import pytest
import torch
from oracle_core import Nested
from oracle_inputs import BATCH, OLD_VALUES, ROLLOUT, TARGETS
from oracle_vectors import EXPECTED
from torch import Tensor

from headrace.algorithms import build_algorithm, shaping
from headrace.algorithms.advantages import ADVANTAGES, EpisodeRewards, lambda_returns
from headrace.algorithms.fields import LossOutput, TokenFields, Totals
from headrace.algorithms.values import gae, value_loss
from headrace.config.critic import SharedCriticConfig
from headrace.config.schema import AlgorithmConfig
from headrace.testing import make_sample

GAMMA, LAMBDA, KL_COEFFICIENT = 0.97, 0.9, 0.1
NUM_TOKENS = sum(map(sum, BATCH.mask))


def flat(nested: Nested) -> Tensor:
    """[N]: the trained entries."""
    rows = zip(nested, BATCH.mask, strict=True)
    return torch.tensor([v for row, mask in rows for v, m in zip(row, mask, strict=True) if m], dtype=torch.float64)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-9)


def episodes() -> list[EpisodeRewards]:
    """Shaped as in a run: reward at the last trained token, KL to the reference as a penalty."""
    samples = [
        make_sample([7], range(len(mask)), member=i, reply_mask=mask, reward=reward)
        for i, (mask, reward) in enumerate(zip(BATCH.mask, ROLLOUT.rewards, strict=True))
    ]
    behind_prompt = [
        [torch.tensor([float("nan"), *row], dtype=torch.float64) for row in nested]
        for nested in (BATCH.old, BATCH.ref, ROLLOUT.values)
    ]
    old, ref, values = behind_prompt
    penalties = shaping.kl_penalties(samples, "k1", KL_COEFFICIENT, old, ref)
    _, rewards = shaping.episode_rewards(samples, ROLLOUT.rewards, penalties, values=values)
    return rewards


def test_golden_row() -> None:
    """ALGORITHMS.md: r = [0, 0, 1], v = [.2, .4, .6], gamma 1, lambda .95 give [.751, .58, .4]."""
    rewards, values = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64)
    same(gae(rewards, values, 1.0, 0.95), torch.tensor([0.751, 0.58, 0.4], dtype=torch.float64))


def test_gae_and_value_targets() -> None:
    """Discount, lambda, penalties and the skipping of masked tokens all bind in the vector."""
    found = torch.cat(ADVANTAGES["gae"].function(episodes(), GAMMA, LAMBDA))
    same(found, flat([advantages for advantages, _ in EXPECTED["gae"]]))
    targets = torch.cat(lambda_returns(episodes(), GAMMA, LAMBDA))
    same(targets, flat([targets for _, targets in EXPECTED["gae"]]))


def test_whitened_gae() -> None:
    """Over all trained tokens of the batch, 1e-8 beside the standard deviation."""
    raw = [advantages for advantages, _ in EXPECTED["gae"]]
    expected = flat(oracle_advantages.whiten(raw, BATCH.mask, delta=1e-8))
    same(torch.cat(ADVANTAGES["gae_whitened"].function(episodes(), GAMMA, LAMBDA)), expected)


@pytest.mark.parametrize(("name", "clip"), [("value_loss", 0.2), ("value_loss_unclipped", None)])
def test_value_loss_and_gradient(name: str, clip: float | None) -> None:
    """Values inside, above and below the clip, on either side of the target; a token mean."""
    loss, gradient = EXPECTED[name]
    values_N = flat(ROLLOUT.values).requires_grad_()
    found = value_loss(values_N, flat(OLD_VALUES), flat(TARGETS), clip)[0].sum() / NUM_TOKENS
    (found_gradient,) = torch.autograd.grad(found, values_N)
    same(found.detach(), torch.tensor(loss, dtype=torch.float64))
    same(found_gradient, flat(gradient))


@pytest.mark.parametrize(("name", "advantage"), [("preset_ppo_critic", None), ("preset_ppo_critic_raw", "gae")])
def test_the_preset_from_advantages_to_gradient(name: str, advantage: str | None) -> None:
    """PPO's clip and the token mean, with advantages that differ within an episode."""
    expected: dict[str, Any] = EXPECTED[name]
    config: dict[str, Any] = {"preset": "ppo_critic", "kl": {"coefficient": KL_COEFFICIENT}}
    algorithm = build_algorithm(
        AlgorithmConfig.model_validate(config | ({"advantage": advantage} if advantage else {})),
        asynchronous=False,
        max_new_tokens=BATCH.max_length,
        critic=SharedCriticConfig(gamma=GAMMA, gae_lambda=LAMBDA),
    )
    lengths = torch.tensor([sum(mask) for mask in BATCH.mask])
    fields = TokenFields(
        advantages_N=flat(expected["advantage"]),
        behaviour_logprobs_N=flat(BATCH.roll),
        proximal_logprobs_N=flat(BATCH.old),
        reference_logprobs_N=flat(BATCH.ref),
        weights_N=torch.ones(NUM_TOKENS, dtype=torch.float64),
        episode_index_N=torch.arange(len(lengths)).repeat_interleave(lengths),
        num_episodes=len(lengths),
        totals=Totals(num_tokens=NUM_TOKENS, num_episodes=len(lengths), max_length=BATCH.max_length),
    )
    logprobs_N = flat(BATCH.new).requires_grad_()
    output: LossOutput = algorithm.loss(logprobs_N, fields)
    loss = output.per_token_N.sum() / output.denominator
    (gradient,) = torch.autograd.grad(loss, logprobs_N)
    same(loss.detach(), torch.tensor(expected["loss"], dtype=torch.float64))
    same(gradient, flat(expected["gradient"]))
