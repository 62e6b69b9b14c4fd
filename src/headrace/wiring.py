"""Builds the parts of a run from its checked configuration (checked.py).

``loop.py`` says what happens when; this file only says what is connected to what.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

import torch
from torch import Tensor

from headrace.checked import Checked, Policy, check_before_work, load_critic, load_policy
from headrace.cluster.ray_followers import RayFollowers
from headrace.cluster.workers import Workers
from headrace.config.engines import TransformersEngineConfig
from headrace.config.load import resolved
from headrace.config.prompts import check_prompts
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog
from headrace.daemon_thread import DaemonThread
from headrace.engine_wiring import build_engine, build_fleet, num_threads
from headrace.engines.fleet.fleet import FleetEngine
from headrace.environments.registry import make_environment
from headrace.environments.runner import EpisodeRunner
from headrace.errors import ConfigError
from headrace.evaluation.gold import GoldCheck, recorded_evaluations
from headrace.model.parallel.mesh import ParallelMesh
from headrace.monitor.fanout import build_sinks
from headrace.monitor.health import HealthMonitor
from headrace.monitor.progress import Progress
from headrace.monitor.stacks import task_stacks, thread_stacks
from headrace.parts import Overlap, Parts, Record
from headrace.player import Player
from headrace.protocols import ChatEngine, Clock, Engine, Environment, Reward
from headrace.record.checkpoints import Checkpoint, CheckpointStore
from headrace.record.episodes import EpisodeWriter
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.redact import redact
from headrace.record.run_dir import RunDirectory, collect_run_info
from headrace.record.spans import SpanWriter
from headrace.reporting import Reporter
from headrace.supervised import SupervisedStream
from headrace.teacher import Teacher
from headrace.trainer.crew import Crew, Followers, LeadingTrainer, join_run
from headrace.trainer.distributed import ParallelTrainer
from headrace.trainer.plan import num_steps_per_batch
from headrace.trainer.routers import Routers
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, Sample, Sampling, Task
from headrace.weights.canary import NUM_PROBE_TOKENS, Canary
from headrace.weights.carried import CarriedWeights
from headrace.weights.catch_up import TrainerCatchUp
from headrace.weights.checksums import checksum, checksums, named_parameters
from headrace.weights.parameters import adapter_travels
from headrace.weights.receivers import make_receiver
from headrace.weights.senders import make_sender
from headrace.weights.streamed import StreamedWeights

NUM_CANARY_PROMPT_TOKENS = {"transformers": 8, "vllm": 40, "sglang": 72}
"""By engine. Prefix caches find whole blocks of tokens (vLLM's of 32, SGLang's of 64 at most), so a shorter prompt
would never be found in them."""


def build_player(
    config: RunConfig,
    engine: Engine | ChatEngine,
    policy: Policy | None,
    reward: Reward,
    watchdog: Watchdog,
    clock: Clock,
    gold: Reward | None = None,
    environments: Callable[[Task], Environment] = make_environment,
) -> Player:
    """Plays episodes as the configuration says. ``policy``: None with an engine of text."""
    runner = EpisodeRunner(
        engine=engine,
        renderer=None if policy is None else policy.renderer,
        make_environment=environments,
        watchdog=watchdog,
        clock=clock,
        run_seed=config.seed,
        generation_deadline_s=config.rollout.generation_deadline_s,
        episode_deadline_s=config.rollout.episode_deadline_s,
    )
    return Player(
        runner=runner,
        reward=reward,
        sampling=Sampling(**config.sampling.model_dump()),
        evaluation_reward=gold,
        greedy_member=config.rollout.group_size,
    )


def build_parts(config: RunConfig, *, resume_from: Path | None, clock: Clock = time.monotonic) -> Parts:
    """Everything, wired. ``resume_from``: the folder of the run to go on with. Raises HeadraceError and its kin for
    what the user can mend; what was opened until then is closed again."""
    if resume_from is None and (config.run_dir / "run.json").exists():
        RunDirectory.create(config.run_dir, {})  # raises, saying whose folder it is
    checked = check_before_work(config)
    policy = load_policy(config)
    for source in (checked.splits.train, checked.splits.held_out):
        check_prompts(source, policy.renderer, config, config.engine.max_context or policy.loaded.max_context)
    limit = policy.loaded.max_context
    supervised = SupervisedStream.build(checked.conversations, config, policy.renderer, limit)
    workers = Workers.of(config)
    beside = _Beside(supervised=supervised, teacher=Teacher.load(config, policy.loaded), workers=workers)
    trainer, carrier = _build_trainer(checked, policy, workers)
    try:
        run_dir = RunDirectory.open(resume_from) if resume_from else _create_run(checked, policy)
        try:
            record, checkpoint = _open_record(checked, trainer, run_dir, clock)
            if workers is not None:
                workers.journal.open(run_dir.path)
                reward, gold = workers.rewards(checked.reward, checked.gold)
                checked = replace(checked, reward=reward, gold=gold)
            return _connect(checked, policy, trainer, carrier, beside, record, checkpoint, clock)
        except BaseException:
            run_dir.close()
            raise
    except BaseException:
        if isinstance(trainer, LeadingTrainer):
            trainer.close()
        raise


def _on_over_optimisation(config: RunConfig) -> Literal["warn", "stop"]:
    return "warn" if config.gold is None else config.gold.on_over_optimisation


def _build_trainer(
    checked: Checked, policy: Policy, workers: Workers | None
) -> tuple[PolicyTrainer, None] | tuple[LeadingTrainer, StreamedWeights | CarriedWeights]:
    """The trainer; with several processes also the engine's weights, copied before the model is split."""
    config = checked.config
    if config.parallel.world_size == 1:
        critic = load_critic(config, policy)
        return PolicyTrainer(policy.loaded, config.trainer, critic=critic, **_trainer_options(checked)), None
    Routers.of(policy.loaded.model, config.trainer)  # refuses what this model cannot have, before any process starts
    carrier: StreamedWeights | CarriedWeights
    engine = config.engine
    if not isinstance(engine, TransformersEngineConfig) or engine.carrier.type == "memory":
        carrier = StreamedWeights(copy.deepcopy(policy.loaded.model), PolicyVersion(0, 0))
    else:
        sender = make_sender(engine.carrier, config.run_dir / "weights")
        carrier = CarriedWeights(policy.loaded.model, PolicyVersion(0, 0), make_receiver(sender.receiver), sender)
    followers: Crew
    if workers is not None and workers.ray_carrier is not None:
        followers = RayFollowers(workers.ray_carrier, workers.journal, resolved(config), config.parallel.world_size)
    else:
        followers = Followers(config)
    try:
        with followers.explained():
            verbs = join_run(config, 0, followers.address)
        own = build_parallel_trainer(checked, policy, ParallelMesh.create(config.parallel))
    except BaseException:
        followers.stop()
        raise
    return LeadingTrainer(own, verbs, followers), carrier


def build_parallel_trainer(checked: Checked, policy: Policy, mesh: ParallelMesh) -> ParallelTrainer:
    """This process's part of the trainer. Every process of the run calls it. Collective."""
    return ParallelTrainer(policy.loaded, checked.config.trainer, mesh, **_trainer_options(checked))


def _trainer_options(checked: Checked) -> _TrainerOptions:
    config = checked.config
    num_frozen_batches = 0 if config.critic is None else config.critic.warmup_batches
    return {
        "num_steps": (config.trainer.num_batches - num_frozen_batches) * num_steps_per_batch(config.trainer),
        "with_reference": checked.algorithm.needs.reference,
        "activation_checkpointing": config.model.activation_checkpointing,
        "activation_budget_bytes": config.model.activation_budget_bytes,
        "beside": "" if config.teacher is None else "the teacher",
    }


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """What a run has beside policy, engine and trainer."""

    supervised: SupervisedStream | None
    teacher: Teacher | None
    workers: Workers | None


class _TrainerOptions(TypedDict):
    num_steps: int
    with_reference: bool
    activation_checkpointing: bool
    activation_budget_bytes: int | None
    beside: str


def _create_run(checked: Checked, policy: Policy) -> RunDirectory:
    config = checked.config
    engine_threads, trainer_threads = num_threads(config)
    info = collect_run_info(
        name=config.name,
        config=resolved(config),
        seeds={"run": config.seed},
        dataset_fingerprints=_fingerprints(checked),
        extra={
            "num_threads": {"engine": engine_threads, "trainer": trainer_threads},
            "num_parameters": sum(p.numel() for p in policy.loaded.model.parameters()),
            "algorithm": str(getattr(checked.algorithm, "resolved", config.algorithm.preset)),
        },
    )
    return RunDirectory.create(config.run_dir, info)


def _fingerprints(checked: Checked) -> dict[str, str]:
    found = {"train": checked.splits.train.fingerprint, "held_out": checked.splits.held_out.fingerprint}
    return found if checked.conversations is None else {**found, "supervised": checked.conversations.fingerprint}


def _open_record(
    checked: Checked, trainer: PolicyTrainer | LeadingTrainer, run_dir: RunDirectory, clock: Clock
) -> tuple[Record, Checkpoint | None]:
    """Restore the newest complete checkpoint, replay the books up to it, and open a lineage."""
    recorded, now = run_dir.info["dataset_fingerprints"], _fingerprints(checked)
    if recorded != now:
        tasks_differ = any(recorded.get(side) != now[side] for side in ("train", "held_out"))
        what = "tasks" if tasks_differ else "rows of supervised_data"
        raise ConfigError(
            f"the {what} are not those that the run in {run_dir.path} was started with (fingerprints differ): a "
            "resume would skip some and repeat others. Bring the old ones back, or start a new run"
        )
    checkpoints = CheckpointStore(run_dir.checkpoints_path, checked.config.checkpoint.keep)
    checkpoint = checkpoints.latest()
    if checkpoint is not None:
        trainer.restore(checkpoint.path)
    ledger = Ledger()
    ledger_store = LedgerStore(run_dir.ledger_path, ledger)
    lineage = ledger_store.open_lineage(trainer.version.number if ledger_store.num_replayed else None)
    trainer.set_lineage(lineage)
    record = Record(
        run_dir=run_dir,
        lineage=lineage,
        ledger=ledger,
        ledger_store=ledger_store,
        checkpoints=checkpoints,
        episodes=EpisodeWriter(run_dir.episodes_path, lineage),
        spans=SpanWriter(run_dir.spans_path, "loop", lineage, clock),
        metrics=MetricsWriter(run_dir.metrics_path, lineage),
    )
    return record, checkpoint


def _connect(
    checked: Checked,
    policy: Policy,
    trainer: PolicyTrainer | LeadingTrainer,
    carrier: StreamedWeights | CarriedWeights | None,
    beside: _Beside,
    record: Record,
    checkpoint: Checkpoint | None,
    clock: Clock,
) -> Parts:
    config = checked.config
    if carrier is not None and isinstance(trainer, LeadingTrainer):
        carrier.receive(trainer.current_weights())
    watchdog = _watchdog(config, clock)
    _, trainer_threads = num_threads(config)
    trainer_thread = DaemonThread("headrace-trainer", lambda: torch.set_num_threads(trainer_threads))
    sinks = build_sinks(config.monitor, record.run_dir.path, config.name, redact(resolved(config)))
    progress = Progress(config.trainer.num_batches, title=config.name, enabled=config.monitor.progress)
    engine = _build_run_engine(config, policy, trainer.version, carrier, beside.workers, record, watchdog, progress)
    bound: float = getattr(config.guards, f"max_ratio_error_{config.model.dtype}")
    canary = _build_canary(checked, policy, engine, trainer, trainer_thread, bound, carrier)
    reporter = Reporter(
        record.lineage,
        metrics=record.metrics,
        episodes=record.episodes,
        spans=record.spans,
        sinks=sinks,
        health=HealthMonitor(config.guards, on_over_optimisation=_on_over_optimisation(config)),
        progress=progress,
        engine=engine,
        reward=checked.reward,
        watchdog=watchdog,
    )
    if checkpoint is not None:
        reporter.remember(record.run_dir.path, trainer.version.number)
    held_out = checked.splits.held_out
    environments: Callable[[Task], Environment] = make_environment
    if beside.workers is not None:
        environments = beside.workers.environments(make_environment)
        beside.workers.told(progress.note)
    return Parts(
        config=config,
        clock=clock,
        tasks=checked.splits.train,
        held_out=[held_out[i] for i in range(len(held_out))],
        engine=engine,
        player=build_player(config, engine, policy, checked.reward, watchdog, clock, checked.gold, environments),
        workers=beside.workers,
        reward=checked.gold or checked.reward,
        gold_check=None if checked.gold is None else _gold_check(record.run_dir.path, trainer.version.number),
        supervised=beside.supervised,
        teacher=beside.teacher,
        model=policy.loaded.model,
        trainer=trainer,
        trainer_thread=trainer_thread,
        algorithm=checked.algorithm,
        canary=canary,
        max_ratio_error=bound,
        watchdog=watchdog,
        record=record,
        sinks=sinks,
        progress=progress,
        reporter=reporter,
        overlap=_overlap(config, trainer),
        restored=checkpoint.state() if checkpoint is not None else {},
    )


def _build_run_engine(
    config: RunConfig,
    policy: Policy,
    version: PolicyVersion,
    carrier: StreamedWeights | CarriedWeights | None,
    workers: Workers | None,
    record: Record,
    watchdog: Watchdog,
    progress: Progress,
) -> Engine:
    """One engine, or several behind one."""
    run_path = record.run_dir.path
    if config.fleet is None:
        return build_engine(config, policy, version, carrier, run_path / "engine.log")
    return build_fleet(
        config,
        config.fleet,
        policy,
        version,
        carrier,
        workers=workers,
        watchdog=watchdog,
        run_path=run_path,
        on_span=record.spans.add,
        on_event=progress.note,
    )


def _build_canary(
    checked: Checked,
    policy: Policy,
    engine: Engine,
    trainer: PolicyTrainer | LeadingTrainer,
    trainer_thread: DaemonThread,
    bound: float,
    carrier: StreamedWeights | CarriedWeights | None,
) -> Canary:
    """It compares with the trainer; engines of a fleet that join late are proved by it, too."""

    async def score(samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        return [t.tolist() for t in await trainer_thread.call(trainer.forward, samples)]

    async def sums() -> Mapping[str, str]:
        return await trainer_thread.call(_trainer_checksums, trainer, policy)

    canary = Canary(
        engine,
        score,
        _canary_prompt(checked, policy),
        bound=bound,
        trainer_checksums=sums,
        shares_weights=checked.config.engine.shares_weights and carrier is None,
    )
    if isinstance(engine, FleetEngine):
        engine.catch_up_by(
            TrainerCatchUp(
                canary,
                trainer,
                lambda: _weights(trainer, policy, travelling=True),
                trainer_thread.call,
                frozen=lambda: _weights(trainer, policy, travelling=False),
            )
        )
    return canary


def _canary_prompt(checked: Checked, policy: Policy) -> Sequence[int]:
    """The first task's prompt, repeated or cut to the length that the engine's cache needs."""
    engine = checked.config.engine
    room = (engine.max_context or policy.loaded.max_context) - NUM_PROBE_TOKENS
    num_tokens = min(NUM_CANARY_PROMPT_TOKENS[engine.type], room)
    prompt = policy.renderer.render(checked.splits.train[0].messages)
    return (prompt * num_tokens)[:num_tokens]


def _overlap(config: RunConfig, trainer: PolicyTrainer | LeadingTrainer) -> Overlap | None:
    if not config.checkpoint.overlap or isinstance(trainer, LeadingTrainer):
        return None
    return Overlap(thread=DaemonThread("headrace-checkpoint"), snapshot=trainer.snapshot)


def _watchdog(config: RunConfig, clock: Clock) -> Watchdog:
    """It can say where every thread and every task is."""
    watchdog = Watchdog(clock, config.guards.stall_min_s)
    watchdog.watch_stacks("threads", thread_stacks)
    watchdog.watch_stacks("asyncio tasks", task_stacks)
    return watchdog


def _gold_check(run_path: Path, up_to_update: int) -> GoldCheck:
    """A gold check that knows what a resumed run had evaluated."""
    check = GoldCheck()
    for update, result in recorded_evaluations(run_path, up_to_update):
        check.add(update, result)
    return check


def _trainer_checksums(trainer: PolicyTrainer | LeadingTrainer, policy: Policy) -> dict[str, str]:
    """Of the weights that the trainer holds now (I6)."""
    if isinstance(trainer, LeadingTrainer):
        return {name: checksum(tensor) for bucket in trainer.weight_buckets() for name, tensor in bucket.items()}
    return checksums(named_parameters(policy.loaded.model).items())


def _weights(trainer: PolicyTrainer | LeadingTrainer, policy: Policy, *, travelling: bool) -> Mapping[str, Tensor]:
    """Those that the trainer holds now, by name, and that updates bring, or those that they do not (the frozen base of
    an adapter); its own storage where it is one process."""
    if isinstance(trainer, LeadingTrainer):  # without adapters: all of them travel
        if not travelling:
            return {}
        return {name: tensor.clone() for bucket in trainer.weight_buckets() for name, tensor in bucket.items()}
    is_adapter = policy.loaded.base is not None
    named = named_parameters(policy.loaded.model).items()
    return {name: tensor for name, tensor in named if (not is_adapter or adapter_travels(name)) == travelling}
