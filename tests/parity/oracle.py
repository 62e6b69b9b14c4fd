"""A scalar oracle for losses and advantages: plain Python floats, one token at a time, from the papers' formulas.

Written from ALGORITHMS.md's formulas without the implementation's structure: nested lists ``[episode][token]``, no
tensors, and gradients in closed form. What the papers hold constant (stop-gradient) is held constant by hand.

This file holds the first, unmasked oracle. The whole family, with masks, stands beside it and is reachable from here:
``core`` (batch, aggregation), ``objectives`` (token level), ``sequences`` (sequence level, Clip-Cov, KL-Cov, M2PO),
``advantages``, ``corrections``, ``other_losses`` (KL, entropy, value, streams) and ``presets`` (reward to gradient).
oracle_inputs and oracle_cases define the vectors, oracle_vectors holds their literals, test_oracle tests all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import oracle_advantages as advantages  # noqa: F401
import oracle_core as core  # noqa: F401
import oracle_corrections as corrections  # noqa: F401
import oracle_losses as other_losses  # noqa: F401
import oracle_objectives as objectives  # noqa: F401
import oracle_presets as presets  # noqa: F401
import oracle_sequences as sequences  # noqa: F401

Nested = list[list[float]]


@dataclass(frozen=True)
class Case:
    """Log-probabilities under the policy, the proximal, the behaviour and the reference policy; advantages."""

    new: Nested
    old: Nested
    roll: Nested
    ref: Nested
    advantage: Nested
    max_length: int


# Every branch of every formula binds somewhere: ratios below, inside and above the clip bounds with advantages of
# both signs and 0; rho below, inside and above the correction bounds; episodes of unequal length, one of one token.
CASE = Case(
    new=[[-0.5, -1.0, -2.0, -0.9], [-0.7], [-0.2, -1.7, -0.35], [-2.5, -0.9]],
    old=[[-0.6, -1.5, -1.8, -0.3], [-1.1], [-0.9, -1.2, -0.30], [-0.8, -1.9]],
    roll=[[-0.55, -1.4, -2.9, -0.31], [-1.0], [-0.1, -1.9, -0.33], [-0.9, -1.2]],
    ref=[[-0.4, -1.2, -2.2, -0.9], [-0.9], [-0.3, -0.4, -0.36], [-1.0, -1.5]],
    advantage=[[1.25, 1.25, 1.25, 1.25], [0.5], [-0.75, -0.75, -0.75], [-1.5, -1.5]],
    max_length=6,
)


# ------------------------------------------------------------------------------------------------ policy term


def ratios(case: Case, level: str) -> Nested:
    """Token: pi/pi_old. Sequence: (prod pi/pi_old)^(1/length), the geometric mean, for each token."""
    out: Nested = []
    for new, old in zip(case.new, case.old, strict=True):
        if level == "token":
            out.append([math.exp(a) / math.exp(b) for a, b in zip(new, old, strict=True)])
        else:
            product = math.prod(math.exp(a) / math.exp(b) for a, b in zip(new, old, strict=True))
            out.append([product ** (1 / len(new))] * len(new))
    return out


def policy_token(
    objective: str, r: float, logprob: float, advantage: float, low: float, high: float, dual: float | None
) -> tuple[float, float]:
    """Loss of one token and its derivative by the token's log-probability. ``low`` and ``high`` bound the ratio."""
    if objective == "reinforce":
        return -advantage * logprob, -advantage
    if objective == "cispo":
        weight = low if r < low else high if r > high else r
        return -weight * advantage * logprob, -weight * advantage
    if advantage > 0:  # improve, but not past the upper bound
        value, slope = (-high * advantage, 0.0) if r > high else (-r * advantage, -r * advantage)
    elif advantage < 0:  # worsen, but not past the lower bound; dual clip stops the loss at c|A|
        value, slope = (-low * advantage, 0.0) if r < low else (-r * advantage, -r * advantage)
        if dual is not None and r > dual:
            value, slope = -dual * advantage, 0.0
    else:
        value, slope = 0.0, 0.0
    return value, slope


def correction_weight(kind: str, rho: float, low: float | None, high: float | None) -> float:
    if kind == "none":
        return 1.0
    if kind == "masked":
        return rho if low <= rho <= high else 0.0
    return rho if high is None or rho < high else high


# ---------------------------------------------------------------------------------------------------- KL


def kl_token(estimator: str, logprob: float, reference: float) -> tuple[float, float]:
    """Value and derivative by the policy's log-probability."""
    p_over_q = math.exp(logprob) / math.exp(reference)
    log_ratio = logprob - reference
    if estimator == "k1":
        return log_ratio, 1.0
    if estimator == "k2":
        return log_ratio**2 / 2, log_ratio
    value = 1 / p_over_q - 1 + log_ratio
    return (value, log_ratio) if estimator == "k3+" else (value, 1 - 1 / p_over_q)


# ------------------------------------------------------------------------------------------------- whole loss


def aggregate(values: Nested, how: str, max_length: int) -> float:
    num_tokens = sum(len(v) for v in values)
    if how == "token_sum":
        return math.fsum(math.fsum(v) for v in values)
    if how == "token_mean":
        return math.fsum(math.fsum(v) for v in values) / num_tokens
    if how == "seq_mean_token_mean":
        return math.fsum(math.fsum(v) / len(v) for v in values) / len(values)
    if how == "seq_mean_token_sum":
        return math.fsum(math.fsum(v) for v in values) / len(values)
    if how == "seq_mean_token_sum_norm":
        return math.fsum(math.fsum(v) / max_length for v in values) / len(values)
    raise KeyError(how)


def token_share(case: Case, episode: int, how: str) -> float:
    """What one unit of loss on one token of ``episode`` adds to the aggregated loss."""
    one_hot = [[0.0] * len(v) for v in case.new]
    one_hot[episode][0] = 1.0
    return aggregate(one_hot, how, case.max_length)


def loss_and_gradient(
    case: Case,
    *,
    objective: str,
    level: str = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual: float | None = None,
    correction: tuple[str, float | None, float | None] = ("none", None, None),
    kl: tuple[float, str] = (0.0, "k1"),
    aggregation: str = "token_mean",
) -> tuple[float, Nested]:
    """The minibatch's loss and its derivative by each token's log-probability (the token form for GSPO)."""
    r = ratios(case, level)
    losses: Nested = []
    gradient: Nested = []
    for i, new in enumerate(case.new):
        losses.append([])
        gradient.append([])
        share = token_share(case, i, aggregation)
        for t, logprob in enumerate(new):
            value, slope = policy_token(
                objective, r[i][t], logprob, case.advantage[i][t], 1 - clip_low, 1 + clip_high, dual
            )
            rho = math.exp(case.old[i][t]) / math.exp(case.roll[i][t])
            weight = correction_weight(correction[0], rho, correction[1], correction[2])
            value, slope = weight * value, weight * slope
            if kl[0] > 0:
                kl_value, kl_slope = kl_token(kl[1], logprob, case.ref[i][t])
                value, slope = value + kl[0] * kl_value, slope + kl[0] * kl_slope
            losses[-1].append(value)
            gradient[-1].append(slope * share)
    return aggregate(losses, aggregation, case.max_length), gradient


# ------------------------------------------------------------------------------------------------- advantages


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def unbiased_std(values: list[float]) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def group_normalised(rewards: list[float]) -> list[float]:
    return [(reward - mean(rewards)) / (unbiased_std(rewards) + 1e-6) for reward in rewards]


def group_centred(rewards: list[float]) -> list[float]:
    return [reward - mean(rewards) for reward in rewards]


def leave_one_out(rewards: list[float]) -> list[float]:
    return [reward - mean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]


def reinforce_plus_plus(rewards: list[float], new: Nested, ref: Nested, beta: float) -> Nested:
    """Token reward -beta k1 and R at the last token; undiscounted return; whitened over every token."""
    all_returns: Nested = []
    for reward, policy, reference in zip(rewards, new, ref, strict=True):
        token_rewards = [-beta * (a - b) for a, b in zip(policy, reference, strict=True)]
        token_rewards[-1] += reward
        all_returns.append([math.fsum(token_rewards[t:]) for t in range(len(token_rewards))])
    flat = [g for episode in all_returns for g in episode]
    return [[(g - mean(flat)) / (unbiased_std(flat) + 1e-8) for g in episode] for episode in all_returns]


def overlong(length: int, max_length: int, buffer: int) -> float:
    expected = max_length - buffer
    return 0.0 if length <= expected else max(-1.0, (expected - length) / buffer)
