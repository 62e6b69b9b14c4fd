"""Untrained tokens anywhere in a sample change nothing, whatever stands there. Legend: T tokens of a sample."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms_advantage import batch_of
from test_algorithms_advantage import sample as rewarded_sample
from test_algorithms_split import COMPOSITIONS, Case, build, make_case
from torch import Tensor

from headrace.algorithms import PRESETS, build_algorithm
from headrace.config.critic import SharedCriticConfig
from headrace.config.schema import AlgorithmConfig
from headrace.types import Sample

Slots = list[int | None]
"""Where each entry of the padded sample came from; None: from nowhere."""


def pad_slots(rng: random.Random, length: int) -> Slots:
    """The first id stays the first: it has no context."""
    slots: Slots = list(range(length))
    for _ in range(rng.randint(1, 4)):
        slots.insert(rng.randint(1, len(slots)), None)
    return slots


def spread(values: Any, slots: Slots, garbage: Any) -> tuple[Any, ...] | None:
    return None if values is None else tuple(garbage if slot is None else values[slot] for slot in slots)


def padded_sample(sample: Sample, slots: Slots) -> Sample:
    """With garbage wherever the mask of the padded sample is 0."""
    return dataclasses.replace(
        sample,
        ids=spread(sample.ids, slots, 3),
        mask=spread(sample.mask, slots, 0),
        behaviour_logprobs=spread(sample.behaviour_logprobs, slots, -55.0),
        versions=spread(sample.versions, slots, None),
        weight_T=spread(sample.weight_T, slots, math.nan),
        teacher_logprobs=spread(sample.teacher_logprobs, slots, 7.0),
        reward_T=spread(sample.reward_T, slots, 9.0),
    )


def spread_tensor(values_T: Tensor, slots: Slots) -> Tensor:
    return torch.stack([values_T.new_tensor(math.nan) if slot is None else values_T[slot] for slot in slots])


def padded(case: Case, places: list[Slots]) -> Case:
    def spread_all(values: Any) -> list[Tensor]:
        return [spread_tensor(v, slots) for v, slots in zip(values, places, strict=True)]

    m = case.minibatch
    return Case(
        dataclasses.replace(
            m,
            samples=tuple(padded_sample(s, slots) for s, slots in zip(m.samples, places, strict=True)),
            advantages=spread_all(m.advantages),
            proximal_logprobs=spread_all(m.proximal_logprobs),
            reference_logprobs=spread_all(m.reference_logprobs),
        ),
        spread_all(case.current),
    )


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=str)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), lengths=st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_padding_moves_neither_loss_nor_gradient(composition: dict[str, Any], seed: int, lengths: list[int]) -> None:
    """FAILURES 58, 59, 64: NaN and garbage between and behind the trained tokens of every preset and stream."""
    streams = ["rl", *random.Random(seed).choices(["rl", "supervised", "distillation"], k=len(lengths) - 1)]
    case = make_case(seed, lengths, streams)
    rng = random.Random(seed + 1)
    places = [pad_slots(rng, len(s.ids)) for s in case.minibatch.samples]
    algorithm = build(**composition)
    chunks = [list(range(len(places)))]
    plain_loss, plain = case.gradient(algorithm, chunks)
    loss, gradient = padded(case, places).gradient(algorithm, chunks)
    assert loss == plain_loss and math.isfinite(loss)
    for found_T, plain_T, slots in zip(gradient, plain, places, strict=True):
        expected_T = torch.nan_to_num(spread_tensor(plain_T, slots), nan=0.0)
        assert torch.equal(found_T, expected_T)


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16))
def test_padding_moves_no_advantage(preset: str, seed: int) -> None:
    """FAILURES 58, 65: nor does it count as length, as a reward or as a token to whiten over."""
    rng = random.Random(seed)
    rewards = [float(rng.random() < 0.5) for _ in range(6)]
    samples = [rewarded_sample(m // 3, m, r, num_trained=rng.randint(1, 5)) for m, r in enumerate(rewards)]
    samples = [dataclasses.replace(s, reward_T=tuple(0.1 for _ in s.ids)) for s in samples]
    places = [pad_slots(rng, len(s.ids)) for s in samples]
    wide = [padded_sample(s, slots) for s, slots in zip(samples, places, strict=True)]
    options = {"overlong_buffer": 0 if preset == "maxrl" else 12}
    critic = SharedCriticConfig() if preset == "ppo_critic" else None
    algorithm = build_algorithm(
        AlgorithmConfig(preset=preset, **options), asynchronous=False, max_new_tokens=16, critic=critic
    )
    values = [torch.tensor([rng.uniform(-1, 1) for _ in s.ids]) for s in samples]
    plain_values, wide_values = {}, {}
    if critic is not None:
        plain_values = {"values": values}
        wide_values = {"values": [spread_tensor(v, slots) for v, slots in zip(values, places, strict=True)]}
    plain = algorithm.advantage(batch_of(*samples), **plain_values)
    found = algorithm.advantage(batch_of(*wide), **wide_values)
    for found_T, plain_T, slots in zip(found, plain, places, strict=True):
        assert torch.equal(found_T, torch.nan_to_num(spread_tensor(plain_T, slots), nan=0.0))
