"""I20: an option that the user set and that has no effect in the chosen setting is an error at start.

Also here: settings that contradict each other, so that a run ends before any work rather than during it. An option
counts as set where the file or the command line states it, whatever its value. What only an algorithm can know about
its own options is checked in the algorithms room; :class:`AlgorithmTraits` carries what is needed of it here.

Not refused, on purpose: ``evaluation.every`` and ``checkpoint.every`` beyond ``trainer.num_batches``, so that a long
run's file can be tried with ``--trainer.num_batches 2``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.config.base import Section
from headrace.config.cluster_checks import cluster_problems
from headrace.config.critic import SharedCriticConfig
from headrace.config.engine_checks import NO_TRAINING, engine_problems
from headrace.config.engines import OpenAiEngineConfig, TransformersEngineConfig
from headrace.config.fleet_checks import fleet_problems
from headrace.config.load import config_error
from headrace.config.schema import (
    ArithmeticTasks,
    DistillationConfig,
    FileTasks,
    ModelConfig,
    RunConfig,
    SupervisedConfig,
)
from headrace.protocols import EngineCapabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmTraits:
    """What the checks must know of the algorithm that a preset resolves to."""

    group_relative: bool
    """Its advantage compares the members of a group, so that a group of one carries no signal."""
    dynamic_sampling: bool
    """Groups whose rewards are all equal are replaced."""
    ratio_is_one: bool = True
    """On the only optimizer step of a batch; False where the ratio is not taken to that step's own policy."""
    needs_values: bool = False
    """Its advantages need a critic's values."""


def check_config(
    config: RunConfig,
    *,
    engine_capabilities: EngineCapabilities | None = None,
    algorithm: AlgorithmTraits | None = None,
    trains: bool = True,
) -> None:
    """Refuse options without effect and contradictions.

    Checks that need to know the engine or the algorithm are left out where these are None. ``trains``: False where
    the configuration is evaluated only, whether or not its training would be.

    Raises:
        ConfigError: one sentence for each problem, naming the dotted key, its value and what to do.
    """
    checks = _CHECKS if trains else [check for check in _CHECKS if check not in (_evaluation, _gold)]
    problems = [*model_problems(config.model), *(problem for check in checks for problem in check(config))]
    if trains and isinstance(config.engine, OpenAiEngineConfig):
        problems.append(NO_TRAINING)
    if algorithm is None or algorithm.ratio_is_one:
        problems += _one_step(config)
    if algorithm is not None:
        problems += _algorithm(config, algorithm)
    if engine_capabilities is not None:
        problems += _capabilities(config, engine_capabilities)
    if problems:
        raise config_error(problems)


def _set(section: Section, *names: str) -> Iterator[str]:
    """Those of ``names`` that the user set."""
    return (name for name in names if name in section.model_fields_set)


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Of a section that runs of every kind have."""
    if model.activation_checkpointing:
        for name in _set(model, "activation_budget_bytes"):
            yield (
                f"model.{name} has no effect: model.activation_checkpointing = true recomputes every layer; remove one "
                "of them"
            )


# --------------------------------------------------------------------------------------- rollout and engine


def _synchronous(config: RunConfig) -> Iterator[str]:
    if config.rollout.max_staleness > 0:
        return
    why = "rollout.max_staleness is 0, so no token is older than the weights it trains"
    for name in _set(config.rollout, "on_overage"):
        yield f"rollout.{name} has no effect: {why}; remove it or raise rollout.max_staleness"
    why = "rollout.max_staleness is 0, so weights never change while requests run"
    for name in _set(config.engine, "kv_policy"):
        yield f"engine.{name} has no effect: {why}; remove it or raise rollout.max_staleness"
    engine, is_alone = config.engine, config.fleet is None
    copies = isinstance(engine, TransformersEngineConfig) and engine.weights == "copy"
    if copies and is_alone and isinstance(engine, TransformersEngineConfig) and engine.carrier.type == "memory":
        yield f'engine.weights = "copy" has no effect but memory: {why}; use "shared" or raise rollout.max_staleness'


def _groups(config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.min_group_size > rollout.group_size:
        yield (
            f"rollout.min_group_size = {rollout.min_group_size} is above rollout.group_size = {rollout.group_size}: "
            "no group could ever be used; lower the one or raise the other"
        )
    if rollout.max_concurrent < rollout.group_size:
        yield (
            f"rollout.max_concurrent = {rollout.max_concurrent} is below rollout.group_size = {rollout.group_size}: "
            "one group would not fit; raise max_concurrent"
        )
    if rollout.on_failure != "refill":
        for name in _set(rollout, "max_retries"):
            yield f'rollout.{name} has no effect: rollout.on_failure = "{rollout.on_failure}" does not retry'
    if rollout.on_failure == "discard":
        for name in _set(rollout, "min_group_size"):
            yield f'rollout.{name} has no effect: rollout.on_failure is "discard", so only full groups are used'
    num_episodes = rollout.groups_per_batch * rollout.group_size
    if config.trainer.num_minibatches > num_episodes:
        yield (
            f"trainer.num_minibatches = {config.trainer.num_minibatches} is above the {num_episodes} episodes of a "
            "rollout batch (rollout.groups_per_batch x rollout.group_size): some optimizer steps would be empty"
        )
    if rollout.generation_deadline_s > rollout.episode_deadline_s:
        for name in _set(rollout, "generation_deadline_s"):
            yield (
                f"rollout.{name} = {rollout.generation_deadline_s} has no effect: rollout.episode_deadline_s = "
                f"{rollout.episode_deadline_s} ends the episode first"
            )


def _sampling(config: RunConfig) -> Iterator[str]:
    sampling, engine = config.sampling, config.engine
    truncation = _truncation(config)
    if isinstance(engine, TransformersEngineConfig) and truncation and not engine.carry_kept_ids:
        yield (
            f"sampling.{truncation} with engine.carry_kept_ids = false: without the kept ids the trainer would score "
            "another distribution than was sampled from, and importance ratios would be wrong; set carry_kept_ids = "
            "true, or turn truncation off (top_p = 1, top_k = 0)"
        )
    if not truncation:
        for name in _set(engine, "carry_kept_ids"):
            yield f"engine.{name} has no effect: sampling is not truncated (top_p = 1, top_k = 0)"
    if "" in sampling.stop_strings:
        yield 'sampling.stop_strings holds "", which would end every reply at once; remove it'
    if engine.max_context is not None and sampling.max_new_tokens >= engine.max_context:
        yield _no_room("engine.max_context", engine.max_context, sampling.max_new_tokens)


def _truncation(config: RunConfig) -> str:
    """The truncating option as ``top_p = 0.9``, or the empty text where all ids can be sampled."""
    sampling = config.sampling
    return f"top_p = {sampling.top_p}" if sampling.top_p < 1 else f"top_k = {sampling.top_k}" if sampling.top_k else ""


def _no_room(name: str, limit: int, max_new_tokens: int) -> str:
    return (
        f"sampling.max_new_tokens = {max_new_tokens} leaves no room for a prompt: {name} is {limit} tokens, prompt and "
        "reply together; lower max_new_tokens"
    )


# ----------------------------------------------------------------------------------------------------- tasks


def _tasks(config: RunConfig) -> Iterator[str]:
    tasks = config.tasks
    if isinstance(tasks, ArithmeticTasks):
        if tasks.min_operand > tasks.max_operand:
            yield f"tasks.min_operand = {tasks.min_operand} is above tasks.max_operand = {tasks.max_operand}"
        elif tasks.min_operand == tasks.max_operand:
            yield (
                f"tasks.min_operand and tasks.max_operand are both {tasks.min_operand}: one problem cannot be split "
                "into train and held out; widen the range"
            )
    if isinstance(tasks, FileTasks):
        if tasks.held_out_path is not None and tasks.held_out_fraction is not None:
            yield (
                "tasks.held_out_path and tasks.held_out_fraction are both set: the held-out tasks come from one "
                "of them; remove the other"
            )
        if _evaluates(config) and tasks.held_out_path is None and tasks.held_out_fraction is None:
            yield (
                "evaluation is on, but there are no held-out tasks: set tasks.held_out_path or "
                "tasks.held_out_fraction, or turn evaluation off"
            )


# ------------------------------------------------------------------------- training, evaluation, monitoring


def _training(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.schedule.type == "constant":
        for name in _set(trainer.schedule, "final_fraction"):
            yield f'trainer.schedule.{name} has no effect: trainer.schedule.type is "constant"; use linear or cosine'
    critic_batches = config.critic.warmup_batches if config.critic is not None else 0
    num_steps = (trainer.num_batches - critic_batches) * trainer.num_epochs * trainer.num_minibatches
    if 0 < num_steps <= trainer.schedule.warmup_steps:
        yield (
            f"trainer.schedule.warmup_steps = {trainer.schedule.warmup_steps}, but the run has {num_steps} optimizer "
            "steps (num_batches x num_epochs x num_minibatches): the full learning rate would never be reached"
        )
    other = "bfloat16" if config.model.dtype == "float32" else "float32"
    for name in _set(config.guards, f"max_ratio_error_{other}"):
        yield f'guards.{name} has no effect: model.dtype is "{config.model.dtype}"'


def _routers(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.router_aux_coefficient and trainer.skip_zero_gradient:
        for name in _set(trainer, "skip_zero_gradient"):
            yield (
                f"trainer.{name} has no effect: with trainer.router_aux_coefficient = {trainer.router_aux_coefficient} "
                "every sample has a gradient; remove one of them"
            )
    if trainer.router_replay and config.critic is not None:
        yield (
            "trainer.router_replay with [critic]: values are computed without replay, so they would belong to other "
            "hidden states than the policy's; remove one of them"
        )


def _critic(config: RunConfig) -> Iterator[str]:
    critic, trainer = config.critic, config.trainer
    if critic is None:
        return
    if critic.warmup_batches >= trainer.num_batches:
        yield (
            f"critic.warmup_batches = {critic.warmup_batches}, but the run has {trainer.num_batches} rollout batches "
            "(trainer.num_batches): the policy would never be trained"
        )
    if critic.schedule.type == "constant":
        for name in _set(critic.schedule, "final_fraction"):
            yield f'critic.schedule.{name} has no effect: critic.schedule.type is "constant"; use linear or cosine'
    steps_per_batch = trainer.num_epochs * trainer.num_minibatches
    if critic.schedule.warmup_steps >= trainer.num_batches * steps_per_batch:
        yield (
            f"critic.schedule.warmup_steps = {critic.schedule.warmup_steps}, but the run has "
            f"{trainer.num_batches * steps_per_batch} optimizer steps: the full learning rate would never be reached"
        )
    if steps_per_batch == 1:
        for name in _set(critic, "value_clip"):
            yield (
                f"critic.{name} has no effect: one optimizer step per rollout batch (trainer.num_minibatches x "
                "trainer.num_epochs = 1) starts from the very values that it is measured against; remove it or make "
                "more steps per batch"
            )
    if isinstance(critic, SharedCriticConfig) and not critic.train_backbone:
        for name in _set(critic, "loss_coefficient"):
            yield f"critic.{name} has no effect: critic.train_backbone is false, so the value loss moves the head only"


_OF_THE_RATIO = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio_level",
    "temperature_positive",
    "temperature_negative",
    "trust_low",
    "trust_high",
    "ratio_cap",
    "penalty",
)


def _one_step(config: RunConfig) -> Iterator[str]:
    """Options that act through a ratio, where the proximal policy is the current one and the ratio exactly 1."""
    algorithm = config.algorithm
    if config.trainer.num_minibatches * config.trainer.num_epochs > 1:
        return
    names = [*_set(algorithm, *_OF_THE_RATIO)]
    if algorithm.correction is not None:
        names += [f"correction.{name}" for name in _set(algorithm.correction, "max_drift")]
    if algorithm.selection is not None:
        names += [f"selection.{name}" for name in _set(algorithm.selection, "penalty")]
    for name in names:
        yield (
            f"algorithm.{name} has no effect: one optimizer step per rollout batch (trainer.num_minibatches x "
            "trainer.num_epochs = 1) has no ratio other than 1 to act on; remove it or make more steps per batch"
        )


def _streams(config: RunConfig) -> Iterator[str]:
    """A training run makes samples of the rl stream, and of the supervised one where it has data for it."""
    if config.supervised_data is None and config.algorithm.supervised != SupervisedConfig():
        yield (
            "algorithm.supervised has no effect: no sample of the run is of the supervised stream; remove it, or name "
            "conversations to imitate beside the rollouts in supervised_data.path"
        )
    if config.supervised_data is not None and not config.algorithm.supervised.coefficient:
        yield "supervised_data has no effect: algorithm.supervised.coefficient is 0; raise it or remove the section"
    yield from _teacher(config)


def _teacher(config: RunConfig) -> Iterator[str]:
    algorithm, teacher = config.algorithm, config.teacher
    if teacher is None:
        if algorithm.distillation != DistillationConfig():
            yield "algorithm.distillation has no effect: the run has no teacher; remove it, or set teacher.path"
        return
    if not algorithm.distillation.coefficient:
        yield "teacher has no effect: algorithm.distillation.coefficient is 0; raise it or remove the section"
    if teacher.stream == "distillation":
        own = {"preset", "distillation", "supervised"}
        for name in sorted(algorithm.model_fields_set - own):
            yield (
                f'algorithm.{name} has no effect: teacher.stream = "distillation" trains on the teacher alone, without '
                'rewards; remove it, or take teacher.stream = "rl"'
            )
        if config.critic is not None:
            yield 'critic has no effect: teacher.stream = "distillation" trains without rewards; remove the section'


def _parallel(config: RunConfig) -> Iterator[str]:
    parallel = config.parallel
    if parallel.pp == 1:
        for name in _set(parallel, "pp_schedule"):
            yield f"parallel.{name} has no effect: parallel.pp is 1, so there is no pipeline; remove it or raise pp"
    if parallel.world_size == 1:
        for name in _set(parallel, "offload_parameters", "offload_optimizer", "bucket_bytes"):
            yield f"parallel.{name} has no effect: the run has one process; remove it or raise an axis of [parallel]"
        return
    if parallel.offload_parameters and parallel.offload_optimizer:
        yield (
            "parallel.offload_optimizer has no effect: parallel.offload_parameters keeps the optimizer in host memory "
            "already; remove one of them"
        )
    if "weights" in config.engine.model_fields_set and config.engine.shares_weights:
        yield (
            f'engine.weights = "shared" with {parallel.world_size} processes: no process holds the whole weights to '
            "share, so the engine has its own copy; remove it"
        )
    if config.model.lora is not None:
        yield (
            f"model.lora with {parallel.world_size} processes: adapters train in one process only so far; remove "
            "model.lora, or set all axes of [parallel] to 1"
        )
    if config.critic is not None:
        yield (
            f"[critic] with {parallel.world_size} processes: a critic trains in one process only so far; set all axes "
            "of [parallel] to 1, or choose an algorithm without critic"
        )
    if config.checkpoint.overlap:
        yield (
            f"checkpoint.overlap with {parallel.world_size} processes: these write their checkpoints together, while "
            "training waits; remove it, or set all axes of [parallel] to 1"
        )
    if config.model.device == "cuda":
        yield (
            f'model.device = "cuda" with {parallel.world_size} processes: several processes compute on the CPU only so '
            "far; remove model.device, or set all axes of [parallel] to 1"
        )


def _evaluates(config: RunConfig) -> bool:
    return config.evaluation.every > 0 or config.evaluation.at_start or config.evaluation.at_end


def _evaluation(config: RunConfig) -> Iterator[str]:
    if not _evaluates(config):
        for name in _set(config.evaluation, "num_tasks", "num_samples", "greedy", "deadline_s"):
            yield (
                f"evaluation.{name} has no effect: evaluation is off; set evaluation.every, evaluation.at_start or "
                "evaluation.at_end"
            )


def _checkpoint(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.overlap and not config.checkpoint.every:
        yield (
            "checkpoint.overlap has no effect: checkpoint.every is 0, and nothing goes on beside the last checkpoint; "
            "set checkpoint.every or remove it"
        )


def _gold(config: RunConfig) -> Iterator[str]:
    if config.gold is not None and not _evaluates(config):
        yield (
            "gold has no effect: its rewards judge the replies of evaluations, and evaluation is off; set "
            "evaluation.every (the rollout batches between gold checks)"
        )


def _monitor(config: RunConfig) -> Iterator[str]:
    monitor = config.monitor
    for sink in monitor.sink_options:
        if sink not in monitor.sinks:
            listed = ", ".join(monitor.sinks) or "empty"
            yield f'monitor.sink_options.{sink} has no effect: "{sink}" is not in monitor.sinks ({listed})'
    for sink in sorted({sink for sink in monitor.sinks if monitor.sinks.count(sink) > 1}):
        yield f'monitor.sinks lists "{sink}" twice; once is enough'
    if config.name in (".", ".."):
        yield f'name = "{config.name}" would put the run outside its own folder; choose a name'


_CHECKS = (
    _synchronous,
    _groups,
    _sampling,
    engine_problems,
    fleet_problems,
    _tasks,
    _training,
    _routers,
    _critic,
    _streams,
    _evaluation,
    _checkpoint,
    _gold,
    _monitor,
    _parallel,
    cluster_problems,
)


# ----------------------------------------------------------------- what the engine and the algorithm can do


def _algorithm(config: RunConfig, algorithm: AlgorithmTraits) -> Iterator[str]:
    if algorithm.group_relative and config.rollout.group_size == 1:
        yield (
            f"rollout.group_size = 1 with the group-relative advantages of algorithm '{config.algorithm.preset}': a "
            "group of one is always equal to its own mean and learns nothing; use a group_size of 2 or more"
        )
    if algorithm.needs_values and config.critic is None:
        yield (
            f"algorithm '{config.algorithm.preset}' needs the values of a critic, and there is no [critic] section: "
            'add one (type = "shared" or "separate"), or choose an algorithm without critic'
        )
    if config.critic is not None and not algorithm.needs_values:
        yield (
            f"the section [critic] has no effect: the advantages of algorithm '{config.algorithm.preset}' use no "
            'values; remove it, or set algorithm.preset = "ppo_critic" or algorithm.advantage = "gae"'
        )
    if not algorithm.dynamic_sampling:
        for name in _set(config.rollout, "max_filter_factor"):
            yield (
                f"rollout.{name} has no effect: algorithm '{config.algorithm.preset}' does not filter groups; set "
                "algorithm.dynamic_sampling = true or remove it"
            )


def _capabilities(config: RunConfig, engine: EngineCapabilities) -> Iterator[str]:
    name = f"engine '{config.engine.type}'"
    truncation = _truncation(config)
    if not engine.logprobs:
        yield f"{name} returns no log-probabilities, which every algorithm needs; choose another engine.type"
    if truncation and not engine.kept_ids and getattr(config.engine, "carry_kept_ids", True):
        yield (
            f"sampling.{truncation}: {name} cannot return the kept ids of truncated sampling, so that importance "
            "ratios would compare two different distributions; set top_p = 1 and top_k = 0, or choose another engine"
        )
    if config.rollout.max_staleness > 0 and not (engine.in_flight_updates and engine.version_spans):
        lack = (
            "change weights while requests run"
            if not engine.in_flight_updates
            else "tell which version sampled a token"
        )
        yield f"rollout.max_staleness = {config.rollout.max_staleness}: {name} cannot {lack}; set it to 0"
    if config.trainer.router_replay and not engine.routing_ids:
        yield (
            f"trainer.router_replay = true: {name} does not record which experts its routers chose; remove it, or "
            "choose another engine"
        )
    if engine.max_context and config.sampling.max_new_tokens >= engine.max_context:
        yield _no_room(f"the context of {name}", engine.max_context, config.sampling.max_new_tokens)
