"""Terms that no vector of the oracle holds; each was found by `make mutation`. Legend: N tokens of a micro-batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from test_algorithms_loss import build, f64, fields_of, gradient
from torch import Tensor

from headrace.algorithms.advantages import whiten
from headrace.algorithms.corrections import masked, mean_weight, truncated
from headrace.algorithms.fields import LossOutput, Minibatch, StreamTotals, Totals
from headrace.algorithms.kl import k3
from headrace.algorithms.objectives import OBJECTIVES, ObjectiveInput, ObjectiveOutput, binary_kl
from headrace.types import AttemptKey, PolicyVersion, RolloutBatch, Sample


def objective(name: str, logprobs: Tensor, anchor: Tensor, advantages: Tensor, **options: Any) -> ObjectiveOutput:
    """Every token is an episode of its own."""
    return OBJECTIVES[name].function(
        ObjectiveInput(
            logprobs_N=logprobs,
            anchor_N=anchor,
            ratio_N=(logprobs - anchor).exp(),
            advantages_N=advantages,
            episode_index_N=torch.arange(len(logprobs)),
            num_episodes=len(logprobs),
            rewards_N=advantages,
            **options,
        )
    )


def flags(output: ObjectiveOutput) -> dict[str, list[int] | None]:
    found = {"low": output.clipped_low_N, "high": output.clipped_high_N}
    return {name: None if values_N is None else values_N.int().tolist() for name, values_N in found.items()}


# Tokens that moved far down and far up, each with A > 0, A < 0 and A = 0; then two that hardly moved.
MOVES = f64(-0.9, -0.9, -0.9, 0.9, 0.9, 0.9, 0.05, -0.05)
SIGNS = f64(1, -1, 0, 1, -1, 0, 1, -1)


@pytest.mark.parametrize(
    ("name", "options", "low", "high"),
    [
        ("ppo", {"clip_low": 0.2, "clip_high": 0.2}, [0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]),
        ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}, [0, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 0, 0]),
        ("cispo", {"clip_low": 0.2, "clip_high": 0.2}, [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0, 0]),
        ("topr", {}, None, [0, 0, 0, 0, 1, 1, 0, 0]),
        (
            "dppo_tv",
            {"trust_low": 0.1, "trust_high": 0.1, "ratio_cap": 20.0},
            [0, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 1, 0, 0, 0, 0],
        ),
        (
            "dppo_kl",
            {"trust_low": 0.05, "trust_high": 0.05, "ratio_cap": 20.0},
            [0, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 1, 0, 0, 0, 0],
        ),
    ],
)
def test_which_bound_acted_on_which_token(
    name: str, options: dict[str, float], low: list[int] | None, high: list[int]
) -> None:
    """FAILURES 63: the counts of the metrics, and what Clip-Cov takes for clipped already."""
    anchor = torch.full_like(MOVES, -1.0)
    assert flags(objective(name, anchor + MOVES, anchor, SIGNS, **options)) == {"low": low, "high": high}


def test_each_direction_of_the_binary_kl_has_its_own_bound() -> None:
    """DPPO-KL: KL of 0.022 upwards and 0.019 downwards, between the bounds, which are exchanged the second time."""
    anchor = f64(-1.0, -1.0)
    logprobs = anchor + f64(0.25, -0.28)
    up, down = binary_kl(anchor, logprobs).tolist()
    assert min(up, down) > 0.01 and max(up, down) < 0.03
    for trust, trusted in (
        ({"trust_low": 0.01, "trust_high": 0.03}, [True, False]),
        ({"trust_low": 0.03, "trust_high": 0.01}, [False, True]),
    ):
        loss_N = objective("dppo_kl", logprobs, anchor, f64(1, -1), ratio_cap=20.0, **trust).loss_N
        assert (loss_N != 0).tolist() == trusted


def test_binary_kl_of_a_probability_rounded_above_one() -> None:
    """Neither side may give a NaN."""
    assert binary_kl(f64(-0.5), f64(1e-7)).tolist() == [math.inf]


def test_k3_is_flat_beyond_its_bound_on_both_sides() -> None:
    """FAILURES 58: clamped as a whole at 20 nats, with no gradient beyond."""
    for difference in (30.0, -30.0):
        logprobs_N = f64(difference).requires_grad_()
        value_N = k3(logprobs_N, f64(0.0))
        bounded = math.copysign(20.0, difference)
        assert value_N.item() == pytest.approx(math.exp(-bounded) - 1 + bounded, rel=1e-12)
        value_N.sum().backward()
        assert logprobs_N.grad is not None and logprobs_N.grad.tolist() == [0.0]


def test_the_entropy_bonus_leaves_the_policy_term_in_place() -> None:
    """I17: -A l - c H, not -c H alone."""
    algorithm = build(objective="reinforce", aggregation="token_sum", entropy_coefficient=0.5)
    fields = fields_of(f64(1.0, -2.0), entropy=f64(0.25, 0.5))
    output: LossOutput = algorithm.loss(f64(-1.0, -3.0), fields)
    assert output.per_token_N.tolist() == pytest.approx([1.0 - 0.125, -6.0 - 0.25])
    assert gradient(algorithm, f64(-1.0, -3.0), fields).tolist() == [-1.0, 2.0]


def test_no_gradient_leaves_through_another_policy() -> None:
    """I17: behaviour, proximal, reference and teacher are other models; a tensor of theirs may carry a graph."""
    others = {
        name: f64(-0.7, -1.1).requires_grad_()
        for name in (
            "behaviour_logprobs_N",
            "proximal_logprobs_N",
            "reference_logprobs_N",
            "teacher_logprobs_N",
        )
    }
    totals = Totals(num_tokens=2, num_episodes=1, max_length=16, distillation=StreamTotals(num_tokens=2))
    fields = dataclasses.replace(fields_of(f64(1.0, -1.0), totals=totals), **others)
    for anchor in ("proximal", "behaviour"):
        correction = {"type": "truncated", "veto": 1e-4} if anchor == "proximal" else {}
        algorithm = build(
            ratio_anchor=anchor, objective="ratio", kl={"coefficient": 0.1}, correction={"max_drift": 5.0, **correction}
        )
        assert gradient(algorithm, f64(-0.6, -1.4), fields).abs().min() > 0
    interpolated = build(correction={"type": "truncated", "proximal": "interpolated"})
    assert gradient(interpolated, f64(-0.6, -1.4), fields).abs().min() > 0
    assert all(values_N.grad is None for values_N in others.values())


def test_a_part_of_an_episode_that_is_rejected_is_not_in_its_mean() -> None:
    """Weights 1, 1 | 3, 3 with one token of the second rejected: an episode counts once, by what is left of it."""
    weights = truncated(f64(0.0, 0.0, math.log(3), math.log(3)), None, None)
    weights = weights.reject(torch.tensor([False, False, False, True]))
    assert mean_weight(weights, "sequence", torch.tensor([0, 0, 1, 1]), 2) == pytest.approx(2.0)


@pytest.mark.parametrize("bounds", [(None, 2.0), (0.5, None)])
def test_a_band_has_two_ends(bounds: tuple[float | None, float | None]) -> None:
    """A composition made by hand that lacks one is an error, not half a band."""
    with pytest.raises(ValueError, match="need both bounds"):
        masked(f64(0.0), *bounds)


def test_whitening_nothing() -> None:
    """A batch without any token, and one whose episodes have none."""
    assert whiten([]) == []
    assert [v.tolist() for v in whiten([f64(), f64()])] == [[], []]


def untrained_sample() -> Sample:
    key = AttemptKey(0, 0)
    return Sample(id=f"{key}/0", key=key, ids=(1, 2), mask=(0, 0), behaviour_logprobs=(0.0,) * 2, versions=(None,) * 2)


def test_nothing_is_chosen_where_nothing_is_trained() -> None:
    """A minibatch of untrained samples passes the choice as it came."""
    zeros = [torch.zeros(2)]
    minibatch = Minibatch(
        samples=(untrained_sample(),),
        advantages=zeros,
        proximal_logprobs=zeros,
        reference_logprobs=None,
        totals=Totals(num_tokens=0, num_episodes=0, max_length=16),
    )
    algorithm: Any = build("m2po")
    assert algorithm.prepare(minibatch, zeros, step=0) is minibatch


@pytest.mark.parametrize("missing", ["proximal_logprobs", "reference_logprobs"])
def test_kl_in_the_reward_needs_both_policies(missing: str) -> None:
    """Either one missing is one clear error."""
    given = {name: [torch.zeros(2)] for name in ("proximal_logprobs", "reference_logprobs") if name != missing}
    batch = RolloutBatch(index=0, groups=(), samples=(untrained_sample(),), version=PolicyVersion(0, 0))
    with pytest.raises(ValueError, match="needs the proximal and the reference log-probabilities"):
        build("reinforce", kl={"coefficient": 0.1}).advantage(batch, **given)
