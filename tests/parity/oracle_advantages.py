"""Advantage estimators. Sequence estimators take the rewards of ONE group; token estimators take nested lists."""

from __future__ import annotations

import math

from oracle_core import Mask, Nested, mean, zeros


def std(values: list[float], unbiased: bool = True) -> float:
    """Two passes: deviations from the mean first (FAILURES.md 49)."""
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - (1 if unbiased else 0)))


def group_mean_std(rewards: list[float], unbiased: bool = True, delta: float = 1e-6) -> list[float]:
    """GRPO, arXiv 2402.03300: (R - mean) / (std + delta). Equal rewards: exactly 0. One member: mean 0, std 1 (verl),
    so A = R / (1 + delta)."""
    if len(rewards) == 1:
        return [rewards[0] / (1 + delta)]
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    scale = std(rewards, unbiased) + delta
    return [(r - mean(rewards)) / scale for r in rewards]


def group_mean(rewards: list[float]) -> list[float]:
    """Dr.GRPO, arXiv 2503.20783: R - mean. One member: mean 0, so A = R (the convention above)."""
    return list(rewards) if len(rewards) == 1 else [r - mean(rewards) for r in rewards]


def rloo(rewards: list[float]) -> list[float]:
    """RLOO, arXiv 2402.14740 eq. 8: (n R - sum R) / (n - 1). One member: no baseline, A = R."""
    n = len(rewards)
    return list(rewards) if n == 1 else [(n * r - math.fsum(rewards)) / (n - 1) for r in rewards]


def opo(rewards: list[float], lengths: list[int]) -> list[float]:
    """OPO, arXiv 2505.23585: baseline = sum L R / sum L over the group; L counts trained tokens."""
    baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


def maxrl(rewards: list[float]) -> list[float]:
    """MaxRL: (R - mean) / mean; mean 0 means no signal, A = 0. A negative mean would flip every sign (FAILURES.md 66):
    the formula is for rewards >= 0, so it is refused."""
    centre = mean(rewards)
    if centre < 0:
        raise ValueError("MaxRL needs rewards with a mean >= 0")
    return [0.0] * len(rewards) if centre == 0 else [(r - centre) / centre for r in rewards]


def broadcast(sequence_values: list[float], mask: Mask) -> Nested:
    """One value for all trained tokens of a sequence; 0 elsewhere."""
    return [[v if m else 0.0 for m in row] for v, row in zip(sequence_values, mask, strict=True)]


def whiten(values: Nested, mask: Mask, unbiased: bool = True, delta: float = 0.0) -> Nested:
    """(v - mean) / (std + delta) over all trained tokens of the rollout batch.

    REINFORCE++ (arXiv 2501.03262) has no delta; where an implementation adds one it shows at ~delta/std.
    """
    flat = [v for row, marks in zip(values, mask, strict=True) for v, m in zip(row, marks, strict=True) if m]
    centre, scale = mean(flat), std(flat, unbiased) + delta
    return [
        [(v - centre) / scale if m else 0.0 for v, m in zip(row, marks, strict=True)]
        for row, marks in zip(values, mask, strict=True)
    ]


def token_rewards(
    rewards: list[float], policy: Nested, ref: Nested, mask: Mask, beta: float, estimator: str = "k1"
) -> Nested:
    """-beta * KL estimate at every trained token, and the sequence's reward at its LAST TRAINED token."""
    out = zeros(mask)
    for i, row in enumerate(mask):
        tokens = [t for t, m in enumerate(row) if m]
        for t in tokens:
            x = policy[i][t] - ref[i][t]
            out[i][t] = -beta * {"k1": x, "k2": x**2 / 2, "k3": math.exp(-x) - 1 + x}[estimator]
        if tokens:
            out[i][tokens[-1]] += rewards[i]
    return out


def returns_to_go(rewards: Nested, mask: Mask, gamma: float = 1.0) -> Nested:
    """G_t = r_t + gamma G_next, where next is the next TRAINED token: masked tokens neither discount nor pay."""
    out = zeros(mask)
    for i, row in enumerate(mask):
        following = 0.0
        for t in reversed([t for t, m in enumerate(row) if m]):
            following = rewards[i][t] + gamma * following
            out[i][t] = following
    return out


def reinforce_pp(
    rewards: list[float],
    policy: Nested,
    ref: Nested,
    mask: Mask,
    beta: float,
    gamma: float = 1.0,
    delta: float = 0.0,
) -> Nested:
    """REINFORCE++, arXiv 2501.03262 eq. 8-10: returns of the KL-penalised token rewards, whitened over the batch.

    ``policy`` is the policy at the start of the step (pi_old): advantages do not change between minibatches.
    """
    return whiten(returns_to_go(token_rewards(rewards, policy, ref, mask, beta), mask, gamma), mask, delta=delta)


def reinforce_pp_baseline(groups: list[list[float]], mask: Mask, delta: float = 0.0) -> Nested:
    """REINFORCE++-baseline: R - group mean, broadcast to the tokens, whitened over all trained tokens of the batch.
    ``groups`` are the rewards group by group; their members are the sequences of ``mask`` in order."""
    return whiten(broadcast([a for rewards in groups for a in group_mean(rewards)], mask), mask, delta=delta)


def remax(
    rewards: list[float],
    greedy: list[float],
    policy: Nested,
    ref: Nested,
    mask: Mask,
    beta: float = 0.0,
) -> Nested:
    """ReMax, arXiv 2310.10505: undiscounted return-to-go (with the KL penalty, if any) minus the greedy reply's R."""
    returns = returns_to_go(token_rewards(rewards, policy, ref, mask, beta), mask)
    return [
        [g - base if m else 0.0 for g, m in zip(row, marks, strict=True)]
        for row, marks, base in zip(returns, mask, greedy, strict=True)
    ]


def gae(
    rewards: list[float],
    values: list[float],
    mask: list[int],
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: float = 0.0,
) -> tuple[list[float], list[float]]:
    """GAE (arXiv 1506.02438 eq. 16) of one sequence; masked tokens are skipped.

    The trained token before a gap sees the value of the trained token after it; values, rewards and discounts of
    masked tokens do not exist. ``bootstrap`` is the value after the last trained token: 0 at an end. Returns advantages
    and value targets A + V, both 0 where masked.
    """
    advantages, targets = [0.0] * len(mask), [0.0] * len(mask)
    next_value, next_advantage = bootstrap, 0.0
    for t in reversed([t for t, m in enumerate(mask) if m]):
        surprise = rewards[t] + gamma * next_value - values[t]
        next_advantage = surprise + gamma * lam * next_advantage
        next_value = values[t]
        advantages[t], targets[t] = next_advantage, next_advantage + values[t]
    return advantages, targets


def overlong_shaping(length: int, max_length: int, buffer: int) -> float:
    """DAPO, arXiv 2503.14476 eq. 13: 0 up to max_length - buffer; falls linearly to -1 at max_length; -1 beyond."""
    if length <= max_length - buffer:
        return 0.0
    return (max_length - buffer - length) / buffer if length <= max_length else -1.0


def has_signal(accuracies: list[float]) -> bool:
    """DAPO's dynamic sampling keeps a group with 0 < mean accuracy < 1 (eq. 11)."""
    return 0 < mean(accuracies) < 1
