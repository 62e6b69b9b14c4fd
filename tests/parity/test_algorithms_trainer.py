"""Streams and whole-minibatch choices through the trainer: one gradient for every layout, that of plain autograd."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.algorithms import ComposedAlgorithm, build_algorithm
from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import AlgorithmConfig, TrainerConfig
from headrace.model.load import prepare_model
from headrace.testing import compute_in_float64, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.plan import plan_update
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, RolloutBatch, Sample

VOCAB = 64
TOKENIZER = tiny_tokenizer("".join(chr(c) for c in range(ord("A"), ord("A") + VOCAB - 9)))
LAYOUTS = [
    {"max_microbatch_tokens": 8192, "share_prompts": True},
    {"max_microbatch_tokens": 8192, "share_prompts": False},
    {"max_microbatch_tokens": 35, "share_prompts": True},
    {"max_microbatch_tokens": 16, "share_prompts": False},
]


def build(**options: Any) -> ComposedAlgorithm:
    config = AlgorithmConfig.model_validate(options)
    algorithm = build_algorithm(config, asynchronous=False, max_new_tokens=16)
    assert isinstance(algorithm, ComposedAlgorithm)
    return algorithm


def make_trainer(**config: Any) -> PolicyTrainer:
    model = tiny_model(vocab_size=VOCAB, initializer_range=0.2)
    compute_in_float64(model)
    return PolicyTrainer(prepare_model(model, TOKENIZER, "float64"), TrainerConfig(**config), num_steps=4)


def make_samples() -> tuple[Sample, ...]:
    """Two rl groups, two supervised samples, two for the teacher alone, and one rl sample that it has seen too."""
    rng = random.Random(0)
    samples = []
    for group in range(4):
        prompt = [rng.randrange(VOCAB) for _ in range(5 + group)]
        for member in range(3 if group < 2 else 2):
            reply = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 7))]
            logprobs = [rng.gauss(-4.0, 0.5) for _ in reply]
            stream = {2: "supervised", 3: "distillation"}.get(group, "rl")
            has_teacher = stream == "distillation" or (group, member) == (1, 2)
            teacher = tuple([0.0] * len(prompt) + [rng.gauss(-4.0, 0.5) for _ in reply])
            samples.append(
                make_sample(
                    prompt,
                    reply,
                    group=group,
                    member=member,
                    logprobs=logprobs,
                    stream=stream,
                    reward=float(member % 2) if stream == "rl" else None,
                    teacher_logprobs=teacher if has_teacher else None,
                    weight_T=tuple(rng.random() for _ in (*prompt, *reply)) if group == 2 else None,
                )
            )
    return tuple(samples)


SAMPLES = make_samples()
BATCH = RolloutBatch(index=0, groups=(), samples=SAMPLES, version=PolicyVersion(0, 0))


def gradients(trainer: PolicyTrainer, minibatch: Minibatch, algorithm: ComposedAlgorithm) -> tuple[Any, Any]:
    metrics = trainer.forward_backward(minibatch, algorithm)
    found = {n: p.grad.clone() for n, p in trainer._model.named_parameters()}
    trainer._weights.clear()
    return metrics, found


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def plain(trainer: PolicyTrainer, advantages: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """REINFORCE over 24 rl tokens' count, cross-entropy and k2 to the teacher over theirs, one sample at a time."""
    model = trainer._model
    totals = Totals.count(SAMPLES, 16)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, advantages_T in zip(SAMPLES, advantages, strict=True):
        logprobs_T = trained_logprobs(model, sample)
        mask_T = torch.tensor(sample.mask[1:], dtype=torch.float64)
        if sample.stream == "rl":
            loss = loss - (advantages_T[1:].double() * logprobs_T * mask_T).sum() / totals.num_tokens
        if sample.stream == "supervised":
            assert sample.weight_T is not None
            weight_T = torch.tensor(sample.weight_T[1:], dtype=torch.float32).double()
            loss = loss - (weight_T * logprobs_T * mask_T).sum() / totals.supervised.num_tokens
        if sample.teacher_logprobs is not None:
            teacher_T = torch.tensor(sample.teacher_logprobs[1:], dtype=torch.float32).double()
            square_T = 0.5 * (logprobs_T - teacher_T).square() * mask_T
            loss = loss + 0.3 * square_T.sum() / totals.distillation.num_tokens
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    trainer._weights.clear()
    return found


def trained_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    model.set_attn_implementation("sdpa")
    ids = torch.tensor([sample.ids])
    logprobs = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0]


def test_streams_share_a_pack() -> None:
    """I4: rl, supervised and distilled samples in one row or in many: the gradient of the three terms written out."""
    algorithm = build(preset="rloo", aggregation="token_mean", distillation={"coefficient": 0.3, "estimator": "k2"})
    (minibatch,) = plan_update(BATCH, algorithm, make_trainer(), TrainerConfig(), max_new_tokens=16)
    expected = plain(make_trainer(), list(minibatch.advantages))
    gap = max(
        abs(found - sampled)
        for sample, logprobs_T in zip(SAMPLES, make_trainer().forward(SAMPLES), strict=True)
        for found, sampled in zip(logprobs_T.tolist(), sample.behaviour_logprobs, strict=True)
        if sample.stream == "rl"
    )
    for layout in LAYOUTS:
        metrics, found = gradients(make_trainer(**layout), minibatch, algorithm)
        assert worst(found, expected) <= 1e-10, layout
        assert metrics["num_skipped_samples"] == 0
        assert metrics["logprob_gap_max"] == pytest.approx(gap, rel=1e-5), "nobody sampled the supervised tokens"


def test_only_rl_samples_without_teacher_are_skipped() -> None:
    """DESIGN section 8: zero advantages mean zero gradient for the rl stream alone."""
    algorithm = build(preset="rloo", aggregation="token_mean")
    (minibatch,) = plan_update(BATCH, algorithm, make_trainer(), TrainerConfig(), max_new_tokens=16)
    minibatch = replace(minibatch, advantages=[torch.zeros(len(s.ids)) for s in SAMPLES])
    metrics, found = gradients(make_trainer(), minibatch, algorithm)
    assert metrics["num_skipped_samples"] == 5
    _, computed = gradients(make_trainer(skip_zero_gradient=False), minibatch, algorithm)
    assert worst(found, computed) <= 1e-10


CHOICES = [
    {"preset": "clip_cov", "selection": {"fraction": 0.3, "low": -1.0, "high": 5.0}},
    {"preset": "kl_cov", "selection": {"fraction": 0.3}},
    {"preset": "m2po", "selection": {"threshold": 0.1}},
    {"correction": {"type": "truncated", "high": 1.5, "batch_normalised": True}},
]


@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("num_steps_before", [0, 1])
def test_choices_do_not_depend_on_the_layout(options: dict[str, Any], num_steps_before: int) -> None:
    """FAILURES 55, I4: on the first step of a batch and after the weights have moved."""
    algorithm = build(**options)
    results = []
    for layout in LAYOUTS:
        trainer = make_trainer(learning_rate=1e-2, **layout)
        first, second = plan_update(BATCH, algorithm, trainer, TrainerConfig(num_epochs=2, **layout), max_new_tokens=16)
        if num_steps_before:
            trainer.forward_backward(first, algorithm)
            trainer.optim_step()
        results.append(gradients(trainer, second if num_steps_before else first, algorithm))
    for metrics, found in results[1:]:
        # after a step the layouts' weights differ in their last bits already (AdamW divides by tiny numbers)
        assert worst(found, results[0][1]) <= (1e-5 if num_steps_before else 1e-10)
        for name in {"policy/selected", "correction/weight"} & results[0][0].keys():
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-6)
    if "selection" in options:
        assert 0 < results[0][0]["policy/selected"] < 1


def test_choices_stay_with_their_samples_where_others_are_skipped() -> None:
    """FAILURES 51: the first group has no advantage and is skipped; the choice is made with it, and is not shifted."""
    samples = tuple(replace(s, reward=1.0) if s.key.group == 0 else s for s in SAMPLES)
    algorithm = build(preset="clip_cov", selection={"fraction": 0.3, "low": -5.0, "high": 5.0})
    results = []
    for skip in (True, False):
        trainer = make_trainer(skip_zero_gradient=skip)
        (minibatch,) = plan_update(
            replace(BATCH, samples=samples), algorithm, trainer, TrainerConfig(), max_new_tokens=16
        )
        metrics, found = gradients(trainer, minibatch, algorithm)
        assert metrics["num_skipped_samples"] == (3 if skip else 0)
        results.append(found)
    assert worst(*results) <= 1e-10


def test_a_choice_on_later_steps_is_made_with_the_weights_of_that_step() -> None:
    """The first step reuses the proximal pass; the second makes one of its own."""
    algorithm = build(preset="clip_cov", selection={"fraction": 0.3, "low": -1.0, "high": 5.0})
    trainer = make_trainer(learning_rate=1e-2)
    calls: list[int] = []
    forward = trainer.forward
    trainer.forward = lambda samples, model="policy": calls.append(len(samples)) or forward(samples, model)  # type: ignore
    first, second = plan_update(BATCH, algorithm, trainer, TrainerConfig(num_epochs=2), max_new_tokens=16)
    assert calls == [len(SAMPLES)], "the proximal pass, over the samples without advantage too"
    trainer.forward_backward(first, algorithm)
    trainer.optim_step()
    assert calls == [len(SAMPLES)]
    trainer.forward_backward(second, algorithm)
    assert calls == [len(SAMPLES)] * 2


def test_the_proximal_pass_is_saved_where_nobody_reads_it() -> None:
    """A ratio to the behaviour policy, or an interpolated proximal one: no pass although there are two steps."""
    for options in ({"preset": "aipo"}, {"correction": {"proximal": "interpolated"}}):
        trainer = make_trainer()
        trainer.forward = None  # type: ignore
        plan = plan_update(BATCH, build(**options), trainer, TrainerConfig(num_epochs=2), max_new_tokens=16)
        assert [m.proximal_logprobs for m in plan] == [None, None]
        assert [m.version for m in plan] == [BATCH.version] * 2


def test_needs_prepare_without_the_method_is_one_clear_error() -> None:
    """A third party's algorithm that promises and does not keep."""
    algorithm = build(preset="m2po")

    class Half:
        needs = algorithm.needs

    (minibatch,) = plan_update(BATCH, algorithm, make_trainer(), TrainerConfig(), max_new_tokens=16)
    with pytest.raises(TypeError, match=r"Half\.needs\.prepare is set"):
        make_trainer().forward_backward(minibatch, Half())  # type: ignore[arg-type]
