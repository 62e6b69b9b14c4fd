"""The critic's vectors of the blind oracle: GAE, value loss, PPO with a critic; in float64, to 1e-9 (I17)."""

from __future__ import annotations

import pytest
import torch
from join_support import advantages, assert_close, build, fields_of, flat, leaves, nest, rollout_batch, run
from oracle_core import Nested
from oracle_inputs import BATCH, OLD_VALUES, ROLLOUT, TARGETS
from oracle_vectors import EXPECTED

from headrace.algorithms import advantages as adv
from headrace.algorithms import shaping
from headrace.algorithms.values import gae, value_loss
from headrace.config.critic import SharedCriticConfig

MASK = BATCH.mask
GAMMA, LAMBDA = 0.97, 0.9


def spread(values_T: torch.Tensor, row: list[int]) -> list[float]:
    return nest(values_T, [row])[0]


def test_gae() -> None:
    """arXiv 1506.02438, equation 16, over trained tokens only; the critic's targets are A + V."""
    samples = rollout_batch(ROLLOUT).samples
    penalties = shaping.kl_penalties(samples, "k1", 0.1, leaves(BATCH.old, MASK), leaves(BATCH.ref, MASK))
    _, episodes = shaping.episode_rewards(samples, ROLLOUT.rewards, penalties)
    found = []
    for episode, values, row in zip(episodes, ROLLOUT.values, MASK, strict=True):
        value_T = flat([values], [row])
        advantage_T = gae(episode.reward_T, value_T, GAMMA, LAMBDA)
        found.append([spread(advantage_T, row), spread(advantage_T + value_T, row)])
    assert_close(found, [list(pair) for pair in EXPECTED["gae"]])


def test_gae_of_a_return_that_goes_on() -> None:
    """The oracle bootstraps behind the last token; headrace's value there is 0, so that the reward of the last token
    must hold what is still to come: gamma times 0.7."""
    row = [1, 0, 1, 1]
    value_T = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64)
    reward_T = torch.tensor([0.0, 0.5, -0.2 + GAMMA * 0.7], dtype=torch.float64)
    advantage_T = gae(reward_T, value_T, GAMMA, LAMBDA)
    assert_close([spread(advantage_T, row), spread(advantage_T + value_T, row)], list(EXPECTED["gae_bootstrap"]))


@pytest.mark.parametrize(("name", "clip"), [("value_loss", 0.2), ("value_loss_unclipped", None)])
def test_value_loss(name: str, clip: float | None) -> None:
    """1/2 max of the plain and the clipped square, token mean, and its gradient by the value."""
    value_N = flat(ROLLOUT.values, MASK).requires_grad_()
    loss_N, _ = value_loss(value_N, flat(OLD_VALUES, MASK), flat(TARGETS, MASK), clip)
    loss = loss_N.sum() / len(loss_N)
    loss.backward()
    assert value_N.grad is not None
    assert_close([loss.item(), nest(value_N.grad, MASK)], list(EXPECTED[name]))


@pytest.mark.parametrize(("name", "options"), [
    ("preset_ppo_critic", {}),
    ("preset_ppo_critic_raw", {"advantage": "gae"}),
])  # fmt: skip
def test_preset(name: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From rewards and values to advantages, loss and gradient, whitened (the preset) and as they are."""
    monkeypatch.setattr(adv, "WHITEN_DELTA", 0.0)
    critic = SharedCriticConfig(gamma=GAMMA, gae_lambda=LAMBDA)
    kl = {"coefficient": 0.1, "estimator": "k1", "placement": "reward"}
    algorithm = build(preset="ppo_critic", kl=kl, critic=critic, **options)
    found: Nested = advantages(algorithm, ROLLOUT, values=ROLLOUT.values)
    loss, gradient, _ = run(algorithm, BATCH, fields_of(BATCH, advantages_N=flat(found, MASK)))
    assert_close({"advantage": found, "loss": loss, "gradient": gradient}, EXPECTED[name], name)


JOINED = {
    "gae",
    "gae_bootstrap",
    "value_loss",
    "value_loss_unclipped",
    "preset_ppo_critic",
    "preset_ppo_critic_raw",
}
