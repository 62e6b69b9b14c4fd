"""Token choices over a whole minibatch, and the batch's normaliser. Legend: N tokens of the minibatch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algorithms import ComposedAlgorithm, build_algorithm
from headrace.algorithms.corrections import mean_weight, truncated
from headrace.algorithms.fields import LossOutput, Minibatch, TokenFields, Totals
from headrace.algorithms.selections import SelectionInput, clip_cov, covariances, kl_cov, m2po
from headrace.config.schema import AlgorithmConfig
from headrace.types import AttemptKey, Sample


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def build(**options: Any) -> ComposedAlgorithm:
    config = AlgorithmConfig.model_validate(options)
    algorithm = build_algorithm(config, asynchronous=False, max_new_tokens=16)
    assert isinstance(algorithm, ComposedAlgorithm)
    return algorithm


def choice(advantages: Tensor, logprobs: Tensor, **options: Any) -> SelectionInput:
    num_tokens = len(advantages)
    fields: dict[str, Any] = {
        "log_ratio_N": torch.zeros(num_tokens).double(),
        "clipped_N": torch.zeros(num_tokens, dtype=torch.bool),
        "names_N": [f"s/{i}" for i in range(num_tokens)],
    }
    return SelectionInput(advantages_N=advantages, logprobs_N=logprobs, **{**fields, **options})


# A - mean = (1, 1, -1, -1), l - mean = (2, -1, -2, 1): covariances 2, -1, 2, -1
A, L = f64(1, 1, -1, -1), f64(-1, -4, -5, -2)


def test_covariances_are_centred_on_the_minibatch() -> None:
    """arXiv 2505.22617, equation 9: both factors less their means."""
    assert covariances(A, L).tolist() == [2.0, -1.0, 2.0, -1.0]
    assert covariances(A + 7, L - 3).tolist() == [2.0, -1.0, 2.0, -1.0]


def test_kl_cov_takes_the_largest() -> None:
    """The fraction of all tokens, at least one; ties to the first in the order of the ids."""
    assert kl_cov(choice(A, L, fraction=0.5)).tolist() == [True, False, True, False]
    assert kl_cov(choice(A, L, fraction=0.74)).tolist() == [True, False, True, False], "int(2.96) = 2"
    assert kl_cov(choice(A, L, fraction=0.75)).tolist() == [True, True, True, False]
    assert kl_cov(choice(A, L, fraction=1e-4)).tolist() == [True, False, False, False]


def test_clip_cov_draws_among_the_candidates() -> None:
    """Strictly within the bounds, not clipped already; never more than there are."""
    within = {"low": 1.0, "high": 5.0}
    assert clip_cov(choice(A, L, fraction=1.0, **within)).tolist() == [True, False, True, False]
    assert clip_cov(choice(A, L, fraction=1.0, low=2.0, high=5.0)).tolist() == [False] * 4, "bounds excluded"
    assert clip_cov(choice(A, L, fraction=1.0, low=-5.0, high=2.0)).tolist() == [False, True, False, True]
    clipped = torch.tensor([True, False, False, False])
    assert clip_cov(choice(A, L, fraction=1.0, clipped_N=clipped, **within)).tolist() == [False, False, True, False]
    drawn = set()
    for step in range(20):
        names = [f"{step}/s/{i}" for i in range(4)]
        flags = clip_cov(choice(A, L, fraction=0.25, names_N=names, **within))
        assert int(flags.sum()) == 1
        assert flags.tolist() == clip_cov(choice(A, L, fraction=0.25, names_N=names, **within)).tolist()
        drawn.add(int(flags.nonzero()[0, 0]))
    assert drawn == {0, 2}, "other names, other draws"


def test_m2po_drops_the_largest_until_the_mean_square_fits() -> None:
    """Squares 1, .04, .25, 0: means of the smallest 1, 2, 3, 4 are 0, .02, .0967, .3225."""
    logs = f64(-1.0, 0.2, 0.5, 0.0)

    def dropped(threshold: float) -> list[bool]:
        return m2po(choice(A, L, log_ratio_N=logs, threshold=threshold)).tolist()

    assert dropped(0.04) == [True, False, True, False]
    assert dropped(0.01) == [True, True, True, False]
    assert dropped(0.1) == [True, False, False, False]
    assert dropped(0.33) == [False] * 4
    assert m2po(choice(A, L, log_ratio_N=f64(1, 1, 1, 1), threshold=0.5)).all(), "nothing fits"


# ------------------------------------------------------------------------------------- in the composition


def sample(member: int, num_tokens: int, behaviour: float) -> Sample:
    key = AttemptKey(0, member)
    mask = (0, *([1] * num_tokens))
    return Sample(
        id=f"{key}/0",
        key=key,
        ids=(1,) * len(mask),
        mask=mask,
        behaviour_logprobs=(behaviour,) * len(mask),
        versions=(None,) * len(mask),
        reward=0.0,
    )


SAMPLES = (sample(0, 2, -1.0), sample(1, 1, -2.0), sample(2, 1, -1.0))


def minibatch(*, proximal: list[list[float]], advantages: tuple[float, ...]) -> Minibatch:
    nan = math.nan  # wherever the mask is 0
    return Minibatch(
        samples=SAMPLES,
        advantages=[torch.tensor([nan] + [a] * s.num_trained) for a, s in zip(advantages, SAMPLES, strict=True)],
        proximal_logprobs=[torch.tensor([nan, *values]) for values in proximal],
        reference_logprobs=None,
        totals=Totals.count(SAMPLES, 16),
    )


def logprobs(*values: list[float]) -> list[Tensor]:
    return [torch.tensor([math.nan, *v]) for v in values]


def test_prepare_leaves_alone_what_the_clip_has_clipped_already() -> None:
    """Clip-Cov: the token with ratio above 1.2 and A > 0 is no candidate."""
    # advantages 1, 1, -1, 1: mean .5; log-probabilities -1, -1, -2, -1: mean -1.25; covariances .125, .125, 1.125, .125
    batch = minibatch(proximal=[[-1.5, -1.0], [-2.0], [-1.0]], advantages=(1.0, -1.0, 1.0))
    algorithm = build(preset="clip_cov", selection={"fraction": 1.0, "low": 0.1, "high": 1.0})
    prepared = algorithm.prepare(batch, logprobs([-1.0, -1.0], [-2.0], [-1.0]), step=0)
    assert prepared.selected is not None
    assert [v.tolist() for v in prepared.selected] == [[False, False, True], [False, False], [False, True]]


@pytest.mark.parametrize(
    ("options", "current", "proximal"), [({}, -3.0, -2.0), ({"dual_clip": 3.0}, -1.5, -3.5)], ids=["low", "dual"]
)
def test_every_bound_of_the_clip_counts(options: dict[str, Any], current: float, proximal: float) -> None:
    """Clip-Cov: with A < 0 a ratio below 0.8, or above the dual clip, is clipped already; under wider bounds it is
    not."""
    batch = minibatch(proximal=[[-2.0, -2.0], [proximal], [-2.0]], advantages=(1.0, -1.0, 1.0))
    now = logprobs([-2.0, -2.0], [current], [-2.0])
    choose_all = {"fraction": 1.0, "low": -5.0, "high": 5.0}
    for bounds, chosen in ((options, False), ({"clip_low": 0.9}, True)):
        algorithm = build(preset="clip_cov", selection=choose_all, **bounds)
        selected = algorithm.prepare(batch, now, step=0).selected
        assert selected is not None
        assert [v.tolist()[1:] for v in selected] == [[True, True], [chosen], [True]]


def test_prepare_takes_the_ratio_to_the_anchor() -> None:
    """M2PO: l - lb, not l - lo, although the proximal log-probabilities are there."""
    batch = minibatch(proximal=[[-1.0, -3.0], [-2.0], [-1.0]], advantages=(1.0, -1.0, 1.0))
    algorithm = build(preset="m2po", selection={"threshold": 0.1})
    prepared = algorithm.prepare(batch, logprobs([-1.0, -1.1], [-2.9], [-1.0]), step=0)
    assert prepared.selected is not None
    assert [v.tolist() for v in prepared.selected] == [[False, False, False], [False, True], [False, False]]


def test_other_streams_have_no_part_in_the_choice() -> None:
    """A supervised sample was sampled by nobody: its log-probabilities are no ratio, and move no mean."""
    supervised = dataclasses.replace(sample(3, 1, 0.0), stream="supervised", reward=None)
    batch = minibatch(proximal=[[-1.0, -3.0], [-2.0], [-1.0]], advantages=(1.0, -1.0, 1.0))
    batch = dataclasses.replace(
        batch,
        samples=(supervised, *batch.samples),
        advantages=[torch.zeros(2), *batch.advantages],
        proximal_logprobs=None,
    )
    current = logprobs([-9.0], [-1.0, -1.1], [-2.9], [-1.0])
    for preset, selection in (("m2po", {"threshold": 0.1}), ("kl_cov", {"fraction": 0.25})):
        prepared = build(preset=preset, selection=selection).prepare(batch, current, step=0)
        assert prepared.selected is not None
        assert [v.tolist()[1:] for v in prepared.selected] == [[False], [False, False], [True], [False]]
    only = dataclasses.replace(batch, samples=(supervised,), advantages=[torch.zeros(2)])
    assert build(preset="m2po").prepare(only, logprobs([-9.0]), step=0) is only, "nothing to choose from"


def test_the_draw_depends_on_the_step() -> None:
    """Clip-Cov draws anew for each optimizer step, and the same again for the same step (I18)."""
    batch = minibatch(proximal=[[-1.0, -1.0], [-2.0], [-1.0]], advantages=(1.0, -1.0, 1.0))
    algorithm = build(preset="clip_cov", selection={"fraction": 0.25, "low": 0.1, "high": 1.0})

    def drawn(step: int) -> list[list[bool]]:
        prepared = algorithm.prepare(batch, logprobs([-1.0, -1.0], [-2.0], [-1.0]), step=step)
        assert prepared.selected is not None
        return [v.tolist() for v in prepared.selected]

    assert drawn(1) == drawn(1)
    assert len({str(drawn(step)) for step in range(12)}) == 3, "three candidates"


def loss_of(algorithm: ComposedAlgorithm, logprobs_N: Tensor, **fields: Any) -> tuple[LossOutput, list[float]]:
    logprobs_N = logprobs_N.clone().requires_grad_()
    num_tokens = len(logprobs_N)
    output = algorithm.loss(
        logprobs_N,
        TokenFields(
            **{
                "advantages_N": torch.ones(num_tokens).double(),
                "behaviour_logprobs_N": f64(-1, -1),
                "proximal_logprobs_N": f64(-1.5, -0.5),
                "reference_logprobs_N": None,
                "weights_N": torch.ones(num_tokens).double(),
                "episode_index_N": torch.arange(num_tokens),
                "num_episodes": num_tokens,
                "totals": Totals(num_tokens=num_tokens, num_episodes=num_tokens, max_length=16),
                **fields,
            }
        ),
    )
    output.per_token_N.sum().backward()
    assert logprobs_N.grad is not None
    return output, logprobs_N.grad.tolist()


def test_what_happens_to_chosen_tokens() -> None:
    """Clip-Cov and M2PO: no policy loss, the denominator stays; KL-Cov: plus penalty x |l - lo|, whatever the sign."""
    new, chosen = f64(-1.0, -1.0), torch.tensor([True, False])
    output, gradient = loss_of(build(preset="clip_cov"), new, selected_N=chosen)
    assert gradient == pytest.approx([0.0, -math.exp(-0.5)]) and output.denominator == 2
    assert output.metrics["policy/selected"] == (1.0, 2.0)
    _, gradient = loss_of(build(preset="m2po"), new, selected_N=~chosen)
    assert gradient == pytest.approx([-1.0, 0.0])
    cov = build(preset="kl_cov", selection={"penalty": 0.7})
    output, gradient = loss_of(cov, new, selected_N=torch.tensor([True, True]))
    assert gradient == pytest.approx([-math.exp(0.5) + 0.7, -math.exp(-0.5) - 0.7])
    assert output.per_token_N.tolist() == pytest.approx([-math.exp(0.5) + 0.35, -math.exp(-0.5) + 0.35])
    _, gradient = loss_of(cov, new, selected_N=chosen)
    assert gradient == pytest.approx([-math.exp(0.5) + 0.7, -math.exp(-0.5)]), "the chosen alone"
    assert "policy/selected" not in loss_of(build(), new)[0].metrics


def test_chosen_tokens_may_be_infinite() -> None:
    """FAILURES 58: selected away, not multiplied by 0."""
    _, gradient = loss_of(
        build(preset="m2po", objective="reinforce"), f64(-math.inf, -1.0), selected_N=f64(1, 0).bool()
    )
    assert gradient == [0.0, -1.0]


def test_what_prepare_makes_is_missed_by_name() -> None:
    """A choice that was never made is an error, never no choice."""
    with pytest.raises(ValueError, match=r"selection 'm2po' needs fields\.selected_N"):
        loss_of(build(preset="m2po"), f64(-1, -1))
    normalised = build(correction={"type": "truncated", "batch_normalised": True})
    with pytest.raises(ValueError, match=r"needs fields\.mean_correction"):
        loss_of(normalised, f64(-1, -1))
    with pytest.raises(ValueError, match="2 lists of log-probabilities for 3 samples"):
        batch = minibatch(proximal=[[0.0, 0.0], [0.0], [0.0]], advantages=(1.0, 1.0, 1.0))
        normalised.prepare(batch, logprobs([-1.0, -1.0], [-1.0]), step=0)


# ------------------------------------------------------------------------------------------ batch normaliser


def test_weights_divided_by_their_mean() -> None:
    """Tokens have weights e^.5, e^0, e^1 -> 2, e^-.5: divided by their mean over the minibatch."""
    batch = minibatch(proximal=[[-0.5, -1.0], [-1.0], [-1.5]], advantages=(1.0, 1.0, 1.0))
    algorithm = build(correction={"type": "truncated", "batch_normalised": True})
    current = logprobs([-0.5, -1.0], [-1.0], [-1.5])
    mean = (math.exp(0.5) + 1 + 2 + math.exp(-0.5)) / 4
    prepared = algorithm.prepare(batch, current, step=0)
    assert prepared.mean_correction == pytest.approx(mean, rel=1e-6)
    assert prepared.selected is None
    fields = {"proximal_logprobs_N": f64(-0.5, -1.5), "mean_correction": mean}
    output, _ = loss_of(algorithm, f64(-0.5, -1.5), **fields)
    total, _ = output.metrics["correction/weight"]
    assert total == pytest.approx((math.exp(0.5) + math.exp(-0.5)) / mean)


def test_at_an_episodes_level_the_mean_is_over_episodes() -> None:
    """Sums: .5, 1, -.5 over three episodes, the first of two tokens, which count once."""
    batch = minibatch(proximal=[[-0.5, -1.0], [-1.0], [-1.5]], advantages=(1.0, 1.0, 1.0))
    algorithm = build(correction={"type": "decoupled", "level": "sequence", "batch_normalised": True})
    prepared = algorithm.prepare(batch, logprobs([0.0, 0.0], [0.0], [0.0]), step=0)
    assert prepared.mean_correction == pytest.approx((math.exp(0.5) + math.e + math.exp(-0.5)) / 3, rel=1e-6)


def test_rejected_weights_are_not_in_the_mean() -> None:
    """I17: counted as 0 they would raise the weight of the rest by N / N_kept; with none left the mean is 1."""
    weights = truncated(f64(0.5, 0.0, 2.0, 2.0), None, None).reject(torch.tensor([False, False, True, True]))
    index = torch.tensor([0, 0, 1, 1])
    assert mean_weight(weights, "token", index, 2) == pytest.approx((math.exp(0.5) + 1) / 2)
    assert mean_weight(weights, "sequence", index, 2) == pytest.approx((math.exp(0.5) + 1) / 2)
    everything = weights.reject(torch.ones(4, dtype=torch.bool))
    assert mean_weight(everything, "token", index, 2) == mean_weight(everything, "geometric", index, 2) == 1.0


def test_interpolation_needs_ages() -> None:
    """A-3PO without the versions of the tokens is an error."""
    with pytest.raises(ValueError, match=r"needs fields\.ages_N"):
        loss_of(build(correction={"proximal": "interpolated"}), f64(-1, -1))
    batch = minibatch(proximal=[[0.0, 0.0], [0.0], [0.0]], advantages=(1.0, 1.0, 1.0))
    algorithm = build(correction={"type": "truncated", "batch_normalised": True, "proximal": "interpolated"})
    with pytest.raises(ValueError, match=r"needs fields\.ages_N"):
        algorithm.prepare(dataclasses.replace(batch, version=None), logprobs([0.0, 0.0], [0.0], [0.0]), step=0)


def test_topr_needs_rewards() -> None:
    """It treats right and wrong episodes differently."""
    with pytest.raises(ValueError, match=r"needs fields\.rewards_N"):
        loss_of(build(preset="topr"), f64(-1, -1))
