"""Save, restore and export: bit for bit, complete, and plain Hugging Face at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.base import LoraConfig, ScheduleConfig
from headrace.config.schema import TrainerConfig
from headrace.model.load import LoadedModel, prepare_model
from headrace.testing import Reinforce, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.trainer.weights import CheckpointError, restore_model
from headrace.types import PolicyVersion

SAMPLES = tuple(make_sample([1, 6, 20], [30 + m, 31, 4], group=0, member=m) for m in range(4))
ALGORITHM = Reinforce({sample.id: 1.0 - 2.0 * (i % 2) for i, sample in enumerate(SAMPLES)})
CONFIG = TrainerConfig(learning_rate=1e-2, weight_decay=0.01, schedule=ScheduleConfig(type="cosine", warmup_steps=2))
MINIBATCH = Minibatch(
    samples=SAMPLES,
    advantages=[torch.tensor(s.mask, dtype=torch.float32) * ALGORITHM.advantages[s.id] for s in SAMPLES],
    proximal_logprobs=None,
    reference_logprobs=None,
    totals=Totals(num_tokens=12, num_episodes=4, max_length=3),
)
KINDS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "lora": ("float32", LoraConfig(rank=4))}


def load(kind: str, **model: object) -> LoadedModel:
    dtype, lora = KINDS[kind]
    return prepare_model(tiny_model(initializer_range=0.2, **model), tiny_tokenizer(), dtype, lora=lora)  # type: ignore[arg-type]


def train(trainer: PolicyTrainer, num_steps: int) -> list[dict[str, float]]:
    metrics = []
    for _ in range(num_steps):
        metrics.append(trainer.forward_backward(MINIBATCH, ALGORITHM) | trainer.optim_step())
        trainer.publish()
    return metrics


@pytest.mark.parametrize("kind", KINDS)
def test_restored_run_equals_the_uninterrupted_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """I11, F115: weights, moments, learning rate, versions, steps and torch's random state."""
    straight = PolicyTrainer(load(kind), CONFIG, num_steps=8)
    train(straight, 3)
    torch.manual_seed(5)
    straight.save(tmp_path / "c")
    draws = torch.rand(3)
    expected = train(straight, 3)

    torch.manual_seed(99)
    resumed = PolicyTrainer(load(kind, seed=0), CONFIG, num_steps=8)
    train(resumed, 1)  # whatever it did before must be gone
    resumed.restore(tmp_path / "c")
    assert torch.equal(torch.rand(3), draws)
    assert (resumed.step, resumed.version) == (3, PolicyVersion(0, 3))
    assert train(resumed, 3) == expected
    for name, master in straight._weights.masters.items():
        other = resumed._weights.masters[name]
        assert torch.equal(master, other)
        old, new = straight._weights.optimizer.state[master], resumed._weights.optimizer.state[other]
        assert old.keys() == new.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(old[field], new[field]) for field in old)


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_is_of_its_moment_whenever_it_is_written(kind: str, tmp_path: Path) -> None:
    """I11: what is written while the run goes on is, byte for byte, what would have been written at once."""
    trainer = PolicyTrainer(load(kind), CONFIG, num_steps=8)
    train(trainer, 2)
    trainer.save(tmp_path / "at once")
    write = trainer.snapshot()
    train(trainer, 2)
    torch.rand(3)
    write(tmp_path / "later")
    files = sorted(f.name for f in (tmp_path / "at once").iterdir())
    assert files == sorted(f.name for f in (tmp_path / "later").iterdir()) and len(files) == 3
    for name in files:
        assert (tmp_path / "at once" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()


def test_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    """The optimizer has no state yet; the restored trainer still makes the same first step."""
    first, second = (PolicyTrainer(load("float32"), CONFIG, num_steps=8) for _ in range(2))
    first.save(tmp_path / "c")
    second.restore(tmp_path / "c")
    assert train(first, 2) == train(second, 2)


def test_adapter_checkpoint_holds_the_adapter_only(tmp_path: Path) -> None:
    """The frozen base is not written again and again."""
    trainer = PolicyTrainer(load("lora"), CONFIG, num_steps=8)
    train(trainer, 1)
    trainer.save(tmp_path / "c")
    assert sum(f.stat().st_size for f in (tmp_path / "c").iterdir()) < 600_000
    assert not list((tmp_path / "c").glob("*.pt")) and not list((tmp_path / "c").glob("*.bin"))


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """Before anything is changed, with the name of a weight that differs."""
    PolicyTrainer(load("float32"), CONFIG, num_steps=8).save(tmp_path / "c")
    other = PolicyTrainer(load("float32", num_layers=1), CONFIG, num_steps=8)
    before = [p.clone() for p in other._model.parameters()]
    with pytest.raises(CheckpointError, match=r"layers\.1"):
        other.restore(tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(before, other._model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match="no trainer checkpoint"):
        other.restore(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_for_evaluation(kind: str, tmp_path: Path) -> None:
    """A checkpoint's policy without a trainer around it."""
    trainer = PolicyTrainer(load(kind), CONFIG, num_steps=8)
    train(trainer, 2)
    trainer.save(tmp_path / "c")
    loaded = load(kind)
    restore_model(loaded, tmp_path / "c")
    pairs = zip(loaded.model.parameters(), trainer._model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_with_transformers_and_gives_the_same_logprobs(kind: str, tied: bool, tmp_path: Path) -> None:
    """A plain folder: no headrace, no peft; an adapter is merged."""
    trainer = PolicyTrainer(load(kind, tied=tied), CONFIG, num_steps=8)
    train(trainer, 3)
    trainer.export(tmp_path / "e")
    assert not list((tmp_path / "e").glob("adapter*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "e")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "e")
    assert len(tokenizer) == len(tiny_tokenizer()) and tokenizer.chat_template
    assert set(model.generation_config.eos_token_id) == {2, 4}
    for sample, scored in zip(SAMPLES, trainer.forward(SAMPLES), strict=True):
        ids = torch.tensor([sample.ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(logprobs[2:], scored[3:], rtol=0, atol=0.1 if kind == "bfloat16" else 1e-4)
