"""Off-policy corrections: detached weights for each token, to be multiplied into ``Terms`` (oracle_core.weighted).

rho = pi_old/mu. A weight of 0 rejects the token; denominators stay those of the mask before rejection.
"""

from __future__ import annotations

import math
from dataclasses import replace

from oracle_core import Batch, Mask, Nested, Terms, clip, mean, weighted, zeros
from oracle_objectives import ppo

LOG_BOUND = 20.0


def log_rho(batch: Batch, level: str) -> Nested:
    """log rho for each token: its own ('token'), the sequence's sum ('sequence') or its mean ('geometric');
    clamped to +-20 before exponentiation."""
    out = zeros(batch.mask)
    for i in range(len(batch.mask)):
        tokens = batch.trained(i)
        total = math.fsum(batch.old[i][t] - batch.roll[i][t] for t in tokens)
        for t in tokens:
            own = batch.old[i][t] - batch.roll[i][t]
            x = {"token": own, "sequence": total, "geometric": total / len(tokens)}[level]
            out[i][t] = clip(x, -LOG_BOUND, LOG_BOUND)
    return out


def rho_weights(
    batch: Batch, level: str = "token", mode: str = "cap", low: float = 0.0, high: float = math.inf
) -> Nested:
    """Weights from rho.

    ``cap`` (TIS): min(rho, high). ``mask`` (MIS, IcePop): rho where low <= rho <= high, else 0. ``reject``: 1 inside
    the bounds, else 0 (rejection without importance weighting; for geometric bounds near 1 it hardly differs from
    ``mask``). ``none``: rho itself (decoupled PPO).
    """
    out = zeros(batch.mask)
    logs = log_rho(batch, level)
    for i, t in batch.cells():
        rho = math.exp(logs[i][t])
        inside = low <= rho <= high
        out[i][t] = {
            "none": rho,
            "cap": min(rho, high),
            "mask": rho if inside else 0.0,
            "reject": 1.0 if inside else 0.0,
        }[mode]
    return out


def batch_normalised(weights: Nested, mask: Mask, over: str = "tokens") -> Nested:
    """weights / mean(weights), after cap or mask; rejected tokens (weight 0) count in the mean.

    ``over`` = 'tokens': mean over all trained tokens of the batch. 'sequences': each sequence once (for weights that
    are constant in a sequence, so that long ones do not count more).
    """
    rows = [[w for w, m in zip(*pair, strict=True) if m] for pair in zip(weights, mask, strict=True)]
    values = [w for row in rows for w in row] if over == "tokens" else [row[0] for row in rows if row]
    scale = mean(values)
    return [[w / scale if m else 0.0 for w, m in zip(*pair, strict=True)] for pair in zip(weights, mask, strict=True)]


def veto(batch: Batch, threshold: float = 1e-4) -> Nested:
    """0 for every token of a sequence in which any trained token has rho < threshold, else 1."""
    out = zeros(batch.mask)
    for i in range(len(batch.mask)):
        vetoed = any(math.exp(batch.old[i][t] - batch.roll[i][t]) < threshold for t in batch.trained(i))
        for t in batch.trained(i):
            out[i][t] = 0.0 if vetoed else 1.0
    return out


def opsm_shift(batch: Batch, i: int) -> float:
    """mean_t(log pi_old - log pi) over the trained tokens."""
    return mean([batch.old[i][t] - batch.new[i][t] for t in batch.trained(i)])


def opsm(batch: Batch, delta: float) -> Nested:
    """Off-policy sequence masking (DeepSeek-V3.2 report): 0 for sequences with A < 0 and ``opsm_shift`` > delta."""
    out = zeros(batch.mask)
    for i in range(len(batch.mask)):
        for t in batch.trained(i):
            out[i][t] = 0.0 if batch.sequence_advantage(i) < 0 and opsm_shift(batch, i) > delta else 1.0
    return out


def product(first: Nested, second: Nested) -> Nested:
    """Corrections compose by multiplication."""
    return [[a * b for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]


def decoupled(
    batch: Batch,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = math.inf,
    live: Nested | None = None,
) -> Terms:
    """Decoupled PPO (arXiv 2110.00641; AReaL arXiv 2505.24298 eq. 5): sg(min(rho, cap)) max(-r A, -clip(r) A)."""
    return weighted(ppo(batch, low, high, live=live), rho_weights(batch, mode="cap", high=cap))


def interpolation(v_behaviour: int, v_proximal: int, v_current: int) -> float:
    """alpha = (v_prox - v_b)/(v_theta - v_b). v_theta = v_b: 0, so that the proximal policy is mu (ALGORITHMS.md,
    AReaL; A-3PO's paper takes the current policy there, which is the same weights)."""
    return 0.0 if v_current == v_behaviour else (v_proximal - v_behaviour) / (v_current - v_behaviour)


def interpolated_proximal(batch: Batch, versions: list[list[int]], v_proximal: int, v_current: int) -> Batch:
    """A-3PO (arXiv 2512.06547): log pi_old = log mu + alpha sg(log pi - log mu), alpha from each TOKEN's version."""
    old = zeros(batch.mask)
    for i, t in batch.cells():
        alpha = interpolation(versions[i][t], v_proximal, v_current)
        old[i][t] = batch.roll[i][t] + alpha * (batch.new[i][t] - batch.roll[i][t])
    return replace(batch, old=old)
