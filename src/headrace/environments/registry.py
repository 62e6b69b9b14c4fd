"""Environments by name: built in, or from a package that declares the entry-point group ``headrace.environments``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

from headrace.config.problems import nearest
from headrace.environments.single_turn import SingleTurn
from headrace.errors import ConfigError
from headrace.protocols import Environment, TaskSource
from headrace.types import Task

GROUP = "headrace.environments"

_BUILT_IN: dict[str, Callable[[], Environment]] = {"single_turn": SingleTurn}


def environment_names() -> list[str]:
    """Every name that a task's ``environment`` may have here."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def environment_factory(name: str) -> Callable[[], Environment]:
    """What makes a fresh environment of this name, once per episode.

    Raises:
        ConfigError: for an unknown name (with the nearest one), or an entry point that cannot be loaded.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    point = next((point for point in entry_points(group=GROUP) if point.name == name), None)
    if point is None:
        names = environment_names()
        match = nearest(name, names)
        advice = f"did you mean {match!r}?" if match else f"known: {', '.join(names)}"
        raise ConfigError(f"there is no environment {name!r}; {advice}")
    return _loaded(point)


def make_environment(task: Task) -> Environment:
    """A fresh environment for one episode of ``task``."""
    return environment_factory(task.environment)()


def check_environments(sources: Iterable[TaskSource]) -> None:
    """Fail before work starts where a task names an environment that is not there.

    Raises:
        ConfigError: naming the first such task.
    """
    known: set[str] = set()
    for source in sources:
        for index in range(len(source)):
            task = source[index]
            if task.environment in known:
                continue
            try:
                environment_factory(task.environment)
            except ConfigError as error:
                raise ConfigError(f"task {task.id!r}: {error}") from error
            known.add(task.environment)


def _loaded(point: EntryPoint) -> Callable[[], Environment]:
    try:
        factory: Callable[[], Environment] = point.load()
    except Exception as error:
        raise ConfigError(
            f"environment {point.name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return factory
