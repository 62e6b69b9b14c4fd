"""The rest of the family against formulas written out here in scalars, value and gradient, in float64 (I17).

Each case holds tokens on both sides of every bound, advantages of both signs, and episodes of 4, 1, 3 and 2 tokens.
Nested lists are [episode][token]; gradients are by the token's own log-probability, what is detached held constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.algorithms import build_algorithm
from headrace.algorithms.fields import LossOutput, TokenFields, Totals
from headrace.algorithms.objectives import binary_kl
from headrace.algorithms.ratios import interpolated_proximal
from headrace.config.schema import AlgorithmConfig

Nested = list[list[float]]

NEW: Nested = [[-0.5, -1.0, -2.0, -0.9], [-0.7], [-0.2, -1.7, -0.35], [-2.5, -0.9]]
OLD: Nested = [[-0.6, -1.5, -1.8, -0.3], [-1.1], [-0.9, -1.2, -0.30], [-0.8, -1.9]]
ROLL: Nested = [[-0.55, -1.4, -2.9, -0.31], [-1.0], [-0.1, -1.9, -0.33], [-0.9, -1.2]]
REF: Nested = [[-0.4, -1.2, -2.2, -0.9], [-0.9], [-0.3, -0.4, -0.36], [-1.0, -1.5]]
ADVANTAGE: Nested = [[1.25] * 4, [0.5], [-0.75] * 3, [-1.5] * 2]
REWARD: Nested = [[1.0] * 4, [0.0], [-1.0] * 3, [0.0] * 2]
AGES: Nested = [[0, 0, 1, 1], [2], [0, 1, 3], [5, 0]]
LENGTHS = [len(v) for v in NEW]
NUM_TOKENS = sum(LENGTHS)


def flat(nested: Nested) -> torch.Tensor:
    return torch.tensor([v for inner in nested for v in inner], dtype=torch.float64)


def ours(**config: Any) -> tuple[float, list[float]]:
    """Loss (token sum) and gradient."""
    algorithm = build_algorithm(
        AlgorithmConfig.model_validate({"aggregation": "token_sum", **config}), asynchronous=False, max_new_tokens=6
    )
    logprobs_N = flat(NEW).requires_grad_()
    fields = TokenFields(
        advantages_N=flat(ADVANTAGE),
        behaviour_logprobs_N=flat(ROLL),
        proximal_logprobs_N=flat(OLD),
        reference_logprobs_N=flat(REF),
        weights_N=torch.ones(NUM_TOKENS, dtype=torch.float64),
        episode_index_N=torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)),
        num_episodes=4,
        totals=Totals(num_tokens=NUM_TOKENS, num_episodes=4, max_length=6),
        rewards_N=flat(REWARD),
        ages_N=flat(AGES).long(),
    )
    output: LossOutput = algorithm.loss(logprobs_N, fields)
    loss = output.per_token_N.sum() / output.denominator
    loss.backward()
    assert logprobs_N.grad is not None
    return loss.item(), logprobs_N.grad.tolist()


TokenRule = Callable[[int, int], tuple[float, float]]
"""(episode, token) -> loss and slope."""


def check(rule: TokenRule, **config: Any) -> None:
    pairs = [rule(i, t) for i in range(4) for t in range(LENGTHS[i])]
    loss, gradient = ours(**config)
    assert loss == pytest.approx(math.fsum(value for value, _ in pairs), rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx([slope for _, slope in pairs], rel=1e-12, abs=1e-12)


def gap(i: int, anchor: Nested) -> list[float]:
    return [a - b for a, b in zip(NEW[i], anchor[i], strict=True)]


# ------------------------------------------------------------------------------------------------- objectives


@pytest.mark.parametrize("low_high", [(0.4, 0.4), (0.15, 0.3)])
def test_gmpo(low_high: tuple[float, float]) -> None:
    """GMPO: geometric mean of ratios clipped in log space on the side that the advantage pulls to."""
    low, high = low_high

    def rule(i: int, t: int) -> tuple[float, float]:
        advantage = ADVANTAGE[i][0]
        bounded = [min(d, high) if advantage > 0 else max(d, -low) for d in gap(i, OLD)]
        share = -advantage * math.exp(math.fsum(bounded) / LENGTHS[i]) / (4 * LENGTHS[i])  # of the mean over 4 episodes
        return share, share if bounded[t] == gap(i, OLD)[t] else 0.0

    check(rule, preset="gmpo", clip_low=low, clip_high=high, aggregation="seq_mean_token_mean")


def test_sapo() -> None:
    """SAPO: derivative of the gate is tau * s * (1 - s) * r, times 4 / tau."""

    def rule(i: int, t: int) -> tuple[float, float]:
        advantage, r = ADVANTAGE[i][t], math.exp(gap(i, OLD)[t])
        tau = 0.7 if advantage > 0 else 1.9
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * r * advantage

    check(rule, preset="sapo", temperature_positive=0.7, temperature_negative=1.9)


def test_ratio() -> None:
    """-r A, to the proximal and to the behaviour policy."""
    for anchor, nested in (("proximal", OLD), ("behaviour", ROLL)):

        def rule(i: int, t: int, nested: Nested = nested) -> tuple[float, float]:
            value = -math.exp(gap(i, nested)[t]) * ADVANTAGE[i][t]
            return value, value

        check(rule, objective="ratio", ratio_anchor=anchor)


def test_ppo_to_the_behaviour_policy() -> None:
    """The anchor is a knob of every objective with a ratio: PPO clipped against the policy that sampled."""

    def rule(i: int, t: int) -> tuple[float, float]:
        advantage, r = ADVANTAGE[i][t], math.exp(gap(i, ROLL)[t])
        bounded = min(r, 1.2) if advantage > 0 else max(r, 0.8)
        return -bounded * advantage, -r * advantage if bounded == r else 0.0

    check(rule, preset="grpo", ratio_anchor="behaviour")


@pytest.mark.parametrize("preset", ["tis_pg", "aipo"])
def test_truncated_policy_gradients(preset: str) -> None:
    """TIS-PG: -sg(min(r, 1)) A l to the proximal policy; AIPO: -sg(min(r, 1.4)) A l to the behaviour policy."""
    anchor, cap = (OLD, 1.0) if preset == "tis_pg" else (ROLL, 1.4)

    def rule(i: int, t: int) -> tuple[float, float]:
        weight = min(math.exp(gap(i, anchor)[t]), cap)
        return -weight * ADVANTAGE[i][t] * NEW[i][t], -weight * ADVANTAGE[i][t]

    check(rule, preset=preset, **({} if preset == "tis_pg" else {"clip_high": 0.4}))


@pytest.mark.parametrize("level", ["trajectory", "token", "sequence"])
def test_topr(level: str) -> None:
    """TOPR: right episodes untapered, all others by min(r, 1) of the trajectory to the behaviour policy."""

    def rule(i: int, t: int) -> tuple[float, float]:
        logs = gap(i, ROLL)
        log = {"trajectory": math.fsum(logs), "token": logs[t], "sequence": math.fsum(logs) / len(logs)}[level]
        weight = 1.0 if REWARD[i][t] > 0 else min(math.exp(log), 1.0)
        return -weight * ADVANTAGE[i][t] * NEW[i][t], -weight * ADVANTAGE[i][t]

    check(rule, preset="topr", ratio_level=level)
    sums = [math.fsum(gap(i, ROLL)) for i in range(4) if REWARD[i][0] <= 0]
    assert min(sums) < 0 < max(sums), "the taper binds on one episode and not on another"


def test_dppo_tv() -> None:
    """DPPO-TV: unequal bounds and a cap that all bind."""

    def rule(i: int, t: int) -> tuple[float, float]:
        advantage = ADVANTAGE[i][t]
        moved = math.exp(NEW[i][t]) - math.exp(ROLL[i][t])
        if moved > 0.06 if advantage > 0 else moved < -0.2:
            return 0.0, 0.0
        weight = min(math.exp(gap(i, ROLL)[t]), 1.3)
        return -weight * advantage * NEW[i][t], -weight * advantage

    check(rule, preset="dppo_tv", trust_high=0.06, trust_low=0.2, ratio_cap=1.3)


def scalar_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def test_dppo_kl() -> None:
    """DPPO-KL: a token that moved far is dropped where A would move it further, and kept where it moves back."""
    seen = set()

    def rule(i: int, t: int) -> tuple[float, float]:
        advantage, mu, pi = ADVANTAGE[i][t], math.exp(ROLL[i][t]), math.exp(NEW[i][t])
        away = pi > mu if advantage > 0 else pi < mu
        is_far = scalar_kl(mu, pi) > (0.03 if advantage > 0 else 0.02)
        seen.add((away, is_far, advantage > 0))
        if away and is_far:
            return 0.0, 0.0
        weight = min(pi / mu, 1.3)
        return -weight * advantage * NEW[i][t], -weight * advantage

    check(rule, preset="dppo_kl", trust_high=0.03, trust_low=0.02, ratio_cap=1.3)
    assert seen >= {(True, True, True), (True, True, False), (False, True, True), (True, False, True)}


def test_binary_kl_of_certain_tokens() -> None:
    """0 for two certain tokens, -log pi where mu alone is certain, inf where pi alone is, and no NaN; rounding above
    log 1 does not matter."""
    anchor = torch.tensor([0.0, 0.0, -1.0, 1e-7, -1.0], dtype=torch.float64)
    logprobs = torch.tensor([0.0, -0.5, 0.0, -0.5, -1.0], dtype=torch.float64)
    assert binary_kl(anchor, logprobs).tolist() == [0.0, 0.5, math.inf, 0.5, 0.0]
    mu, pi = math.exp(-0.3), math.exp(-0.9)
    value = float(binary_kl(torch.tensor([-0.3]).double(), torch.tensor([-0.9]).double()))
    assert value == pytest.approx(scalar_kl(mu, pi), rel=1e-6)


@pytest.mark.parametrize("preset", ["dro", "kimi"])
def test_quadratic(preset: str) -> None:
    """DRO and Kimi: the square is of the episode's summed log-ratio; gradient -A + beta S, mean over 4 episodes."""

    def rule(i: int, t: int) -> tuple[float, float]:
        total = math.fsum(gap(i, OLD))
        value = -ADVANTAGE[i][t] * NEW[i][t] + (0.5 * 0.3 * total**2 if t == 0 else 0.0)
        return value / 4, (-ADVANTAGE[i][t] + 0.3 * total) / 4

    check(rule, preset=preset, penalty=0.3, aggregation="seq_mean_token_sum")


def test_trajectory_ratio_in_ppo() -> None:
    """The product of the token ratios, each token with its own gradient (token form)."""

    def rule(i: int, t: int) -> tuple[float, float]:
        r, advantage = math.exp(math.fsum(gap(i, OLD))), ADVANTAGE[i][t]
        bounded = min(r, 1.2) if advantage > 0 else max(r, 0.8)
        return -bounded * advantage, -r * advantage if bounded == r else 0.0

    check(rule, objective="ppo", ratio_level="trajectory")


# ------------------------------------------------------------------------------------------------ corrections


def policy_gradient(i: int, t: int, weight: float) -> tuple[float, float]:
    return -weight * ADVANTAGE[i][t] * NEW[i][t], -weight * ADVANTAGE[i][t]


def rho_logs(i: int) -> list[float]:
    return [a - b for a, b in zip(OLD[i], ROLL[i], strict=True)]


@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncated", "masked", "decoupled"])
def test_weights_of_whole_episodes(kind: str, level: str) -> None:
    """Sequence: exp of the sum; geometric: exp of the mean; each with every kind of bound."""
    low, high = 0.9, 1.1

    def rule(i: int, t: int) -> tuple[float, float]:
        total = math.fsum(rho_logs(i))
        rho = math.exp(total if level == "sequence" else total / LENGTHS[i])
        weight = {"truncated": min(rho, high), "masked": rho * (low <= rho <= high), "decoupled": rho}[kind]
        return policy_gradient(i, t, weight)

    bounds = {"truncated": {"high": high}, "masked": {"low": low, "high": high}, "decoupled": {}}[kind]
    check(rule, objective="reinforce", correction={"type": kind, "level": level, **bounds})
    sums = [math.fsum(rho_logs(i)) for i in range(4)]
    assert min(sums) < math.log(low) and max(sums) > math.log(high)


@pytest.mark.parametrize("kind", ["none", "decoupled", "masked"])
def test_veto(kind: str) -> None:
    """One token with rho below the bound rejects its whole episode, also without any weight."""

    def rule(i: int, t: int) -> tuple[float, float]:
        is_vetoed = min(rho_logs(i)) < math.log(0.6)
        rho = 1.0 if kind == "none" else math.exp(rho_logs(i)[t])
        is_out = kind == "masked" and not 0.92 <= rho <= 1.5
        return policy_gradient(i, t, 0.0 if is_vetoed or is_out else rho)

    band = {"low": 0.92, "high": 1.5} if kind == "masked" else {}
    check(rule, objective="reinforce", correction={"type": kind, "veto": 0.6, **band})
    assert sorted(min(rho_logs(i)) < math.log(0.6) for i in range(4)) == [False, False, True, True]


@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_off_policy_sequence_masking(anchor: str) -> None:
    """Rejects tokens with A < 0 of episodes whose mean(lo - l) is above the bound; lo is the ratio's anchor."""
    nested = OLD if anchor == "proximal" else ROLL
    bound = 0.1 if anchor == "proximal" else 0.0

    def rule(i: int, t: int) -> tuple[float, float]:
        is_off = ADVANTAGE[i][t] < 0 and -math.fsum(gap(i, nested)) / LENGTHS[i] > bound
        value = -math.exp(gap(i, nested)[t]) * ADVANTAGE[i][t] * (not is_off)
        return value, value

    check(rule, objective="ratio", ratio_anchor=anchor, correction={"max_drift": bound})
    drifts = [-math.fsum(gap(i, nested)) / LENGTHS[i] for i in (2, 3)]
    assert min(drifts) <= bound < max(drifts)


def test_interpolated_proximal_policy() -> None:
    """A-3PO: lo = lb + age / (age + 1) * (l - lb), held constant; both the ratio and rho use it."""

    def rule(i: int, t: int) -> tuple[float, float]:
        alpha = AGES[i][t] / (AGES[i][t] + 1)
        middle = ROLL[i][t] + alpha * (NEW[i][t] - ROLL[i][t])
        r, rho, advantage = math.exp(NEW[i][t] - middle), math.exp(middle - ROLL[i][t]), ADVANTAGE[i][t]
        bounded = min(r, 1.2) if advantage > 0 else max(r, 0.8)
        return -min(rho, 1.5) * bounded * advantage, -min(rho, 1.5) * r * advantage if bounded == r else 0.0

    check(rule, correction={"type": "truncated", "high": 1.5, "proximal": "interpolated"})


def test_interpolation_over_versions() -> None:
    """A-3PO: alpha = (v_prox - v_b) / (v - v_b); the token that the current version sampled takes lb."""
    logprobs, behaviour = torch.full((4,), -1.0), torch.full((4,), -3.0)
    versions = torch.tensor([9, 8, 6, 4])
    proximal = interpolated_proximal(logprobs.requires_grad_(), behaviour, versions, 8, 9)
    assert not proximal.requires_grad, "held constant"
    found = proximal.tolist()
    assert found == pytest.approx([-3.0, -3.0, -3.0 + 2 / 3 * 2, -3.0 + 4 / 5 * 2])


# --------------------------------------------------------------------------------------------------------- KL


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("anchor", ["proximal", "behaviour"])
def test_unbiased_kl(estimator: str, anchor: str) -> None:
    """V3.2: times exp(l - lo) with its gradient: slope r * (k + k')."""
    nested = OLD if anchor == "proximal" else ROLL

    def rule(i: int, t: int) -> tuple[float, float]:
        d, r = gap(i, REF)[t], math.exp(gap(i, nested)[t])
        kl, slope = (d, 1.0) if estimator == "k1" else (math.exp(-d) - 1 + d, 1 - math.exp(-d))
        policy = -r * ADVANTAGE[i][t]
        return policy + 0.3 * r * kl, policy + 0.3 * r * (kl + slope)

    kl_config = {"coefficient": 0.3, "estimator": estimator, "unbiased": True}
    check(rule, objective="ratio", ratio_anchor=anchor, kl=kl_config)


def test_unbiased_kl_has_the_gradient_of_the_kl_off_policy() -> None:
    """FAILURES 60: exact expectation over three tokens that another policy mu samples."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64).requires_grad_()
    log_mu = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    log_q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    log_p = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits, retain_graph=True)
    for estimator in ("k1", "k3"):
        config = {"kl": {"coefficient": 1.0, "estimator": estimator, "unbiased": True}, "aggregation": "token_sum"}
        algorithm = build_algorithm(AlgorithmConfig.model_validate(config), asynchronous=False, max_new_tokens=6)
        zeros = torch.zeros(3, dtype=torch.float64)
        fields = TokenFields(
            advantages_N=zeros,
            behaviour_logprobs_N=log_mu,
            proximal_logprobs_N=log_mu,
            reference_logprobs_N=log_q,
            weights_N=log_mu.exp(),  # the expectation
            episode_index_N=zeros.long(),
            num_episodes=1,
            totals=Totals(num_tokens=3, num_episodes=1, max_length=6),
        )
        (found,) = torch.autograd.grad(algorithm.loss(log_p, fields).per_token_N.sum(), logits, retain_graph=True)
        assert found.tolist() == pytest.approx(exact.tolist(), abs=1e-12), estimator


def test_kl_with_its_own_aggregation() -> None:
    """The KL term over 10 tokens beside the policy term over 4 episodes, as one number over one denominator."""

    def rule(i: int, t: int) -> tuple[float, float]:
        policy = -math.exp(gap(i, OLD)[t]) * ADVANTAGE[i][t] / 4
        d = gap(i, REF)[t]
        return policy + 0.3 * d**2 / 2 / NUM_TOKENS, policy + 0.3 * d / NUM_TOKENS

    kl_config = {"coefficient": 0.3, "estimator": "k2", "aggregation": "token_mean"}
    check(rule, objective="ratio", aggregation="seq_mean_token_sum", kl=kl_config)
