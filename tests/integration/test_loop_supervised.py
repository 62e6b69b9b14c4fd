"""Supervised samples beside the rollouts of a real run: they are learned, and the rl stream does not notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loop_runs import assert_same_weights, books, metric, small_config

from headrace.errors import HeadraceError
from headrace.record.metrics import read_metrics
from headrace.run import train

REPLY = "hhhhhhhh"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replies that no reward asks for. The prompts are of six letters, tasks of five."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    prompts = [f"abcde{letter}" for letter in "abcdefgh"]
    made = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": REPLY}]} for p in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def run(
    folder: Path,
    name: str,
    rows: Path | None,
    num_batches: int = 6,
    resume: bool = False,
    critic: dict[str, Any] | None = None,
    **algorithm: Any,
) -> Path:
    sections: dict[str, Any] = {"algorithm": algorithm} if algorithm else {}
    if critic is not None:
        sections["critic"] = critic
    if rows is not None:
        sections["supervised_data"] = {"path": str(rows), "conversations_per_batch": 3}
    schedule = {"type": "constant", "warmup_steps": 0}
    trainer = {"num_batches": num_batches, "learning_rate": 1e-3, "schedule": schedule}
    config = small_config(folder, name, trainer=trainer, **sections)
    return train(config, resume_from=folder / name if resume else None).run_dir


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, rows: Path) -> tuple[Path, Path]:
    """The same run without and with supervised data; the KL needs log-probabilities of each sample."""
    folder = tmp_path_factory.mktemp("runs")
    kl = {"coefficient": 0.01}
    return run(folder, "alone", None, kl=kl), run(folder, "beside", rows, kl=kl, supervised={"coefficient": 0.5})


def test_they_are_learned(pair: tuple[Path, Path]) -> None:
    """The loss of their tokens falls by more than half a nat."""
    nll = metric(pair[1], "supervised/nll")
    assert nll[1] > 2.0 and nll[6] < nll[1] - 0.5


def test_the_rl_stream_does_not_notice(pair: tuple[Path, Path]) -> None:
    """I17: on the first batch, where weights are equal still, every rl number is what it was: counts, denominators,
    entropy, KL; the loss is the rl loss plus coefficient x nll."""
    alone, beside = (next(iter(read_metrics(run_dir))) for run_dir in pair)
    apart = {"supervised/nll", "supervised/num_samples", "supervised/num_tokens"}
    assert beside.keys() - alone.keys() == apart
    assert beside["supervised/num_samples"] == 3.0 and beside["supervised/num_tokens"] == 3.0 * (len(REPLY) + 1)
    moved = {"train/loss", "train/grad_norm"}
    names = {n for n in alone if n.startswith(("train/", "policy/", "reward/", "ledger/", "rollout/"))} - moved
    assert {"train/num_tokens", "train/num_samples", "policy/entropy_mean", "policy/kl"} <= names
    assert {n: beside[n] for n in names} == pytest.approx({n: alone[n] for n in names}, rel=1e-4, abs=1e-6, nan_ok=True)
    added = 0.5 * beside["supervised/nll"]
    assert beside["train/loss"] == pytest.approx(alone["train/loss"] + added, rel=1e-5, abs=1e-6) and added > 1.0


def test_the_books_do_not_know_them(pair: tuple[Path, Path]) -> None:
    """I10: they are no attempts."""
    alone, beside = (books(run_dir).surviving().by_task for run_dir in pair)
    assert sum(counts["trained"] for counts in alone.values()) == 6 * 4 * 4
    assert sum(counts["trained"] for counts in beside.values()) == 6 * 4 * 4


def test_a_resume_goes_on_with_the_data(tmp_path: Path, rows: Path) -> None:
    """I11: 2 batches, then 3 more, are 5 batches: weights and moments bit for bit, so the same conversations in
    the same order. Other rows are refused."""
    whole = run(tmp_path, "whole", rows, num_batches=5)
    run(tmp_path, "parts", rows, num_batches=2)
    resumed = run(tmp_path, "parts", rows, num_batches=5, resume=True)
    assert metric(resumed, "supervised/nll") == metric(whole, "supervised/nll")
    assert_same_weights(whole, resumed)
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace("abcdea", "abcdff"))
    with pytest.raises(HeadraceError, match="the rows of supervised_data are not those"):
        run(tmp_path, "parts", other, num_batches=6, resume=True)


def test_a_critic_foretells_nothing_of_theirs(tmp_path: Path, rows: Path) -> None:
    """On the first batch the critic's loss, values and returns are what they are without supervised data."""
    alone, beside = (
        next(iter(read_metrics(run(tmp_path, name, data, 1, critic={"type": "separate"}, preset="ppo_critic"))))
        for name, data in (("alone", None), ("beside", rows))
    )
    names = {name for name in alone if name.startswith("critic/")}
    assert {"critic/loss", "critic/value_mean", "critic/return_mean"} <= names and alone["critic/loss"] > 0
    assert {n: beside[n] for n in names} == pytest.approx({n: alone[n] for n in names}, rel=1e-4, abs=1e-6, nan_ok=True)
    assert beside["supervised/nll"] > 0
