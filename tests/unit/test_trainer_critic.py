"""The critic inside the trainer: where gradients go, warm-up, values at behaviour time, checkpoints, exports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from headrace.algorithms import build_algorithm
from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.base import LoraConfig, ScheduleConfig
from headrace.config.critic import CriticConfig, SeparateCriticConfig, SharedCriticConfig
from headrace.config.schema import AlgorithmConfig, TrainerConfig
from headrace.errors import ConfigError
from headrace.model.load import LoadedModel, prepare_model
from headrace.protocols import Algorithm, AlgorithmNeeds
from headrace.reporting import TrainRecord
from headrace.testing import SMALL_ALPHABET, Reinforce, compute_in_float64, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.critic import Critic
from headrace.trainer.plan import plan_update
from headrace.trainer.trainer import PolicyTrainer
from headrace.trainer.weights import CheckpointError, NonFiniteError
from headrace.types import PolicyVersion, RolloutBatch

SAMPLES = tuple(
    make_sample(
        [1, 6, 20 + g],
        [30 + m, 31, 8, 40 + g, 4][: 3 + 2 * m],
        group=g,
        member=m,
        reply_mask=[1, 1, 0, 1, 1][: 3 + 2 * m],
        reward=float(m == g % 2),
    )
    for g in range(3)
    for m in range(2)
)
BATCH = RolloutBatch(index=0, groups=(), samples=SAMPLES, version=PolicyVersion(0, 0))
TRAIN = TrainerConfig(learning_rate=1e-2, num_minibatches=2, num_epochs=2)
SHARED = SharedCriticConfig(learning_rate=1e-2, schedule=ScheduleConfig(type="linear"))
SEPARATE = SeparateCriticConfig(learning_rate=1e-2, schedule=ScheduleConfig(type="linear"))
CONFIGS: dict[str, CriticConfig] = {
    "shared": SHARED,
    "shared_train_backbone": SHARED.model_copy(update={"train_backbone": True}),
    "separate": SEPARATE,
    "separate_lora": SEPARATE.model_copy(update={"lora": LoraConfig(rank=4)}),
}


def load(dtype: str = "float32", lora: LoraConfig | None = None, **model: Any) -> LoadedModel:
    return prepare_model(tiny_model(initializer_range=0.2, **model), tiny_tokenizer(), dtype, lora=lora)


def make(
    critic: CriticConfig, *, dtype: str = "float32", lora: LoraConfig | None = None, **train: Any
) -> tuple[PolicyTrainer, Algorithm]:
    policy = load(dtype, lora)
    own = load(dtype, critic.lora) if isinstance(critic, SeparateCriticConfig) else None
    made = Critic(critic, policy, own=own, num_steps=40)
    trainer = PolicyTrainer(policy, TRAIN.model_copy(update=train), num_steps=40, critic=made)
    config = AlgorithmConfig(preset="ppo_critic")
    return trainer, build_algorithm(config, asynchronous=False, max_new_tokens=8, critic=critic)


def plan(trainer: PolicyTrainer, algorithm: Algorithm) -> list[Minibatch]:
    return plan_update(BATCH, algorithm, trainer, trainer.config, max_new_tokens=8)


def train(trainer: PolicyTrainer, algorithm: Algorithm, num_batches: int = 1) -> list[dict[str, float]]:
    metrics = []
    for _ in range(num_batches):
        for minibatch in plan(trainer, algorithm):
            metrics.append(trainer.forward_backward(minibatch, algorithm) | trainer.optim_step())
        trainer.publish()
    return metrics


def critic_of(trainer: PolicyTrainer) -> Critic:
    assert trainer._critic is not None
    return trainer._critic


def policy_weights(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer._model.named_parameters()}


def critic_masters(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {name: m.detach().clone() for name, m in critic_of(trainer)._weights.masters.items()}


# ---------------------------------------------------------------------------------------- where gradients go


@pytest.mark.parametrize("kind", CONFIGS)
def test_who_moves_whose_weights(kind: str) -> None:
    """The value loss reaches the policy's weights on a shared backbone with train_backbone, and never else: the
    policy's gradient is otherwise the one that it has without a critic."""
    trainer, algorithm = make(CONFIGS[kind])
    minibatch = plan(trainer, algorithm)[0]
    assert minibatch.values is not None and minibatch.value_targets is not None
    trainer.forward_backward(minibatch, algorithm)
    with_critic = {n: m.grad.clone() for n, m in trainer._weights.masters.items() if m.grad is not None}
    alone = PolicyTrainer(load(), TRAIN, num_steps=40)
    alone.forward_backward(minibatch, algorithm)
    without = {n: m.grad for n, m in alone._weights.masters.items() if m.grad is not None}
    same = all(torch.equal(with_critic[n], without[n]) for n in without)
    assert same or kind == "shared_train_backbone"
    head = critic_of(trainer).head
    assert head.weight.grad is not None and head.weight.grad.any()
    # The head starts at 0, so that the backbone hears of the value loss from the second step on.
    trainer.optim_step()
    trainer.forward_backward(plan(trainer, algorithm)[0], algorithm)
    named = critic_of(trainer)._weights.masters
    moved = {name for name, m in named.items() if m.grad is not None and m.grad.any()}
    assert {"value_head.weight", "value_head.bias"} <= moved
    assert any("backbone" in name for name in moved) == kind.startswith("separate")
    assert not any("lm_head" in name for name in named), "a critic needs no output head"


def test_train_backbone_adds_the_scaled_value_gradient() -> None:
    """Backbone gradient = policy's + loss_coefficient x value loss's; the head's is not scaled."""
    gradients, heads = {}, {}
    for coefficient in (None, 1.0, 0.25):
        update = {} if coefficient is None else {"train_backbone": True, "loss_coefficient": coefficient}
        trainer, algorithm = make(SHARED.model_copy(update=update), dtype="float64")
        compute_in_float64(trainer._model)
        torch.nn.init.constant_(critic_of(trainer).head.weight, 0.1)
        trainer.forward_backward(plan(trainer, algorithm)[0], algorithm)
        gradients[coefficient] = {n: m.grad.clone() for n, m in trainer._weights.masters.items() if m.grad is not None}
        heads[coefficient] = critic_of(trainer).head.weight.grad
    for name, plain in gradients[None].items():
        whole = gradients[1.0][name] - plain
        assert whole.any()
        torch.testing.assert_close(gradients[0.25][name] - plain, 0.25 * whole, rtol=1e-7, atol=1e-11)
    assert torch.equal(heads[1.0], heads[0.25]) and torch.equal(heads[None], heads[1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["shared", "shared_train_backbone", "separate"])
def test_critic_gradient_does_not_depend_on_micro_batches_or_sharing(kind: str) -> None:
    """I4 for the value loss, in float64: one denominator for the minibatch."""
    results = []
    for options in ({}, {"max_microbatch_tokens": 16}, {"share_prompts": False}):
        trainer, algorithm = make(CONFIGS[kind], dtype="float64", num_minibatches=1, num_epochs=1, **options)
        for model in (trainer._model, critic_of(trainer).backbone):
            if model is not None:
                compute_in_float64(model)
        torch.nn.init.constant_(critic_of(trainer).head.weight, 0.1)
        metrics = trainer.forward_backward(plan(trainer, algorithm)[0], algorithm)
        masters = {**trainer._weights.masters, **critic_of(trainer)._weights.masters}
        results.append((metrics["critic/loss"], {n: m.grad for n, m in masters.items() if m.grad is not None}))
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)  # values travel in float32
        assert gradients.keys() == results[0][1].keys()
        for name, gradient in gradients.items():
            expected = results[0][1][name]
            assert gradient is not None and expected is not None
            assert float((gradient - expected).norm() / expected.norm()) < 1e-6, name


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_value_loss_is_the_rl_streams_and_carries_the_samples_weights(kind: str) -> None:
    """DESIGN section 2, F53: supervised tokens in the minibatch, in the same packed row, change neither the value
    loss nor its gradient; a token of weight 2 counts twice, and the denominator stays the count."""
    rl = SAMPLES[:4]
    doubled = dataclasses.replace(rl[0], weight=0.5, weight_T=(4.0,) * len(rl[0].ids))
    taught = make_sample([1, 6, 20], [30, 31, 9], member=7, stream="supervised")
    found = {}
    for name, samples in {
        "plain": rl,
        "mixed": (rl[0], taught, *rl[1:]),
        "weighted": (doubled, *rl[1:]),
        "first": rl[:1],
        "taught": (taught,),
    }.items():
        trainer, _ = make(CONFIGS[kind])
        values = [torch.zeros(len(s.ids)) for s in samples]
        targets = [torch.full((len(s.ids),), 1e6 if s is taught else 0.5 + s.key.member) for s in samples]
        minibatch = Minibatch(
            samples=samples,
            advantages=values,
            proximal_logprobs=None,
            reference_logprobs=None,
            totals=Totals.count(samples, 8),
            values=values,
            value_targets=targets,
        )
        algorithm = build_algorithm(
            AlgorithmConfig(preset="ppo_critic"), asynchronous=False, max_new_tokens=8, critic=CONFIGS[kind]
        )
        trainer.forward_backward(minibatch, algorithm)
        grad = critic_of(trainer).head.weight.grad
        found[name] = torch.zeros_like(critic_of(trainer).head.weight) if grad is None else grad
    assert found["plain"].any() and not found["taught"].any()
    torch.testing.assert_close(found["mixed"], found["plain"])
    share = rl[0].num_trained / sum(s.num_trained for s in rl)  # of the first sample's own token mean
    torch.testing.assert_close(found["weighted"], found["plain"] + share * found["first"])


# ------------------------------------------------------------------------------------------ values over time


@pytest.mark.parametrize("kind", CONFIGS)
def test_values_are_those_of_behaviour_time(kind: str) -> None:
    """Computed once, before the first step, by the gradient pass's own code and micro-batches: the first pass finds
    them again bit for bit, so that nothing is clipped; later passes of the batch have moved, and keep the old ones."""
    trainer, algorithm = make(CONFIGS[kind].model_copy(update={"value_clip": 1e-6}))
    train(trainer, algorithm)
    minibatches = plan(trainer, algorithm)
    before = [[v.clone() for v in m.values or ()] for m in minibatches]
    assert any(v.any() for v in before[0]), "the head has left 0"
    first = minibatches[0]
    assert all(torch.equal(a, b) for a, b in zip(trainer.forward(first.samples, "critic"), before[0], strict=True))
    assert trainer.forward_backward(first, algorithm)["critic/clip_share"] == 0.0
    trainer.optim_step()
    clip_shares = []
    for minibatch in minibatches[1:]:
        clip_shares.append(trainer.forward_backward(minibatch, algorithm)["critic/clip_share"])
        trainer.optim_step()
    assert max(clip_shares) > 0.0
    for minibatch, old in zip(minibatches, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(minibatch.values or (), old, strict=True))
    for sample, value_T in zip(SAMPLES, trainer.forward(SAMPLES, "critic"), strict=True):
        assert not value_T[~torch.tensor(sample.mask, dtype=torch.bool)].any() and value_T.dtype == torch.float32


def test_a_critic_learns_to_foretell() -> None:
    """Fixed rewards: explained variance rises, the loss falls; both are reported over the whole batch."""
    trainer, algorithm = make(SEPARATE.model_copy(update={"warmup_batches": 99, "gae_lambda": 1.0}))
    explained = []
    for _ in range(12):
        record = TrainRecord(BATCH)
        for minibatch in plan(trainer, algorithm):
            record.add(minibatch, trainer.forward_backward(minibatch, algorithm), trainer.last_logprobs())
            record.add_step(trainer.optim_step())
        metrics = record.metrics()
        explained.append(metrics["critic/explained_variance"])
        assert {"critic/loss", "critic/clip_share", "critic/grad_norm", "critic/learning_rate"} <= metrics.keys()
    assert explained[0] <= 0.01 and explained[-1] > 0.5
    assert metrics["critic/return_mean"] == pytest.approx(
        sum(s.num_trained * (s.reward or 0.0) for s in SAMPLES) / sum(s.num_trained for s in SAMPLES)
    )


# ---------------------------------------------------------------------------------------------- warm-up


@pytest.mark.parametrize("kind", CONFIGS)
def test_warm_up_trains_the_critic_only(kind: str) -> None:
    """The policy's weights, steps and schedule stand still while versions count on; the first-step ratio is still
    measured (I5). Afterwards the policy's first step has the rate of step 0 (F117: a schedule is its step)."""
    trainer, algorithm = make(
        CONFIGS[kind].model_copy(update={"warmup_batches": 2}), schedule=ScheduleConfig(type="linear")
    )
    start, critic_start = policy_weights(trainer), critic_masters(trainer)
    metrics = train(trainer, algorithm, 2)
    assert all(torch.equal(a, start[n]) for n, a in policy_weights(trainer).items())
    assert any(not torch.equal(a, critic_start[n]) for n, a in critic_masters(trainer).items())
    assert trainer.version == PolicyVersion(0, 2) and trainer.step == 0 and critic_of(trainer).step == 8
    assert not trainer._weights.optimizer.state, "no momentum was gathered"
    assert "grad_norm" not in metrics[0] and metrics[0]["critic/grad_norm"] > 0 and "max_ratio_error" in metrics[0]
    rates = [m["critic/learning_rate"] for m in metrics]
    assert rates == pytest.approx([1e-2 * (1 - s / 40) for s in range(8)])
    after = train(trainer, algorithm)
    assert after[0]["learning_rate"] == 1e-2 and trainer.step == 4 and critic_of(trainer).step == 12
    assert any(not torch.equal(a, start[n]) for n, a in policy_weights(trainer).items())


# ------------------------------------------------------------------------------------ checkpoint and export


@pytest.mark.parametrize("kind", [*CONFIGS, "bfloat16", "policy_lora"])
def test_resume_is_bit_exact(kind: str, tmp_path: Path) -> None:
    """I11: the critic's weights, moments, steps and schedule too, also from within the warm-up."""
    config = CONFIGS.get(kind, SEPARATE).model_copy(update={"warmup_batches": 2})
    if kind == "policy_lora":
        config = CONFIGS["shared_train_backbone"].model_copy(update={"warmup_batches": 2})
    options: dict[str, Any] = {"dtype": "bfloat16"} if kind == "bfloat16" else {}
    options |= {"lora": LoraConfig(rank=4)} if kind == "policy_lora" else {}
    straight, algorithm = make(config, **options)
    train(straight, algorithm)
    straight.save(tmp_path / "c")
    expected = train(straight, algorithm, 2)
    resumed, _ = make(config, **options)
    train(resumed, algorithm, 3)  # whatever it did before must be gone
    resumed.restore(tmp_path / "c")
    assert critic_of(resumed).step == 4 and resumed.policy_is_frozen
    assert train(resumed, algorithm, 2) == expected
    for (name, a), b in zip(critic_masters(straight).items(), critic_masters(resumed).values(), strict=True):
        assert torch.equal(a, b), name
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy_weights(straight).values(), policy_weights(resumed).values(), strict=True)
    )


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    """Without a critic, or with another kind: one error that says so."""
    PolicyTrainer(load(), TRAIN, num_steps=4).save(tmp_path / "without")
    trainer, _ = make(SHARED)
    with pytest.raises(CheckpointError, match="critic is no trainer checkpoint"):
        trainer.restore(tmp_path / "without")
    trainer.save(tmp_path / "shared")
    with pytest.raises(CheckpointError, match="belongs to another model"):
        make(SEPARATE)[0].restore(tmp_path / "shared")


def test_export_holds_the_policy_only(tmp_path: Path) -> None:
    """A plain folder, without value head."""
    trainer, algorithm = make(CONFIGS["shared_train_backbone"])
    train(trainer, algorithm)
    trainer.export(tmp_path / "e")
    with safe_open(tmp_path / "e" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {n for n, _ in load().model.named_parameters()}


# ---------------------------------------------------------------------------------------------- refusals


def test_a_critic_of_other_ids_is_refused() -> None:
    own = prepare_model(tiny_model(vocab_size=48), tiny_tokenizer(SMALL_ALPHABET))
    with pytest.raises(ConfigError, match=r"critic\.path: the tokenizer of .* \(48 ids\) is not the policy's"):
        Critic(SEPARATE, load(), own=own, num_steps=4)


def test_an_algorithm_that_asks_for_values_and_cannot_use_them() -> None:
    """Named before any pass: needs and methods contradict each other."""
    algorithm = Reinforce({s.id: 1.0 for s in SAMPLES}, needs=AlgorithmNeeds(values=True))
    with pytest.raises(TypeError, match=r"Reinforce\.needs\.values is set, but it has no method value_targets"):
        plan(make(SHARED)[0], algorithm)


def test_values_without_a_critic_are_an_error() -> None:
    with pytest.raises(ValueError, match="without a critic"):
        PolicyTrainer(load(), TRAIN, num_steps=4).forward(SAMPLES, "critic")


@pytest.mark.parametrize("kind", ["shared_train_backbone", "separate"])
def test_a_value_loss_that_is_not_finite_changes_nothing(kind: str) -> None:
    """I13: neither policy nor critic keeps any gradient of such a minibatch."""
    trainer, algorithm = make(CONFIGS[kind])
    minibatch = plan(trainer, algorithm)[0]
    assert minibatch.value_targets is not None
    minibatch.value_targets[-1].fill_(float("inf"))  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError, match="value loss of the critic's step 0"):
        trainer.forward_backward(minibatch, algorithm)
    masters = [*trainer._weights.masters.values(), *critic_of(trainer)._weights.masters.values()]
    assert all(m.grad is None for m in masters)
