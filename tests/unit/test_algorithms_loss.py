"""Losses: gradients, independence of the split, safety behind masks, metrics. Legend: N tokens, E episodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algorithms import PRESETS, build_algorithm
from headrace.algorithms.fields import LossOutput, TokenFields, Totals
from headrace.algorithms.ratios import MAX_LOG_RATIO, bounded_exp
from headrace.config.schema import AlgorithmConfig
from headrace.protocols import Algorithm, AlgorithmNeeds


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def build(preset: str = "grpo", **options: Any) -> Algorithm:
    config = AlgorithmConfig.model_validate({"preset": preset, **options})
    return build_algorithm(config, asynchronous=False, max_new_tokens=16)


def fields_of(
    advantages_N: Tensor,
    *,
    old: Tensor | None = None,
    roll: Tensor | None = None,
    ref: Tensor | None = None,
    index: list[int] | None = None,
    totals: Totals | None = None,
    weights: Tensor | None = None,
    entropy: Tensor | None = None,
) -> TokenFields:
    """Fields of one micro-batch; by default one episode, and the micro-batch is the whole minibatch."""
    num_tokens = len(advantages_N)
    index_N = torch.tensor(index or [0] * num_tokens)
    num_episodes = int(index_N.max()) + 1
    return TokenFields(
        advantages_N=advantages_N,
        behaviour_logprobs_N=torch.zeros_like(advantages_N) if roll is None else roll,
        proximal_logprobs_N=old,
        reference_logprobs_N=ref,
        weights_N=torch.ones_like(advantages_N) if weights is None else weights,
        episode_index_N=index_N,
        num_episodes=num_episodes,
        totals=totals or Totals(num_tokens=num_tokens, num_episodes=num_episodes, max_length=16),
        entropy_N=entropy,
        rewards_N=advantages_N,
        ages_N=torch.arange(num_tokens) % 3,
        selected_N=torch.arange(num_tokens) % 2 == 1,
        mean_correction=1.0,
    )


def gradient(algorithm: Algorithm, logprobs_N: Tensor, fields: TokenFields) -> Tensor:
    logprobs_N = logprobs_N.clone().requires_grad_()
    output: LossOutput = algorithm.loss(logprobs_N, fields)
    (output.per_token_N.sum() / output.denominator).backward()
    assert logprobs_N.grad is not None
    return logprobs_N.grad


# ------------------------------------------------------------------------------------------------ gradients

OLD, ROLL, REF = f64(-0.6, -1.5, -1.8, -0.7, -0.9), f64(-0.5, -1.9, -1.8, -0.8, -0.3), f64(-0.4, -1.2, -2.2, -0.9, -0.3)
NEW, ADVANTAGES, INDEX = f64(-0.5, -1.0, -2.4, -0.75, -0.2), f64(1, 1, 1, -1, -1), [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"clip_high": 0.28},
        {"dual_clip": 1.5},
        {"objective": "reinforce"},
        {"correction": {"type": "truncated", "high": 1.2}},
        {"correction": {"type": "masked", "low": 0.8, "high": 1.2}},
        {"kl": {"coefficient": 0.3, "estimator": "k1"}},
        {"kl": {"coefficient": 0.3, "estimator": "k2"}},
        {"kl": {"coefficient": 0.3, "estimator": "k3"}},
        {"kl": {"coefficient": 0.3, "estimator": "k3", "unbiased": True, "aggregation": "token_sum"}},
        {"objective": "ratio"},
        {"objective": "ratio", "ratio_anchor": "behaviour"},
        {"objective": "sapo"},
        {"objective": "quadratic", "penalty": 0.7},
        {"objective": "ratio", "selection": {"type": "kl_cov", "penalty": 0.4}},
        {"objective": "ratio", "selection": {"type": "m2po"}},
        {"correction": {"type": "truncated", "high": 1.2, "level": "sequence"}},
        {"correction": {"type": "decoupled", "level": "geometric", "batch_normalised": True}},
        {"correction": {"max_drift": 0.1, "veto": 0.6}},
    ],
    ids=str,
)
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_gradcheck(options: dict[str, Any], aggregation: str) -> None:
    """I17: the gradient is that of the loss. The proximal policy is given, so nothing that moves is detached."""
    algorithm = build(aggregation=aggregation, **options)
    fields = fields_of(ADVANTAGES, old=OLD, roll=ROLL, ref=REF, index=INDEX)

    def loss(logprobs_N: Tensor) -> Tensor:
        output: LossOutput = algorithm.loss(logprobs_N, fields)
        return output.per_token_N.sum() / output.denominator

    assert torch.autograd.gradcheck(loss, NEW.clone().requires_grad_())


def test_entropy_bonus_has_its_gradient() -> None:
    """I17: -c H, aggregated as the rest."""
    entropy_N = f64(0.5, 1.0, 2.0, 0.1, 0.2).requires_grad_()
    fields = fields_of(torch.zeros(5, dtype=torch.float64), old=NEW, index=INDEX, entropy=entropy_N)
    output: LossOutput = build("dapo", entropy_coefficient=0.01).loss(NEW, fields)
    (output.per_token_N.sum() / output.denominator).backward()
    assert entropy_N.grad is not None and entropy_N.grad.tolist() == pytest.approx([-0.01 / 5] * 5)
    assert output.metrics["policy/entropy"] == pytest.approx((3.8, 5))


def test_ppo_clipped_token_has_no_gradient_and_cispo_keeps_it() -> None:
    """I17: ratio 1.65 with A > 0: PPO 0, CISPO -1.2 A; ratio 0.55 with A < 0: PPO 0, CISPO -0.8 A."""
    new, old, advantages = f64(-1.0, -2.0), f64(-1.5, -1.4), f64(2.0, -3.0)
    fields = fields_of(advantages, old=old)
    assert gradient(build(aggregation="token_sum"), new, fields).tolist() == [0.0, 0.0]
    cispo = gradient(build(objective="cispo", aggregation="token_sum"), new, fields)
    assert cispo.tolist() == pytest.approx([-1.2 * 2.0, 0.8 * 3.0])
    assert gradient(build("cispo", aggregation="token_sum"), new, fields).tolist() == pytest.approx(
        [-1.28 * 2.0, math.exp(-0.6) * 3.0]
    ), "the preset has no lower bound"


def test_gspo_token_gradient() -> None:
    """I17: -s_i A_i / (B |o_i|), and 0 for the tokens of a clipped sequence; the second sequence is clipped."""
    old, new = f64(-0.6, -1.5, -1.8, -0.7, -0.9), f64(-0.5, -1.5, -1.9, -0.7, -0.2)
    fields = fields_of(f64(1, 1, 1, 1, 1) * 0.7, old=old, index=INDEX)
    s = math.exp((0.1 + 0.0 - 0.1) / 3)
    expected = [-s * 0.7 / (2 * 3)] * 3 + [0.0, 0.0]
    assert gradient(build("gspo"), new, fields).tolist() == pytest.approx(expected, abs=1e-15)


def test_first_step_uses_the_current_policy_as_proximal() -> None:
    """I5: without proximal log-probabilities the ratio is exactly 1 and the gradient is REINFORCE's."""
    fields = fields_of(ADVANTAGES, index=INDEX)
    output: LossOutput = build().loss(NEW, fields)
    assert output.metrics["policy/ratio"] == (5.0, 5.0)
    assert output.metrics["policy/clipped_high"] == (0.0, 5.0)
    on_policy = gradient(build(), NEW, fields)
    assert on_policy.tolist() == pytest.approx(gradient(build(objective="reinforce"), NEW, fields).tolist(), abs=1e-15)


def test_correction_is_detached_and_leaves_kl_alone() -> None:
    """I17: rho is a weight, not a path for the gradient, even where the proximal policy is the current one."""
    options = {"correction": {"type": "truncated", "high": 1.5}, "aggregation": "token_sum"}
    new, roll = f64(-1.0, -1.0), f64(-1.2, -3.0)
    fields = fields_of(f64(1.0, -2.0), roll=roll, ref=f64(-0.5, -0.5))
    assert gradient(build(**options), new, fields).tolist() == pytest.approx([-math.exp(0.2), 1.5 * 2.0])
    with_kl = gradient(build(**options, kl={"coefficient": 0.1, "estimator": "k2"}), new, fields)
    assert with_kl.tolist() == pytest.approx([-math.exp(0.2) - 0.05, 3.0 - 0.05])


def test_kl_gradients_on_a_policy_of_three_tokens() -> None:
    """FAILURES 60: in expectation k2 in the loss and k1 in the reward have the gradient of KL(p || q), k1 in the loss
    has none, k3 in the loss has another one. Exact expectations over all tokens."""
    logits = f64(0.3, -0.5, 1.1).requires_grad_()
    log_q = f64(0.2, 0.5, 0.3).log()
    log_p = logits.log_softmax(0)
    p = log_p.exp().detach()

    def of(value: Tensor) -> list[float]:
        (gradient_3,) = torch.autograd.grad(value, logits, retain_graph=True)
        return list(gradient_3.tolist())

    def in_loss(name: str) -> list[float]:
        kl_3 = build(kl={"coefficient": 1.0, "estimator": name}, aggregation="token_sum").loss(
            log_p, fields_of(torch.zeros(3).double(), ref=log_q)
        )
        return of((p * kl_3.per_token_N).sum())

    exact = of((log_p.exp() * (log_p - log_q)).sum())
    assert in_loss("k1") == pytest.approx([0.0] * 3, abs=1e-12)
    assert in_loss("k2") == pytest.approx(exact, abs=1e-12)
    assert in_loss("k3+") == pytest.approx(exact, abs=1e-12)
    assert in_loss("k3") != pytest.approx(exact, rel=1e-2)
    reward = build(objective="reinforce", aggregation="token_sum").loss(log_p, fields_of(-(log_p - log_q).detach()))
    assert of((p * reward.per_token_N).sum()) == pytest.approx(exact, abs=1e-12)


# ------------------------------------------------------------------------------------ the split does not matter


COMPOSITIONS: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS),
    {"preset": "grpo", "kl": {"coefficient": 0.2}, "correction": {"type": "masked", "low": 0.8, "high": 1.2}},
    {"preset": "gspo", "aggregation": "token_mean", "correction": {"type": "truncated", "high": 1.1}},
    {"preset": "grpo", "kl": {"coefficient": 0.2, "unbiased": True}},
    {"preset": "grpo", "correction": {"type": "decoupled", "level": "sequence", "veto": 1e-4, "max_drift": 0.1}},
    {"preset": "grpo", "correction": {"type": "masked", "level": "geometric", "proximal": "interpolated"}},
]


def test_token_mean_is_not_a_mean_of_means() -> None:
    """FAILURES T35: 2 tokens of loss 1 and 8 of loss 0 have the token mean 0.2, and not 0.5."""
    algorithm = build(objective="reinforce", aggregation="token_mean")
    totals = Totals(num_tokens=10, num_episodes=2, max_length=16)
    parts = []
    for num_tokens, advantage in ((2, 1.0), (8, 0.0)):
        advantages_N = torch.full((num_tokens,), advantage, dtype=torch.float64)
        output: LossOutput = algorithm.loss(-torch.ones(num_tokens).double(), fields_of(advantages_N, totals=totals))
        parts.append(float(output.per_token_N.sum()) / output.denominator)
    assert sum(parts) == pytest.approx(0.2, abs=1e-15)


def test_dr_grpo_divides_by_a_constant() -> None:
    """FAILURES 56, 57: twice the tokens of equal loss, twice the loss; L_max comes from the run, not the batch."""
    losses = []
    for num_tokens in (2, 4):
        advantages_N = torch.ones(num_tokens, dtype=torch.float64)
        output: LossOutput = build("dr_grpo").loss(-advantages_N, fields_of(advantages_N))
        assert output.denominator == 16.0
        losses.append(float(output.per_token_N.sum()) / output.denominator)
    assert losses == pytest.approx([-2 / 16, -4 / 16])


def test_rejection_does_not_raise_the_weight_of_the_rest() -> None:
    """I17: denominators are counts before rejection; with all but one of 4 tokens rejected the kept one weighs 1/4."""
    algorithm = build("dapo", correction={"type": "masked", "low": 0.5, "high": 2.0})
    fields = fields_of(torch.ones(4).double(), old=f64(-1, -1, -1, -1), roll=f64(-1, -3, -3, 0))
    assert gradient(algorithm, f64(-1, -1, -1, -1), fields).tolist() == [-0.25, 0.0, 0.0, 0.0]


def test_sample_weights_scale_the_loss_and_not_the_denominator() -> None:
    """I17: the sample's unit of weight multiplies its tokens."""
    weights = f64(1, 1, 1, 0.5, 0.5)
    plain = gradient(build(), NEW, fields_of(ADVANTAGES, old=OLD, index=INDEX))
    weighted = gradient(build(), NEW, fields_of(ADVANTAGES, old=OLD, index=INDEX, weights=weights))
    assert weighted.tolist() == pytest.approx((plain * weights).tolist())
    assert float(plain.abs().sum()) > 0


# ------------------------------------------------------------------------------------------------ masked values


def test_rejected_token_may_be_infinite() -> None:
    """FAILURES 58: a token that the correction rejects holds -inf, and changes neither loss nor gradient."""
    algorithm = build(objective="reinforce", correction={"type": "masked", "low": 0.5, "high": 2.0})
    new, old, roll = f64(-1.0, -math.inf), f64(-1.0, -200.0), f64(-1.0, -1.0)
    fields = fields_of(f64(1.0, 1.0), old=old, roll=roll)
    output: LossOutput = algorithm.loss(new, fields)
    assert output.per_token_N.tolist() == [0.5, 0.0]
    assert gradient(algorithm, new, fields).tolist() == [-0.5, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_ratios_stay_finite(dtype: torch.dtype) -> None:
    """I13, FAILURES 58: log-ratios of +-300, which overflow exp in float32, leave a finite loss and gradient."""
    new, old = torch.tensor([-1.0, -301.0], dtype=dtype), torch.tensor([-301.0, -1.0], dtype=dtype)
    advantages, roll = torch.tensor([-1.0, 1.0], dtype=dtype), torch.tensor([-1.0, -301.0], dtype=dtype)
    for composition in COMPOSITIONS:
        algorithm = build(**composition)
        fields = fields_of(advantages, old=old, roll=roll, ref=old)
        assert gradient(algorithm, new, fields).isfinite().all(), composition
    assert bounded_exp(torch.tensor([1e6])).item() == pytest.approx(math.exp(MAX_LOG_RATIO))


def test_nan_of_a_trained_token_is_not_hidden() -> None:
    """I13: the guard before the optimizer step must see it."""
    output: LossOutput = build().loss(f64(-1.0, math.nan), fields_of(f64(1.0, 1.0), old=f64(-1.0, -1.0)))
    assert output.per_token_N.isnan().tolist() == [False, True]


# ---------------------------------------------------------------------------------------------------- metrics


def test_metrics_count_what_the_bounds_did() -> None:
    """FAILURES 63: sums and counts, so that means over a minibatch are exact."""
    new, old = f64(-1.0, -2.0, -1.0, -1.0), f64(-1.5, -1.4, -1.0, -2.0)
    advantages, roll = f64(1.0, -1.0, 1.0, -1.0), f64(-1.5, -1.4, -2.0, -1.0)
    algorithm = build(dual_clip=2.0, correction={"type": "masked", "low": 0.5, "high": 2.0})
    metrics = algorithm.loss(new, fields_of(advantages, old=old, roll=roll)).metrics
    assert metrics["policy/clipped_high"] == (1.0, 4.0)
    assert metrics["policy/clipped_low"] == (1.0, 4.0)
    assert metrics["policy/dual_clipped"] == (1.0, 4.0)
    assert metrics["policy/ratio"] == pytest.approx((math.exp(0.5) + math.exp(-0.6) + 1 + math.e, 4.0))
    assert metrics["correction/masked"] == (2.0, 4.0)
    assert metrics["correction/weight"] == pytest.approx((2.0, 4.0))
    truncated = build(correction={"type": "truncated", "high": 2.0})
    metrics = truncated.loss(new, fields_of(advantages, old=old, roll=roll)).metrics
    assert metrics["correction/truncated"] == (1.0, 4.0)
    assert metrics["correction/weight"] == pytest.approx((1 + 1 + 2 + math.exp(-1), 4.0))


def test_a_ratio_out_of_bounds_is_clipped_only_where_it_binds() -> None:
    """The other sign of the advantage pulls the ratio back, so that PPO does not clip it, and does not count it."""
    new, old = f64(-1.0, -2.0), f64(-1.5, -1.4)
    metrics = build().loss(new, fields_of(f64(-1.0, 1.0), old=old)).metrics
    assert metrics["policy/clipped_high"] == metrics["policy/clipped_low"] == (0.0, 2.0)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_logged_kl_is_the_trained_kl(placement: str) -> None:
    """FAILURES 61: one function; the metric is the term that the loss adds, and is there for either placement."""
    estimator = "k3" if placement == "loss" else "k1"
    kl = {"coefficient": 0.5, "estimator": estimator, "placement": placement}
    fields = fields_of(torch.zeros(5).double(), old=NEW, ref=REF, index=INDEX)
    output: LossOutput = build("dapo", kl=kl).loss(NEW, fields)
    total, count = output.metrics["policy/kl"]
    assert count == 5 and total != 0
    assert float(output.per_token_N.sum()) == pytest.approx(0.5 * total if placement == "loss" else 0.0)
    same: LossOutput = build("dapo", kl=kl).loss(REF, fields_of(torch.zeros(5).double(), ref=REF, index=INDEX))
    assert same.metrics["policy/kl"] == (0.0, 5.0), "0 where policy and reference agree (FAILURES 62)"


# -------------------------------------------------------------------------------------------- needs and errors


@pytest.mark.parametrize(
    ("options", "needs", "skips"),
    [
        ({}, AlgorithmNeeds(), True),
        ({"kl": {"coefficient": 0.1}}, AlgorithmNeeds(reference=True), False),
        (
            {"kl": {"coefficient": 0.1, "placement": "reward"}},
            AlgorithmNeeds(reference=True, proximal=True),
            True,
        ),
        ({"entropy_coefficient": 0.01}, AlgorithmNeeds(entropy=True), False),
        ({"correction": {"type": "truncated"}}, AlgorithmNeeds(), True),
        ({"preset": "dro"}, AlgorithmNeeds(), False),
        ({"preset": "kl_cov"}, AlgorithmNeeds(prepare=True), False),
        ({"preset": "clip_cov"}, AlgorithmNeeds(prepare=True), True),
        ({"preset": "m2po"}, AlgorithmNeeds(prepare=True, skips_proximal=True), True),
    ],
    ids=str,
)
def test_needs_follow_from_the_composition(options: dict[str, Any], needs: AlgorithmNeeds, skips: bool) -> None:
    """DESIGN section 8: a backward pass is skipped only where its gradient is provably zero."""
    algorithm = build(**options)
    assert algorithm.needs == needs
    assert algorithm.zero_advantage_means_zero_gradient is skips
    fields = fields_of(torch.zeros(5).double(), old=OLD, roll=ROLL, ref=REF, index=INDEX, entropy=NEW * NEW)
    if not needs.entropy:
        assert bool((gradient(algorithm, NEW, fields) == 0).all()) is skips


def test_missing_fields_are_named() -> None:
    """What an algorithm needs and does not get is an error, never a term left out."""
    with pytest.raises(ValueError, match="reference_logprobs_N"):
        build(kl={"coefficient": 0.1}).loss(NEW, fields_of(ADVANTAGES, index=INDEX))
    with pytest.raises(ValueError, match="entropy_N"):
        build(entropy_coefficient=0.1).loss(NEW, fields_of(ADVANTAGES, index=INDEX))
    with pytest.raises(ValueError, match="without trained tokens"):
        build("dapo").loss(NEW, fields_of(ADVANTAGES, totals=Totals(num_tokens=0, num_episodes=0, max_length=16)))
