"""Objectives that look at whole sequences or at the whole batch: GSPO, GMPO, DRO, Kimi, Clip-Cov, KL-Cov, M2PO.

Legend and the meaning of ``live``: see oracle_core. Lengths count trained tokens only.
"""

from __future__ import annotations

import math

from oracle_core import Batch, Nested, SequenceTerms, Terms, clip, mean, per_token, zeros
from oracle_objectives import ppo, surrogate


def sequence_ratios(batch: Batch, log_cap: float | None = None, live: Nested | None = None) -> list[float]:
    """GSPO's s_i = exp(mean_t(log pi - log pi_old)), arXiv 2507.18071 eq. 7; verl caps the logarithm at 10."""
    new = live or batch.new
    out = []
    for i in range(len(batch.mask)):
        log_s = mean([new[i][t] - batch.old[i][t] for t in batch.trained(i)]) if batch.trained(i) else 0.0
        out.append(math.exp(log_s if log_cap is None else min(log_s, log_cap)))
    return out


def gspo(
    batch: Batch, low: float = 3e-4, high: float = 4e-4, log_cap: float | None = None, live: Nested | None = None
) -> Terms:
    """GSPO in its token form (arXiv 2507.18071 eq. 14): s_it = sg(s_i) exp(log pi - sg log pi);
    max(-s_it A, -clip(s_it, 1-low, 1+high) A). Slope: -s_i A, 0 where clipped or where ``log_cap`` binds."""
    new = live or batch.new
    s = sequence_ratios(batch)

    def term(i: int, t: int) -> tuple[float, float]:
        advantage = batch.advantage[i][t]
        log_s_t = math.log(s[i]) + new[i][t] - batch.new[i][t]
        capped = log_cap is not None and log_s_t > log_cap
        s_t = math.exp(log_cap) if log_cap is not None and capped else math.exp(log_s_t)
        value, slope = -s_t * advantage, 0.0 if capped else -s_t * advantage
        clipped = -clip(s_t, 1 - low, 1 + high) * advantage
        return (clipped, 0.0) if clipped > value else (value, slope)

    return per_token(batch, term)


def gspo_sequence(batch: Batch, low: float = 3e-4, high: float = 4e-4, live: Nested | None = None) -> SequenceTerms:
    """GSPO as first written (eq. 5): one clipped term a sequence; d s_i / d log pi_t = s_i / length. Its mean over
    sequences has the loss and the gradient of the token form under seq_mean_token_mean."""
    s = sequence_ratios(batch, live=live)
    value, slope = [0.0] * len(batch.mask), zeros(batch.mask)
    for i in range(len(batch.mask)):
        if not batch.trained(i):
            continue
        advantage = batch.sequence_advantage(i)
        value[i] = max(-s[i] * advantage, -clip(s[i], 1 - low, 1 + high) * advantage)
        if value[i] == -s[i] * advantage:
            for t in batch.trained(i):
                slope[i][t] = -s[i] * advantage / len(batch.trained(i))
    return SequenceTerms(value, slope)


def gmpo(batch: Batch, low: float = 0.4, high: float = 0.4, live: Nested | None = None) -> SequenceTerms:
    """GMPO, arXiv 2507.20673 eq. 4: -A exp(mean_t g), d = log r, g = sign(A) min(sign(A) d, sign(A) clip(d,-low,high)).

    ``low`` and ``high`` are bounds of the LOG ratio. Slope: -A exp(mean g) / length where the token is not clipped.
    """
    new = live or batch.new
    value, slope = [0.0] * len(batch.mask), zeros(batch.mask)
    for i in range(len(batch.mask)):
        tokens = batch.trained(i)
        if not tokens or batch.sequence_advantage(i) == 0:
            continue
        advantage = batch.sequence_advantage(i)
        sign = math.copysign(1.0, advantage)
        d = {t: new[i][t] - batch.old[i][t] for t in tokens}
        is_free = {t: sign * d[t] <= sign * clip(d[t], -low, high) for t in tokens}
        geometric = math.exp(mean([d[t] if is_free[t] else clip(d[t], -low, high) for t in tokens]))
        value[i] = -advantage * geometric
        for t in tokens:
            slope[i][t] = -advantage * geometric / len(tokens) if is_free[t] else 0.0
    return SequenceTerms(value, slope)


def squared_sequence(batch: Batch, strength: float, live: Nested | None = None) -> SequenceTerms:
    """-A sum_t log pi + strength/2 (sum_t (log pi - log pi_old))^2: the square is of the SUM."""
    new = live or batch.new
    value, slope = [0.0] * len(batch.mask), zeros(batch.mask)
    for i in range(len(batch.mask)):
        tokens = batch.trained(i)
        if not tokens:
            continue
        advantage = batch.sequence_advantage(i)
        shift = math.fsum(new[i][t] - batch.old[i][t] for t in tokens)
        value[i] = -advantage * math.fsum(new[i][t] for t in tokens) + 0.5 * strength * shift**2
        for t in tokens:
            slope[i][t] = -advantage + strength * shift
    return SequenceTerms(value, slope)


def dro(batch: Batch, beta: float = 0.1, live: Nested | None = None) -> SequenceTerms:
    """DRO (arXiv 2405.19107, policy part): -(A sum log pi - beta/2 (sum log r)^2), mean over sequences."""
    return squared_sequence(batch, beta, live)


def kimi(batch: Batch, tau: float = 0.2, live: Nested | None = None) -> SequenceTerms:
    """Kimi k1.5, arXiv 2501.12599 eq. 3: -A sum log pi + tau/2 (sum log r)^2, mean over sequences."""
    return squared_sequence(batch, tau, live)


# ------------------------------------------------------------------------------------- batch-wide selections


def covariances(batch: Batch) -> dict[tuple[int, int], float]:
    """arXiv 2505.22617 eq. 10: (log pi - mean log pi)(A - mean A), means over all trained tokens of the batch."""
    mean_logprob = mean([batch.new[i][t] for i, t in batch.cells()])
    mean_advantage = mean([batch.advantage[i][t] for i, t in batch.cells()])
    return {
        (i, t): (batch.new[i][t] - mean_logprob) * (batch.advantage[i][t] - mean_advantage) for i, t in batch.cells()
    }


def is_clipped(batch: Batch, i: int, t: int, low: float, high: float) -> bool:
    """True where PPO's clip takes the gradient away."""
    r, advantage = math.exp(batch.new[i][t] - batch.old[i][t]), batch.advantage[i][t]
    return (advantage > 0 and r > 1 + high) or (advantage < 0 and r < 1 - low)


def clip_cov_candidates(
    batch: Batch, cov_low: float = 1.0, cov_high: float = 5.0, low: float = 0.2, high: float = 0.2
) -> list[tuple[int, int]]:
    """Tokens with covariance strictly inside (cov_low, cov_high) that PPO has not already clipped."""
    return [
        cell
        for cell, cov in covariances(batch).items()
        if cov_low < cov < cov_high and not is_clipped(batch, *cell, low, high)
    ]


def num_selected(batch: Batch, ratio: float) -> int:
    """How many tokens Clip-Cov and KL-Cov select: floor(ratio * trained tokens), at least 1."""
    return max(1, math.floor(ratio * len(batch.cells())))


def clip_cov(
    batch: Batch, chosen: list[tuple[int, int]], low: float = 0.2, high: float = 0.2, live: Nested | None = None
) -> Terms:
    """Clip-Cov (arXiv 2505.22617 eq. 11, with PPO's clip as in its code): loss and gradient of ``chosen`` become 0.

    ``chosen`` is a random subset of ``clip_cov_candidates`` of size min(num_selected, candidates); the draw belongs to
    the caller. The tokens stay in the denominator.
    """
    base = ppo(batch, low, high, live=live)
    return per_token(batch, lambda i, t: (0.0, 0.0) if (i, t) in chosen else (base.value[i][t], base.slope[i][t]))


def kl_cov(batch: Batch, ratio: float = 2e-4, coefficient: float = 1.0, live: Nested | None = None) -> Terms:
    """KL-Cov (arXiv 2505.22617 eq. 13): -r A, and on the top tokens by covariance + coefficient |log r|.

    Choice (paper and its code): no ratio clip underneath. Slope of the penalty: coefficient * sign(log r).
    """
    new = live or batch.new
    base = surrogate(batch, live)
    ranked = sorted(covariances(batch).items(), key=lambda item: -item[1])
    top = {cell for cell, _ in ranked[: num_selected(batch, ratio)]}

    def term(i: int, t: int) -> tuple[float, float]:
        log_r = new[i][t] - batch.old[i][t]
        penalised = (i, t) in top
        value = base.value[i][t] + (coefficient * abs(log_r) if penalised else 0.0)
        return value, base.slope[i][t] + (coefficient * math.copysign(1.0, log_r) if penalised else 0.0)

    return per_token(batch, term)


def m2po_keep(batch: Batch, tau: float) -> list[list[int]]:
    """M2PO's mask (arXiv 2510.01161): drop the token with the largest (log pi - log mu)^2 until the mean of those
    that remain is <= tau. The mean is over all trained tokens of the batch."""
    second = {(i, t): (batch.new[i][t] - batch.roll[i][t]) ** 2 for i, t in batch.cells()}
    kept = sorted(second, key=lambda cell: -second[cell])
    while kept and mean([second[cell] for cell in kept]) > tau:
        kept = kept[1:]
    return [[int((i, t) in kept) for t in range(len(row))] for i, row in enumerate(batch.mask)]


def m2po(batch: Batch, tau: float = 0.04, behaviour: bool = True, live: Nested | None = None) -> Terms:
    """M2PO: -(pi/mu) A on the kept tokens, no ratio clip; dropped tokens stay in the denominator.

    Choice: the paper's ratio is pi/mu (``behaviour``); with ``behaviour=False`` it is pi/pi_old.
    """
    new = live or batch.new
    keep = m2po_keep(batch, tau)
    base = batch.roll if behaviour else batch.old

    def term(i: int, t: int) -> tuple[float, float]:
        value = -math.exp(new[i][t] - base[i][t]) * batch.advantage[i][t] if keep[i][t] else 0.0
        return value, value

    return per_token(batch, term)
