"""Losses over written data: values by hand, gradients, and that the split into rows changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headrace.config.offline import OfflineTrainerConfig
from headrace.model.load import LoadedModel, prepare_model
from headrace.model.renderer import ChatRenderer
from headrace.model.replies import conversation_samples
from headrace.model.reward_model import Description, RewardModel
from headrace.testing import SMALL_ALPHABET, compute_in_float64, tiny_model, tiny_tokenizer
from headrace.trainer.objectives import BradleyTerry, CrossEntropy, Dpo, Objective, dpo_loss
from headrace.trainer.offline import OfflineTrainer
from headrace.types import Sample

REPLIES = [("abc", "b"), ("d", "efg"), ("hello", "hallo"), ("xy", "")]


def load() -> LoadedModel:
    tokenizer = tiny_tokenizer(SMALL_ALPHABET)
    model = tiny_model(
        vocab_size=len(tokenizer), hidden_size=16, num_layers=1, num_heads=2, initializer_range=0.3, max_context=64
    )
    loaded = prepare_model(model.double(), tokenizer, "float64")
    compute_in_float64(loaded.model)
    return loaded


def pair_samples(model: RewardModel) -> list[Sample]:
    from dataclasses import replace

    samples = []
    for row, (chosen, rejected) in enumerate(REPLIES):
        messages = [{"role": "user", "content": f"prompt {row}"}]
        samples.append(replace(model.sample(messages, chosen, row=row, name="chosen"), weight=1.0))
        samples.append(replace(model.sample(messages, rejected, row=row, name="rejected"), weight=-1.0))
    return samples


def bradley_terry(loaded: LoadedModel, centre: float = 0.0) -> tuple[Objective, list[Sample]]:
    model = RewardModel(loaded, ChatRenderer(loaded.tokenizer), Description())
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-1, 1, 16, dtype=torch.float64)[None])
    samples = pair_samples(model)
    margins = {s.key: 0.25 * s.key.group for s in samples}
    return BradleyTerry(model=model, margins=margins, centre_coefficient=centre), samples


def dpo(loaded: LoadedModel) -> tuple[Objective, list[Sample]]:
    """Pairs whose replies are trained token by token."""
    model = RewardModel(loaded, ChatRenderer(loaded.tokenizer), Description())
    del loaded.model._modules["reward_head"]
    from dataclasses import replace

    samples = []
    for s in pair_samples(model):
        ids, length = s.ids[:-1], len(s.ids) - 1
        mask = tuple(int(t >= s.prefix_length) for t in range(length))
        samples.append(replace(s, ids=ids, mask=mask, behaviour_logprobs=(0.0,) * length, versions=(None,) * length))
    reference = {s.id: -3.0 - i for i, s in enumerate(samples)}
    return Dpo(loaded=loaded, reference=reference, beta=0.3, label_smoothing=0.1, max_logit_tokens=7), samples


def cross_entropy(loaded: LoadedModel) -> tuple[Objective, list[Sample]]:
    chat = ChatRenderer(loaded.tokenizer)
    weights: dict[str, Any] = {}
    samples = []
    for row, (text, other) in enumerate(REPLIES):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": text}]
        messages += [{"role": "user", "content": "b"}, {"role": "assistant", "content": other}]
        for weighted in conversation_samples(chat, messages, [0.0, 1.0, 0.0, 0.5], row):
            samples.append(weighted.sample)
            weights[weighted.sample.id] = weighted.weight_T.double()
    return CrossEntropy(loaded=loaded, weights=weights, max_logit_tokens=7), samples


def gradients(
    make: Callable[[LoadedModel], tuple[Objective, list[Sample]]], max_tokens: int, order: Sequence[int] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    loaded = load()
    objective, samples = make(loaded)
    if order is not None:
        samples = [s for row in order for s in samples if s.key.group == row]
    config = OfflineTrainerConfig(learning_rate=0.0, max_microbatch_tokens=max_tokens)
    trainer = OfflineTrainer(loaded, config, num_steps=1)
    kept: dict[str, torch.Tensor] = {}
    for name, p in loaded.model.named_parameters():
        p.register_hook(lambda g, name=name: kept.__setitem__(name, kept.get(name, 0) + g.clone()))
    loss = trainer.train_step(samples, objective)["loss"]
    return loss, kept


@pytest.mark.parametrize("make", [bradley_terry, dpo, cross_entropy], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("max_tokens", "order"), [(16, None), (40, None), (1000, [2, 0, 3, 1]), (30, [3, 1, 2, 0])])
def test_split_and_order_change_nothing(
    make: Callable[[LoadedModel], tuple[Objective, list[Sample]]], max_tokens: int, order: Sequence[int] | None
) -> None:
    """I4: the same loss and gradient whatever the micro-batches, with denominators of the whole step (FAILURES 53)."""
    loss, expected = gradients(make, 1000)
    other, found = gradients(make, max_tokens, order)
    assert other == pytest.approx(loss, rel=1e-12)
    assert expected.keys() == found.keys() and any(g.abs().sum() > 0 for g in expected.values())
    for name, gradient in expected.items():
        assert float((gradient - found[name]).norm() / gradient.norm().clamp(min=1e-30)) < 1e-10, name


def test_bradley_terry_by_hand() -> None:
    """softplus(-(s_c - s_r - m)) + centre (s_c + s_r)^2, averaged over pairs; every term binds."""
    loaded = load()
    objective, samples = bradley_terry(loaded, centre=0.5)
    assert isinstance(objective, BradleyTerry)
    scores = objective.model.score(samples)
    expected = 0.0
    for i in range(4):
        chosen, rejected = scores[2 * i], scores[2 * i + 1]
        expected += math.log1p(math.exp(-(chosen - rejected - 0.25 * i))) + 0.5 * (chosen + rejected) ** 2
    trainer = OfflineTrainer(loaded, OfflineTrainerConfig(), num_steps=1)
    measured = trainer.measure(samples, objective)
    assert measured["loss"] == pytest.approx(expected / 4, rel=1e-12)
    right = sum(scores[2 * i] > scores[2 * i + 1] for i in range(4)) / 4
    assert measured["accuracy"] == right


def test_dpo_by_hand() -> None:
    """Rafailov et al. 2023, eq. 7, with label noise: log pi = (-1.5, -2), log ref = (-2, -1.25) -> d = 1.25."""
    loss = dpo_loss(torch.tensor([1.25, -0.5], dtype=torch.float64), beta=0.4, label_smoothing=0.1)
    assert loss.tolist() == pytest.approx([0.5240769841801067, 0.7781388693815918], abs=1e-13)
    plain = dpo_loss(torch.tensor([1.25], dtype=torch.float64), beta=0.4, label_smoothing=0.0)
    assert plain.item() == pytest.approx(math.log1p(math.exp(-0.5)), abs=1e-15)


def test_dpo_gradient() -> None:
    difference_P = torch.tensor([1.25, -0.5, 0.0, 8.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: dpo_loss(d, 0.4, 0.1), (difference_P,))


def test_dpo_sums_whole_replies_of_the_right_side() -> None:
    """The row's difference is that of plain per-token sums, end of turn included."""
    loaded = load()
    objective, samples = dpo(loaded)
    assert isinstance(objective, Dpo)
    expected = []
    for i in range(4):
        gained = []
        for s in samples[2 * i : 2 * i + 2]:
            logits = plain_logits(loaded, s.ids)
            total = sum(float(logits[t - 1].log_softmax(-1)[s.ids[t]]) for t in range(len(s.ids)) if s.mask[t])
            gained.append(total - objective.reference[s.id])
        expected.append(gained[0] - gained[1])
    trainer = OfflineTrainer(loaded, OfflineTrainerConfig(), num_steps=1)
    loss = dpo_loss(torch.tensor(expected, dtype=torch.float64), 0.3, 0.1).mean()
    measured = trainer.measure(samples, objective)
    assert measured["loss"] == pytest.approx(float(loss), rel=1e-6)  # references are float32
    assert measured["margin"] == pytest.approx(0.3 * sum(expected) / 4, rel=1e-6)


def plain_logits(loaded: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """By transformers' own attention, without packing."""
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits: torch.Tensor = loaded.model(input_ids=torch.tensor([ids])).logits[0]
    from headrace.model.attention import ATTENTION_NAME

    loaded.model.set_attn_implementation(ATTENTION_NAME)
    return logits


def test_cross_entropy_by_hand() -> None:
    """-sum(w log p) / sum(w) over the step, not a mean of means."""
    loaded = load()
    objective, samples = cross_entropy(loaded)
    assert isinstance(objective, CrossEntropy)
    total = weight = 0.0
    for s in samples:
        logits = plain_logits(loaded, s.ids)
        for t, w in enumerate(objective.weights[s.id].tolist()):
            total -= w * float(logits[t - 1].log_softmax(-1)[s.ids[t]]) if w else 0.0
            weight += w
    trainer = OfflineTrainer(loaded, OfflineTrainerConfig(), num_steps=1)
    assert trainer.measure(samples, objective)["loss"] == pytest.approx(total / weight, rel=1e-9)
