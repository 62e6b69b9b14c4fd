"""Policy objectives: ratio and advantage to a loss per token, minimised. Legend: N trained tokens of a micro-batch.

A new objective is one function and one entry of :data:`OBJECTIVES`, which also names the options that act on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.algorithms.ratios import bounded_exp, episode_means, episode_sums, token_form


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInput:
    """What an objective may read. ``ratio_N`` carries gradient; an objective that must not pass it detaches it."""

    logprobs_N: Tensor
    anchor_N: Tensor
    """Log-probabilities of the policy that the ratio is taken to: proximal or behaviour. Without gradient."""
    ratio_N: Tensor
    """At the ratio level: of the token, or of its episode in token form."""
    advantages_N: Tensor
    episode_index_N: Tensor
    num_episodes: int
    rewards_N: Tensor | None = None
    """The reward of the token's episode, before shaping."""
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float | None = None
    temperature_positive: float = 1.0
    temperature_negative: float = 1.0
    trust_low: float = 0.0
    trust_high: float = 0.0
    ratio_cap: float = 0.0
    penalty: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """The loss of each token before correction and aggregation, and which tokens a bound acted on (bool [N])."""

    loss_N: Tensor
    clipped_low_N: Tensor | None = None
    clipped_high_N: Tensor | None = None
    dual_clipped_N: Tensor | None = None


# ------------------------------------------------------------------------------------ gradient through the ratio


def ppo(x: ObjectiveInput) -> ObjectiveOutput:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A): PPO, arXiv 1707.06347, equation 7; with unequal bounds
    DAPO's clip-higher, arXiv 2503.14476, section 3.1. With ``dual_clip`` = c, where A < 0: min(that, -c A)
    (dual-clip PPO, arXiv 1912.09729)."""
    ratio_N, advantages_N = x.ratio_N, x.advantages_N
    low, high = 1.0 - x.clip_low, 1.0 + x.clip_high
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    dual_clipped_N = None
    if x.dual_clip is not None:
        bound_N = -x.dual_clip * advantages_N
        dual_clipped_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(dual_clipped_N, bound_N, loss_N)
    return ObjectiveOutput(
        loss_N=loss_N,
        clipped_low_N=(ratio_N < low) & (advantages_N < 0),
        clipped_high_N=(ratio_N > high) & (advantages_N > 0),
        dual_clipped_N=dual_clipped_N,
    )


def ratio(x: ObjectiveInput) -> ObjectiveOutput:
    """-r A, without a trust region of its own: what KL-Cov and M2PO start from (the surrogate of TRPO,
    arXiv 1502.05477, equation 14)."""
    return ObjectiveOutput(loss_N=-x.ratio_N * x.advantages_N)


def gmpo(x: ObjectiveInput) -> ObjectiveOutput:
    """-A exp(mean_t g_t), g = sign(A) min(sign(A) d, sign(A) clip(d, -clip_low, clip_high)), d = l - lo: the geometric
    mean of clipped token ratios; the bounds are log-ratios (GMPO, arXiv 2507.20673, equation 4 and section 3).

    In token form: under ``seq_mean_token_mean`` value and gradient are those of the episode's term.
    """
    difference_N, sign_N = x.logprobs_N - x.anchor_N, x.advantages_N.sign()
    bounded_N = difference_N.clamp(-x.clip_low, x.clip_high)
    clipped_N = sign_N * torch.minimum(sign_N * difference_N, sign_N * bounded_N)
    means_E = episode_means(clipped_N, x.episode_index_N, x.num_episodes)
    return ObjectiveOutput(
        loss_N=-x.advantages_N * bounded_exp(token_form(means_E, clipped_N, x.episode_index_N)),
        clipped_low_N=(difference_N < -x.clip_low) & (x.advantages_N < 0),
        clipped_high_N=(difference_N > x.clip_high) & (x.advantages_N > 0),
    )


def sapo(x: ObjectiveInput) -> ObjectiveOutput:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A: a soft gate in place of the clip (SAPO,
    arXiv 2511.20347, equations 5 to 7). At r = 1 its gradient is that of -r A whatever tau is."""
    positive, negative = (x.ratio_N.new_tensor(t) for t in (x.temperature_positive, x.temperature_negative))
    temperature_N = torch.where(x.advantages_N > 0, positive, negative)
    gate_N = (temperature_N * (x.ratio_N - 1.0)).sigmoid()
    return ObjectiveOutput(loss_N=-(4.0 / temperature_N) * gate_N * x.advantages_N)


# ----------------------------------------------------------------------- gradient through the log-probability


def reinforce(x: ObjectiveInput) -> ObjectiveOutput:
    """-A l: REINFORCE (Williams 1992). No ratio, so right on policy only, or under an importance correction."""
    return ObjectiveOutput(loss_N=-x.advantages_N * x.logprobs_N)


def cispo(x: ObjectiveInput) -> ObjectiveOutput:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A l: CISPO, arXiv 2506.13585, section 3.1.

    Every token keeps a gradient; the bound limits its weight only. The paper turns the lower bound off
    (``clip_low = 1``). TRL's option of the same name is the bound itself: its ``epsilon_high = 5`` is
    ``clip_high = 4`` here. With both bounds at [0, 1] it is the truncated policy gradient (``tis_pg``), and with the
    ratio taken to the behaviour policy it is AIPO (LlamaRL, arXiv 2505.24034).
    """
    low, high = 1.0 - x.clip_low, 1.0 + x.clip_high
    ratio_N = x.ratio_N.detach()
    return ObjectiveOutput(
        loss_N=-ratio_N.clamp(low, high) * x.advantages_N * x.logprobs_N,
        clipped_low_N=ratio_N < low,
        clipped_high_N=ratio_N > high,
    )


def topr(x: ObjectiveInput) -> ObjectiveOutput:
    """Where R > 0: -A l; else -sg(clip(r, 0, 1)) A l: tapered off-policy REINFORCE, arXiv 2503.14286, equation 5.

    The ratio is the whole trajectory's to the behaviour policy; ROLL's is a token's (``ratio_level = "token"``).
    """
    if x.rewards_N is None:
        raise ValueError("objective 'topr' needs fields.rewards_N: it treats right and wrong episodes differently")
    ratio_N = x.ratio_N.detach()
    tapered_N = x.rewards_N <= 0
    weight_N = torch.where(tapered_N, ratio_N.clamp(max=1.0), 1.0)
    return ObjectiveOutput(loss_N=-weight_N * x.advantages_N * x.logprobs_N, clipped_high_N=tapered_N & (ratio_N > 1.0))


def dppo_tv(x: ObjectiveInput) -> ObjectiveOutput:
    """-sg(min(r, ratio_cap)) A l where the token's probability has not moved too far in the direction of A, else 0:
    pi - mu <= trust_high for A > 0, pi - mu >= -trust_low for the others (DPPO with the binary total variation,
    arXiv 2602.04879, section 4)."""
    return _dppo(x, _tv_trusted(x))


def dppo_tv_penalised(x: ObjectiveInput) -> ObjectiveOutput:
    """-r A where :func:`dppo_tv` trusts the token, and penalty * (l - la)^2 on every token: the form of DPPO that
    prime-rl trains. The ratio carries its gradient and has no cap; the square takes the cap's place."""
    trusted_N = _tv_trusted(x)
    square_N = (x.logprobs_N - x.anchor_N).square()
    return _masked(x, trusted_N, torch.where(trusted_N, -x.ratio_N * x.advantages_N, 0.0) + x.penalty * square_N)


def _tv_trusted(x: ObjectiveInput) -> Tensor:
    moved_N = x.logprobs_N.detach().exp() - x.anchor_N.exp()
    return torch.where(x.advantages_N > 0, moved_N <= x.trust_high, moved_N >= -x.trust_low)


def dppo_kl(x: ObjectiveInput) -> ObjectiveOutput:
    """As :func:`dppo_tv` with the binary KL(mu || pi) as distance: kept where it is at most ``trust_high`` (A > 0) or
    ``trust_low``, or where the token moves back towards mu (arXiv 2602.04879, section 4)."""
    logprobs_N = x.logprobs_N.detach()
    divergence_N = binary_kl(x.anchor_N, logprobs_N)
    rises_N = x.advantages_N > 0
    high, low = (logprobs_N.new_tensor(t) for t in (x.trust_high, x.trust_low))
    moves_away_N = torch.where(rises_N, logprobs_N > x.anchor_N, logprobs_N < x.anchor_N)
    return _dppo(x, ~(moves_away_N & (divergence_N > torch.where(rises_N, high, low))))


def binary_kl(anchor_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), from log-probabilities (of at most 0, rounding aside).
    A certain token (mu = 1) has no second part; inf where pi alone is 1."""
    anchor_N, logprobs_N = anchor_N.clamp(max=0.0), logprobs_N.clamp(max=0.0)
    rest_N = -anchor_N.expm1()
    other_N = rest_N * (rest_N.log() - (-logprobs_N.expm1()).log())
    return anchor_N.exp() * (anchor_N - logprobs_N) + torch.where(rest_N > 0, other_N, 0.0)


def _dppo(x: ObjectiveInput, trusted_N: Tensor) -> ObjectiveOutput:
    weight_N = x.ratio_N.detach().clamp(max=x.ratio_cap)
    return _masked(x, trusted_N, torch.where(trusted_N, -weight_N * x.advantages_N * x.logprobs_N, 0.0))


def _masked(x: ObjectiveInput, trusted_N: Tensor, loss_N: Tensor) -> ObjectiveOutput:
    return ObjectiveOutput(
        loss_N=loss_N,
        clipped_low_N=~trusted_N & (x.advantages_N < 0),
        clipped_high_N=~trusted_N & (x.advantages_N > 0),
    )


def quadratic(x: ObjectiveInput) -> ObjectiveOutput:
    """-A sum(l) + penalty / 2 * (sum(l - lo))^2 for each episode, the square of the summed log-ratio: DRO,
    arXiv 2405.19107, equation 9; Kimi k1.5's mirror descent, arXiv 2501.12599, equation 3.

    The square S^2 is spread over the tokens as S d_t; their sum has its value and its gradient, 2 S for each token.
    """
    difference_N = x.logprobs_N - x.anchor_N
    sums_E = episode_sums(difference_N, x.episode_index_N, x.num_episodes)
    square_N = sums_E[x.episode_index_N] * difference_N
    return ObjectiveOutput(loss_N=-x.advantages_N * x.logprobs_N + 0.5 * x.penalty * square_N)


# --------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective, and the options that act on it with their defaults; any other option is refused (I20)."""

    function: Callable[[ObjectiveInput], ObjectiveOutput]
    options: Mapping[str, float | str | None] = field(default_factory=dict)
    zero_advantage_zero_gradient: bool = True
    """False where a term is no product with the advantage."""
    needs_rewards: bool = False


_TO_PROXIMAL: dict[str, float | str | None] = {"ratio_level": "token", "ratio_anchor": "proximal"}
_TO_BEHAVIOUR: dict[str, float | str | None] = {"ratio_level": "token", "ratio_anchor": "behaviour"}
_TRUST: dict[str, float | str | None] = {"trust_low": 0.1, "trust_high": 0.1}

OBJECTIVES: dict[str, Objective] = {
    "ppo": Objective(ppo, {**_TO_PROXIMAL, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    "ratio": Objective(ratio, _TO_PROXIMAL),
    "gmpo": Objective(gmpo, {"ratio_anchor": "proximal", "clip_low": 0.4, "clip_high": 0.4}),
    "sapo": Objective(sapo, {**_TO_PROXIMAL, "temperature_positive": 1.0, "temperature_negative": 1.05}),
    "reinforce": Objective(reinforce),
    "cispo": Objective(cispo, {**_TO_PROXIMAL, "clip_low": 0.2, "clip_high": 0.2}),
    "topr": Objective(topr, {**_TO_BEHAVIOUR, "ratio_level": "trajectory"}),
    "dppo_tv": Objective(dppo_tv, {**_TO_BEHAVIOUR, **_TRUST, "ratio_cap": 20.0}),
    "dppo_tv_penalised": Objective(
        dppo_tv_penalised, {**_TO_BEHAVIOUR, **_TRUST, "penalty": 1e-3}, zero_advantage_zero_gradient=False
    ),
    "dppo_kl": Objective(dppo_kl, {**_TO_BEHAVIOUR, "trust_low": 0.05, "trust_high": 0.05, "ratio_cap": 20.0}),
    "quadratic": Objective(quadratic, {"ratio_anchor": "proximal", "penalty": 0.1}, zero_advantage_zero_gradient=False),
}
