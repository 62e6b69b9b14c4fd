"""From the ``tasks`` section of a run to its train and held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.config.references import load_reference
from headrace.config.schema import ArithmeticTasks, EntryPointTasks, FileTasks, ReasoningGymTasks
from headrace.environments.task_list import TaskList, TaskSplits
from headrace.environments.tasks_arithmetic import arithmetic_tasks
from headrace.environments.tasks_file import file_tasks
from headrace.environments.tasks_reasoning_gym import reasoning_gym_tasks
from headrace.errors import ConfigError
from headrace.protocols import TaskSource
from headrace.types import Task

__all__ = ["TaskList", "TaskSplits", "build_tasks"]


def build_tasks(config: ArithmeticTasks | FileTasks | ReasoningGymTasks | EntryPointTasks) -> TaskSplits:
    """Load or make all tasks of a run, and check each before any work starts.

    Raises:
        ConfigError: saying which file, line or task cannot be used and why.
    """
    if isinstance(config, ArithmeticTasks):
        return arithmetic_tasks(config)
    if isinstance(config, FileTasks):
        return file_tasks(config)
    if isinstance(config, ReasoningGymTasks):
        return reasoning_gym_tasks(config)
    return _factory_tasks(config)


def _factory_tasks(config: EntryPointTasks) -> TaskSplits:
    """A third party's tasks: its function is called with the options and returns (train, held out)."""
    factory = load_reference(config.factory, "tasks.factory")
    if not callable(factory):
        raise ConfigError(f"tasks.factory {config.factory!r} is a {type(factory).__name__}, not a function")
    try:
        result = factory(**config.options)
    except Exception as error:
        raise ConfigError(
            f"tasks.factory {config.factory!r} raised {type(error).__name__}: {error} (options: {config.options})"
        ) from error
    if not isinstance(result, tuple) or len(result) != 2:
        raise ConfigError(
            f"tasks.factory {config.factory!r} returned a {type(result).__name__}; "
            "it must return a pair (train, held out)"
        )
    train = _as_source(result[0], f"{config.factory!r} (train)")
    held_out = _as_source(result[1], f"{config.factory!r} (held out)")
    if not len(train):
        raise ConfigError(f"tasks.factory {config.factory!r} returned no training task")
    return TaskSplits(train=train, held_out=held_out)


def _as_source(part: Any, what: str) -> TaskSource:
    """A task source as it is; a plain sequence of tasks as a :class:`TaskList`."""
    if hasattr(part, "fingerprint") and hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return part  # type: ignore[no-any-return]
    if not isinstance(part, Sequence):
        kind = type(part).__name__
        raise ConfigError(f"tasks.factory {what}: expected a sequence of Task or a TaskSource, got {kind}")
    for index, task in enumerate(part):
        if not isinstance(task, Task):
            raise ConfigError(f"tasks.factory {what}: item {index} is a {type(task).__name__}, not a headrace Task")
    ids = [task.id for task in part]
    if len(set(ids)) < len(ids):
        duplicate = next(name for name in ids if ids.count(name) > 1)
        raise ConfigError(f"tasks.factory {what}: the task id {duplicate!r} occurs twice; ids must be unique")
    return TaskList(part)
