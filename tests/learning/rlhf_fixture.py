"""The RLHF example's rule on the smallest model: SFT, reward model, and policies that hold back or do not."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.load import restore_as, restore_config
from headrace.config.offline import DpoConfig, RewardModelConfig, SftConfig
from headrace.offline.dpo import train_dpo
from headrace.offline.reward_model import train_reward_model
from headrace.offline.run import OfflineResult
from headrace.offline.sft import train_sft
from headrace.run import TrainResult, train
from headrace.testing import SMALL_ALPHABET, save_tiny

RULE = Path(__file__).parents[2] / "examples" / "rlhf" / "rule.py"
sys.path.insert(0, str(RULE.parent))
import rule  # noqa: E402

sys.path.remove(str(RULE.parent))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What was trained before any policy."""

    path: Path
    seed: int
    sft: OfflineResult
    reward_model: OfflineResult


def offline(path: Path, name: str, model: Path, rows: Path, seed: int, **trainer: Any) -> dict[str, Any]:
    return {
        "name": name,
        "seed": seed,
        "output_dir": str(path),
        "model": {"path": str(model)},
        "data": {"path": str(rows)},
        "trainer": {"num_threads": 1, "learning_rate": 1e-3, **trainer},
    }


def build(path: Path, seed: int = 0) -> Pipeline:
    """SFT on careless replies, then a reward model on pairs of them."""
    start = save_tiny(path / "start", alphabet=SMALL_ALPHABET, max_context=64, seed=seed)
    rows = rule.write_jsonl(path / "sft.jsonl", rule.conversations(4096, seed))
    config = offline(path, "sft", start, rows, seed, batch_size=64)
    sft = train_sft(restore_as(SftConfig, config, "x"), tell=lambda text: None)
    rule.write_jsonl(path / "pairs.jsonl", rule.pairs(2000, seed))
    config = offline(path, "reward-model", sft.export, path / "pairs.jsonl", seed, num_epochs=3)
    reward_model = train_reward_model(restore_as(RewardModelConfig, config, "x"), tell=lambda text: None)
    return Pipeline(path=path, seed=seed, sft=sft, reward_model=reward_model)


def run_dpo(pipeline: Pipeline) -> OfflineResult:
    path, seed = pipeline.path, pipeline.seed
    config = offline(path, "dpo", pipeline.sft.export, path / "pairs.jsonl", seed, learning_rate=3e-4)
    return train_dpo(restore_as(DpoConfig, config, "x"), tell=lambda text: None)


def policy(pipeline: Pipeline, name: str, *, kl: float, num_batches: int = 12, seed: int = 0) -> TrainResult:
    """Train against the reward model; gold is checked every second batch."""
    data: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "output_dir": str(pipeline.path),
        "model": {"path": str(pipeline.sft.export)},
        "tasks": {"type": "python", "factory": f"{RULE}:tasks"},
        "rewards": [
            {"type": "reward_model", "options": {"path": str(pipeline.reward_model.export), "max_batch_size": 16}}
        ],
        "gold": {"rewards": [{"type": f"{RULE}:gold"}]},
        "sampling": {"max_new_tokens": 20},
        "algorithm": {"kl": {"coefficient": kl}} if kl else {},
        "trainer": {"learning_rate": 1e-3, "num_batches": num_batches, "num_threads": 1},
        "engine": {"max_batch_size": 256, "num_threads": 1},
        "rollout": {"groups_per_batch": 8, "group_size": 8},
        "evaluation": {"every": 2, "at_start": True, "num_samples": 1, "num_tasks": 64, "greedy": False},
        "checkpoint": {"every": 0},
        "monitor": {"progress": False},
    }
    return train(restore_config(data, "x"))


def alarm_updates(result: TrainResult) -> list[int]:
    """Updates at which the over-optimisation alarm held."""
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["update"] for line in lines if any("over_optimisation" in a for a in line["health/alarms"])]
