"""``--dry-run``: the resolved configuration, and what would run. Reads the tasks, loads no model, writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.config.carriers import CarrierConfig, DeltaCarrierConfig, FileCarrierConfig
from headrace.config.critic import CriticConfig
from headrace.config.dump import dump_toml
from headrace.config.engines import SglangEngineConfig, TransformersEngineConfig, VllmEngineConfig
from headrace.config.load import resolved
from headrace.config.schema import GoldConfig, RunConfig
from headrace.config.vllm_python import check_this_python, find_python
from headrace.environments.preferences import Conversation, Rows, read_supervised
from headrace.environments.tasks import TaskSplits, build_tasks
from headrace.errors import HeadraceError
from headrace.model.paths import resolve_model_path
from headrace.record.redact import redact


def print_dry_run(config: RunConfig) -> None:
    """Print both to the standard output.

    Raises:
        ConfigError: tasks, or conversations of supervised_data, that cannot be read.
    """
    tasks = build_tasks(config.tasks)
    conversations = read_supervised(config.supervised_data, tasks.held_out)
    print("# Resolved configuration; lines that begin with # are defaults.\n")
    print(dump_toml(config, redact(resolved(config))))
    print("# What would run\n")
    for name, value in _plan(config, tasks, conversations):
        print(f"{name:<15} {value}")


def _plan(config: RunConfig, tasks: TaskSplits, conversations: Rows[Conversation] | None) -> Iterator[tuple[str, str]]:
    """(what, how much), in the order of the data's way round."""
    rollout, trainer = config.rollout, config.trainer
    num_episodes = rollout.groups_per_batch * rollout.group_size
    num_groups = trainer.num_batches * rollout.groups_per_batch
    yield "model", _model(config)
    yield "engine", _engine(config)
    yield "tasks", f"{len(tasks.train)} to train on, {len(tasks.held_out)} held out"
    yield (
        "rollout batch",
        f"{rollout.groups_per_batch} groups x {rollout.group_size} = {num_episodes} episodes, at most "
        f"{num_episodes * config.sampling.max_new_tokens:,} sampled tokens",
    )
    yield (
        "run",
        (
            f"{trainer.num_batches} rollout batches = {num_groups * rollout.group_size:,} episodes, "
            f"{num_groups / len(tasks.train):.1f} passes over the tasks"
        ),
    )
    steps_per_batch = trainer.num_minibatches * trainer.num_epochs
    yield (
        "training",
        (
            f"{steps_per_batch} optimizer steps a batch, {trainer.num_batches * steps_per_batch} in all; "
            f"learning rate {trainer.learning_rate:g}, {trainer.schedule.type}"
        ),
    )
    if config.critic is not None:
        yield "critic", _critic(config.critic)
    if config.supervised_data is not None and conversations is not None:
        num = config.supervised_data.conversations_per_batch
        passes = trainer.num_batches * num / len(conversations.train)
        yield "supervised data", f"{num} of {len(conversations.train)} conversations a batch, {passes:.1f} passes"
    if config.teacher is not None:
        how = "alone" if config.teacher.stream == "distillation" else "beside the rewards"
        yield "teacher", f"{config.teacher.path} ({config.teacher.dtype}), {how}"
    staleness = rollout.max_staleness
    yield (
        "mode",
        f"asynchronous, tokens up to {staleness} versions old" if staleness else "synchronous (max_staleness 0)",
    )
    yield "rewards", ", ".join(f"{reward.type} x {reward.weight:g}" for reward in config.rewards)
    yield "evaluation", _evaluation(config, len(tasks.held_out))
    if config.gold is not None:
        yield "gold check", _gold(config.gold)
    yield "checkpoints", _checkpoints(config)
    yield "metrics to", ", ".join(("metrics.jsonl", *config.monitor.sinks))
    yield "folder", f"{config.run_dir}{_state(config.run_dir)}"


def _model(config: RunConfig) -> str:
    kind = f"LoRA of rank {config.model.lora.rank}" if config.model.lora else "all weights"
    try:
        where = resolve_model_path(config.model.path)
    except HeadraceError as error:
        return f"MISSING: {error}"
    return f"{where} ({config.model.dtype}, {kind})"


def _critic(critic: CriticConfig) -> str:
    backbone = "the policy's" if critic.type == "shared" else critic.path or "a copy of the policy's start"
    warmup = f"; the first {critic.warmup_batches} batches train it alone" if critic.warmup_batches else ""
    return f"backbone: {backbone}; learning rate {critic.learning_rate:g}, {critic.schedule.type}{warmup}"


def _engine(config: RunConfig) -> str:
    engine = config.engine
    if isinstance(engine, TransformersEngineConfig):
        return f"{engine.type}, in the trainer's process, {engine.weights} weights{_carrier(config, engine.carrier)}"
    if isinstance(engine, SglangEngineConfig):
        folder = engine.weights_path or config.run_dir / "weights"
        servers = ", ".join(engine.urls)
        return f"sglang, the server at {servers} (not asked now); weights travel through the folder {folder}"
    if not isinstance(engine, VllmEngineConfig):
        return f"{engine.type}, the server at {engine.url}: for headrace eval only"
    try:
        if engine.mode == "in_process":
            check_this_python()
            return "vllm, on a thread of the trainer's process; weights are handed over through shared memory"
        python = find_python(engine.python)
    except HeadraceError as error:
        return f"MISSING: {error}"
    how = _carrier(config, engine.carrier)
    return f"vllm, a server in a process of its own ({python}); weights travel{how or ' by shared memory'}"


def _carrier(config: RunConfig, carrier: CarrierConfig) -> str:
    """How weights travel, where the configuration says."""
    if isinstance(carrier, FileCarrierConfig | DeltaCarrierConfig):
        return f" by {carrier.type}, in {carrier.path or config.run_dir / 'weights'}"
    return "" if carrier.type == "memory" else f" by {carrier.type} ({carrier.backend})"


def _evaluation(config: RunConfig, num_held_out: int) -> str:
    evaluation = config.evaluation
    when = [f"every {evaluation.every} batches"] if evaluation.every else []
    when += [name for name, on in (("at start", evaluation.at_start), ("at end", evaluation.at_end)) if on]
    if not when:
        return "off"
    num_tasks = min(num_held_out, evaluation.num_tasks or num_held_out)
    return f"{', '.join(when)}: {num_tasks} tasks x {evaluation.num_samples} samples" + (
        " and greedy" if evaluation.greedy else ""
    )


def _gold(gold: GoldConfig) -> str:
    rewards = ", ".join(f"{reward.type} x {reward.weight:g}" for reward in gold.rewards)
    then = "stops the run" if gold.on_over_optimisation == "stop" else "warns"
    return f"{rewards}, on the sampled replies of each evaluation, never trained on; over-optimisation {then}"


def _checkpoints(config: RunConfig) -> str:
    every, keep = config.checkpoint.every, config.checkpoint.keep
    return f"{f'every {every} batches and ' if every else ''}at the end; the last {keep} kept"


def _state(run_dir: Path) -> str:
    if not (run_dir / "run.json").exists():
        return " (new)"
    return f" (ALREADY HOLDS A RUN: give another --name, or go on with: headrace resume {run_dir})"
