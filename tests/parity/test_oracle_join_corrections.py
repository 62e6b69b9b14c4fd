"""Every correction's vector of the blind oracle, computed by the implementation in float64, to 1e-9 (I17).

The weight of each token, and PPO 0.2/0.28 under it: loss under five aggregations, slopes and gradients.
"""

from __future__ import annotations

from typing import Any

import oracle_cases as cases
import pytest
import torch
from join_support import assert_close, build, describe, fields_of, flat, leaves, minibatch_of, nest
from oracle_core import Batch, Nested
from oracle_vectors import EXPECTED

from headrace.algorithms.corrections import CorrectionWeights, mean_weight
from headrace.algorithms.policy_term import policy_term

PPO = {"preset": "grpo", "clip_low": 0.2, "clip_high": 0.28}
TRUNCATED = {"type": "truncated", "high": 2.0}

# Vector -> [algorithm.correction]
CORRECTIONS: dict[str, dict[str, Any]] = {
    "tis": TRUNCATED,
    "mis": {"type": "masked", "low": 0.5, "high": 2.0},
    "icepop": {"type": "masked"},
    "token_reject": {"type": "rejected", "low": 0.5, "high": 2.0},
    "sequence_cap": {"type": "truncated", "level": "sequence", "high": 1.8},
    "sequence_mask": {"type": "masked", "level": "sequence", "low": 0.87, "high": 1.7},
    "sequence_clamped": {"type": "decoupled", "level": "sequence"},
    "geometric_cap": {"type": "truncated", "level": "geometric", "high": 1.2},
    "geometric_mask": {"type": "masked", "level": "geometric", "low": 0.9, "high": 1.2},
    "geometric_reject": {"type": "rejected", "level": "geometric", "low": 0.9, "high": 1.2},
    "veto": {"veto": 1e-4},
    "opsm": {"max_drift": 0.1},
    "tis_normalised": {**TRUNCATED, "batch_normalised": True},
    "mis_normalised": {"type": "masked", "low": 0.5, "high": 2.0, "batch_normalised": True},
    "sequence_normalised": {"type": "truncated", "level": "sequence", "high": 1.8, "batch_normalised": True},
    "sequence_normalised_by_tokens": {
        "type": "truncated",
        "level": "sequence",
        "high": 1.8,
        "batch_normalised": True,
    },
    "tis_and_opsm": {**TRUNCATED, "max_drift": 0.1},
}

JOINED = {*CORRECTIONS, *(f"{name}/ppo" for name in CORRECTIONS)}

# Named deviations, both of docs/algorithms.md. What the oracle divides by, that headrace does not:
# * mis_normalised: the mean over all tokens, rejected ones as 0. That raises the weight of the kept by N / N_kept,
#   which the rule on denominators forbids; headrace's mean is over the kept: its weights are N_kept / N of these.
# * sequence_normalised_by_tokens: an episode's weight once for each token. headrace counts an episode once; the parts
#   compute the other mean too, and no key asks for it.
KEPT_ALONE = "mis_normalised"
BY_TOKENS = "sequence_normalised_by_tokens"


def weights_of(name: str, batch: Batch) -> CorrectionWeights:
    """Before the batch's normaliser."""
    algorithm = build(batch.max_length, **PPO, correction=CORRECTIONS[name])
    term = policy_term(algorithm.resolved, flat(batch.new, batch.mask), fields_of(batch))
    assert term.weights is not None
    return term.weights


def normaliser(name: str, batch: Batch) -> float | None:
    """The mean weight of the batch as the oracle's vector has it; None where it has none."""
    if not CORRECTIONS[name].get("batch_normalised"):
        return None
    weights, fields = weights_of(name, batch), fields_of(batch)
    level = "token" if name == BY_TOKENS else CORRECTIONS[name].get("level", "token")
    mean = mean_weight(weights, level, fields.episode_index_N, fields.num_episodes)
    if name == KEPT_ALONE:
        num_tokens, num_kept = len(weights.rejected_N), int((~weights.rejected_N).sum())
        assert num_kept < num_tokens
        mean *= num_kept / num_tokens
    return mean


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights(name: str) -> None:
    """I17: rho at each level under each bound; rejections by veto and by drift; the batch's normaliser."""
    batch, _ = cases.WEIGHTS[name]
    weights = weights_of(name, batch)
    mean = normaliser(name, batch)
    weight_N = weights.apply(torch.ones_like(weights.weight_N)) / (1.0 if mean is None else mean)
    assert_close(nest(weight_N, batch.mask), EXPECTED[name], name)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_ppo_under_them(name: str) -> None:
    """I17: the weight multiplies loss and slope; a rejected token still counts in each denominator."""
    batch, _ = cases.WEIGHTS[name]
    found = describe({**PPO, "correction": CORRECTIONS[name]}, batch, mean_correction=normaliser(name, batch))
    assert_close(found, EXPECTED[f"{name}/ppo"], name)


@pytest.mark.parametrize("name", [n for n in CORRECTIONS if n.endswith("_normalised")])
def test_prepare_computes_the_normaliser(name: str) -> None:
    """The mean that the vectors above divide by is what the whole minibatch's call gives (in float32), but for the
    named deviation."""
    batch, _ = cases.WEIGHTS[name]
    algorithm = build(batch.max_length, **PPO, correction=CORRECTIONS[name])
    prepared = algorithm.prepare(minibatch_of(batch), leaves(batch.new, batch.mask), step=0)
    kept: Nested = EXPECTED[name]
    share = 1.0
    if name == KEPT_ALONE:
        flags = [bool(kept[i][t]) for i, t in batch.cells()]
        share = sum(flags) / len(flags)
    expected = normaliser(name, batch)
    assert expected is not None
    assert prepared.mean_correction == pytest.approx(expected / share, rel=1e-6)
