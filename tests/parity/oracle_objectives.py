"""Token-level objectives of ALGORITHMS.md, one small function each: ``f(batch, ..., live=None) -> Terms``.

Legend: r = pi/pi_old, A = advantage, sg = stop-gradient, mu = behaviour policy. Losses are minimised. The slope is the
derivative of the token's loss by its current log-probability: d r / d log pi = r.
"""

from __future__ import annotations

import math

from oracle_core import Batch, Nested, Terms, clip, per_token


def ppo(
    batch: Batch, low: float = 0.2, high: float = 0.2, dual: float | None = None, live: Nested | None = None
) -> Terms:
    """Clipped surrogate, arXiv 1707.06347 eq. 7: max(-r A, -clip(r, 1-low, 1+high) A).

    ``dual`` = c > 1 is dual clip, arXiv 1912.09729 eq. 5: for A < 0 the loss is at most -c A. GRPO, Dr.GRPO, DAPO and
    BNPO use this term; they differ in advantage, bounds and aggregation (oracle_presets).
    """
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        advantage = batch.advantage[i][t]
        r = math.exp(new[i][t] - batch.old[i][t])
        value, slope = -r * advantage, -r * advantage
        clipped = -clip(r, 1 - low, 1 + high) * advantage
        if clipped > value:
            value, slope = clipped, 0.0
        if dual is not None and advantage < 0 and value > -dual * advantage:
            value, slope = -dual * advantage, 0.0
        return value, slope

    return per_token(batch, term)


def surrogate(batch: Batch, live: Nested | None = None) -> Terms:
    """The importance-weighted surrogate without any clip: -r A (KL-Cov and M2PO start from it)."""
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        value = -math.exp(new[i][t] - batch.old[i][t]) * batch.advantage[i][t]
        return value, value

    return per_token(batch, term)


def reinforce(batch: Batch, live: Nested | None = None) -> Terms:
    """REINFORCE (Williams 1992): -A log pi. RLOO, ReMax, OPO, MaxRL and REINFORCE++ put their own A into it."""
    new = live or batch.new
    return per_token(batch, lambda i, t: (-batch.advantage[i][t] * new[i][t], -batch.advantage[i][t]))


def cispo(batch: Batch, low: float | None = 0.2, high: float = 0.28, live: Nested | None = None) -> Terms:
    """CISPO, arXiv 2506.13585 eq. 4-5: -sg(clip(r, 1-low, 1+high)) A log pi. The clipped token keeps its gradient.

    ``low=None`` switches the lower bound off, as in the paper's experiments. ``high`` is an offset from 1, never the
    bound itself (TRL takes the bound).
    """
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        r = math.exp(batch.new[i][t] - batch.old[i][t])
        weight = clip(r, 0.0 if low is None else 1 - low, 1 + high)
        return -weight * batch.advantage[i][t] * new[i][t], -weight * batch.advantage[i][t]

    return per_token(batch, term)


def truncated_pg(batch: Batch, live: Nested | None = None) -> Terms:
    """TIS-PG (ROLL): -sg(clip(r, 0, 1)) A log pi."""
    return cispo(batch, low=None, high=0.0, live=live)


def trajectory_ratio(batch: Batch, i: int) -> float:
    """prod_t pi/mu over the trained tokens of sequence ``i`` under the current policy."""
    return math.exp(math.fsum(batch.new[i][t] - batch.roll[i][t] for t in batch.trained(i)))


def topr(batch: Batch, token_level: bool = False, live: Nested | None = None) -> Terms:
    """TOPR, arXiv 2503.14286 sec. 3: A > 0: -A log pi; A <= 0: -sg(clip(rho, 0, 1)) A log pi.

    rho is the ratio of the whole trajectory under the CURRENT policy to mu (``token_level``: ROLL's form, per token).
    Choice: the sign tested is that of A. The paper writes R with the baseline already subtracted.
    """
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        advantage = batch.advantage[i][t]
        weight = 1.0
        if advantage <= 0:
            ratio = math.exp(batch.new[i][t] - batch.roll[i][t]) if token_level else trajectory_ratio(batch, i)
            weight = clip(ratio, 0.0, 1.0)
        return -weight * advantage * new[i][t], -weight * advantage

    return per_token(batch, term)


def aipo(batch: Batch, cap: float = 2.0, live: Nested | None = None) -> Terms:
    """AIPO (LlamaRL, arXiv 2505.24034): -sg(min(pi/mu, cap)) A log pi."""
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        weight = min(math.exp(batch.new[i][t] - batch.roll[i][t]), cap)
        return -weight * batch.advantage[i][t] * new[i][t], -weight * batch.advantage[i][t]

    return per_token(batch, term)


def sapo(batch: Batch, tau_positive: float = 1.0, tau_negative: float = 1.05, live: Nested | None = None) -> Terms:
    """SAPO, arXiv 2511.20347: -(4/tau) sigmoid(tau (r - 1)) A; tau by the sign of A. Slope: -4 s (1-s) r A."""
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        advantage = batch.advantage[i][t]
        tau = tau_positive if advantage > 0 else tau_negative
        r = math.exp(new[i][t] - batch.old[i][t])
        gate = 1 / (1 + math.exp(-tau * (r - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * r * advantage

    return per_token(batch, term)


def tv_keep(batch: Batch, i: int, t: int, low: float, high: float) -> bool:
    """DPPO's binary total-variation mask (detached): may this token still move the way its advantage points?"""
    shift = math.exp(batch.new[i][t]) - math.exp(batch.roll[i][t])
    return shift <= high if batch.advantage[i][t] > 0 else shift >= -low


def dppo_tv(batch: Batch, low: float = 0.1, high: float = 0.1, cap: float = 20.0, live: Nested | None = None) -> Terms:
    """DPPO-TV, arXiv 2602.04879: -sg(min(pi/mu, cap)) A log pi on tokens that ``tv_keep`` keeps; pi/mu throughout."""
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        if not tv_keep(batch, i, t, low, high):
            return 0.0, 0.0
        weight = min(math.exp(batch.new[i][t] - batch.roll[i][t]), cap)
        return -weight * batch.advantage[i][t] * new[i][t], -weight * batch.advantage[i][t]

    return per_token(batch, term)


def dppo_tv_penalised(
    batch: Batch, low: float = 0.1, high: float = 0.1, tau: float = 0.01, live: Nested | None = None
) -> Terms:
    """prime-rl's form: -(pi/mu) A keep + tau (log pi - log mu)^2 on all tokens; meant for ``token_sum``.

    Choice: pi/mu carries the gradient and has no cap; keep is detached; the penalty carries its gradient.
    """
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        log_ratio = new[i][t] - batch.roll[i][t]
        value, slope = tau * log_ratio**2, 2 * tau * log_ratio
        if tv_keep(batch, i, t, low, high):
            pull = -math.exp(log_ratio) * batch.advantage[i][t]
            value, slope = value + pull, slope + pull
        return value, slope

    return per_token(batch, term)


def binary_kl(log_mu: float, log_pi: float) -> float:
    """KL of two Bernoulli distributions, 'this token or another': mu log(mu/pi) + (1-mu) log((1-mu)/(1-pi))."""
    mu, pi = math.exp(log_mu), math.exp(log_pi)
    return mu * (log_mu - log_pi) + (1 - mu) * (math.log1p(-mu) - math.log1p(-pi))


def kl_keep(batch: Batch, i: int, t: int, delta: float) -> bool:
    """Within ``delta``, or moving back: A > 0 with pi <= mu, or A <= 0 with pi >= mu (detached)."""
    log_pi, log_mu = batch.new[i][t], batch.roll[i][t]
    moves_back = log_pi <= log_mu if batch.advantage[i][t] > 0 else log_pi >= log_mu
    return moves_back or binary_kl(log_mu, log_pi) <= delta


def dppo_kl(batch: Batch, delta: float = 0.05, cap: float = 20.0, live: Nested | None = None) -> Terms:
    """DPPO-KL, arXiv 2602.04879: as DPPO-TV, with the mask of ``kl_keep``: KL(mu || pi) of the binary distributions."""
    new = live or batch.new

    def term(i: int, t: int) -> tuple[float, float]:
        if not kl_keep(batch, i, t, delta):
            return 0.0, 0.0
        weight = min(math.exp(batch.new[i][t] - batch.roll[i][t]), cap)
        return -weight * batch.advantage[i][t] * new[i][t], -weight * batch.advantage[i][t]

    return per_token(batch, term)
