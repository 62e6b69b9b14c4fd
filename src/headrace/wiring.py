"""Builds the parts of a run from its configuration, cheapest checks first: nothing is written and no model is loaded
before everything that can be known to be wrong is known to be right.

``loop.py`` says what happens when; this file only says what is connected to what.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from headrace.algorithms.fields import Minibatch
from headrace.algorithms.registry import build_algorithm
from headrace.cluster.inprocess import ThreadActor
from headrace.config.checks import AlgorithmTraits, check_config
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog, await_with_deadline
from headrace.engines.embedded import TransformersEngine
from headrace.environments.registry import check_environments, make_environment
from headrace.environments.runner import EpisodeRunner
from headrace.environments.tasks import TaskSplits, build_tasks
from headrace.errors import ConfigError
from headrace.evaluation.evaluate import evaluate
from headrace.evaluation.result import EvaluationResult
from headrace.model.load import LoadedModel, load_model
from headrace.model.paths import resolve_model_path
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.monitor.fanout import FanOut, build_sinks
from headrace.monitor.health import HealthMonitor
from headrace.monitor.progress import Progress
from headrace.protocols import Algorithm, Clock, Engine, Renderer, Reward, TaskSource, WeightUpdate
from headrace.record.checkpoints import CheckpointStore
from headrace.record.episodes import EpisodeWriter
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.redact import redact
from headrace.record.run_dir import RunDirectory, collect_run_info
from headrace.record.spans import SpanWriter
from headrace.reporting import Reporter
from headrace.rewards.build import build_rewards
from headrace.trainer.plan import num_steps_per_batch, plan_update
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import AttemptKey, Episode, PolicyVersion, RolloutBatch, Sample, Sampling, Task
from headrace.weights.canary import Canary
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.inprocess import CopiedWeights, SharedWeights

T = TypeVar("T")

NUM_CANARY_PROMPT_TOKENS = 8
REWARD_MARGIN_S = 5.0
MAX_PROMPTS_CHECKED = 20_000
"""Prompts rendered at start to find one that is too long; of more tasks, those with the longest text."""


@dataclass(kw_only=True)
class Parts:
    """Everything a loop works with."""

    config: RunConfig
    clock: Clock
    tasks: TaskSource
    held_out: Sequence[Task]
    sampling: Sampling
    renderer: Renderer
    engine: Engine
    shares_weights: bool
    model: PreTrainedModel
    """The trainer's; the engine's too where it shares weights."""
    trainer: PolicyTrainer
    trainer_thread: ThreadActor
    algorithm: Algorithm
    reward: Reward
    runner: EpisodeRunner
    canary: Canary
    watchdog: Watchdog
    run_dir: RunDirectory
    ledger: Ledger
    ledger_store: LedgerStore
    checkpoints: CheckpointStore
    episodes: EpisodeWriter
    spans: SpanWriter
    metrics: MetricsWriter
    sinks: FanOut
    progress: Progress
    reporter: Reporter
    max_ratio_error: float
    """I5: largest |ratio - 1| of fresh tokens, for the model's dtype."""
    reward_deadline_s: float
    """The rewards' longest own deadline (they judge at the same time), and a margin for queueing."""
    restored: Mapping[str, Any] = field(default_factory=dict)
    """Extra state of the checkpoint that was restored; empty for a fresh start."""

    async def wait(self, awaitable: Awaitable[T], *, waiter: str, on: str, what: str, deadline_s: float) -> T:
        """Await with a name and a deadline (I19)."""
        return await await_with_deadline(
            awaitable, watchdog=self.watchdog, waiter=waiter, on=on, what=what, deadline_s=deadline_s
        )

    async def on_trainer(self, function: Callable[..., T], *args: Any, what: str, deadline_s: float) -> T:
        """Run a blocking call on the trainer's thread, on the timeline and under a deadline."""
        started_s = self.clock()
        call = self.trainer_thread.call(function, *args)
        result = await self.wait(call, waiter="loop", on="trainer", what=what, deadline_s=deadline_s)
        self.spans.add("trainer", what, started_s, self.clock())
        self.watchdog.progress(what)
        return result

    def plan(self, batch: RolloutBatch) -> list[Minibatch]:
        """The batch's minibatches, in the order of their optimizer steps. On the trainer's thread."""
        config = self.config
        return plan_update(
            batch,
            self.algorithm,
            self.trainer,
            config.trainer,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=config.seed,
        )

    def forward_backward(self, minibatch: Minibatch) -> dict[str, float]:
        return self.trainer.forward_backward(minibatch, self.algorithm)

    def publish(self) -> WeightUpdate:
        """The next version; with its tensors where the engine holds a copy. On the trainer's thread."""
        update = self.trainer.publish()
        if self.shares_weights:
            return update
        return WeightUpdate(version=update.version, tensors=named_parameters(self.model))

    def trainer_checksums(self) -> dict[str, str]:
        """Of the weights that the trainer holds now (I6)."""
        return checksums(named_parameters(self.model).items())

    def save_checkpoint(self, number: int, state: dict[str, Any]) -> None:
        """Trainer, state and episodes of this moment, complete or not at all (I12). On the trainer's thread."""
        with self.checkpoints.writing(number) as folder:
            self.trainer.save(folder)
            self.checkpoints.write_state(folder, state)

    async def evaluate(self, play: Callable[..., Awaitable[Episode]], version: PolicyVersion) -> EvaluationResult:
        """The held-out tasks on the engine's current version. Seeds are the same at each evaluation, so that two of
        them differ by the policy and not by luck."""
        config = self.config
        tasks = list(self.held_out)[: config.evaluation.num_tasks]
        index = {task.id: number for number, task in enumerate(tasks)}
        greedy = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)

        async def run_episode(task: Task, sample: int, is_greedy: bool) -> Episode:
            key = AttemptKey(index[task.id], sample)
            if is_greedy:
                return await play(key, task, greedy, "evaluation-greedy")
            return await play(key, task, self.sampling, "evaluation")

        result = await evaluate(
            tasks,
            run_episode,
            num_samples=config.evaluation.num_samples,
            greedy=config.evaluation.greedy,
            deadline_s=config.evaluation.deadline_s,
            concurrency=config.rollout.max_concurrent,
            clock=self.clock,
        )
        folder = self.run_dir.path / "evaluations"
        folder.mkdir(exist_ok=True)
        (folder / f"version-{version}.json").write_text(result.to_json())
        return result

    async def close(self) -> None:
        """Let go of everything, in an order in which nothing writes into what is closed."""
        await self.engine.close()
        await self.reward.close()
        self.trainer_thread.close()
        for closable in (self.ledger_store, self.episodes, self.spans, self.metrics):
            closable.close()
        self.sinks.close()
        self.progress.stop()
        self.run_dir.close()


def check_before_work(config: RunConfig) -> tuple[TaskSplits, Algorithm, Reward]:
    """All that can be refused without loading a model. Raises ConfigError and its kin."""
    algorithm = build_algorithm(
        config.algorithm,
        asynchronous=config.rollout.max_staleness > 0,
        max_new_tokens=config.sampling.max_new_tokens,
        min_group_size=config.rollout.min_group_size,
    )
    traits = AlgorithmTraits(
        group_relative=getattr(getattr(algorithm, "resolved", None), "is_group_relative", False),
        dynamic_sampling=getattr(getattr(algorithm, "resolved", None), "dynamic_sampling", True),
    )
    check_config(config, algorithm=traits)
    splits = build_tasks(config.tasks)
    check_environments([splits.train, splits.held_out])
    evaluation = config.evaluation
    if (evaluation.every or evaluation.at_start or evaluation.at_end) and not len(splits.held_out):
        raise ConfigError(
            "evaluation is on, but there are no held-out tasks; set tasks.held_out_path or tasks.held_out_fraction, "
            "or turn evaluation.every, at_start and at_end off"
        )
    return splits, algorithm, build_rewards(config.rewards)


def check_prompts(tasks: Sequence[Task] | TaskSource, renderer: Renderer, config: RunConfig, max_context: int) -> None:
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
    """(engine, trainer): all cores each where they take turns, half each where they run at the same time."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    default = num_cores if config.rollout.max_staleness == 0 else max(1, num_cores // 2)
    return config.engine.num_threads or default, config.trainer.num_threads or default


def build_engine(
    config: RunConfig, loaded: LoadedModel, renderer: Renderer, version: PolicyVersion
) -> TransformersEngine:
    """The engine that the configuration names."""
    carrier = SharedWeights if config.engine.weights == "shared" else CopiedWeights
    engine_threads, _ = num_threads(config)
    return TransformersEngine(
        carrier(loaded.model, version),
        config.engine.model_copy(update={"num_threads": engine_threads}),
        vocab_size=loaded.vocab_size,
        decode=renderer.decode,
    )


def build_parts(config: RunConfig, *, resume_from: Path | None, clock: Clock = time.monotonic) -> Parts:
    """Everything, wired. ``resume_from``: the folder of the run to go on with. Raises HeadraceError and its kin for
    what the user can mend; what was opened until then is closed again."""
    if resume_from is None and (config.run_dir / "run.json").exists():
        RunDirectory.create(config.run_dir, {})  # raises, saying whose folder it is
    splits, algorithm, reward = check_before_work(config)
    loaded = load_model(
        resolve_model_path(config.model.path), config.model.dtype, lora=config.model.lora, seed=config.seed
    )
    renderer = ChatRenderer(loaded.tokenizer, config.model.chat_template, generation_eos_ids(config.model.path))
    max_context = config.engine.max_context or loaded.max_context
    for source in (splits.train, splits.held_out):
        check_prompts(source, renderer, config, max_context)
    trainer = PolicyTrainer(
        loaded,
        config.trainer,
        num_steps=config.trainer.num_batches * num_steps_per_batch(config.trainer),
        with_reference=algorithm.needs.reference,
        activation_checkpointing=config.model.activation_checkpointing,
    )
    run_dir = RunDirectory.open(resume_from) if resume_from else _create_run(config, splits, loaded)
    try:
        return _open_record(config, clock, splits, algorithm, reward, loaded, renderer, trainer, run_dir)
    except BaseException:
        run_dir.close()
        raise


def _create_run(config: RunConfig, splits: TaskSplits, loaded: LoadedModel) -> RunDirectory:
    info = collect_run_info(
        name=config.name,
        config=resolved(config),
        seeds={"run": config.seed},
        dataset_fingerprints=_fingerprints(splits),
        extra={"num_threads": dict(zip(("engine", "trainer"), num_threads(config), strict=True)), "model": {
            "num_parameters": sum(p.numel() for p in loaded.model.parameters()), "path": loaded.path}},
    )  # fmt: skip
    return RunDirectory.create(config.run_dir, info)


def _fingerprints(splits: TaskSplits) -> dict[str, str]:
    return {"train": splits.train.fingerprint, "held_out": splits.held_out.fingerprint}


def _open_record(
    config: RunConfig,
    clock: Clock,
    splits: TaskSplits,
    algorithm: Algorithm,
    reward: Reward,
    loaded: LoadedModel,
    renderer: Renderer,
    trainer: PolicyTrainer,
    run_dir: RunDirectory,
) -> Parts:
    """Replay the books, restore the newest complete checkpoint, open a lineage, and connect the rest."""
    recorded = run_dir.info["dataset_fingerprints"]
    if recorded != _fingerprints(splits):
        raise ConfigError(
            f"the tasks are not those that the run in {run_dir.path} was started with (fingerprints differ): a resume "
            "would skip some and repeat others. Bring the old tasks back, or start a new run"
        )
    checkpoints = CheckpointStore(run_dir.checkpoints_path, config.checkpoint.keep)
    checkpoint = checkpoints.latest()
    if checkpoint is not None:
        trainer.restore(checkpoint.path)
    ledger = Ledger()
    ledger_store = LedgerStore(run_dir.ledger_path, ledger)
    lineage = ledger_store.open_lineage(trainer.version.number if ledger_store.num_replayed else None)
    trainer.set_lineage(lineage)
    engine = build_engine(config, loaded, renderer, trainer.version)
    watchdog = Watchdog(clock, config.guards.stall_min_s)
    watchdog.watch_stacks("threads", thread_stacks)
    watchdog.watch_stacks("asyncio tasks", task_stacks)
    _, trainer_threads = num_threads(config)
    trainer_thread = ThreadActor("trainer", setup=lambda: torch.set_num_threads(trainer_threads))
    bound = getattr(config.guards, f"max_ratio_error_{config.model.dtype}")

    async def score(samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        return [t.tolist() for t in await trainer_thread.call(trainer.forward, samples)]

    spans = SpanWriter(run_dir.spans_path, "loop", lineage, clock)
    metrics = MetricsWriter(run_dir.metrics_path, lineage)
    episodes = EpisodeWriter(run_dir.episodes_path, lineage)
    sinks = build_sinks(config.monitor, run_dir.path, config.name, redact(resolved(config)))
    progress = Progress(config.trainer.num_batches, enabled=config.monitor.progress)
    reporter = Reporter(
        lineage=lineage,
        metrics=metrics,
        episodes=episodes,
        spans=spans,
        sinks=sinks,
        health=HealthMonitor(config.guards),
        progress=progress,
        engine=engine,
        success_threshold=reward.value_range[1],
    )
    if checkpoint is not None:
        reporter.remember(run_dir.path, trainer.version.number)
    prompt = renderer.render(splits.train[0].messages)[:NUM_CANARY_PROMPT_TOKENS]
    return Parts(
        config=config,
        clock=clock,
        tasks=splits.train,
        held_out=[splits.held_out[i] for i in range(len(splits.held_out))],
        sampling=Sampling(**config.sampling.model_dump()),
        renderer=renderer,
        engine=engine,
        shares_weights=config.engine.weights == "shared",
        model=loaded.model,
        trainer=trainer,
        trainer_thread=trainer_thread,
        algorithm=algorithm,
        reward=reward,
        runner=EpisodeRunner(
            engine=engine,
            renderer=renderer,
            make_environment=make_environment,
            watchdog=watchdog,
            clock=clock,
            run_seed=config.seed,
            generation_deadline_s=config.rollout.generation_deadline_s,
            episode_deadline_s=config.rollout.episode_deadline_s,
        ),
        canary=Canary(engine, score, prompt, bound=bound),
        watchdog=watchdog,
        run_dir=run_dir,
        ledger=ledger,
        ledger_store=ledger_store,
        checkpoints=checkpoints,
        episodes=episodes,
        spans=spans,
        metrics=metrics,
        sinks=sinks,
        progress=progress,
        reporter=reporter,
        max_ratio_error=bound,
        reward_deadline_s=max(reward.deadline_s for reward in config.rewards) + REWARD_MARGIN_S,
        restored=checkpoint.state() if checkpoint is not None else {},
    )


def thread_stacks() -> str:
    """Where every thread of this process is, for the watchdog's report."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-6:])}" for ident, frame in frames
    )


def task_stacks(limit: int = 20) -> str:
    """Where the oldest asyncio tasks wait."""
    lines = []
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    for task in tasks[:limit]:
        stack = task.get_stack(limit=1)
        where = f"{stack[-1].f_code.co_qualname}, line {stack[-1].f_lineno}" if stack else "not started"
        lines.append(f"{task.get_name()}: {where}")
    return "\n".join([*lines, *([f"and {len(tasks) - limit} more"] if len(tasks) > limit else [])])
