"""Tasks from any generator of the reasoning-gym package, scored by its own ``score_answer`` (reward ``reasoning_gym``).

Train and held-out tasks are successive items of ONE generator: item i is drawn with seed + i, so that two generators
with neighbouring seeds would pose the same problems. A held-out item that repeats a training question is passed over.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from headrace.child_process import child_environment, how_it_ended
from headrace.config.problems import nearest
from headrace.config.schema import ReasoningGymTasks
from headrace.environments.task_list import TaskList, TaskSplits
from headrace.errors import ConfigError
from headrace.types import Task

INSTALL_HINT = "pip install 'headrace[environments]'"
METADATA_KEY = "reasoning_gym"

_RESERVED_OPTIONS = {"seed": "tasks.seed", "size": "tasks.size and tasks.held_out_size"}


def reasoning_gym_tasks(config: ReasoningGymTasks, *, deadline_s: float = 1800.0) -> TaskSplits:
    """Make all tasks of a run.

    Raises:
        ConfigError: for a missing package, an unknown generator, options that it refuses, one that has too few
            different problems, and one that is not done after ``deadline_s``.
    """
    for option, instead in _RESERVED_OPTIONS.items():
        if option in config.options:
            raise ConfigError(f"tasks.options.{option} is set by {instead}; remove it from the options")
    answer = _generate(config, deadline_s)
    if "error" in answer:
        raise ConfigError(_problem(config, answer))
    if len(answer["held_out"]) < config.held_out_size:
        raise ConfigError(
            f"reasoning-gym {config.dataset!r}: only {len(answer['held_out'])} of {config.held_out_size} held-out "
            f"problems differ from the {config.size} training problems (tried {answer['size'] - config.size}); lower "
            "tasks.held_out_size, or choose options with more variety"
        )
    return TaskSplits(
        train=TaskList(_task(config, row, answer["size"]) for row in answer["train"]),
        held_out=TaskList(_task(config, row, answer["size"]) for row in answer["held_out"]),
    )


def _generate(config: ReasoningGymTasks, deadline_s: float) -> dict[str, Any]:
    request = json.dumps(config.model_dump(include={"dataset", "size", "held_out_size", "seed", "options"}))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headrace.environments.reasoning_gym_worker"],
            input=request,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=child_environment(),
            timeout=deadline_s,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"reasoning-gym {config.dataset!r} did not make {config.size} + {config.held_out_size} problems in "
            f"{deadline_s:g} s; lower tasks.size"
        ) from None
    if done.returncode:
        printed = done.stderr.strip()[-800:] or "nothing"
        raise ConfigError(
            f"reasoning-gym {config.dataset!r} failed while making problems: its process "
            f"{how_it_ended(done.returncode, lower='tasks.size')}. It printed: {printed}"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _problem(config: ReasoningGymTasks, answer: dict[str, Any]) -> str:
    if answer["error"] == "not_installed":
        return f"tasks of type 'reasoning_gym' need the reasoning-gym package: {INSTALL_HINT} ({answer['message']})"
    if answer["error"] == "unknown_dataset":
        match = nearest(config.dataset, answer["names"])
        advice = f"did you mean {match!r}?" if match else f"known: {', '.join(answer['names'])}"
        return f"tasks.dataset = {config.dataset!r} is not a generator of reasoning-gym; {advice}"
    return f"reasoning-gym {config.dataset!r} refuses tasks.options = {config.options}: {answer['message']}"


def _task(config: ReasoningGymTasks, row: dict[str, Any], size: int) -> Task:
    return Task(
        id=f"{config.dataset}-{config.seed}-{row['index']}",
        messages=({"role": "user", "content": row["question"]},),
        answer=row["answer"],
        metadata={
            METADATA_KEY: {
                "dataset": config.dataset,
                "seed": config.seed,
                "index": row["index"],
                "size": size,
                "options": config.options,
                "entry": row["entry"],
            }
        },
    )
