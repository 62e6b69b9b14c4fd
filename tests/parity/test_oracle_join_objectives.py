"""Every objective's vector of the blind oracle, computed by the implementation in float64, to 1e-9 (I17).

Loss under all five aggregations, the slope of each token, and the gradient under each aggregation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import oracle_cases as cases
import oracle_inputs as inputs
import pytest
import torch
from join_support import assert_close, build, describe, fields_of, flat, nest, run, selected, shared
from oracle_core import AGGREGATIONS, Batch
from oracle_inputs import BATCH, CAPPED, TOKEN_BATCH
from oracle_vectors import EXPECTED

from headrace.algorithms import ComposedAlgorithm, ratios
from headrace.algorithms.objectives import OBJECTIVES
from headrace.errors import ConfigError

CLIP = {"preset": "grpo", "clip_low": 0.2, "clip_high": 0.28}
CLIP_COV = {**CLIP, "selection": {"type": "clip_cov", "fraction": 0.25, "low": 0.1, "high": 0.605}}

# Vector -> composition. Computed on BATCH and, as "<name>/token", on TOKEN_BATCH.
TOKEN_OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo": CLIP,
    "dual_clip": {**CLIP, "dual_clip": 3.0},
    "surrogate": {"objective": "ratio"},
    "reinforce": {"objective": "reinforce"},
    "cispo": {"objective": "cispo", "clip_low": 0.2, "clip_high": 0.28},
    "cispo_no_lower": {"preset": "cispo"},
    "truncated_pg": {"preset": "tis_pg"},
    "topr_token": {"preset": "topr", "ratio_level": "token"},
    "aipo": {"preset": "aipo", "clip_high": 1.0},
    "sapo": {"preset": "sapo"},
    "dppo_tv": {"preset": "dppo_tv"},
    "dppo_tv_asymmetric": {"preset": "dppo_tv", "trust_low": 0.15, "trust_high": 0.125},
    "dppo_tv_penalised": {"objective": "dppo_tv_penalised", "penalty": 0.01},
    "dppo_kl": {"preset": "dppo_kl", "trust_low": 0.034, "trust_high": 0.034},
    "kl_cov": {"preset": "kl_cov", "selection": {"fraction": cases.KL_COV_RATIO, "penalty": 0.5}},
    "m2po": {"preset": "m2po", "selection": {"threshold": 0.1}},
    "m2po_proximal": {"preset": "m2po", "ratio_anchor": "proximal", "selection": {"threshold": 0.1}},
    "decoupled": {**CLIP, "correction": {"type": "decoupled"}},
    "decoupled_capped": {**CLIP, "correction": {"type": "decoupled", "high": 3.0}},
}

GSPO = {"preset": "gspo", "clip_low": 0.1, "clip_high": 0.28}
OTHER_OBJECTIVES: dict[str, tuple[Batch, dict[str, Any]]] = {
    "topr": (BATCH, {"preset": "topr"}),
    "gspo": (BATCH, GSPO),
    "gspo_paper_bounds": (BATCH, {"preset": "gspo"}),
    "clip_cov": (BATCH, CLIP_COV),
    "a3po": (BATCH, {**CLIP, "correction": {"type": "decoupled", "proximal": "interpolated"}}),
}

SEQUENCE_OBJECTIVES: dict[str, dict[str, Any]] = {
    "gspo_sequence": GSPO,
    "gmpo": {"preset": "gmpo"},
    "gmpo_asymmetric": {"preset": "gmpo", "clip_low": 0.25, "clip_high": 0.48},
    "dro": {"preset": "dro"},
    "kimi": {"preset": "kimi", "penalty": 0.3},
}

KL = [(kind, off_policy) for kind in ("k1", "k2", "k3", "k3+") for off_policy in (False, True)]
KL_NAMES = {f"kl_loss_{kind}{'_off_policy' if off else ''}": (kind, off) for kind, off in KL}

JOINED = {
    *TOKEN_OBJECTIVES,
    *(f"{name}/token" for name in TOKEN_OBJECTIVES),
    *OTHER_OBJECTIVES,
    *SEQUENCE_OBJECTIVES,
    *KL_NAMES,
    "gspo_capped",
}


def objective(name: str) -> tuple[Batch, dict[str, Any]]:
    if name in OTHER_OBJECTIVES:
        return OTHER_OBJECTIVES[name]
    batch = TOKEN_BATCH if name.endswith("/token") else BATCH
    return batch, TOKEN_OBJECTIVES[name.removesuffix("/token")]


def ages_N() -> torch.Tensor:
    """v_prox - v_b of each token; the version that is being made is v_prox + 1, as in the oracle's case."""
    return flat([[4 - v for v in row] for row in inputs.VERSIONS], BATCH.mask).long()


@pytest.mark.parametrize(
    "name", sorted({*TOKEN_OBJECTIVES, *(f"{n}/token" for n in TOKEN_OBJECTIVES), *OTHER_OBJECTIVES})
)
def test_objectives(name: str) -> None:
    """I17: loss and gradient of each objective of ALGORITHMS.md, with whatever is chosen in the whole minibatch."""
    batch, config = objective(name)
    changes: dict[str, Any] = {"ages_N": ages_N()} if name == "a3po" else {}
    if build(**config).needs.prepare:
        changes["selected_N"] = selected(config, batch)
    assert_close(describe(config, batch, **changes), EXPECTED[name], name)


def test_capped_sequence_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: the cap on log s, with its gradient of 0. headrace's is 20 for every log-ratio (verl caps log s at 10)."""
    monkeypatch.setattr(ratios, "MAX_LOG_RATIO", 0.5)
    assert_close(describe(GSPO, CAPPED), EXPECTED["gspo_capped"])


@pytest.mark.parametrize("name", SEQUENCE_OBJECTIVES)
def test_sequence_objectives(name: str) -> None:
    """I17: the token forms sum up to the loss of each sequence, and have its gradient."""
    algorithm = build(**SEQUENCE_OBJECTIVES[name])
    loss, gradient, output = run(algorithm, BATCH, fields_of(BATCH))
    assert output.denominator == len(BATCH.mask)
    found = {
        "mean": loss,
        "value": [sum(row) for row in nest(output.per_token_N.detach(), BATCH.mask)],
        "slope": [[len(BATCH.mask) * g for g in row] for row in gradient],
        "gradient": gradient,
    }
    assert_close(found, EXPECTED[name], name)


@pytest.mark.parametrize("name", KL_NAMES)
def test_kl_losses(name: str) -> None:
    """I17: each estimator as a loss, alone and times the ratio with its gradient.

    headrace refuses k2 and k3+ times the ratio, whose mean is not the KL; the formula is there all the same.
    """
    kind, is_off_policy = KL_NAMES[name]
    silent = dataclasses.replace(BATCH, advantage=[[0.0] * len(row) for row in BATCH.mask])
    found: dict[str, Any] = {}
    for how in AGGREGATIONS:
        config = {"aggregation": how, "kl": {"coefficient": 1.0, "estimator": kind, "placement": "loss"}}
        algorithm = ComposedAlgorithm(dataclasses.replace(build(**config).resolved, kl_unbiased=is_off_policy))
        found[how], gradient, _ = run(algorithm, silent, fields_of(silent))
        assert_close(gradient, shared(EXPECTED[name]["slope"], BATCH, how), how)
        if how == "token_sum":
            found["slope"] = gradient
    assert_close(found, EXPECTED[name], name)
    if is_off_policy and kind in ("k2", "k3+"):
        with pytest.raises(ConfigError, match=r"algorithm\.kl\.unbiased cannot hold together"):
            build(kl={"coefficient": 1.0, "estimator": kind, "unbiased": True})


def test_every_objective_has_a_vector() -> None:
    """I17: nothing in the table of objectives goes without an oracle."""
    configs = [*TOKEN_OBJECTIVES.values(), *(c for _, c in OTHER_OBJECTIVES.values()), *SEQUENCE_OBJECTIVES.values()]
    assert {build(**config).resolved.objective for config in configs} == set(OBJECTIVES)
