"""PPO with a critic: a whole run through its warm-up, a resume out of it, and learning on the reversal fixture."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import reversal
import torch
from safetensors.torch import load_file

from headrace.config.schema import RunConfig
from headrace.record.metrics import read_metrics
from headrace.record.recorded_config import recorded_config
from headrace.rewards.base import reward
from headrace.run import TrainResult, train
from headrace.testing import SMALL_ALPHABET, save_tiny
from headrace.types import Task

WARMUP_BATCHES = 2


@reward(value_range=(0.0, 1.0))
def few_distinct(reply: str, task: Task) -> float:
    """Something that an untrained model's replies differ in."""
    return 1.0 / (1 + len(set(reply)))


def small_run(folder: Path, name: str, critic: dict[str, Any], num_batches: int) -> RunConfig:
    model = folder / "model"
    if not model.exists():
        save_tiny(model, alphabet=SMALL_ALPHABET, vocab_size=48, max_context=64)
    data = reversal.run_config(
        model,
        folder,
        name,
        rewards=[{"type": f"{__file__}:few_distinct"}],
        algorithm={"preset": "ppo_critic"},
        critic={"learning_rate": 1e-3, "warmup_batches": WARMUP_BATCHES, **critic},
        trainer={"num_batches": num_batches, "num_minibatches": 2},
        rollout={"groups_per_batch": 4, "group_size": 2},
        checkpoint={"every": 1, "keep": 9},
    )
    return RunConfig.model_validate(data)


def weights(result: TrainResult, step: int, part: str = "") -> dict[str, torch.Tensor]:
    return load_file(result.run_dir / "checkpoints" / f"step-{step}" / part / "weights.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "critic", [{"type": "separate"}, {"type": "shared", "train_backbone": True}], ids=["separate", "shared"]
)
def test_warm_up_and_resume_of_a_whole_run(critic: dict[str, Any], tmp_path: Path) -> None:
    """During warm-up the policy's weights stand still while versions count on, every batch is proved by the canary and
    booked as trained (I6, I10); a run resumed from within it equals the uninterrupted one bit for bit (I11)."""
    straight = train(small_run(tmp_path, "straight", critic, 4))
    lines = list(read_metrics(straight.run_dir))
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    start = load_file(tmp_path / "model" / "model.safetensors")
    for step in (1, 2):
        frozen = weights(straight, step)
        assert all(torch.equal(frozen[name], start[name]) for name in frozen)
    assert not same(weights(straight, 3), weights(straight, 2))
    assert not same(weights(straight, 1, "critic"), weights(straight, 2, "critic"))
    for number, line in enumerate(lines, 1):
        assert line["ledger/issued"] == 8 * number and line["canary/max_gap"] < 1e-3
        assert line["policy/max_ratio_error"] < 1e-3 and line["critic/loss"] >= 0 and "critic/value_mean" in line
        assert ("train/grad_norm" in line) == (number > WARMUP_BATCHES)
        assert line["ledger/trained"] + line["ledger/trained_uncommitted"] == 8 * number

    part = tmp_path / "resumed"
    shutil.copytree(straight.run_dir, part)
    for step in (2, 3, 4):
        shutil.rmtree(part / "checkpoints" / f"step-{step}")
    resumed = train(recorded_config(part), resume_from=part)
    assert resumed.num_updates == 4
    for folder in ("", "critic"):
        assert same(weights(resumed, 4, folder), weights(straight, 4, folder)), folder or "policy"


def learn(tmp_path: Path, seed: int, num_batches: int, critic: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """(gain of sampled accuracy on fresh words, metrics lines). Every seed starts where there is as much to learn."""
    model = reversal.warmed_up_model(tmp_path / "model", seed=seed, accuracy=0.35)
    data = reversal.run_config(
        model,
        tmp_path,
        "run",
        seed=seed,
        algorithm={"preset": "ppo_critic"},
        critic={"learning_rate": 1e-3, "warmup_batches": 2, **critic},
        trainer={"num_batches": num_batches, "num_minibatches": 4, "learning_rate": 3e-4},
        evaluation={"at_start": True, "at_end": True, "greedy": False, "num_samples": 2},
    )
    result = train(RunConfig.model_validate(data))
    (_, before), (_, after) = result.evaluations
    gain = after.metrics()["eval/sampled_accuracy"] - before.metrics()["eval/sampled_accuracy"]
    return gain, list(read_metrics(result.run_dir))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        (0, "separate"),
        *(pytest.param(seed, "separate", marks=pytest.mark.slow) for seed in range(1, 5)),
        *(pytest.param(seed, "shared", marks=pytest.mark.slow) for seed in range(5)),
    ],
)
def test_ppo_with_a_critic_learns(seed: int, kind: str, tmp_path: Path) -> None:
    """Issue 3, end criterion 3: sampled accuracy on fresh words gains at least 0.15."""
    critic = {"type": kind} if kind == "separate" else {"type": kind, "train_backbone": True}
    gain, lines = learn(tmp_path, seed, 50 if seed == 0 else 100, critic)
    assert gain >= 0.15
    if kind == "separate":
        explained = [line["critic/explained_variance"] for line in lines]
        assert sum(explained[-10:]) / 10 > max(0.02, explained[0]), "the values know something"
