"""Builds a real loop over scripted parts, with a real record on disk, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.algorithms.registry import algorithm_of
from headrace.config.load import resolved, restore_config
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog
from headrace.engines.fleet.fleet import FleetEngine
from headrace.environments.runner import EpisodeRunner
from headrace.environments.single_turn import SingleTurn
from headrace.environments.task_list import TaskList
from headrace.loop import Loop
from headrace.monitor.fanout import build_sinks
from headrace.monitor.health import HealthMonitor
from headrace.monitor.progress import Progress
from headrace.parts import Overlap, Parts, Record
from headrace.player import Player
from headrace.record.checkpoints import CheckpointStore
from headrace.record.episodes import EpisodeWriter
from headrace.record.files import RecordError
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.run_dir import RunDirectory, collect_run_info
from headrace.record.spans import SpanWriter
from headrace.reporting import Reporter
from headrace.run import _run_watched, first_cause
from headrace.scripted import (
    ScriptedEngine,
    ScriptedRenderer,
    ScriptedReward,
    ScriptedThread,
    ScriptedTrainer,
    run_in_virtual_time,
)
from headrace.types import Episode, PolicyVersion, Sample, Sampling, Score, ScoreResult, Task
from headrace.weights.canary import Canary
from headrace.weights.catch_up import TrainerCatchUp

TASKS = [Task(id=f"t{i}", messages=({"role": "user", "content": f"{i}?"},), answer="1") for i in range(64)]


def scripted_config(folder: Path, **sections: Any) -> RunConfig:
    """4 batches of 2 groups of 2."""
    data: dict[str, Any] = {
        "name": "run",
        "output_dir": str(folder),
        "model": {"path": "none"},
        "tasks": {"type": "python", "factory": "none:none"},
        "rewards": [{"type": "exact"}],
        "sampling": {"max_new_tokens": 8},
        "trainer": {"num_batches": 4},
        "rollout": {"groups_per_batch": 2, "group_size": 2},
        "checkpoint": {"every": 0},
        "monitor": {"progress": False},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return restore_config(data, "the test")


def by_member(episode: Episode) -> ScoreResult:
    """Even members are right, so that every group teaches something."""
    return Score(value=float(episode.key.member % 2 == 0))


def scripted_parts(
    config: RunConfig,
    *,
    engine: ScriptedEngine | Callable[[Watchdog, PolicyVersion], FleetEngine] | None = None,
    trainer: ScriptedTrainer | None = None,
    thread: ScriptedThread | None = None,
    writer: ScriptedThread | None = None,
    reward: ScriptedReward | None = None,
    judge: Callable[[Episode], ScoreResult] = by_member,
    held_out: Sequence[Task] = (),
    make_environment: Callable[[Task], Any] = lambda task: SingleTurn(),
) -> Parts:
    """As ``wiring.build_parts``; call it inside the virtual event loop. A folder with a run in it is resumed."""
    clock = asyncio.get_running_loop().time
    trainer, thread = trainer or ScriptedTrainer(), thread or ScriptedThread()
    reward = reward or ScriptedReward(judge)
    is_resume = (config.run_dir / "run.json").exists()
    info = collect_run_info(
        name=config.name, config=resolved(config), seeds={"run": config.seed}, dataset_fingerprints={}
    )
    run_dir = RunDirectory.open(config.run_dir) if is_resume else RunDirectory.create(config.run_dir, info)
    checkpoints = CheckpointStore(run_dir.checkpoints_path, config.checkpoint.keep)
    checkpoint = checkpoints.latest()
    if checkpoint is not None:
        trainer.restore(checkpoint.path)
    ledger = Ledger()
    store = LedgerStore(run_dir.ledger_path, ledger)
    lineage = store.open_lineage(trainer.version.number if store.num_replayed else None)
    trainer.set_lineage(lineage)
    watchdog = Watchdog(clock, config.guards.stall_min_s)
    if engine is not None and not isinstance(engine, ScriptedEngine):
        engine = engine(watchdog, trainer.version)
    else:
        engine = engine or ScriptedEngine()
        engine.version = trainer.version
    record = Record(
        run_dir=run_dir,
        lineage=lineage,
        ledger=ledger,
        ledger_store=store,
        checkpoints=checkpoints,
        episodes=EpisodeWriter(run_dir.episodes_path, lineage),
        spans=SpanWriter(run_dir.spans_path, "loop", lineage, clock),
        metrics=MetricsWriter(run_dir.metrics_path, lineage),
    )
    progress = Progress(config.trainer.num_batches, enabled=False)
    sinks = build_sinks(config.monitor, run_dir.path, config.name, {})
    runner = EpisodeRunner(
        engine=engine,
        renderer=ScriptedRenderer(),
        make_environment=make_environment,
        watchdog=watchdog,
        clock=clock,
        run_seed=config.seed,
        generation_deadline_s=config.rollout.generation_deadline_s,
        episode_deadline_s=config.rollout.episode_deadline_s,
    )

    async def score(samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        return [t.tolist() for t in await thread.call(trainer.forward, samples)]

    async def no_checksums() -> dict[str, str]:
        return {}

    canary = Canary(engine, score, (2, 65), bound=1e-3, trainer_checksums=no_checksums, shares_weights=True)
    if isinstance(engine, FleetEngine):
        engine.catch_up_by(TrainerCatchUp(canary, trainer, lambda: {}, thread.call))
        engine.tally._on_span = record.spans.add

    return Parts(
        config=config,
        clock=clock,
        tasks=TaskList(TASKS),
        held_out=held_out,
        engine=engine,
        player=Player(runner=runner, reward=reward, sampling=Sampling(**config.sampling.model_dump())),
        reward=reward,
        model=torch.nn.Linear(1, 1),
        trainer=trainer,
        trainer_thread=thread,
        algorithm=algorithm_of(config),
        canary=canary,
        max_ratio_error=1e-3,
        watchdog=watchdog,
        overlap=Overlap(thread=writer or thread, snapshot=trainer.snapshot) if config.checkpoint.overlap else None,
        record=record,
        sinks=sinks,
        progress=progress,
        reporter=Reporter(
            lineage,
            metrics=record.metrics,
            episodes=record.episodes,
            spans=record.spans,
            sinks=sinks,
            health=HealthMonitor(config.guards),
            progress=progress,
            engine=engine,
            reward=reward,
            watchdog=watchdog,
        ),
        restored=checkpoint.state() if checkpoint is not None else {},
    )


def run_scripted(
    config: RunConfig, *, during: Callable[[Loop], Any] | None = None, **parts: Any
) -> tuple[Loop, BaseException | None, float]:
    """Run a loop under the watch; returns it, what ended it (None: it finished), and the virtual seconds it took.
    ``during``: a coroutine function that runs beside it."""

    async def main() -> tuple[Loop, BaseException | None, float]:
        loop = Loop(scripted_parts(config, **parts))
        beside = asyncio.ensure_future(during(loop)) if during is not None else None
        error: BaseException | None = None
        try:
            await _run_watched(loop)
        except Exception as raised:
            error = first_cause(raised)
        finally:
            try:
                loop.parts.record.close()
            except RecordError as closing:
                error = error or closing
            if beside is not None:
                beside.cancel()
        return loop, error, asyncio.get_running_loop().time()

    return run_in_virtual_time(main)
