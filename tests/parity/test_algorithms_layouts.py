"""Packing, order, shared prompts and padding do not move the gradient of any preset, through the model (I4)."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.algorithms import PRESETS, ComposedAlgorithm, build_algorithm
from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import AlgorithmConfig, TrainerConfig
from headrace.model.load import prepare_model
from headrace.testing import compute_in_float64, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, Sample

VOCAB = 16
TOKENIZER = tiny_tokenizer("ABCDEFG")
CHOICES = {
    "clip_cov": {"selection": {"fraction": 0.3, "low": -5.0, "high": 5.0}},
    "kl_cov": {"selection": {"fraction": 0.3}},
    "m2po": {"selection": {"threshold": 0.1}},
}


def make_trainer(**layout: Any) -> PolicyTrainer:
    model = tiny_model(vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=2, initializer_range=0.5)
    compute_in_float64(model)
    return PolicyTrainer(prepare_model(model, TOKENIZER, "float64"), TrainerConfig(**layout), num_steps=1)


def make_minibatch(rng: random.Random) -> Minibatch:
    """Two groups of three replies with untrained stretches; one episode has two samples."""
    samples: list[Sample] = []
    values: dict[str, list[torch.Tensor]] = {"advantages": [], "proximal_logprobs": [], "reference_logprobs": []}
    for group in range(2):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        for member in range(3):
            advantage = rng.choice([-1.0, 0.5, 1.5])
            for branch in range(2 if (group, member) == (1, 2) else 1):
                reply = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
                mask = [1, *(int(rng.random() < 0.7) for _ in reply[1:])]
                logprobs = [rng.gauss(-2.5, 0.5) if m else 0.0 for m in mask]
                samples.append(
                    make_sample(
                        prompt,
                        reply,
                        group=group,
                        member=member,
                        branch=branch,
                        reply_mask=mask,
                        logprobs=logprobs,
                        reward=float(advantage > 0),
                        temperature=rng.choice([1.0, 0.8]),
                    )
                )
                mask_T = torch.tensor(samples[-1].mask, dtype=torch.float32)
                values["advantages"].append(advantage * mask_T)
                for name in ("proximal_logprobs", "reference_logprobs"):
                    values[name].append(torch.tensor([rng.gauss(-2.5, 0.5) for _ in mask_T]) * mask_T)
    return Minibatch(
        samples=tuple(samples), **values, totals=Totals.count(samples, 8), version=PolicyVersion(0, rng.randint(0, 3))
    )


def reordered(minibatch: Minibatch, order: list[int]) -> Minibatch:
    lists = {
        name: [getattr(minibatch, name)[i] for i in order]
        for name in ("advantages", "proximal_logprobs", "reference_logprobs")
    }
    return dataclasses.replace(minibatch, samples=tuple(minibatch.samples[i] for i in order), **lists)


def with_tails(minibatch: Minibatch, num_tokens: int) -> Minibatch:
    """Untrained tokens behind every sample."""

    def longer(sample: Sample) -> Sample:
        return dataclasses.replace(
            sample,
            ids=(*sample.ids, *([3] * num_tokens)),
            mask=(*sample.mask, *([0] * num_tokens)),
            behaviour_logprobs=(*sample.behaviour_logprobs, *([0.0] * num_tokens)),
            versions=(*sample.versions, *([None] * num_tokens)),
        )

    lists = {
        name: [torch.cat([v, torch.full((num_tokens,), torch.nan)]) for v in getattr(minibatch, name)]
        for name in ("proximal_logprobs", "reference_logprobs")
    }
    advantages = [torch.cat([v, torch.zeros(num_tokens)]) for v in minibatch.advantages]
    samples = tuple(longer(sample) for sample in minibatch.samples)
    return dataclasses.replace(minibatch, samples=samples, advantages=advantages, **lists)


def gradient(minibatch: Minibatch, algorithm: ComposedAlgorithm, **layout: Any) -> torch.Tensor:
    """Of all parameters, as one vector."""
    trainer = make_trainer(**layout)
    trainer.forward_backward(minibatch, algorithm)
    return torch.cat([p.grad.flatten() for p in trainer._model.parameters() if p.grad is not None])


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    max_tokens=st.integers(16, 60),
    shares_prompts=st.booleans(),
    num_tail=st.integers(0, 3),
)
def test_no_layout_moves_the_gradient(
    preset: str, seed: int, max_tokens: int, shares_prompts: bool, num_tail: int
) -> None:
    """I4, FAILURES 53, 55, 59: one long row, against several rows in another order with tails, for every preset."""
    config = AlgorithmConfig.model_validate({"preset": preset, **CHOICES.get(preset, {})})
    algorithm = build_algorithm(config, asynchronous=False, max_new_tokens=8)
    assert isinstance(algorithm, ComposedAlgorithm)
    rng = random.Random(seed)
    minibatch = make_minibatch(rng)
    expected = gradient(minibatch, algorithm, max_microbatch_tokens=8192, share_prompts=not shares_prompts)
    order = rng.sample(range(len(minibatch.samples)), len(minibatch.samples))
    changed = with_tails(reordered(minibatch, order), num_tail)
    found = gradient(changed, algorithm, max_microbatch_tokens=max_tokens, share_prompts=shares_prompts)
    assert float((found - expected).norm()) <= 1e-10 * float(expected.norm())
