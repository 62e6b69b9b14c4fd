"""Builds the parts of a run from its configuration, cheapest checks first: nothing is written and no model is loaded
before everything that can be known to be wrong is known to be right.

``loop.py`` says what happens when; this file only says what is connected to what.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch

from headrace.algorithms.registry import build_algorithm
from headrace.config.checks import AlgorithmTraits, check_config
from headrace.config.critic import SeparateCriticConfig
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog
from headrace.daemon_thread import DaemonThread
from headrace.engines.embedded import TransformersEngine
from headrace.environments.registry import check_environments, make_environment
from headrace.environments.runner import EpisodeRunner
from headrace.environments.tasks import TaskSplits, build_tasks
from headrace.errors import ConfigError
from headrace.evaluation.gold import GoldCheck, recorded_evaluations
from headrace.model.load import LoadedModel, load_model
from headrace.model.memory import keep_large_buffers
from headrace.model.parallel.check import ModelShape, check_layout
from headrace.model.parallel.mesh import ParallelMesh
from headrace.model.paths import resolve_model_path
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.monitor.fanout import build_sinks
from headrace.monitor.health import HealthMonitor
from headrace.monitor.progress import Progress
from headrace.monitor.stacks import task_stacks, thread_stacks
from headrace.parts import Parts, Record
from headrace.player import Player
from headrace.protocols import Algorithm, Clock, Renderer, Reward, TaskSource
from headrace.record.checkpoints import Checkpoint, CheckpointStore
from headrace.record.episodes import EpisodeWriter
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.redact import redact
from headrace.record.run_dir import RunDirectory, collect_run_info
from headrace.record.spans import SpanWriter
from headrace.reporting import Reporter
from headrace.rewards.build import build_rewards
from headrace.rewards.composite import with_gold
from headrace.trainer.crew import Followers, LeadingTrainer, join_run
from headrace.trainer.critic import Critic
from headrace.trainer.distributed import ParallelTrainer
from headrace.trainer.plan import num_steps_per_batch
from headrace.trainer.routers import Routers
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, Sample, Sampling
from headrace.weights.canary import Canary
from headrace.weights.checksums import checksum, checksums, named_parameters
from headrace.weights.inprocess import CopiedWeights, SharedWeights
from headrace.weights.streamed import StreamedWeights

NUM_CANARY_PROMPT_TOKENS = 8
MAX_PROMPTS_CHECKED = 20_000
"""Prompts rendered at start to find one that is too long; of more tasks, those with the longest text."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the configuration names, made without loading a model."""

    config: RunConfig
    splits: TaskSplits
    algorithm: Algorithm
    reward: Reward
    gold: Reward | None = None
    """Reward and gold standard together, for evaluations: the value is the reward's, gold is a component."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A loaded model, and the renderer that speaks its ids."""

    loaded: LoadedModel
    renderer: ChatRenderer


def check_before_work(config: RunConfig) -> Checked:
    """All that can be refused without loading a model. Raises ConfigError and its kin."""
    algorithm = build_algorithm(
        config.algorithm,
        asynchronous=config.rollout.max_staleness > 0,
        max_new_tokens=config.sampling.max_new_tokens,
        min_group_size=config.rollout.min_group_size,
        critic=config.critic,
    )
    composed = getattr(algorithm, "resolved", None)  # a third party's algorithm knows its own options
    check_config(
        config,
        algorithm=AlgorithmTraits(
            group_relative=getattr(composed, "is_group_relative", False),
            dynamic_sampling=getattr(composed, "dynamic_sampling", True),
            ratio_is_one=getattr(composed, "ratio_is_one_on_one_step", True),
            needs_values=algorithm.needs.values,
        ),
    )
    folder = Path(resolve_model_path(config.model.path)).expanduser()
    if config.parallel.world_size > 1 and folder.is_dir():
        check_layout(config.parallel, ModelShape.of_folder(folder))
    if config.parallel.world_size > 1 and algorithm.needs.prepare:
        raise ConfigError(
            f"algorithm '{config.algorithm.preset}' chooses tokens or weights over a whole minibatch, which several "
            "processes cannot do yet; set all axes of [parallel] to 1, or take algorithm.selection and "
            "correction.batch_normalised away"
        )
    splits = build_tasks(config.tasks)
    check_environments([splits.train, splits.held_out])
    evaluation = config.evaluation
    if (evaluation.every or evaluation.at_start or evaluation.at_end) and not len(splits.held_out):
        raise ConfigError(
            "evaluation is on, but there are no held-out tasks; set tasks.held_out_path or tasks.held_out_fraction, "
            "or turn evaluation.every, at_start and at_end off"
        )
    reward = build_rewards(config.rewards)
    if getattr(composed, "refuses_negative_rewards", False) and reward.value_range[0] < 0:
        raise ConfigError(
            f"reward '{reward.name}' ranges from {reward.value_range[0]}, and algorithm '{config.algorithm.preset}' "
            "divides by the mean reward of a group: use rewards from 0 up, or another algorithm"
        )
    gold = None
    if config.gold is not None:
        gold = with_gold(reward, build_rewards(config.gold.rewards, where="gold.rewards"))
    return Checked(config=config, splits=splits, algorithm=algorithm, reward=reward, gold=gold)


def load_policy(config: RunConfig) -> Policy:
    """The model that the run starts from."""
    keep_large_buffers()
    path = resolve_model_path(config.model.path)
    device = config.model.device if config.parallel.world_size == 1 else "cpu"  # where the mesh is
    loaded = load_model(path, config.model.dtype, lora=config.model.lora, seed=config.seed, device=device)
    return Policy(
        loaded=loaded,
        renderer=ChatRenderer(loaded.tokenizer, config.model.chat_template, generation_eos_ids(path)),
    )


def load_critic(config: RunConfig, policy: Policy) -> Critic | None:
    """The critic that the configuration names; None where it names none. Raises ConfigError for a model that does not
    fit the policy."""
    if config.critic is None:
        return None
    own = None
    if isinstance(config.critic, SeparateCriticConfig):
        path = resolve_model_path(config.critic.path or config.model.path)
        own = load_model(
            path, config.model.dtype, lora=config.critic.lora, seed=config.seed, device=config.model.device
        )
        needed = config.engine.max_context or policy.loaded.max_context
        if own.max_context < needed:
            raise ConfigError(
                f"critic.path: the model allows {own.max_context} tokens, but prompt and reply may have {needed}; "
                "choose a model with a longer context, or lower engine.max_context"
            )
    num_steps = config.trainer.num_batches * num_steps_per_batch(config.trainer)
    return Critic(config.critic, policy.loaded, own=own, num_steps=num_steps)


def check_prompts(tasks: TaskSource, renderer: Renderer, config: RunConfig, max_context: int) -> None:
    """Refuse a prompt that leaves no room for its reply, before any work. Raises ConfigError naming the task."""
    indices: Sequence[int] = range(len(tasks))
    if len(tasks) > MAX_PROMPTS_CHECKED:
        indices = sorted(indices, key=lambda i: -len(str(tasks[i].messages)))[:MAX_PROMPTS_CHECKED]
    for i in indices:
        num_tokens = len(renderer.render(tasks[i].messages))
        if num_tokens + config.sampling.max_new_tokens > max_context:
            raise ConfigError(
                f"the prompt of task {tasks[i].id!r} has {num_tokens} tokens; with sampling.max_new_tokens = "
                f"{config.sampling.max_new_tokens} that exceeds the context of {max_context} tokens. Shorten or remove "
                "the task, or lower sampling.max_new_tokens: headrace never cuts a prompt"
            )


def num_threads(config: RunConfig) -> tuple[int, int]:
    """(engine, trainer): all cores each where they take turns, half each where they run at the same time; divided by
    the processes of the run."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = config.parallel.world_size if config.rollout.max_staleness == 0 else 2 * config.parallel.world_size
    default = max(1, num_cores // shares)
    return config.engine.num_threads or default, config.trainer.num_threads or default


def build_engine(
    config: RunConfig, policy: Policy, version: PolicyVersion, carrier: StreamedWeights | None = None
) -> TransformersEngine:
    """The engine that the configuration names, serving ``version``; ``carrier``: of a trainer of several processes."""
    make_carrier = SharedWeights if config.engine.weights == "shared" else CopiedWeights
    engine_threads, _ = num_threads(config)
    return TransformersEngine(
        carrier or make_carrier(policy.loaded.model, version),
        config.engine.model_copy(update={"num_threads": engine_threads}),
        vocab_size=policy.loaded.vocab_size,
        decode=policy.renderer.decode,
        record_routing=config.trainer.router_replay,
    )


def build_player(
    config: RunConfig,
    engine: TransformersEngine,
    policy: Policy,
    reward: Reward,
    watchdog: Watchdog,
    clock: Clock,
    gold: Reward | None = None,
) -> Player:
    """Plays episodes as the configuration says."""
    runner = EpisodeRunner(
        engine=engine,
        renderer=policy.renderer,
        make_environment=make_environment,
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
    trainer, carrier = _build_trainer(checked, policy)
    try:
        run_dir = RunDirectory.open(resume_from) if resume_from else _create_run(checked, policy)
        try:
            record, checkpoint = _open_record(checked, trainer, run_dir, clock)
            return _connect(checked, policy, trainer, carrier, record, checkpoint, clock)
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
    checked: Checked, policy: Policy
) -> tuple[PolicyTrainer, None] | tuple[LeadingTrainer, StreamedWeights]:
    """The trainer; with several processes also the engine's weights, copied before the model is split."""
    config = checked.config
    if config.parallel.world_size == 1:
        critic = load_critic(config, policy)
        return PolicyTrainer(policy.loaded, config.trainer, critic=critic, **_trainer_options(checked)), None
    Routers.of(policy.loaded.model, config.trainer)  # refuses what this model cannot have, before any process starts
    carrier = StreamedWeights(copy.deepcopy(policy.loaded.model), PolicyVersion(0, 0))
    followers = Followers(config)
    try:
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
    }


class _TrainerOptions(TypedDict):
    num_steps: int
    with_reference: bool
    activation_checkpointing: bool


def _create_run(checked: Checked, policy: Policy) -> RunDirectory:
    config = checked.config
    engine_threads, trainer_threads = num_threads(config)
    info = collect_run_info(
        name=config.name,
        config=resolved(config),
        seeds={"run": config.seed},
        dataset_fingerprints=_fingerprints(checked.splits),
        extra={
            "num_threads": {"engine": engine_threads, "trainer": trainer_threads},
            "num_parameters": sum(p.numel() for p in policy.loaded.model.parameters()),
            "algorithm": str(getattr(checked.algorithm, "resolved", config.algorithm.preset)),
        },
    )
    return RunDirectory.create(config.run_dir, info)


def _fingerprints(splits: TaskSplits) -> dict[str, str]:
    return {"train": splits.train.fingerprint, "held_out": splits.held_out.fingerprint}


def _open_record(
    checked: Checked, trainer: PolicyTrainer | LeadingTrainer, run_dir: RunDirectory, clock: Clock
) -> tuple[Record, Checkpoint | None]:
    """Restore the newest complete checkpoint, replay the books up to it, and open a lineage."""
    if run_dir.info["dataset_fingerprints"] != _fingerprints(checked.splits):
        raise ConfigError(
            f"the tasks are not those that the run in {run_dir.path} was started with (fingerprints differ): a resume "
            "would skip some and repeat others. Bring the old tasks back, or start a new run"
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
    carrier: StreamedWeights | None,
    record: Record,
    checkpoint: Checkpoint | None,
    clock: Clock,
) -> Parts:
    config = checked.config
    if carrier is not None and isinstance(trainer, LeadingTrainer):
        carrier.receive(trainer.current_weights())
    engine = build_engine(config, policy, trainer.version, carrier)
    watchdog = _watchdog(config, clock)
    _, trainer_threads = num_threads(config)
    trainer_thread = DaemonThread("headrace-trainer", lambda: torch.set_num_threads(trainer_threads))

    async def score(samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        return [t.tolist() for t in await trainer_thread.call(trainer.forward, samples)]

    bound: float = getattr(config.guards, f"max_ratio_error_{config.model.dtype}")
    canary_prompt = policy.renderer.render(checked.splits.train[0].messages)[:NUM_CANARY_PROMPT_TOKENS]
    sinks = build_sinks(config.monitor, record.run_dir.path, config.name, redact(resolved(config)))
    progress = Progress(config.trainer.num_batches, title=config.name, enabled=config.monitor.progress)
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
    )
    if checkpoint is not None:
        reporter.remember(record.run_dir.path, trainer.version.number)
    held_out = checked.splits.held_out
    return Parts(
        config=config,
        clock=clock,
        tasks=checked.splits.train,
        held_out=[held_out[i] for i in range(len(held_out))],
        engine=engine,
        player=build_player(config, engine, policy, checked.reward, watchdog, clock, checked.gold),
        reward=checked.gold or checked.reward,
        gold_check=None if checked.gold is None else _gold_check(record.run_dir.path, trainer.version.number),
        model=policy.loaded.model,
        trainer=trainer,
        trainer_thread=trainer_thread,
        algorithm=checked.algorithm,
        canary=Canary(
            engine,
            score,
            canary_prompt,
            bound=bound,
            trainer_checksums=lambda: _trainer_checksums(trainer, policy),
            shares_weights=config.engine.weights == "shared" and carrier is None,
        ),
        max_ratio_error=bound,
        watchdog=watchdog,
        record=record,
        sinks=sinks,
        progress=progress,
        reporter=reporter,
        restored=checkpoint.state() if checkpoint is not None else {},
    )


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
