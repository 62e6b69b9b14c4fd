"""Every vector of the oracle: a name, the inputs and what the oracle makes of them.

``compute(name)`` gives nested lists of floats, to be compared with the literals in oracle_vectors.py (EXPECTED).
``python oracle_cases.py`` writes them anew; only do so after having found out WHY a digit moved.

Objectives give ``{aggregation: loss, ..., "slope": [[...]]}``: the slope is the derivative of each token's (for
SEQUENCE_OBJECTIVES: each sequence's) own loss by the log-probability; times ``oracle_core.shares`` it is the gradient.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle_advantages as adv
import oracle_corrections as cor
import oracle_losses as los
import oracle_objectives as obj
import oracle_presets as pre
import oracle_sequences as seq
from oracle_core import AGGREGATIONS, Batch, Nested, SequenceTerms, Terms, reduce_sequences, reduce_terms, weighted
from oracle_inputs import (
    BATCH,
    CAPPED,
    EXTREME,
    LOGITS,
    OLD_VALUES,
    ROLLOUT,
    STREAM_WEIGHTS,
    SUPERVISED_MASK,
    TARGETS,
    TEACHER_LOGITS,
    TOKEN_BATCH,
    VERSIONS,
)

Live = Nested | None

CLIP_COV_BOUNDS = (0.1, 0.605)
CLIP_COV_CHOSEN = [(0, 0), (0, 4), (4, 0), (5, 1)]  # = all candidates: floor(0.25 * 18) = 4, so no draw is left
KL_COV_RATIO = 0.25  # floor(0.25 * 18) = 4 tokens

# Objectives that take an advantage for each token: computed on BATCH and, as "<name>/token", on TOKEN_BATCH.
TOKEN_OBJECTIVES: dict[str, Callable[[Batch, Live], Terms]] = {
    "ppo": lambda b, live: obj.ppo(b, 0.2, 0.28, live=live),
    "dual_clip": lambda b, live: obj.ppo(b, 0.2, 0.28, 3.0, live=live),
    "surrogate": lambda b, live: obj.surrogate(b, live=live),
    "reinforce": lambda b, live: obj.reinforce(b, live=live),
    "cispo": lambda b, live: obj.cispo(b, 0.2, 0.28, live=live),
    "cispo_no_lower": lambda b, live: obj.cispo(b, None, 0.28, live=live),
    "truncated_pg": lambda b, live: obj.truncated_pg(b, live=live),
    "topr_token": lambda b, live: obj.topr(b, token_level=True, live=live),
    "aipo": lambda b, live: obj.aipo(b, 2.0, live=live),
    "sapo": lambda b, live: obj.sapo(b, 1.0, 1.05, live=live),
    "dppo_tv": lambda b, live: obj.dppo_tv(b, 0.1, 0.1, 20.0, live=live),
    "dppo_tv_asymmetric": lambda b, live: obj.dppo_tv(b, 0.15, 0.125, 20.0, live=live),
    "dppo_tv_penalised": lambda b, live: obj.dppo_tv_penalised(b, 0.1, 0.1, 0.01, live=live),
    "dppo_kl": lambda b, live: obj.dppo_kl(b, 0.034, 20.0, live=live),
    "kl_cov": lambda b, live: seq.kl_cov(b, KL_COV_RATIO, 0.5, live=live),
    "m2po": lambda b, live: seq.m2po(b, 0.1, live=live),
    "m2po_proximal": lambda b, live: seq.m2po(b, 0.1, behaviour=False, live=live),
    "decoupled": lambda b, live: cor.decoupled(b, 0.2, 0.28, live=live),
    "decoupled_capped": lambda b, live: cor.decoupled(b, 0.2, 0.28, cap=3.0, live=live),
}

# Objectives whose advantage is one for the sequence, or whose input is special.
OTHER_OBJECTIVES: dict[str, tuple[Batch, Callable[[Batch, Live], Terms]]] = {
    "topr": (BATCH, lambda b, live: obj.topr(b, live=live)),
    "gspo": (BATCH, lambda b, live: seq.gspo(b, 0.1, 0.28, live=live)),
    "gspo_paper_bounds": (BATCH, lambda b, live: seq.gspo(b, 3e-4, 4e-4, live=live)),
    "gspo_capped": (CAPPED, lambda b, live: seq.gspo(b, 0.1, 0.28, log_cap=0.5, live=live)),
    "clip_cov": (BATCH, lambda b, live: seq.clip_cov(b, CLIP_COV_CHOSEN, 0.2, 0.28, live=live)),
    "a3po": (
        cor.interpolated_proximal(BATCH, VERSIONS, 4, 5),
        lambda b, live: cor.decoupled(b, 0.2, 0.28, live=live),
    ),
    **{
        f"kl_loss_{kind}{'_off_policy' if off else ''}": (
            BATCH,
            lambda b, live, kind=kind, off=off: los.kl_loss(b, kind, off, live=live),  # type: ignore[misc]
        )
        for kind in los.KL_ESTIMATORS
        for off in (False, True)
    },
}

SEQUENCE_OBJECTIVES: dict[str, Callable[[Batch, Live], SequenceTerms]] = {
    "gspo_sequence": lambda b, live: seq.gspo_sequence(b, 0.1, 0.28, live=live),
    "gmpo": lambda b, live: seq.gmpo(b, 0.4, 0.4, live=live),
    "gmpo_asymmetric": lambda b, live: seq.gmpo(b, 0.25, 0.48, live=live),
    "dro": lambda b, live: seq.dro(b, 0.1, live=live),
    "kimi": lambda b, live: seq.kimi(b, 0.3, live=live),
}

# Weights of each correction on BATCH (or EXTREME); "<name>/ppo" is PPO 0.2/0.28 under them, with all denominators.
WEIGHTS: dict[str, tuple[Batch, Callable[[Batch], Nested]]] = {
    "tis": (BATCH, lambda b: cor.rho_weights(b, "token", "cap", high=2.0)),
    "mis": (BATCH, lambda b: cor.rho_weights(b, "token", "mask", 0.5, 2.0)),
    "icepop": (BATCH, lambda b: cor.rho_weights(b, "token", "mask", 0.5, 5.0)),
    "token_reject": (BATCH, lambda b: cor.rho_weights(b, "token", "reject", 0.5, 2.0)),
    "sequence_cap": (BATCH, lambda b: cor.rho_weights(b, "sequence", "cap", high=1.8)),
    "sequence_mask": (BATCH, lambda b: cor.rho_weights(b, "sequence", "mask", 0.87, 1.7)),
    "sequence_clamped": (EXTREME, lambda b: cor.rho_weights(b, "sequence", "none")),
    "geometric_cap": (BATCH, lambda b: cor.rho_weights(b, "geometric", "cap", high=1.2)),
    "geometric_mask": (BATCH, lambda b: cor.rho_weights(b, "geometric", "mask", 0.9, 1.2)),
    "geometric_reject": (BATCH, lambda b: cor.rho_weights(b, "geometric", "reject", 0.9, 1.2)),
    "veto": (EXTREME, lambda b: cor.veto(b, 1e-4)),
    "opsm": (BATCH, lambda b: cor.opsm(b, 0.1)),
    "tis_normalised": (
        BATCH,
        lambda b: cor.batch_normalised(cor.rho_weights(b, "token", "cap", high=2.0), b.mask),
    ),
    "mis_normalised": (
        BATCH,
        lambda b: cor.batch_normalised(cor.rho_weights(b, "token", "mask", 0.5, 2.0), b.mask),
    ),
    "sequence_normalised": (
        BATCH,
        lambda b: cor.batch_normalised(cor.rho_weights(b, "sequence", "cap", high=1.8), b.mask, "sequences"),
    ),
    "sequence_normalised_by_tokens": (
        BATCH,
        lambda b: cor.batch_normalised(cor.rho_weights(b, "sequence", "cap", high=1.8), b.mask, "tokens"),
    ),
    "tis_and_opsm": (
        BATCH,
        lambda b: cor.product(cor.rho_weights(b, "token", "cap", high=2.0), cor.opsm(b, 0.1)),
    ),
}

R = ROLLOUT.rewards
GROUPS = {"mixed": [1.0, 0.0, 0.5, 0.25, -0.75], "equal": [0.35] * 4, "one": [0.8], "zero": [0.0, 0.0]}
MASK, OLD, REF = BATCH.mask, BATCH.old, BATCH.ref

OTHERS: dict[str, Callable[[], Any]] = {
    "group_mean_std": lambda: {k: adv.group_mean_std(v) for k, v in GROUPS.items()},
    "group_mean_std_biased": lambda: {k: adv.group_mean_std(v, unbiased=False) for k, v in GROUPS.items()},
    "group_mean_std_delta": lambda: {k: adv.group_mean_std(v, delta=1e-2) for k, v in GROUPS.items()},
    "group_mean": lambda: {k: adv.group_mean(v) for k, v in GROUPS.items()},
    "leave_one_out": lambda: {k: adv.rloo(v) for k, v in GROUPS.items()},
    "opo_advantage": lambda: adv.opo(GROUPS["mixed"], [4, 1, 7, 2, 11]),
    "maxrl_advantage": lambda: {k: adv.maxrl(v) for k, v in GROUPS.items()},
    "remax_advantage": lambda: adv.remax(R, ROLLOUT.greedy, OLD, REF, MASK, 0.1),
    "whiten": lambda: adv.whiten(TOKEN_BATCH.advantage, MASK),
    "whiten_biased": lambda: adv.whiten(TOKEN_BATCH.advantage, MASK, unbiased=False),
    "whiten_delta_1e-8": lambda: adv.whiten(TOKEN_BATCH.advantage, MASK, delta=1e-8),
    "reinforce_pp_advantage": lambda: adv.reinforce_pp(R, OLD, REF, MASK, 0.1, 0.9),
    "reinforce_pp_advantage_delta_1e-8": lambda: adv.reinforce_pp(R, OLD, REF, MASK, 0.1, 0.9, delta=1e-8),
    "reinforce_pp_baseline_advantage": lambda: adv.reinforce_pp_baseline(ROLLOUT.groups(), MASK),
    "kl_reward_k1": lambda: adv.token_rewards(R, OLD, REF, MASK, 0.1),
    "kl_reward_k2": lambda: adv.token_rewards(R, OLD, REF, MASK, 0.1, "k2"),
    "kl_reward_k3": lambda: adv.token_rewards(R, OLD, REF, MASK, 0.1, "k3"),
    "gae": lambda: [
        adv.gae(r, v, m, 0.97, 0.9)
        for r, v, m in zip(adv.token_rewards(R, OLD, REF, MASK, 0.1), ROLLOUT.values, MASK, strict=True)
    ],
    "gae_bootstrap": lambda: adv.gae([0.0, 5.0, 0.5, -0.2], [0.2, 9.0, 0.4, 0.6], [1, 0, 1, 1], 0.97, 0.9, 0.7),
    "overlong": lambda: [adv.overlong_shaping(n, 20, 8) for n in (1, 12, 13, 17, 20, 21, 40)],
    "dynamic_sampling": lambda: [int(adv.has_signal(a)) for a in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.5, 0.5])],
    "opsm_shift": lambda: [cor.opsm_shift(BATCH, i) for i in range(7)],
    "sequence_ratio": lambda: seq.sequence_ratios(BATCH),
    "sequence_ratio_capped": lambda: seq.sequence_ratios(CAPPED, 0.5),
    "trajectory_ratio": lambda: [obj.trajectory_ratio(BATCH, i) for i in range(7)],
    "covariances": lambda: [[*cell, cov] for cell, cov in seq.covariances(BATCH).items()],
    "clip_cov_candidates": lambda: [list(c) for c in seq.clip_cov_candidates(BATCH, *CLIP_COV_BOUNDS, 0.2, 0.28)],
    "clip_cov_candidates_wide": lambda: [list(c) for c in seq.clip_cov_candidates(BATCH, -9.0, 9.0, 0.2, 0.28)],
    "m2po_keep": lambda: seq.m2po_keep(BATCH, 0.1),
    "interpolation": lambda: [
        cor.interpolation(b, p, c) for b, p, c in ((2, 4, 5), (4, 4, 5), (5, 4, 5), (5, 5, 5), (3, 5, 5))
    ],
    "interpolated_proximal": lambda: cor.interpolated_proximal(BATCH, VERSIONS, 4, 5).old,
    "entropy": lambda: [los.entropy(z) for z in LOGITS],
    "entropy_bonus": lambda: los.entropy_bonus([LOGITS, LOGITS[:1]], [[1, 0, 1], [1]], 0.01),
    "reverse_kl": lambda: [los.reverse_kl(z, q) for z, q in zip(LOGITS, TEACHER_LOGITS, strict=True)],
    "forward_kl": lambda: [los.forward_kl(z, q) for z, q in zip(LOGITS, TEACHER_LOGITS, strict=True)],
    "value_loss": lambda: los.value_loss(ROLLOUT.values, OLD_VALUES, TARGETS, MASK, 0.2),
    "value_loss_unclipped": lambda: los.value_loss(ROLLOUT.values, OLD_VALUES, TARGETS, MASK, None),
    "cross_entropy": lambda: los.cross_entropy(BATCH.new, STREAM_WEIGHTS, SUPERVISED_MASK),
    "distillation": lambda: los.distillation(BATCH.new, REF, STREAM_WEIGHTS, MASK),
    "distillation_k2": lambda: los.distillation_k2(BATCH.new, REF, STREAM_WEIGHTS, MASK),
    "streams": lambda: los.streams(
        [
            (1.0, *reduce_terms(obj.ppo(BATCH, 0.2, 0.28), MASK, "token_mean", 6)),
            (0.3, *los.cross_entropy(BATCH.new, STREAM_WEIGHTS, SUPERVISED_MASK)),
            (0.05, *los.distillation(BATCH.new, REF, STREAM_WEIGHTS, MASK)),
        ]
    ),
}

PRESETS: dict[str, Callable[[], pre.Result]] = {
    "preset_ppo_critic": lambda: pre.ppo_critic(ROLLOUT, 0.97, 0.9, 0.1),
    "preset_ppo_critic_raw": lambda: pre.ppo_critic(ROLLOUT, 0.97, 0.9, 0.1, whiten=False),
    "preset_grpo": lambda: pre.grpo(ROLLOUT),
    "preset_dr_grpo": lambda: pre.dr_grpo(ROLLOUT),
    "preset_dapo": lambda: pre.dapo(ROLLOUT, 4, 3),
    "preset_bnpo_global": lambda: pre.bnpo_global(ROLLOUT),
    "preset_reinforce": lambda: pre.reinforce_raw(ROLLOUT),
    "preset_rloo": lambda: pre.rloo(ROLLOUT),
    "preset_opo": lambda: pre.opo(ROLLOUT),
    "preset_maxrl": lambda: pre.maxrl(ROLLOUT),
    "preset_remax": lambda: pre.remax(ROLLOUT),
    "preset_reinforce_pp": lambda: pre.reinforce_pp(ROLLOUT),
    "preset_reinforce_pp_baseline": lambda: pre.reinforce_pp_baseline(ROLLOUT),
}


def objectives() -> dict[str, tuple[Batch, Callable[[Batch, Live], Terms]]]:
    """Every token-level objective with the batch it is evaluated on."""
    out = {name: (BATCH, f) for name, f in TOKEN_OBJECTIVES.items()}
    out |= {f"{name}/token": (TOKEN_BATCH, f) for name, f in TOKEN_OBJECTIVES.items()}
    return out | OTHER_OBJECTIVES


def describe(terms: Terms, batch: Batch) -> dict[str, Any]:
    losses = {how: reduce_terms(terms, batch.mask, how, batch.max_length)[0] for how in AGGREGATIONS}
    return {**losses, "slope": terms.slope}


def names() -> list[str]:
    corrected = [f"{name}/ppo" for name in WEIGHTS]
    return [*objectives(), *SEQUENCE_OBJECTIVES, *WEIGHTS, *corrected, *OTHERS, *PRESETS]


def plain(value: Any) -> Any:
    """Tuples become lists: the literals hold lists only."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def compute(name: str) -> Any:
    """The oracle's answer now."""
    if name in objectives():
        batch, f = objectives()[name]
        return describe(f(batch, None), batch)
    if name in SEQUENCE_OBJECTIVES:
        terms = SEQUENCE_OBJECTIVES[name](BATCH, None)
        loss, gradient = reduce_sequences(terms, MASK)
        return {"mean": loss, "value": terms.value, "slope": terms.slope, "gradient": gradient}
    if name in WEIGHTS:
        batch, weights = WEIGHTS[name]
        return weights(batch)
    if name.endswith("/ppo"):
        batch, weights = WEIGHTS[name.removesuffix("/ppo")]
        return describe(weighted(obj.ppo(batch, 0.2, 0.28), weights(batch)), batch)
    if name in PRESETS:
        return plain(dataclasses.asdict(PRESETS[name]()))
    return plain(OTHERS[name]())


def literal(value: Any) -> str:
    """``repr`` with -0.0 written as 0.0: 17 significant digits where they are needed."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}": {literal(v)}' for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(literal(v) for v in value) + "]"
    return repr(value + 0.0) if isinstance(value, float) else repr(value)


def main() -> None:
    """Write the literal files next to this one."""
    everything = names()
    files = {
        "objectives": [n for n in everything if n in objectives() and not n.endswith("/token")],
        "token_objectives": [n for n in everything if n.endswith("/token")],
        "corrections": [n for n in everything if n.removesuffix("/ppo") in WEIGHTS],
        "rest": [n for n in everything if n not in objectives() and n.removesuffix("/ppo") not in WEIGHTS],
    }
    for part, members in files.items():
        lines = [
            '"""Literals written by ``python oracle_cases.py``: a regression of the oracle shows against them."""',
            "\nfrom typing import Any\n\nEXPECTED: dict[str, Any] = {}\n",
        ]
        for name in members:
            body = textwrap.fill(literal(compute(name)), 115, break_long_words=False, break_on_hyphens=False)
            lines.append(f'EXPECTED["{name}"] = (\n{textwrap.indent(body, "    ")}\n)')
        Path(__file__).with_name(f"oracle_vectors_{part}.py").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
