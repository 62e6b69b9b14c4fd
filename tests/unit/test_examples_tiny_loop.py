"""examples/tiny_loop.py is what a newcomer reads first, so it must run."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headrace.model.load import LoadedModel, load_model
from headrace.rewards.in_process import CallableReward
from headrace.testing import save_tiny

SCRIPT = Path(__file__).parents[2] / "examples" / "tiny_loop.py"


@pytest.fixture
def tiny_loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a reward that a random model earns now and then."""
    spec = importlib.util.spec_from_file_location("tiny_loop", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "build_rewards", lambda configs: CallableReward(has_digit))
    return module


async def has_digit(reply: str) -> float:
    return float(any(c.isdigit() for c in reply))


def test_two_batches_train_on_what_was_sampled(
    tiny_loop: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """I5: under each published version, the second included, the trainer's probabilities of the sampled ids are the
    engine's; and the weights move, on some samples, with others of no gradient among them left out."""
    loaded: list[LoadedModel] = []
    monkeypatch.setattr(tiny_loop, "load_model", lambda path: loaded.append(load_model(path)) or loaded[-1])
    folder = save_tiny(tmp_path / "tiny", seed=0)
    history = asyncio.run(tiny_loop.main(argparse.Namespace(model=str(folder), batches=2)))

    assert len(history) == 2
    for metrics in history:
        assert 0.0 < metrics["reward"] < 1.0
        assert metrics["grad_norm"] > 0
        assert metrics["max_ratio_error"] < 1e-3
        assert metrics["num_samples"] == tiny_loop.GROUPS_PER_BATCH * tiny_loop.GROUP_SIZE
        assert metrics["num_skipped_samples"] < metrics["num_samples"]
    start = load_model(folder).model.state_dict()
    assert any(not torch.equal(tensor, start[name]) for name, tensor in loaded[0].model.state_dict().items())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("batch   2  reward ")


def test_groups_hold_the_attempts_at_their_own_task(tiny_loop: ModuleType) -> None:
    """F50: groups are joined by id; each has its members, its own task, and goes on where the last batch ended."""

    async def attempt(engine: None, renderer: None, reward: None, key, task):  # type: ignore[no-untyped-def]
        from headrace.types import Episode, Outcome, Trace

        return Episode(key=key, task=task, turns=(), trace=Trace(), outcome=Outcome.DONE)

    tiny_loop.attempt = attempt
    tasks = tiny_loop.build_tasks(tiny_loop.ArithmeticTasks(operation="multiply")).train
    groups = asyncio.run(tiny_loop.rollouts(None, None, None, tasks, first_group=len(tasks) - 1))
    assert [g.id for g in groups] == [len(tasks) + i for i in (-1, 0, 1, 2)]
    assert [g.task.id for g in groups] == [tasks[i].id for i in (len(tasks) - 1, 0, 1, 2)]
    assert all([e.key.member for e in g.episodes] == list(range(8)) for g in groups)
