"""Presets: published algorithms as compositions of this room's parts, with their deviations by name.

``docs/algorithms.md`` shows this table to the user.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One row: which advantage, ratio level, objective, aggregation, and where KL goes when it is turned on."""

    paper: str
    advantage: str
    objective: str
    aggregation: str
    ratio_level: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_estimator: str = "k3"
    kl_placement: str = "loss"
    dynamic_sampling: bool = False
    overlong_fraction: float = 0.0
    """Overlong buffer over ``max_new_tokens``; 0: no penalty."""
    deviations: tuple[str, ...] = ()


_NO_KL = "KL coefficient 0 (no reference model); set kl.coefficient for the paper's"

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        paper="arXiv 2402.03300",
        advantage="group_normalised",
        objective="ppo",
        aggregation="seq_mean_token_mean",
        deviations=(_NO_KL + " 0.04",),
    ),
    "dr_grpo": Preset(
        paper="arXiv 2503.20783",
        advantage="group_centred",
        objective="ppo",
        aggregation="seq_mean_token_sum_norm",
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
    "dapo": Preset(
        paper="arXiv 2503.14476",
        advantage="group_normalised",
        objective="ppo",
        aggregation="token_mean",
        clip_high=0.28,
        dynamic_sampling=True,
        overlong_fraction=0.2,
        deviations=("overlong buffer: a fifth of max_new_tokens (the paper: 4096 of 20480)",),
    ),
    "gspo": Preset(
        paper="arXiv 2507.18071",
        advantage="group_normalised",
        objective="ppo",
        aggregation="seq_mean_token_mean",
        ratio_level="sequence",
        clip_low=3e-4,
        clip_high=4e-4,
        deviations=("the token form (GSPO-token): the same value and gradient for one advantage per episode",),
    ),
    "cispo": Preset(
        paper="arXiv 2506.13585",
        advantage="group_normalised",
        objective="cispo",
        aggregation="token_mean",
        clip_low=1.0,
        clip_high=0.28,
        deviations=("the paper names no upper bound: 1.28; the lower bound is 0, that is, off, as in the paper",),
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
