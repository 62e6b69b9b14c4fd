"""Presets: published algorithms as compositions of this room's parts, with their deviations by name.

``docs/algorithms.md`` shows this table to the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One row: which parts, and where KL goes when it is turned on. What it does not state has the part's default."""

    paper: str
    advantage: str
    objective: str
    aggregation: str
    options: Mapping[str, float | str] = field(default_factory=dict)
    """Options of the objective that differ from its defaults."""
    selection: str = "none"
    kl_estimator: str = "k3"
    kl_placement: str = "loss"
    dynamic_sampling: bool = False
    overlong_fraction: float = 0.0
    """Overlong buffer over ``max_new_tokens``; 0: no penalty."""
    deviations: tuple[str, ...] = ()


_NO_KL = "KL coefficient 0 (no reference model); set kl.coefficient for the paper's"

_GROUP_PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        paper="arXiv 2402.03300",
        advantage="group_normalised",
        objective="ppo",
        aggregation="seq_mean_token_mean",
        deviations=(_NO_KL + " 0.04",),
    ),
    "bnpo": Preset(
        paper="TRL's loss_type",
        advantage="group_normalised",
        objective="ppo",
        aggregation="token_mean",
        deviations=(
            "the mean is over the minibatch's tokens, TRL's over a micro-batch's, which depends on the split",
            "arXiv 2506.02864, the paper of that name, normalises rewards by a Beta distribution; not this",
        ),
    ),
    "dr_grpo": Preset(
        paper="arXiv 2503.20783",
        advantage="group_centred",
        objective="ppo",
        aggregation="seq_mean_token_sum_norm",
    ),
    "dapo": Preset(
        paper="arXiv 2503.14476",
        advantage="group_normalised",
        objective="ppo",
        aggregation="token_mean",
        options={"clip_high": 0.28},
        dynamic_sampling=True,
        overlong_fraction=0.2,
        deviations=(
            "overlong buffer: a fifth of max_new_tokens (the paper: 4096 of 20480)",
            "dynamic sampling drops groups of equal rewards (the paper's are 0 or 1)",
        ),
    ),
    "gspo": Preset(
        paper="arXiv 2507.18071",
        advantage="group_normalised",
        objective="ppo",
        aggregation="seq_mean_token_mean",
        options={"ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        deviations=("the token form (GSPO-token): the same value and gradient for one advantage per episode",),
    ),
    "gmpo": Preset(
        paper="arXiv 2507.20673",
        advantage="group_normalised",
        objective="gmpo",
        aggregation="seq_mean_token_mean",
        deviations=("the token form: the same value and gradient for one advantage per episode",),
    ),
    "sapo": Preset(
        paper="arXiv 2511.20347",
        advantage="group_normalised",
        objective="sapo",
        aggregation="seq_mean_token_mean",
    ),
    "cispo": Preset(
        paper="arXiv 2506.13585",
        advantage="group_normalised",
        objective="cispo",
        aggregation="token_mean",
        options={"clip_low": 1.0, "clip_high": 0.28},
        deviations=("the paper names no upper bound: 1.28; the lower bound is 0, that is, off, as in the paper",),
    ),
    "maxrl": Preset(
        paper="arXiv 2602.02710",
        advantage="mean_normalised",
        objective="reinforce",
        aggregation="seq_mean_token_sum",
        deviations=("rewards from 0 up, where the paper's are 0 or 1",),
    ),
    "opo": Preset(
        paper="arXiv 2505.23585",
        advantage="length_weighted",
        objective="reinforce",
        aggregation="seq_mean_token_sum",
    ),
    "rloo": Preset(
        paper="arXiv 2402.14740",
        advantage="leave_one_out",
        objective="reinforce",
        aggregation="seq_mean_token_sum",
        kl_estimator="k1",
        kl_placement="reward",
        deviations=(_NO_KL + " penalty in the reward",),
    ),
}

_BATCH_PRESETS: dict[str, Preset] = {
    "reinforce": Preset(
        paper="Williams 1992",
        advantage="none",
        objective="reinforce",
        aggregation="seq_mean_token_sum",
        kl_estimator="k1",
        kl_placement="reward",
    ),
    "reinforce++": Preset(
        paper="arXiv 2501.03262",
        advantage="batch_whitened",
        objective="ppo",
        aggregation="token_mean",
        kl_estimator="k1",
        kl_placement="reward",
        deviations=(_NO_KL + " penalty in the reward",),
    ),
    "reinforce++_baseline": Preset(
        paper="arXiv 2501.03262",
        advantage="group_centred_whitened",
        objective="ppo",
        aggregation="token_mean",
        kl_estimator="k2",
        deviations=(_NO_KL + " k2 term in the loss",),
    ),
    "remax": Preset(
        paper="arXiv 2310.10505",
        advantage="greedy_centred",
        objective="reinforce",
        aggregation="seq_mean_token_sum",
        kl_estimator="k1",
        kl_placement="reward",
        deviations=(_NO_KL + " penalty in the reward",),
    ),
    "ppo": Preset(
        paper="arXiv 1707.06347",
        advantage="batch_whitened",
        objective="ppo",
        aggregation="token_mean",
        kl_estimator="k1",
        kl_placement="reward",
        deviations=("no critic: returns whitened over the batch take the place of GAE; ppo_critic has them",),
    ),
    "ppo_critic": Preset(
        paper="arXiv 1707.06347",
        advantage="gae_whitened",
        objective="ppo",
        aggregation="token_mean",
        kl_estimator="k1",
        kl_placement="reward",
        deviations=("advantages whitened over the batch", "the critic has an optimizer of its own"),
    ),
}

_OFF_POLICY_PRESETS: dict[str, Preset] = {
    "tis_pg": Preset(
        paper="arXiv 2506.06122",
        advantage="group_normalised",
        objective="cispo",
        aggregation="token_mean",
        options={"clip_low": 1.0, "clip_high": 0.0},
        deviations=("advantage and aggregation are headrace's choice; ROLL names the loss alone",),
    ),
    "topr": Preset(
        paper="arXiv 2503.14286",
        advantage="none",
        objective="topr",
        aggregation="seq_mean_token_sum",
        deviations=("rewards as they are, without the baseline that the paper tunes",),
    ),
    "aipo": Preset(
        paper="arXiv 2505.24034",
        advantage="group_centred",
        objective="cispo",
        aggregation="token_mean",
        options={"ratio_anchor": "behaviour", "clip_low": 1.0, "clip_high": 3.0},
        deviations=("the cap of the ratio is 4, from the paper's range of 2 to 10",),
    ),
    "dppo_tv": Preset(
        paper="arXiv 2602.04879",
        advantage="group_centred",
        objective="dppo_tv",
        aggregation="token_mean",
        deviations=("bounds 0.1 and aggregation are headrace's choice", "ratio capped at 20"),
    ),
    "dppo_kl": Preset(
        paper="arXiv 2602.04879",
        advantage="group_centred",
        objective="dppo_kl",
        aggregation="token_mean",
        deviations=("bounds 0.05 and aggregation are headrace's choice", "ratio capped at 20"),
    ),
    "dro": Preset(
        paper="arXiv 2405.19107",
        advantage="group_centred",
        objective="quadratic",
        aggregation="seq_mean_token_sum",
        deviations=("the group's mean takes the place of the learned value; penalty 0.1 is headrace's choice",),
    ),
    "kimi": Preset(
        paper="arXiv 2501.12599",
        advantage="group_centred",
        objective="quadratic",
        aggregation="seq_mean_token_sum",
        deviations=("penalty 0.1 is headrace's choice", "no length reward"),
    ),
    "clip_cov": Preset(
        paper="arXiv 2505.22617",
        advantage="group_normalised",
        objective="ppo",
        aggregation="token_mean",
        selection="clip_cov",
        deviations=("tokens are chosen over the whole minibatch; at least one",),
    ),
    "kl_cov": Preset(
        paper="arXiv 2505.22617",
        advantage="group_normalised",
        objective="ratio",
        aggregation="token_mean",
        selection="kl_cov",
        deviations=("tokens are chosen over the whole minibatch; at least one",),
    ),
    "m2po": Preset(
        paper="arXiv 2510.01161",
        advantage="group_normalised",
        objective="ratio",
        aggregation="token_mean",
        options={"ratio_anchor": "behaviour"},
        selection="m2po",
        deviations=("tokens are chosen over the whole minibatch, whatever the sign of their advantage",),
    ),
}

PRESETS: dict[str, Preset] = {**_GROUP_PRESETS, **_BATCH_PRESETS, **_OFF_POLICY_PRESETS}
