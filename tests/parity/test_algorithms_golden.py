"""The golden vectors of ALGORITHMS.md, to the digits given there, in float64 (I17)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headrace.algorithms import build_algorithm
from headrace.algorithms.advantages import (
    group_centred,
    group_normalised,
    group_normalised_biased,
    leave_one_out,
    mean_normalised,
)
from headrace.algorithms.corrections import RHO_LEVELS, masked, off_policy_sequences, truncated
from headrace.algorithms.fields import LossOutput, TokenFields, Totals
from headrace.algorithms.kl import KL_ESTIMATORS
from headrace.algorithms.ratios import bounded_exp, sequence_log_ratio
from headrace.algorithms.shaping import overlong_penalty
from headrace.config.schema import AlgorithmConfig


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


NEW, OLD = f64(-0.5, -1, -2, -0.7, -0.2), f64(-0.6, -1.5, -1.8, -0.7, -0.9)
ROLL, REF = f64(-0.55, -1.4, -1.9, -0.75, -0.8), f64(-0.4, -1.2, -2.2, -0.9, -0.3)
ADVANTAGES = f64(1, 1, 1, -1, -1)
INDEX = torch.tensor([0, 0, 0, 1, 1])
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
CLIP = {"preset": "grpo", "clip_low": 0.2, "clip_high": 0.28}


def run(config: dict[str, object]) -> LossOutput:
    algorithm = build_algorithm(AlgorithmConfig.model_validate(config), asynchronous=False, max_new_tokens=4)
    fields = TokenFields(
        advantages_N=ADVANTAGES,
        behaviour_logprobs_N=ROLL,
        proximal_logprobs_N=OLD,
        reference_logprobs_N=REF,
        weights_N=torch.ones(5, dtype=torch.float64),
        episode_index_N=INDEX,
        num_episodes=2,
        totals=Totals(num_tokens=5, num_episodes=2, max_length=4),
    )
    output = algorithm.loss(NEW, fields)
    assert isinstance(output, LossOutput)
    return output


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CLIP, "-0.038030 0.219455 -0.095074 -0.023769"),
        ({**CLIP, "dual_clip": 1.5}, "-0.140780 0.091016 -0.351951 -0.087988"),
        ({**CLIP, "dual_clip": 3.0}, "-0.038030 0.219455 -0.095074 -0.023769"),
        ({**CLIP, "objective": "cispo"}, "0.502809 0.339341 1.257023 0.314256"),
        (
            {**CLIP, "objective": "cispo", "clip_low": 0.1},
            "0.535317091808 0.366430909840 1.338292729519 0.334573182380",
        ),
        ({**CLIP, "correction": {"type": "decoupled"}}, "-0.048182 0.199297 -0.120455 -0.030114"),
        ({**CLIP, "correction": {"type": "truncated", "high": 1.05}}, "-0.039402 0.206508 -0.098506 -0.024626"),
        ({**CLIP, "correction": {"type": "masked", "low": 0.95, "high": 1.06}}, "0.0 0.087606 0.0 0.0"),
        (
            {**CLIP, "correction": {"type": "masked", "low": 0.95, "high": 1.12}},
            "-0.180967483607 -0.063200311641 -0.452418709018 -0.113104677254",
        ),
        ({"preset": "sapo"}, "-0.362780 0.092457 -0.906950 -0.226738"),
        ({"preset": "dppo_tv"}, "0.246999371344 0.114140015491 0.617498428359 0.154374607090"),
    ],
    ids=[
        "ppo",
        "dual",
        "dual-idle",
        "cispo",
        "cispo-low",
        "decoupled",
        "tis",
        "icepop-cancels",
        "icepop",
        "sapo",
        "dppo-tv",
    ],
)
def test_loss_rows(config: dict[str, object], expected: str) -> None:
    """I17: the four aggregations of each row, to the digits printed in ALGORITHMS.md."""
    for aggregation, text in zip(AGGREGATIONS, expected.split(), strict=True):
        output = run({**config, "aggregation": aggregation})
        loss = float(output.per_token_N.sum() / output.denominator)
        digits = max(6, len(text.split(".")[1]))
        assert abs(loss - float(text)) <= 0.51 * 10**-digits, aggregation


def test_ratio_row() -> None:
    """I17: the ratio of each token; its mean is the metric."""
    expected = [1.105171, 1.648721, 0.818731, 1.0, 2.013753]
    assert bounded_exp(NEW - OLD).tolist() == pytest.approx(expected, abs=5.1e-7)
    total, count = run(CLIP).metrics["policy/ratio"]
    assert total / count == pytest.approx(sum(expected) / 5, abs=1e-6)


@pytest.mark.parametrize(
    ("clip", "per_sequence", "loss"),
    [((0.2, 0.28), (-1.142631, 1.419068), 0.138218), ((3e-4, 4e-4), (-1.0004, 1.419068), 0.209334)],
)
def test_gspo_rows(clip: tuple[float, float], per_sequence: tuple[float, float], loss: float) -> None:
    """I17: GSPO's sequence ratios, per-sequence losses and their mean."""
    assert bounded_exp(sequence_log_ratio(NEW, OLD, INDEX, 2)).tolist() == pytest.approx(
        [1.142631] * 3 + [1.419068] * 2, abs=5.1e-7
    )
    output = run({"preset": "gspo", "clip_low": clip[0], "clip_high": clip[1]})
    values = output.per_token_N
    assert (float(values[:3].sum()), float(values[3:].sum())) == pytest.approx(per_sequence, abs=5.1e-7)
    assert float(values.sum() / output.denominator) == pytest.approx(loss, abs=5.1e-7)


def test_gmpo_row() -> None:
    """I17: the loss of each sequence and their mean; 0.4 in log space."""
    output = run({"preset": "gmpo"})
    sequences = (float(output.per_token_N[:3].sum()), float(output.per_token_N[3:].sum()))
    assert sequences == pytest.approx((-1.105171, 1.419068), abs=5.1e-7)
    assert sum(sequences) / output.denominator == pytest.approx(0.156948, abs=5.1e-7)


def test_sequence_and_geometric_rho_rows() -> None:
    """I17: rho_seq and rho_geo of the two sequences."""
    for level, row in {"sequence": (0.951229, 0.951229), "geometric": (0.983471, 0.975310)}.items():
        rho = bounded_exp(RHO_LEVELS[level](OLD - ROLL, INDEX, 2)).tolist()
        assert rho == pytest.approx([row[0]] * 3 + [row[1]] * 2, abs=5.1e-7)


def test_opsm_row() -> None:
    """I17: mean(lo - l) is -0.133333 and -0.35: a bound just below rejects the sequence, one just above does not."""
    for bound, rejected in ((-0.36, (1, 1)), (-0.34, (1, 0)), (-0.1334, (1, 0)), (-0.1333, (0, 0))):
        flags = off_policy_sequences(NEW - OLD, -ADVANTAGES.abs(), bound, INDEX, 2).tolist()
        assert flags == [bool(rejected[0])] * 3 + [bool(rejected[1])] * 2
    assert not off_policy_sequences(NEW - OLD, ADVANTAGES, -1.0, INDEX, 2)[:3].any(), "A > 0 is never rejected"


def test_rho_and_icepop_keep_rows() -> None:
    """I17: rho of each token, what IcePop keeps of it, and which tokens truncation at 1.05 caps."""
    rho = truncated(OLD - ROLL, None, None).weight_N
    assert rho.tolist() == pytest.approx([0.951229, 0.904837, 1.105171, 1.051271, 0.904837], abs=5.1e-7)
    assert (~masked(OLD - ROLL, 0.95, 1.06).rejected_N).tolist() == [True, False, False, True, False]
    assert truncated(OLD - ROLL, None, 1.05).truncated_N.tolist() == [False, False, True, True, False]


def test_kl_row() -> None:
    """I17: k1, k2, k3 token means; k3+ has the value of k3."""
    means = [float(KL_ESTIMATORS[name](NEW, REF).mean()) for name in ("k1", "k2", "k3", "k3+")]
    assert means == pytest.approx([0.12, 0.014, 0.013240, 0.013240], abs=5.1e-7)
    assert means[2] == pytest.approx(sum(math.exp(-d) - 1 + d for d in (NEW - REF).tolist()) / 5, abs=1e-15)


def test_advantage_row() -> None:
    """I17: R = [1, 0, 0, 1, 1] under GRPO (unbiased and biased), Dr. GRPO, RLOO and MaxRL."""
    rewards = f64(1, 0, 0, 1, 1)
    expected = {
        group_normalised: (0.730295, -1.095443),
        group_normalised_biased: (0.816495, -1.224742),
        group_centred: (0.4, -0.6),
        leave_one_out: (0.5, -0.75),
        mean_normalised: (0.666667, -1.0),
    }
    for function, (right, wrong) in expected.items():
        values = function(rewards).tolist()
        assert values == pytest.approx([right, wrong, wrong, right, right], abs=5.1e-7)


def test_overlong_row() -> None:
    """I17: DAPO's soft punishment with 20480 tokens and a buffer of 4096."""
    lengths = (16384, 18432, 20480, 20481)
    assert [overlong_penalty(n, 20480, 4096) for n in lengths] == [0.0, -0.5, -1.0, -1.0]
