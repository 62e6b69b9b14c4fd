"""Activation checkpointing by budget: the same gradient bit for bit, less memory with each layer that is recomputed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.offline import SftConfig, check_offline
from headrace.config.schema import ParallelConfig, RunConfig, TrainerConfig
from headrace.errors import ConfigError
from headrace.model.load import prepare_model
from headrace.model.parallel.check import ModelShape, ParallelError
from headrace.model.parallel.forecast import Pass, forecast, recomputed_layers
from headrace.testing import Reinforce, make_sample, save_tiny, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.wiring import check_before_work

NUM_LAYERS = 5
SAMPLES = tuple(make_sample([1, 6, 20], [20 + m] * 30, group=m) for m in range(8))
NUM_TOKENS = sum(len(s.ids) - 1 for s in SAMPLES)
"""Of the one packed row."""
ALGORITHM = Reinforce({sample.id: 1.0 - 2.0 * (i % 2) for i, sample in enumerate(SAMPLES)})
MINIBATCH = Minibatch(
    samples=SAMPLES,
    advantages=[torch.tensor(s.mask, dtype=torch.float32) * ALGORITHM.advantages[s.id] for s in SAMPLES],
    proximal_logprobs=None,
    reference_logprobs=None,
    totals=Totals(num_tokens=240, num_episodes=8, max_length=30),
)
CONFIG = TrainerConfig(max_microbatch_tokens=NUM_TOKENS, share_prompts=False)


def make_trainer(budget_bytes: int | None, **options: Any) -> PolicyTrainer:
    loaded = prepare_model(tiny_model(num_layers=NUM_LAYERS, initializer_range=0.2), tiny_tokenizer())
    return PolicyTrainer(loaded, CONFIG, num_steps=1, activation_budget_bytes=budget_bytes, **options)


def shape() -> ModelShape:
    return ModelShape.of(tiny_model(num_layers=NUM_LAYERS).config.to_dict())


def work(budget_bytes: int | None) -> Pass:
    return Pass(num_tokens=NUM_TOKENS, max_logit_tokens=1024, activation_budget_bytes=budget_bytes)


def activations_bytes(budget_bytes: int | None) -> int:
    return forecast(ParallelConfig(), shape(), work(budget_bytes))[0].activations_bytes


def budgets() -> list[int]:
    """The smallest that need 0, 1, 2, ... layers to be recomputed."""
    found = [activations_bytes(None)]
    while len(found) < NUM_LAYERS:
        found.append(activations_bytes(found[-1] - 1))
    return found


def train(trainer: PolicyTrainer) -> tuple[int, dict[str, Tensor]]:
    """(bytes that autograd saves for the backward pass, weights aside; the gradients)."""
    weights = {p.untyped_storage().data_ptr() for p in trainer._model.parameters()}
    saved: dict[int, Tensor] = {}  # kept alive, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.forward_backward(MINIBATCH, ALGORITHM)
    num_bytes = sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in weights)
    return num_bytes, {name: p.grad.clone() for name, p in trainer._model.named_parameters()}  # type: ignore[union-attr]


def count_passes(trainer: PolicyTrainer) -> list[int]:
    """How often each layer computes in one gradient pass."""
    calls = [0] * NUM_LAYERS

    def counter(i: int) -> Any:
        def count(*_: Any) -> None:
            calls[i] += 1

        return count

    for i, layer in enumerate(trainer._model.model.layers):
        layer.input_layernorm.register_forward_hook(counter(i))
    trainer.forward_backward(MINIBATCH, ALGORITHM)
    return calls


def test_gradients_are_bit_equal_and_activations_fall_with_the_budget() -> None:
    """I4; and what autograd really saves falls by what the forecast says."""
    most, expected = train(make_trainer(None))
    saved = [most]
    for budget in budgets()[1:]:
        num_bytes, found = train(make_trainer(budget))
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
        saved.append(num_bytes)
        assert most - num_bytes == pytest.approx(activations_bytes(None) - activations_bytes(budget), rel=0.1)
    everything, found = train(make_trainer(None, activation_checkpointing=True))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    saved.append(everything)
    assert saved == sorted(set(saved), reverse=True) and len(saved) == NUM_LAYERS + 1


@pytest.mark.parametrize("number", range(NUM_LAYERS))
def test_as_few_layers_are_recomputed_as_the_budget_allows(number: int) -> None:
    """The first ones: by the time that they are recomputed, the others' activations are gone."""
    budget = budgets()[number]
    assert recomputed_layers(ParallelConfig(), shape(), work(budget)) == [number]
    assert forecast(ParallelConfig(), shape(), work(budget))[0].num_recomputed == number
    assert count_passes(make_trainer(budget)) == [2] * number + [1] * (NUM_LAYERS - number)


def test_each_stage_keeps_the_budget_by_itself() -> None:
    """The last stage has the final norm, and 1F1B's first stage holds several rows."""
    parallel = ParallelConfig(pp=2, pp_schedule="1f1b")
    free = [f.activations_bytes for f in forecast(parallel, shape(), work(None))]
    assert free[0] > free[1]
    assert recomputed_layers(parallel, shape(), work(free[0])) == [0, 0]
    first, last = recomputed_layers(parallel, shape(), work(free[1]))
    assert first > 0 and last == 0


def test_a_budget_that_cannot_be_kept_ends_the_run_before_it_starts(tmp_path: Path) -> None:
    """Done line 7 of issue 3: one clear error, which says what is needed."""
    least = budgets()[-1]
    with pytest.raises(ParallelError, match=rf"{least - 1:,}: with all layers but one .* still take {least:,} bytes"):
        make_trainer(least - 1)
    model = {"path": str(save_tiny(tmp_path / "model")), "activation_budget_bytes": 1000}
    run = {"model": model, "tasks": {"type": "arithmetic"}, "rewards": [{"type": "last_number"}]}
    with pytest.raises(ParallelError, match=r"model\.activation_budget_bytes = 1,000"):
        check_before_work(RunConfig.model_validate(run))


def test_a_budget_beside_all_layers_has_no_effect(tmp_path: Path) -> None:
    """I20, for runs of the loop and for those on written data."""
    model = {"path": "unused", "activation_checkpointing": True, "activation_budget_bytes": 1 << 40}
    run = {"model": model, "tasks": {"type": "arithmetic"}, "rewards": [{"type": "last_number"}]}
    message = r"model\.activation_budget_bytes has no effect"
    with pytest.raises(ConfigError, match=message):
        check_before_work(RunConfig.model_validate(run))
    with pytest.raises(ConfigError, match=message):
        check_offline(SftConfig.model_validate({"model": model, "data": {"path": "rows.jsonl"}}))
