"""``headrace eval``: the accuracy of a run's checkpoint or of any model, alone or against another one."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headrace.checked import Checked, Policy, check_before_work, load_policy, make_openai_engine
from headrace.config.engines import OpenAiEngineConfig
from headrace.config.load import load_config
from headrace.config.prompts import check_prompts
from headrace.config.schema import RunConfig
from headrace.control.watchdog import Watchdog
from headrace.engine_wiring import build_engine
from headrace.errors import ConfigError
from headrace.evaluation.render import comparison_table, result_table
from headrace.evaluation.result import EvaluationResult, compare
from headrace.model.paths import resolve_model_path
from headrace.protocols import ChatEngine, Engine
from headrace.record.checkpoints import find_checkpoints
from headrace.record.recorded_config import recorded_config
from headrace.record.run_dir import read_run_info
from headrace.trainer.weights import restore_model
from headrace.types import PolicyVersion
from headrace.wiring import build_player


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to evaluate: the model that ``config`` names, or a checkpoint of its run."""

    name: str
    run_dir: Path | None = None
    checkpoint: Path | None = None
    model: str | None = None


def evaluate_checkpoint(
    target: str,
    *,
    against: str | None = None,
    tasks_from: Path | None = None,
    num_tasks: int | None = None,
    num_samples: int | None = None,
) -> list[EvaluationResult]:
    """Evaluate ``target`` (a run, one of its checkpoints, or what model.path takes) and print a table; with
    ``against``, both, compared in pairs by task. ``tasks_from``: the TOML file whose tasks, rewards, gold standard and
    sampling to use; without it those of the target's run. Raises ConfigError where none of that can be found."""
    targets = [find_target(name) for name in (target, against) if name is not None]
    config = _tasks_config(targets, tasks_from)
    changes = {"num_tasks": num_tasks, "num_samples": num_samples}
    evaluation = config.evaluation.model_copy(update={k: v for k, v in changes.items() if v is not None})
    config = config.model_copy(update={"evaluation": evaluation})
    console = Console()
    results: dict[str, EvaluationResult] = {}
    for item in targets:
        with console.status(f"evaluating {item.name}"):
            results[item.name] = asyncio.run(_evaluate(config, item))
    console.print(result_table(results))
    if len(targets) == 2:
        first, second = results
        console.print(comparison_table(compare(results[first], results[second]), first, second))
    return list(results.values())


def find_target(name: str) -> Target:
    """A run's folder takes its newest complete checkpoint. Raises ConfigError for a run without one."""
    path = Path(name).expanduser().absolute()
    if (path / "run.json").is_file():
        if kind := read_run_info(path).get("kind"):
            raise ConfigError(f"{path} is a run of headrace {kind}; evaluate what came out of it: {path / 'export'}")
        checkpoints = find_checkpoints(path / "checkpoints")
        if not checkpoints:
            raise ConfigError(f"the run {path} has no complete checkpoint yet; evaluate its model, or resume it first")
        return Target(name=f"{path.name} (step {checkpoints[-1].step})", run_dir=path, checkpoint=checkpoints[-1].path)
    if (path.parent.parent / "run.json").is_file():
        if path not in (c.path for c in find_checkpoints(path.parent)):
            raise ConfigError(f"{path} is not a complete checkpoint of the run {path.parent.parent}")
        run_dir = path.parent.parent
        return Target(name=f"{run_dir.name} ({path.name})", run_dir=run_dir, checkpoint=path)
    return Target(name=name, model=name)


def _tasks_config(targets: list[Target], tasks_from: Path | None) -> RunConfig:
    if tasks_from is not None:
        return load_config(tasks_from)
    for target in targets:
        if target.run_dir is not None:
            return recorded_config(target.run_dir)
    raise ConfigError(f"{targets[0].name} is a model, not a run; say on which tasks with --tasks RUN.TOML")


async def _evaluate(config: RunConfig, target: Target) -> EvaluationResult:
    if isinstance(config.engine, OpenAiEngineConfig):
        return await _evaluate_served(config, config.engine, target)
    model = recorded_config(target.run_dir).model if target.run_dir else None
    if model is None:
        path = resolve_model_path(target.model or config.model.path)
        model = config.model.model_copy(update={"path": path, "lora": None})
    # One engine takes all cores here: nothing trains beside it.
    rollout = config.rollout.model_copy(update={"max_staleness": 0})
    config = config.model_copy(update={"model": model})
    checked = check_before_work(config, trains=False)
    config = config.model_copy(update={"rollout": rollout, "fleet": None})
    _check_held_out(checked)
    policy = load_policy(config)
    if target.checkpoint is not None:
        restore_model(policy.loaded, target.checkpoint)
    held_out = checked.splits.held_out
    check_prompts(held_out, policy.renderer, config, config.engine.max_context or policy.loaded.max_context)
    return await _play(config, checked, build_engine(config, policy, PolicyVersion(0, 0)), policy)


async def _evaluate_served(config: RunConfig, engine: OpenAiEngineConfig, target: Target) -> EvaluationResult:
    """A model of somebody's server, by the name that it has there. No model is loaded here."""
    if target.model is None:
        raise ConfigError(
            f'{target.name} is a checkpoint, and with engine.type = "openai" the server at {engine.url} is evaluated: '
            "name a model that it serves; or evaluate the checkpoint with --tasks of a file with another engine"
        )
    model = config.model.model_copy(update={"path": target.model, "lora": None})
    config = config.model_copy(update={"model": model})
    checked = check_before_work(config, trains=False)
    _check_held_out(checked)
    return await _play(config, checked, make_openai_engine(engine, target.model), None)


def _check_held_out(checked: Checked) -> None:
    if not len(checked.splits.held_out):
        raise ConfigError("there are no held-out tasks to evaluate on; set tasks.held_out_path or held_out_fraction")


async def _play(
    config: RunConfig, checked: Checked, engine: Engine | ChatEngine, policy: Policy | None
) -> EvaluationResult:
    """Every held-out task; engine and reward are closed afterwards."""
    watchdog = Watchdog(time.monotonic, config.guards.stall_min_s)
    player = build_player(config, engine, policy, checked.reward, watchdog, time.monotonic, checked.gold)
    reward, held_out = checked.gold or checked.reward, checked.splits.held_out
    try:
        await reward.start()
        tasks = [held_out[i] for i in range(len(held_out))]
        return await player.evaluate(tasks, config.evaluation, concurrency=config.rollout.max_concurrent)
    finally:
        await engine.close()
        await reward.close()
