"""What an actor is, whatever carries it: a name, a factory that makes its object, and what it needs of a machine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import HeadraceError

Role = Literal["engine", "environment", "reward", "trainer", "controller"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpec:
    """One actor of a run.

    Example::

        ActorSpec(role="reward", index=0, incarnation=2, factory="headrace.actors:rewards", options={"config": {...}})
    """

    role: Role
    index: int
    incarnation: int
    """0 for the first actor at this place, one more for each that replaced it."""
    factory: str
    """``module:function``; called in the actor's process with ``options``, returns the object that is called."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    num_threads: int = 1
    """Of OpenMP, in a process of its own."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}" + (f".{self.incarnation}" if self.incarnation else "")


class ActorNotMade(HeadraceError):
    """The actor's process is well, and its factory raised: another start would most likely end the same way."""

    def __init__(self, spec: ActorSpec, why: str) -> None:
        super().__init__(f"actor {spec.name} could not be made: {why}")


def load_factory(reference: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, _, name = reference.partition(":")
    factory: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return factory
