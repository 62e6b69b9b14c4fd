"""GAE, lambda-returns and the value loss against numbers worked out by hand; nothing behind a mask counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algorithms import ComposedAlgorithm, build_algorithm
from headrace.algorithms.values import explained_variance, gae, value_loss
from headrace.config.critic import SharedCriticConfig
from headrace.config.schema import AlgorithmConfig
from headrace.errors import ConfigError
from headrace.testing import make_sample
from headrace.types import PolicyVersion, RolloutBatch, Sample


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def build(advantage: str = "gae", *, gamma: float = 1.0, gae_lambda: float = 0.95, **options: Any) -> ComposedAlgorithm:
    config = AlgorithmConfig.model_validate({"preset": "ppo_critic", "advantage": advantage, **options})
    critic = SharedCriticConfig(gamma=gamma, gae_lambda=gae_lambda)
    algorithm = build_algorithm(config, asynchronous=False, max_new_tokens=16, critic=critic)
    assert isinstance(algorithm, ComposedAlgorithm)
    return algorithm


def batch_of(*samples: Sample) -> RolloutBatch:
    return RolloutBatch(index=0, groups=(), samples=samples, version=PolicyVersion(0, 0))


def values_for(sample: Sample, trained: list[float], elsewhere: float = 0.0) -> Tensor:
    values_T = torch.full((len(sample.ids),), elsewhere)
    values_T[torch.tensor(sample.mask, dtype=torch.bool)] = torch.tensor(trained)
    return values_T


def trained(sample: Sample, per_token_T: Tensor) -> list[float]:
    return per_token_T[torch.tensor(sample.mask, dtype=torch.bool)].tolist()


# -------------------------------------------------------------------------------------------------- GAE


def test_golden_vector_of_the_notes() -> None:
    """ALGORITHMS.md: r = [0, 0, 1], V = [.2, .4, .6], gamma 1, lambda .95."""
    assert gae(f64(0, 0, 1), f64(0.2, 0.4, 0.6), 1.0, 0.95).tolist() == pytest.approx([0.751, 0.58, 0.4], abs=1e-12)


def test_discount_and_lambda_by_hand() -> None:
    """gamma and lambda bind separately: d2 = 2 - 3, d1 = -1 + .5 * 3 - 2, d0 = .5 * 2 - 1; A = d + .1 A'."""
    assert gae(f64(0, -1, 2), f64(1, 2, 3), 0.5, 0.2).tolist() == pytest.approx([-0.16, -1.6, -1.0], abs=1e-12)
    assert gae(f64(0, -1, 2), f64(1, 2, 3), 0.5, 0.0).tolist() == pytest.approx([0.0, -1.5, -1.0], abs=1e-12)
    assert gae(f64(), f64(), 1.0, 0.95).tolist() == []
    with pytest.raises(ValueError, match="2 values for 3"):
        gae(f64(0, 0, 1), f64(0, 0), 1.0, 1.0)


def test_t37_masked_tokens_are_skipped() -> None:
    """T37, F64: rewards [0, 1, 0], values [0, 0, 100], mask [1, 1, 0] give exactly [0.95, 1.0, 0]."""
    sample = make_sample([7], [1, 2, 3], reply_mask=[1, 1, 0], reward=1.0)
    values = [torch.tensor([0.0, 0.0, 0.0, 100.0])]
    (advantages_T,) = build().advantage(batch_of(sample), values=values)
    assert advantages_T.tolist() == [0.0, torch.tensor(0.95).item(), 1.0, 0.0]


@pytest.mark.parametrize("garbage", [1e30, -5.0, math.inf, math.nan])
@pytest.mark.parametrize("advantage", ["gae", "gae_whitened"])
def test_garbage_in_masked_values_changes_nothing(advantage: str, garbage: float) -> None:
    """F64, F58: prompt and environment slots may hold anything; advantages and targets stay bit-equal."""
    samples = [
        make_sample([7, 8], [1, 2, 3, 4, 5], member=m, reply_mask=[1, 1, 0, 0, 1], reward=float(m)) for m in range(3)
    ]
    algorithm, batch = build(advantage), batch_of(*samples)
    clean = [values_for(s, [0.3, -0.2, 0.1 * s.key.member]) for s in samples]
    dirty = [values_for(s, trained(s, v), elsewhere=garbage) for s, v in zip(samples, clean, strict=True)]
    for method in (algorithm.advantage, algorithm.value_targets):
        for a, b in zip(method(batch, values=clean), method(batch, values=dirty), strict=True):
            assert torch.equal(a, b) and a.isfinite().all()


def test_gae_runs_over_turns_and_samples_of_an_episode() -> None:
    """The value that bootstraps a turn's last token is that of the next turn's first, in the next sample if need be."""
    first = make_sample([7], [1, 2, 9, 3], reply_mask=[1, 1, 0, 1], reward=1.0)
    second = make_sample([7, 8], [4], branch=1, reward=1.0)
    other = make_sample([7], [1], member=1, reward=0.0)
    values = [values_for(first, [0.1, 0.2, 0.3]), values_for(second, [0.4]), values_for(other, [5.0])]
    expected = gae(f64(0, 0, 0, 1), f64(0.1, 0.2, 0.3, 0.4), 1.0, 0.95).tolist()
    found = build().advantage(batch_of(first, second, other), values=values)
    assert [*trained(first, found[0]), *trained(second, found[1])] == pytest.approx(expected, abs=1e-6)
    assert trained(other, found[2]) == [-5.0], "episodes do not leak into each other"


def test_terminal_reward_falls_on_the_last_trained_token() -> None:
    """F65: trailing environment ids get nothing; with lambda 0 and values 0 the advantages are the rewards."""
    sample = make_sample([7], [1, 2, 9, 9], reply_mask=[1, 1, 0, 0], reward=0.75)
    (found,) = build(gae_lambda=0.0).advantage(batch_of(sample), values=[torch.zeros(5)])
    assert found.tolist() == [0.0, 0.0, 0.75, 0.0, 0.0]


def test_an_episode_without_trained_tokens_is_no_obstacle() -> None:
    """F44: all its tokens were masked for age; it adds nothing, and moves nobody."""
    kept = [make_sample([7], [1, 2], member=m, reward=float(m)) for m in range(2)]
    empty = make_sample([7], [1, 2], member=2, reply_mask=[0, 0], reward=100.0)
    algorithm = build("gae_whitened")
    alone = algorithm.advantage(batch_of(*kept), values=[torch.zeros(3)] * 2)
    joined = algorithm.advantage(batch_of(*kept, empty), values=[torch.zeros(3)] * 3)
    assert all(torch.equal(a, b) for a, b in zip(alone, joined, strict=False))
    assert not joined[2].any()


def test_whitened_and_targets() -> None:
    """Advantages are whitened over the batch; targets come from the advantages before that: G = A + V."""
    samples = [make_sample([7], [1, 2], member=m, reward=float(m)) for m in range(3)]
    values = [values_for(s, [0.5, 0.25]) for s in samples]
    raw = build("gae").advantage(batch_of(*samples), values=values)
    algorithm = build("gae_whitened")
    white = torch.cat([a[1:] for a in algorithm.advantage(batch_of(*samples), values=values)])
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-6) and float(white.std()) == pytest.approx(1.0, abs=1e-5)
    targets = algorithm.value_targets(batch_of(*samples), values=values)
    for sample, raw_T, target_T, value_T in zip(samples, raw, targets, values, strict=True):
        assert trained(sample, target_T) == pytest.approx(trained(sample, raw_T + value_T), abs=1e-6)
        assert not target_T[0]


def test_kl_in_the_reward_reaches_the_targets() -> None:
    """The critic foretells what the policy is trained on, penalties included: k1 of -.5 and .25, coefficient 2."""
    sample = make_sample([7], [1, 2], reward=1.0)
    batch, values = batch_of(sample), [torch.zeros(3)]
    logprobs = {
        "proximal_logprobs": [torch.tensor([0.0, -1.5, -1.0])],
        "reference_logprobs": [torch.tensor([0.0, -1.0, -1.25])],
    }
    algorithm = build(gae_lambda=1.0, kl={"coefficient": 2.0})
    (targets,) = algorithm.value_targets(batch, values=values, **logprobs)
    assert targets.tolist() == [0.0, 1.5, 0.5]
    assert torch.equal(algorithm.advantage(batch, values=values, **logprobs)[0], targets), "values are 0"


def test_samples_of_other_streams_have_neither_advantage_nor_target() -> None:
    """DESIGN section 2: a supervised sample has no reward and no return; it is in no episode of GAE, whitens nobody and
    is given nothing, whatever the critic says of it."""
    samples = [make_sample([7], [1, 2], member=m, reward=float(m)) for m in range(2)]
    taught = make_sample([7], [3, 4], member=9, stream="supervised")
    values = [values_for(s, [0.25, 0.5]) for s in samples]
    algorithm = build("gae_whitened")
    mixed, alone = batch_of(samples[0], taught, samples[1]), batch_of(*samples)
    for method in (algorithm.advantage, algorithm.value_targets):
        first, other, second = method(mixed, values=[values[0], torch.full((3,), 1e6), values[1]])
        expected = method(alone, values=values)
        assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])
        assert other.tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="2 lists of values for 3 samples"):
        algorithm.advantage(mixed, values=values)


def test_the_discount_is_the_critics() -> None:
    """One discount acts: critic.gamma with GAE, algorithm.discount with plain returns, never both (I20)."""
    sample = make_sample([7], [1, 2], reward=1.0)
    (found,) = build(gamma=0.5, gae_lambda=1.0).advantage(batch_of(sample), values=[torch.zeros(3)])
    assert found.tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(
        ConfigError, match=r"algorithm\.discount has no effect .* discounts by critic\.gamma: remove it"
    ):
        build(discount=0.5)
    plain = AlgorithmConfig(preset="reinforce", discount=0.5)
    algorithm = build_algorithm(plain, asynchronous=False, max_new_tokens=16, critic=SharedCriticConfig(gamma=0.25))
    assert algorithm.advantage(batch_of(sample))[0].tolist() == [0.0, 0.5, 1.0]


# ------------------------------------------------------------------------------------------- value loss


def test_value_loss_by_hand() -> None:
    """1/2 max((V - G)^2, (clip(V, Vo - .2, Vo + .2) - G)^2), every branch of it binding once."""
    value = f64(0.1, 0.9, -0.9, 0.9).requires_grad_()
    old, target = f64(0.0, 0.0, 0.0, 0.0), f64(1.0, 1.0, -1.0, -1.0)
    loss, clipped = value_loss(value, old, target, 0.2)
    # inside; clipped above (.2 - 1)^2 > (.9 - 1)^2; clipped below; moved away from the target: the plain term is larger
    assert loss.tolist() == pytest.approx([0.405, 0.32, 0.32, 1.805], abs=1e-12)
    assert clipped.tolist() == [False, True, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    assert gradient.tolist() == pytest.approx([-0.9, 0.0, 0.0, 1.9], abs=1e-12)
    plain, none_clipped = value_loss(value, old, target, None)
    assert plain.tolist() == pytest.approx([0.405, 0.005, 0.005, 1.805], abs=1e-12)
    assert not none_clipped.any()


def test_value_loss_gradient_is_exact() -> None:
    """Away from its kinks, with old values and targets frozen."""
    value = f64(0.1, 0.9, -0.9, 0.9, 0.3).requires_grad_()
    old, target = f64(0.0, 0.05, 0.1, -0.1, 0.9), f64(1.0, 1.0, -1.0, -1.0, 0.25)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, target, 0.2)[0], value)


def test_explained_variance_by_hand() -> None:
    target = f64(0.0, 1.0, 2.0, 3.0)
    assert explained_variance(target + 5, target) == pytest.approx(1.0), "a constant error is no variance"
    assert explained_variance(f64(7, 7, 7, 7), target) == pytest.approx(0.0)
    assert explained_variance(-target, target) == pytest.approx(-3.0)
    assert explained_variance(f64(1, 2), f64(3, 3)) is None and explained_variance(f64(1), f64(3)) is None


# ---------------------------------------------------------------------------------------------- refusals


def test_missing_values_are_named() -> None:
    sample = make_sample([7], [1, 2], reward=1.0)
    with pytest.raises(ValueError, match="g0m0 needs a critic's values"):
        build().advantage(batch_of(sample))
    with pytest.raises(ValueError, match=r"\(2,\) entries for 3 ids"):
        build().advantage(batch_of(sample), values=[torch.zeros(2)])
    without = build_algorithm(AlgorithmConfig(preset="ppo_critic"), asynchronous=False, max_new_tokens=16)
    with pytest.raises(ValueError, match="needs a critic"):
        without.advantage(batch_of(sample), values=[torch.zeros(3)])  # type: ignore[call-arg]


def test_masked_truncated_replies_and_a_critic_are_refused() -> None:
    """I20: their tokens would still move the critic."""
    with pytest.raises(ConfigError, match=r"algorithm\.mask_truncated cannot hold .* \(the critic's loss\)"):
        build(mask_truncated=True)
