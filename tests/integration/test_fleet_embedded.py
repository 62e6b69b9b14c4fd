"""A whole run over two real engines in this process: one is killed in the middle, and the run learns on (I6, I7, I10).

Each engine holds its own copy of the weights; the one that starts again gets them from the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from loop_runs import small_config

from headrace.config.base import LoraConfig
from headrace.config.schema import RunConfig
from headrace.engines.embedded import TransformersEngine
from headrace.engines.fleet.fleet import FleetEngine
from headrace.loop import Loop
from headrace.parts import Parts
from headrace.record.episodes import read_episodes
from headrace.record.metrics import read_metrics
from headrace.record.spans import read_spans
from headrace.run import _run_watched
from headrace.wiring import build_parts

FLEET = {"num_engines": 2, "restart_backoff_s": 0.1, "sync_deadline_s": 20.0}


def run(
    config: RunConfig,
    during: Callable[[Loop, FleetEngine], Coroutine[Any, Any, None]],
    resume_from: Path | None = None,
) -> Loop:
    async def main() -> Loop:
        parts: Parts = build_parts(config, resume_from=resume_from)
        assert isinstance(parts.engine, FleetEngine)
        await parts.reward.start()
        loop = Loop(parts)
        beside = asyncio.create_task(during(loop, parts.engine))
        try:
            await _run_watched(loop)
        finally:
            beside.cancel()
            await parts.close()
        return loop

    return asyncio.run(main())


def settings(tmp_path: Path, **sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "trainer": {"num_batches": 6, "schedule": {"type": "constant"}},
        "rollout": {"groups_per_batch": 8, "group_size": 8, "max_staleness": 1},
        "engine": {"weights": "copy"},
        "fleet": FLEET,
        "checkpoint": {"every": 0},
        "evaluation": {"at_start": True, "at_end": True, "num_samples": 4, "greedy": False},
        "tasks": {"options": {"num_train": 2048, "num_held_out": 128}},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return small_config(tmp_path, **base)


def killer(batch: int, killed: list[TransformersEngine]) -> Callable[[Loop, FleetEngine], Coroutine[Any, Any, None]]:
    """Kills engine 0 while it decodes, once ``batch`` batches are trained."""

    async def kill(loop: Loop, fleet: FleetEngine) -> None:
        while True:
            await asyncio.sleep(0)
            member = fleet.supervisor.members.get(0)
            if loop.batch_index < batch or member is None or fleet._is_paused or not fleet.router.num_in_flight(0):
                continue
            engine = member.engine
            assert isinstance(engine, TransformersEngine)
            if any(running.ids for running in engine._by_id.values()):
                engine._fail(RuntimeError("killed by the test"))
                killed.append(engine)
                return

    return kill


def test_a_run_learns_on_when_one_of_its_engines_is_killed(tmp_path: Path) -> None:
    """Two real engines, one dies at batch 12 while it decodes: its episodes go on, it comes back, gets the weights, is
    proved, serves; books are complete and held-out accuracy rises."""
    killed: list[TransformersEngine] = []

    rollout = {"groups_per_batch": 16, "group_size": 16}
    loop = run(settings(tmp_path, trainer={"num_batches": 36}, rollout=rollout), killer(12, killed))
    assert len(killed) == 1
    assert loop.batch_index == 36
    loop.parts.record.ledger.check(full=True)
    summary = loop.parts.record.ledger.summary()
    assert summary["trained"] == 36 * 256
    assert "failed:infrastructure_error" not in summary  # no attempt was lost with its engine
    lines = list(read_metrics(loop.parts.record.run_dir.path))
    assert sum(line["fleet/num_deaths"] for line in lines) == 1.0
    assert sum(line["fleet/num_continued"] for line in lines) >= 1.0
    assert lines[-1]["fleet/num_serving"] == 2.0
    assert all(line["canary/max_gap"] < 1e-3 for line in lines)
    assert {"idle/engine-0_s", "idle/engine-1_s", "wait/engine_paused_s", "wait/episode_on_engine_s"} <= lines[
        -1
    ].keys()
    ages = [line["staleness/max"] for line in lines]
    assert max(ages) <= 1.0
    rewards = [line["reward/mean"] for line in lines]
    assert fmean(rewards[-9:]) > fmean(rewards[:9])
    (_, before), (_, after) = loop.evaluations
    assert before.is_valid and after.is_valid
    assert before.versions == (loop.parts.trainer.version._replace(number=0),)
    assert after.metrics()["eval/sampled_accuracy"] > before.metrics()["eval/sampled_accuracy"]
    spans = list(read_spans(loop.parts.record.run_dir.path))
    assert {s["incarnation"] for s in spans if s["actor"] == "engine-0" and s["what"] == "syncing"} == {0, 1}


async def nothing(loop: Loop, fleet: FleetEngine) -> None:
    await asyncio.Event().wait()


def test_a_resumed_fleet_serves_the_restored_version(tmp_path: Path) -> None:
    """I7, I11: stopped in the middle and resumed: engines start with the restored weights, are proved under the new
    lineage, and no attempt is trained twice."""

    async def stop(loop: Loop, fleet: FleetEngine) -> None:
        while loop.batch_index < 3:
            await asyncio.sleep(0.01)
        loop.stop()

    config = settings(tmp_path)
    first = run(config, stop)
    assert 3 <= first.batch_index < 6
    second = run(config, nothing, resume_from=first.parts.record.run_dir.path)
    assert second.parts.trainer.version == (1, 6)
    assert second.parts.engine.version == (1, 6)
    second.parts.record.ledger.check(full=True)
    assert second.parts.record.ledger.summary()["trained"] == 6 * 64
    lines = list(read_metrics(second.parts.record.run_dir.path))
    assert sorted({line["update"] for line in lines}) == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["canary/max_gap"] < 1e-3


@pytest.mark.parametrize("lag", [0, 1])
def test_versions_of_every_token_are_within_the_bound(tmp_path: Path, lag: int) -> None:
    """I7 over two engines, updated together (lag 0) or one after the other (lag 1)."""
    config = settings(tmp_path, trainer={"num_batches": 5}, fleet={**FLEET, "max_engine_lag": lag})
    loop = run(config, nothing)
    trained = [e for e in read_episodes(loop.parts.record.run_dir.path) if e["status"] == "trained"]
    assert len(trained) == 5 * 64
    for episode in trained:
        assert all(0 <= episode["update"] - 1 - span[2] <= 1 for span in episode["version_spans"])
    served = {s["actor"] for s in read_spans(loop.parts.record.run_dir.path) if s["what"] == "generate"}
    assert served == {"engine-0", "engine-1"}


@pytest.mark.timeout(280)
def test_engines_of_a_trainer_of_several_processes(tmp_path: Path) -> None:
    """Its buckets are gathered once for all engines, and once more for the engine that comes back."""
    killed: list[TransformersEngine] = []
    config = settings(tmp_path, parallel={"dp_shard": 2})
    loop = run(config, killer(2, killed))
    assert len(killed) == 1
    loop.parts.record.ledger.check(full=True)
    assert loop.parts.record.ledger.summary()["trained"] == 6 * 64
    lines = list(read_metrics(loop.parts.record.run_dir.path))
    assert all(line["canary/max_gap"] < 1e-3 for line in lines)
    assert sum(line["fleet/num_deaths"] for line in lines) == 1.0


def test_adapters_travel_to_every_engine(tmp_path: Path) -> None:
    """LoRA: updates bring the adapter alone; an engine that comes back has the frozen base from its start, and is
    proved on both."""
    killed: list[TransformersEngine] = []
    config = settings(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": LoraConfig(rank=4)})})
    loop = run(config, killer(2, killed))
    assert len(killed) == 1
    loop.parts.record.ledger.check(full=True)
    lines = list(read_metrics(loop.parts.record.run_dir.path))
    assert all(line["canary/max_gap"] < 1e-3 for line in lines)
    assert sum(line["fleet/num_starts"] for line in lines) == 3.0
