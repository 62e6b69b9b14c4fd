"""Sampling: the declared distribution, its log-probability, and the counter-based random stream."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from headrace.engines.sampling import Sampler, uniform
from headrace.types import Sampling


def logprobs_of(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The declared distribution the slow way: softmax(logits / T), then top-k, then top-p, renormalised."""
    probs_V = (logits_V.double() / (sampling.temperature or 1.0)).softmax(-1)
    order_V = sorted(range(len(probs_V)), key=lambda i: -float(probs_V[i]))
    if sampling.top_k:
        order_V = order_V[: sampling.top_k]
    mass = sum(float(probs_V[i]) for i in order_V)
    kept, cumulative = [], 0.0
    for i in order_V:
        if cumulative / mass >= sampling.top_p:
            break
        kept.append(i)
        cumulative += float(probs_V[i])
    out_V = torch.full_like(probs_V, float("-inf"))
    out_V[kept] = (probs_V[kept] / probs_V[kept].sum()).log()
    return out_V


def test_t39_temperature_is_part_of_the_logprob():
    """T39 / F6: logits [2, 1, 0], id 0, temperature 0.6 has log-probability -0.20257, not -0.40761."""
    sampler = Sampler(3)
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    draws = sampler(logits, [Sampling(temperature=0.6)], [1e-9])
    assert draws.ids == [0]
    assert draws.logprobs[0] == pytest.approx(-0.20257, abs=1e-5)


def test_greedy_reports_temperature_one():
    """F6: greedy takes the largest logit; its log-probability is that at temperature 1."""
    draws = Sampler(3)(torch.tensor([[2.0, 1.0, 0.0]]), [Sampling(temperature=0)], [0.999])
    assert draws.ids == [0]
    assert draws.logprobs[0] == pytest.approx(-0.40761, abs=1e-5)


@pytest.mark.parametrize("vocab_size", [5, 256, 1000, 1025])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(temperature=2.5),
        Sampling(top_k=4),
        Sampling(top_p=0.7),
        Sampling(top_p=0.999),
        Sampling(temperature=0.7, top_k=50, top_p=0.8),
        Sampling(temperature=4.0, top_p=0.95),
    ],
    ids=str,
)
def test_ids_and_logprobs_are_those_of_the_declared_distribution(vocab_size, sampling):
    """F6, F7: every uniform number gives an id of the distribution, by inversion in the order of ids, with its
    log-probability; kept ids are exactly the ids that could have come out."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(1, vocab_size) * 2
    expected_V = logprobs_of(logits[0], sampling)
    cumulative_V = expected_V.exp().cumsum(0)
    sampler = Sampler(vocab_size)
    for k in range(60):
        u = (k + 0.5) / 60
        draws = sampler(logits, [sampling], [u])
        chosen = draws.ids[0]
        assert draws.logprobs[0] == pytest.approx(float(expected_V[chosen]), abs=2e-6)
        before = float(cumulative_V[chosen - 1]) if chosen else 0.0
        assert before - 1e-6 <= u <= float(cumulative_V[chosen]) + 1e-6
        if sampling.is_truncated:
            kept = torch.isfinite(expected_V).nonzero().flatten().tolist()
            assert list(draws.kept_ids[0]) == kept
        else:
            assert draws.kept_ids == [None]


def test_extreme_uniforms_never_leave_the_support():
    """F14: the smallest and largest uniform numbers give ids with mass, beside ids of no mass and padding blocks."""
    logits = torch.full((1, 300), float("-inf"))
    logits[0, 17], logits[0, 280] = 0.0, 1.0
    for sampling in (Sampling(), Sampling(top_k=2), Sampling(top_p=0.99)):
        assert Sampler(300)(logits, [sampling], [2.0**-53]).ids == [17]
        assert Sampler(300)(logits, [sampling], [1 - 2.0**-53]).ids == [280]


def test_padded_vocabulary_is_never_sampled_and_has_no_mass():
    """F14: logits at and above the tokenizer's size get nothing, even where they are the largest."""
    logits = torch.tensor([[0.0, 1.0, 50.0, 50.0]])
    for sampling in (Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(top_p=0.99)):
        draws = Sampler(2)(logits, [sampling], [0.9])
        assert draws.ids[0] < 2
        assert draws.logprobs[0] == pytest.approx(math.log(1 / (1 + math.exp(-1))), abs=1e-5)


def test_mixed_rows_do_not_disturb_each_other():
    """I18: a row's draw is bit-equal whatever kinds of rows stand beside it."""
    torch.manual_seed(0)
    logits = torch.randn(6, 700)
    samplings = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_k=3),
        Sampling(top_p=0.9),
        Sampling(temperature=0.5),
        Sampling(top_k=90, top_p=0.5),
    ]
    uniforms = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    together = Sampler(700)(logits, samplings, uniforms)
    for i in range(6):
        alone = Sampler(700)(logits[i : i + 1], samplings[i : i + 1], uniforms[i : i + 1])
        assert (alone.ids[0], alone.kept_ids[0]) == (together.ids[i], together.kept_ids[i])
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)


def test_frequencies_match_probabilities():
    """I18: the streams of many seeds draw each id as often as its probability says (chi-square, 4 degrees)."""
    logits = torch.tensor([[0.0, 0.5, 1.0, 1.5, -1.0]]).expand(4000, 5)
    draws = Sampler(5)(logits, [Sampling()] * 4000, [uniform(seed, 3) for seed in range(4000)])
    counts = Counter(draws.ids)
    expected = logits[0].softmax(-1).mul(4000).tolist()
    chi_square = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(5))
    assert chi_square < 18.5  # the 0.1 % point


def test_uniform_depends_on_seed_and_position_only():
    """I18: fixed values (so that a run can be replayed by a later version), spread over (0, 1), big seeds allowed."""
    assert uniform(0, 0) == uniform(0, 0)
    values = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(values)) == 1600
    assert all(0 < value < 1 for value in values)
    assert abs(sum(values) / 1600 - 0.5) < 0.03
    assert uniform(2**64 + 7, 1) == uniform(7, 1)
    # SplitMix64 with state 0 gives 0xE220A8397B1DCDAF first; mix(0) = 0, so seed 0 reads that very sequence.
    assert uniform(0, 0) == ((0xE220A8397B1DCDAF >> 12) + 0.5) * 2.0**-52
    assert uniform(0, 1) == ((0x6E789E6AA1B965F4 >> 12) + 0.5) * 2.0**-52


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_raise(bad):
    """I13: logits that make no distribution are an error with the row, not a token."""
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        Sampler(10)(logits, [Sampling()] * 3, [0.5] * 3)


def test_bfloat16_logits_are_scored_in_float32():
    """F9: the log-probability of bf16 logits is computed in float32."""
    torch.manual_seed(0)
    logits = torch.randn(2, 400).bfloat16()
    draws = Sampler(400)(logits, [Sampling()] * 2, [0.3, 0.8])
    expected = logits.float().log_softmax(-1)
    for row in range(2):
        assert draws.logprobs[row] == pytest.approx(float(expected[row, draws.ids[row]]), abs=1e-6)


def test_draws_from_one_row_are_those_from_copies_of_it():
    """I18: rows of a batch whose tokens agree share their logits, and each draws bit for bit as from its own."""
    torch.manual_seed(1)
    logits = torch.randn(4, 700)
    samplings = [Sampling(), Sampling(temperature=0), Sampling(temperature=0.5, top_k=9), Sampling(top_p=0.7)]
    row_of = [2, 0, 0, 3, 1, 2, 0, 3]
    uniforms = [uniform(7, t) for t in range(8)]
    shared = Sampler(700)(logits, samplings, uniforms, row_of)
    copied = Sampler(700)(logits[row_of], [samplings[row] for row in row_of], uniforms)
    assert shared == copied
    assert len({shared.ids[1], shared.ids[2], shared.ids[6]}) > 1
