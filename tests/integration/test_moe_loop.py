"""A mixture-of-experts model through the whole loop: metrics, balance loss and replay, in one process and in two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_runs import reversal

from headrace.config.load import restore_config
from headrace.errors import ConfigError
from headrace.record.metrics import read_metrics
from headrace.run import train
from headrace.testing import SMALL_ALPHABET, save_tiny

LOAD = {
    "router/balance_loss",
    "router/load_max_violation",
    "router/load_entropy",
    "router/num_dead_experts",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(
        tmp_path_factory.mktemp("moe") / "model",
        alphabet=SMALL_ALPHABET,
        architecture="qwen3_moe",
        tied=False,
        norm_topk_prob=True,
        max_context=64,
        initializer_range=0.2,
    )


def run(model: Path, folder: Path, trainer: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    data = reversal.run_config(
        model,
        folder,
        "run",
        trainer={"num_batches": 3, "num_minibatches": 2, "skip_zero_gradient": True, **trainer},
        rollout={"groups_per_batch": 4, "group_size": 4, **sections.pop("rollout", {})},
        tasks={"options": {"num_train": 40, "num_held_out": 8}},
        algorithm={"entropy_coefficient": 0.01},  # rewards are all 0 at first
        **sections,
    )
    config = restore_config(data, "the test")
    return list(read_metrics(train(config).run_dir))


def test_load_is_in_the_metrics_and_replay_finds_nothing_to_change(model: Path, tmp_path: Path) -> None:
    """F75; and on the first step engine and trainer choose alike, so that replay is the plain pass."""
    plain = run(model, tmp_path / "plain", {})
    replayed = run(model, tmp_path / "replayed", {"router_replay": True})
    for a, b in zip(plain, replayed, strict=True):
        assert {n for n in a if n.startswith("router/")} == LOAD
        assert {n for n in b if n.startswith("router/")} == LOAD | {"router/replay_changed_share"}
        assert 0 < a["router/load_entropy"] <= 1 and a["router/load_max_violation"] > 0
    assert plain[0]["train/grad_norm"] > 1e-3
    assert replayed[0]["router/replay_changed_share"] < 0.02
    assert replayed[0]["policy/logprob_gap_max"] < 1e-4


def test_two_processes_balance_and_replay_as_one(model: Path, tmp_path: Path) -> None:
    """Expert parallel: load and loss are the whole minibatch's, and the record reaches the other process."""
    trainer = {"router_replay": True, "router_aux_coefficient": 0.1, "skip_zero_gradient": False}
    alone = run(model, tmp_path / "one", trainer)
    together = run(model, tmp_path / "two", trainer, parallel={"ep": 2})
    same = {*LOAD, "router/replay_changed_share", "train/loss", "train/grad_norm", "reward/mean"}
    for a, b in zip(alone, together, strict=True):
        assert {n: b[n] for n in same} == pytest.approx({n: a[n] for n in same}, rel=1e-3, abs=1e-5)


def test_asynchronous_run_replays_across_updates(model: Path, tmp_path: Path) -> None:
    """Tokens of older weights are on record like any other."""
    lines = run(model, tmp_path, {"router_replay": True}, rollout={"max_staleness": 1})
    assert len(lines) == 3 and all("router/replay_changed_share" in line for line in lines)


@pytest.mark.parametrize("parallel", [{}, {"dp_shard": 2}], ids=str)
def test_a_dense_model_is_refused_before_anything_is_written(parallel: dict[str, int], tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "dense", alphabet=SMALL_ALPHABET, max_context=64)
    with pytest.raises(ConfigError, match="has no routers that headrace knows"):
        run(folder, tmp_path / "runs", {"router_replay": True}, parallel=parallel)
    assert not list((tmp_path / "runs").rglob("*"))
