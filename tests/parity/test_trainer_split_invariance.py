"""I4: however a minibatch is cut and laid out, the gradient is the same; and it is the one of plain transformers."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import TrainerConfig
from headrace.model.attention import ATTENTION_NAME
from headrace.model.load import prepare_model
from headrace.protocols import AlgorithmNeeds
from headrace.testing import Reinforce, compute_in_float64, make_reply, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import Sample

VOCAB = 64
BOUNDS = {"float32": 1e-5, "float64": 1e-10}
MODELS = {
    "llama-tied": {"architecture": "llama", "tied": True},
    "llama-untied-gqa": {"architecture": "llama", "tied": False, "num_kv_heads": 2},
    "qwen3-tied-gqa": {"architecture": "qwen3", "tied": True, "num_kv_heads": 2},
}
SMALL_TOKENIZER = tiny_tokenizer("".join(chr(c) for c in range(ord("A"), ord("A") + VOCAB - 9)))


def make_samples(seed: int = 0) -> tuple[Sample, ...]:
    """Three groups of ragged replies, with untrained stretches, an empty tail, and an episode of two branches."""
    rng = random.Random(seed)
    samples = []
    for group, prompt_length in enumerate((7, 1, 12)):
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_length)]
        replies: list[list[int]] = []
        for member in range(4):
            reply = make_reply(rng, VOCAB, 11, replies)
            replies.append(reply)
            mask = [int(rng.random() < 0.8) for _ in reply]
            mask[rng.randrange(len(reply))] = 1
            temperature = 1.0 if group < 2 else 0.7
            samples.append(
                make_sample(prompt, reply, group=group, member=member, reply_mask=mask, temperature=temperature)
            )
    branch_prompt = [rng.randrange(VOCAB) for _ in range(9)]
    samples.append(make_sample(branch_prompt, [3, 4, 5], group=2, member=3, branch=1, prefix_key="rewritten"))
    samples.append(make_sample([5, 6], [7], group=1, member=0, branch=1, reply_mask=[0]))
    return tuple(samples)


def make_trainer(model: str, dtype: str, **config: object) -> PolicyTrainer:
    built = tiny_model(**MODELS[model], vocab_size=VOCAB, initializer_range=0.2)
    if dtype == "float64":
        compute_in_float64(built)
    loaded = prepare_model(built, SMALL_TOKENIZER, dtype)
    return PolicyTrainer(loaded, TrainerConfig(**config), num_steps=1)  # type: ignore[arg-type]


def algorithm_of(samples: tuple[Sample, ...], **options: object) -> Reinforce:
    rng = random.Random(1)
    return Reinforce({sample.id: rng.uniform(-1, 1) for sample in samples}, **options)  # type: ignore[arg-type]


def minibatch_of(samples: tuple[Sample, ...], algorithm: Reinforce) -> Minibatch:
    totals = Totals(
        num_tokens=sum(s.num_trained for s in samples), num_episodes=len({s.key for s in samples}), max_length=16
    )
    return Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * algorithm.advantages[s.id] for s in samples],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=totals,
    )


def gradients(trainer: PolicyTrainer, samples: tuple[Sample, ...], algorithm: Reinforce) -> tuple[float, dict]:
    metrics = trainer.forward_backward(minibatch_of(samples, algorithm), algorithm)
    found = {n: p.grad.clone() for n, p in trainer._model.named_parameters()}
    trainer._weights.clear()
    return metrics["loss"], found


def worst(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected)


def plain_gradients(trainer: PolicyTrainer, samples: tuple[Sample, ...], algorithm: Reinforce) -> tuple[float, dict]:
    """One sequence at a time with transformers' own attention, logits and autograd."""
    model = trainer._model
    # transformers' eager attention rounds its softmax to float32
    model.set_attn_implementation("eager" if next(model.parameters()).dtype == torch.float32 else "sdpa")
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for sample in samples:
        ids = torch.tensor([sample.ids])
        logprobs = (model(ids, use_cache=False).logits[0, :-1] / sample.temperature).log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        weight = torch.tensor(sample.mask[1:], dtype=chosen.dtype)
        advantage = torch.tensor(algorithm.advantages[sample.id], dtype=torch.float32).to(chosen.dtype)
        loss = loss - (weight * (advantage * chosen + algorithm.entropy_coefficient * entropy)).sum()
    loss = loss / sum(s.num_trained for s in samples)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.set_attn_implementation(ATTENTION_NAME)
    trainer._weights.clear()
    return float(loss.detach()), found


LAYOUTS = {
    "one row, shared": {"max_microbatch_tokens": 8192, "share_prompts": True},
    "one row, not shared": {"max_microbatch_tokens": 8192, "share_prompts": False},
    "two rows, shared": {"max_microbatch_tokens": 70, "share_prompts": True},
    "four rows, shared": {"max_microbatch_tokens": 30, "share_prompts": True},
    "ragged, not shared": {"max_microbatch_tokens": 41, "share_prompts": False},
    "one episode a row": {"max_microbatch_tokens": 16, "share_prompts": True},
    "logits in chunks": {"max_logit_tokens": 5, "share_prompts": True},
    "logits one by one": {"max_logit_tokens": 1, "share_prompts": False},
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("model", MODELS)
def test_gradient_is_that_of_plain_transformers_for_every_split(model: str, dtype: str) -> None:
    """I4 and F16, F53: micro-batches, packing, shared prompts and logit chunks change nothing."""
    samples = make_samples()
    algorithm = algorithm_of(samples)
    expected_loss, expected = plain_gradients(make_trainer(model, dtype), samples, algorithm)
    for name, layout in LAYOUTS.items():
        trainer = make_trainer(model, dtype, **layout)
        loss, found = gradients(trainer, samples, algorithm)
        assert worst(found, expected) <= BOUNDS[dtype], name
        assert loss == pytest.approx(expected_loss, rel=BOUNDS[dtype]), name


def test_entropy_gradient_is_that_of_plain_transformers() -> None:
    """The differentiable entropy that an entropy bonus uses, chunked and not."""
    samples = make_samples()
    algorithm = algorithm_of(samples, needs=AlgorithmNeeds(entropy=True), entropy_coefficient=0.3)
    _, expected = plain_gradients(make_trainer("llama-tied", "float64"), samples, algorithm)
    for chunk in (1024, 4):
        _, found = gradients(make_trainer("llama-tied", "float64", max_logit_tokens=chunk), samples, algorithm)
        assert worst(found, expected) <= 1e-10


def test_layouts_really_differ() -> None:
    """The test above compares what it says: the layouts make different numbers of rows and of tokens."""
    samples = make_samples()
    shapes = set()
    for layout in LAYOUTS.values():
        rows = list(make_trainer("llama-tied", "float32", **layout)._rows(samples))
        shapes.add((len(rows), sum(row.num_tokens for row in rows)))
    assert {count for count, _ in shapes} >= {1, 2, 4}
    assert len({tokens for _, tokens in shapes}) >= 3


def test_replies_in_chunks_of_a_long_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree above the chunk limit attends in several calls over the pieces of its path: the same gradient."""
    monkeypatch.setattr("headrace.model.layout.MAX_CHUNK_TOKENS", 4)
    samples = make_samples()
    algorithm = algorithm_of(samples)
    _, expected = plain_gradients(make_trainer("llama-untied-gqa", "float64"), samples, algorithm)
    trainer = make_trainer("llama-untied-gqa", "float64")
    row = next(iter(trainer._rows(samples)))
    assert any(len(call.before) > 1 for call in row.layout._calls)
    _, found = gradients(trainer, samples, algorithm)
    assert worst(found, expected) <= 1e-10


def test_activation_checkpointing_changes_no_gradient() -> None:
    """Recomputed layers give bit-equal gradients, and really are recomputed."""
    samples = make_samples()
    algorithm = algorithm_of(samples)
    plain = make_trainer("llama-tied", "float32")
    _, expected = gradients(plain, samples, algorithm)
    loaded = prepare_model(tiny_model(vocab_size=VOCAB, initializer_range=0.2), SMALL_TOKENIZER)
    trainer = PolicyTrainer(loaded, TrainerConfig(), num_steps=1, activation_checkpointing=True)
    calls: list[int] = []
    loaded.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    _, found = gradients(trainer, samples, algorithm)
    assert len(calls) == 2
    assert all(torch.equal(found[n], expected[n]) for n in expected)


def test_skipped_and_computed_zero_advantages_give_one_gradient() -> None:
    """DESIGN section 8: leaving out samples without gradient changes neither the others' nor the denominator."""
    samples = make_samples()
    advantages = {s.id: 0.0 if s.key.group == 1 else 1.0 for s in samples}
    results = []
    for skip in (True, False):
        trainer = make_trainer("llama-tied", "float64", skip_zero_gradient=skip)
        algorithm = Reinforce(advantages)
        metrics = trainer.forward_backward(minibatch_of(samples, algorithm), algorithm)
        assert metrics["num_skipped_samples"] == (5 if skip else 0)
        results.append({n: p.grad.clone() for n, p in trainer._model.named_parameters()})
    assert worst(results[0], results[1]) <= 1e-10


def test_algorithm_that_does_not_allow_it_skips_nothing() -> None:
    """A KL or entropy term gives gradient to samples with zero advantage: they must be computed."""
    samples = make_samples()
    algorithm = Reinforce({s.id: 0.0 for s in samples}, zero_advantage_means_zero_gradient=False)
    trainer = make_trainer("llama-tied", "float32")
    metrics = trainer.forward_backward(minibatch_of(samples, algorithm), algorithm)
    assert metrics["num_skipped_samples"] == 0
    assert metrics["num_trained_tokens"] == sum(s.num_trained for s in samples)
