"""The load-balance loss and the load metrics of a mixture-of-experts model: its formula, and I4 under every split."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import TrainerConfig
from headrace.errors import ConfigError
from headrace.model.load import prepare_model
from headrace.testing import Reinforce, compute_in_float64, make_reply, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import Sample

VOCAB = 64
TOKENIZER = tiny_tokenizer("".join(chr(c) for c in range(ord("A"), ord("A") + VOCAB - 9)))
COEFFICIENT = 0.5
EXPERTS, CHOSEN = 4, 2


def make_trainer(*, dtype: str = "float64", architecture: str = "qwen3_moe", **options: Any) -> PolicyTrainer:
    checkpointing = options.pop("activation_checkpointing", False)
    moe = {"norm_topk_prob": True, "tied": False} if architecture == "qwen3_moe" else {}
    model = tiny_model(architecture, vocab_size=VOCAB, initializer_range=0.2, **moe)
    if dtype == "float64":
        compute_in_float64(model)
    config = TrainerConfig(**{"router_aux_coefficient": COEFFICIENT, **options})
    loaded = prepare_model(model, TOKENIZER, dtype)
    return PolicyTrainer(loaded, config, num_steps=1, activation_checkpointing=checkpointing)


def make_samples() -> tuple[Sample, ...]:
    """Groups with shared prompts, untrained stretches and tails, and an episode of two branches."""
    rng = random.Random(0)
    samples = []
    for group, prompt_length in enumerate((7, 1, 12)):
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_length)]
        replies: list[list[int]] = []
        for member in range(4):
            reply = make_reply(rng, VOCAB, 11, replies)
            replies.append(reply)
            mask = [int(rng.random() < 0.8) for _ in reply]
            mask[rng.randrange(len(reply))] = 1
            samples.append(make_sample(prompt, reply, group=group, member=member, reply_mask=mask))
    samples.append(make_sample([9, 9, 3], [3, 4, 5], group=2, member=3, branch=1, prefix_key="rewritten"))
    return tuple(samples)


SAMPLES = make_samples()


def minibatch_of(advantages: dict[str, float]) -> Minibatch:
    return Minibatch(
        samples=SAMPLES,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * advantages[s.id] for s in SAMPLES],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=sum(s.num_trained for s in SAMPLES), num_episodes=len(SAMPLES), max_length=16),
    )


def gradients(trainer: PolicyTrainer, advantage: float = 0.0) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    advantages = {sample.id: advantage * (-1) ** i for i, sample in enumerate(SAMPLES)}
    metrics = trainer.forward_backward(minibatch_of(advantages), Reinforce(advantages))
    return {n: p.grad for n, p in trainer._model.named_parameters() if p.grad is not None}, metrics


def plain_routers(trainer: PolicyTrainer) -> list[torch.Tensor]:
    """Router logits [tokens, E] of each layer, of all tokens that the samples feed, one sample at a time, by plain
    transformers. With gradient."""
    model = trainer._model
    model.set_attn_implementation("sdpa")
    seen: list[list[torch.Tensor]] = []
    for sample in SAMPLES:
        length = max(t for t, trained in enumerate(sample.mask) if trained)
        found: list[torch.Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda _m, _a, output, found=found: found.append(output[0]))
            for layer in model.model.layers
        ]
        model(torch.tensor([sample.ids[:length]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        seen.append(found)
    model.set_attn_implementation("headrace")
    return [torch.cat(layer) for layer in zip(*seen, strict=True)]


def test_gradient_is_the_published_losss() -> None:
    """Switch Transformers, equations 4 to 6, over the whole minibatch: advantages of 0 leave nothing else."""
    trainer = make_trainer(max_microbatch_tokens=35)
    found, metrics = gradients(trainer)
    trainer._weights.clear()
    loss, violations, entropies, dead, balance = torch.zeros((), dtype=torch.float64), [], [], 0, []
    for logits in plain_routers(trainer):
        chosen = torch.nn.functional.one_hot(logits.topk(CHOSEN).indices, EXPERTS).sum((0, 1)).double()
        share = chosen / chosen.sum()
        one = EXPERTS * (share * logits.softmax(-1).mean(0)).sum()
        loss = loss + COEFFICIENT * one
        violations.append(float(share.max()) / (1 / EXPERTS) - 1)
        entropies.append(-sum(float(f) * math.log(f) for f in share if f) / math.log(EXPERTS))
        dead += int((share == 0).sum())
        balance.append(float(one.detach()))
    loss.backward()
    expected = {n: p.grad for n, p in trainer._model.named_parameters() if p.grad is not None}
    assert expected["model.layers.0.mlp.gate.weight"].norm() > 1e-3
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-10, name
    assert metrics["loss"] == 0 and metrics["num_skipped_samples"] == 0
    assert metrics["router/load_max_violation"] == pytest.approx(max(violations))
    assert metrics["router/load_entropy"] == pytest.approx(sum(entropies) / len(entropies))
    assert metrics["router/num_dead_experts"] == dead
    assert metrics["router/balance_loss"] == pytest.approx(sum(balance) / len(balance))


LAYOUTS = {
    "one row, not shared": {"max_microbatch_tokens": 8192, "share_prompts": False},
    "three rows, shared": {"max_microbatch_tokens": 60, "share_prompts": True},
    "ragged, not shared": {"max_microbatch_tokens": 41, "share_prompts": False},
    "one episode a row": {"max_microbatch_tokens": 16, "share_prompts": True},
    "recomputed": {"max_microbatch_tokens": 60, "activation_checkpointing": True},
}


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-5)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_split_does_not_matter(layout: dict[str, Any], dtype: str, bound: float) -> None:
    """I4: policy and balance loss together, whatever the micro-batches and wherever a prompt is computed."""
    expected, known = gradients(make_trainer(dtype=dtype, max_microbatch_tokens=8192), 1.0)
    found, metrics = gradients(make_trainer(dtype=dtype, **layout), 1.0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) <= bound, name
    for name in known:
        if name.startswith("router/"):
            assert metrics[name] == pytest.approx(known[name], rel=1e-5), name


def test_off_by_default_and_counted_all_the_same() -> None:
    """The default has no such gradient; the load is watched (F75)."""
    assert TrainerConfig().router_aux_coefficient == 0
    off, metrics = gradients(make_trainer(router_aux_coefficient=0.0), 1.0)
    on, _ = gradients(make_trainer(), 1.0)
    name = "model.layers.0.mlp.gate.weight"
    assert float((on[name] - off[name]).norm() / off[name].norm()) > 1e-2
    assert {n for n in metrics if n.startswith("router/")} == {
        "router/balance_loss",
        "router/load_max_violation",
        "router/load_entropy",
        "router/num_dead_experts",
    }
    silent, metrics = gradients(make_trainer(router_aux_coefficient=0.0), 0.0)
    assert not silent and metrics["num_skipped_samples"] == len(SAMPLES)
    assert "router/load_entropy" not in metrics, "nothing was computed, so nothing is said"


def test_it_evens_out_the_load() -> None:
    """The sign of everything: steps on the balance loss alone even out a load that one expert has too much of."""
    trainer = make_trainer(dtype="float32", learning_rate=1e-2)
    with torch.no_grad():
        trainer._model.model.layers[0].mlp.gate.weight[0] += 0.5
        trainer._model.model.layers[0].mlp.gate.weight[1:] -= 0.2
    seen = []
    for _ in range(15):
        seen.append(gradients(trainer)[1])
        trainer.optim_step()
    assert seen[-1]["router/balance_loss"] < seen[0]["router/balance_loss"]
    assert seen[-1]["router/load_entropy"] > seen[0]["router/load_entropy"]
    assert seen[-1]["router/load_max_violation"] < seen[0]["router/load_max_violation"]


@pytest.mark.parametrize("options", [{"router_aux_coefficient": 0.1}, {"router_replay": True}], ids=str)
def test_a_dense_model_is_refused(options: dict[str, Any]) -> None:
    """I20: an option without effect is an error at start."""
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(options))}.*LlamaForCausalLM has no routers"):
        make_trainer(architecture="llama", dtype="float32", **{"router_aux_coefficient": 0.0, **options})
    assert "router/load_entropy" not in gradients(make_trainer(architecture="llama", router_aux_coefficient=0.0), 1)[1]
