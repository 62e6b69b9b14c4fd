"""From the ``rewards`` section of a run to one Reward; what can be wrong with it is said here, before work starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from headrace.config.base import Section
from headrace.config.problems import nearest
from headrace.config.schema import RewardConfig
from headrace.errors import ConfigError
from headrace.protocols import Reward
from headrace.rewards.base import RewardBase, RewardFunction, reward_name
from headrace.rewards.composite import CompositeReward, Part
from headrace.rewards.in_process import CallableReward
from headrace.rewards.reward_model import RewardModelOptions, RewardModelReward
from headrace.rewards.text import (
    BoxedReward,
    BoxFormatReward,
    ExactOptions,
    ExactReward,
    FormatOptions,
    LastNumberReward,
    ReasoningOptions,
)
from headrace.rewards.verified import (
    FunctionReward,
    MathOptions,
    MathReward,
    PatternReward,
    PooledReward,
    ReasoningGymOptions,
    ReasoningGymReward,
)
from headrace.rewards.worker_pool import Probe, WorkerPool

GROUP = "headrace.rewards"
_WORKER_KEYS = ("deadline_s", "memory_bytes", "num_workers")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in reward: its options, how it is made, and one line for ``headrace reward list``."""

    options: type[Section]
    make: Callable[[Any, RewardConfig, str], RewardBase]
    summary: str


def build_rewards(
    configs: Sequence[RewardConfig], *, extra: Sequence[Part] = (), where: str = "rewards"
) -> CompositeReward:
    """The weighted sum of ``configs`` and, from Python, of ``extra`` parts. Nothing is started yet.

    ``where`` is the key of the configuration, for errors. Components carry the reward's short name; where two would
    have the same, the later ones get ``_2``, ``_3``.

    Raises:
        ConfigError: for an unknown type or option (with the nearest right one), a bad option value, and an option
            that has no effect on this reward.
    """
    taken: set[str] = {part.reward.name for part in extra}
    parts: list[Part] = []
    for index, config in enumerate(configs):
        name = _free_name(reward_name(config.type), taken)
        parts.append(Part(build_reward(config, f"{where}[{index}]", name), config.weight))
    if all(part.weight == 0 for part in (*parts, *extra)):
        raise ConfigError("every reward has weight 0: there is nothing to learn from")
    return CompositeReward([*parts, *extra])


def build_reward(config: RewardConfig, where: str, name: str) -> Reward:
    """One reward; ``where`` says in errors which entry of the configuration it is."""
    if config.type in BUILT_INS:
        built_in = BUILT_INS[config.type]
        return built_in.make(_options(built_in.options, config, where), config, name)
    if ":" in config.type:
        if config.options:
            raise ConfigError(f"{where}.options have no effect: a reward function takes no options ({config.type})")
        return FunctionReward(
            name, _pool(config, name, {"kind": "function", "reference": config.type, "name": name}), config.deadline_s
        )
    return _from_entry_point(config, where, name)


def reward_names() -> list[str]:
    """Every name that ``rewards.type`` may have here, besides references to functions."""
    return sorted({*BUILT_INS, *(point.name for point in entry_points(group=GROUP))})


# ------------------------------------------------------------------------------------------------ helpers


def _free_name(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _options(section: type[Section], config: RewardConfig, where: str) -> Any:
    known = list(section.model_fields)
    for key in config.options:
        if key not in known:
            match = nearest(key, known)
            advice = f"did you mean {match!r}?" if match else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}.options.{key} is not an option of reward {config.type!r}; {advice}")
    try:
        return section(**config.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).replace("Input should ", "must ")
        raise ConfigError(f"{where}.options.{key} = {first['input']!r}: {message}") from error


def _refuse(config: RewardConfig, name: str, keys: Sequence[str], why: str) -> None:
    """I20: what the user set and what has no effect is an error."""
    without_effect = [key for key in keys if key in config.model_fields_set]
    if without_effect:
        raise ConfigError(f"rewards.{without_effect[0]} has no effect on reward {name!r}, {why}; remove it")


def _in_process(make: Callable[[Any, str], RewardBase]) -> Callable[[Any, RewardConfig, str], RewardBase]:
    def build(options: Any, config: RewardConfig, name: str) -> RewardBase:
        _refuse(config, name, _WORKER_KEYS, "which runs in process and always ends")
        return make(options, name)

    return build


def _pool(
    config: RewardConfig,
    name: str,
    judge: dict[str, Any],
    probes: Sequence[Probe] = (),
    cpu_s: float | None = None,
) -> WorkerPool:
    return WorkerPool(
        name,
        judge,
        num_workers=config.num_workers,
        memory_bytes=config.memory_bytes,
        cpu_s=cpu_s,
        probes=probes,
    )


def _math(options: MathOptions, config: RewardConfig, name: str) -> PooledReward:
    probes = [
        Probe({"gold": r"\frac{3}{4}", "answer": "0.75"}, 1.0),
        Probe({"gold": r"\frac{3}{4}", "answer": r"\frac{4}{3}"}, 0.0),
        Probe({"gold": "(x+1)^2", "answer": "x^2+2x+1"}, 1.0),
    ]
    cpu_s = config.deadline_s / 4 if options.cpu_s is None else options.cpu_s
    if cpu_s >= config.deadline_s:
        raise ConfigError(
            f"options.cpu_s = {cpu_s:g} of reward {name!r} has no effect: it must be below deadline_s = "
            f"{config.deadline_s:g}, which ends a score first"
        )
    judge = {"kind": "math", "relative_tolerance": options.relative_tolerance}
    return MathReward(options, _pool(config, name, judge, probes, cpu_s), config.deadline_s, name)


def _format(options: FormatOptions, config: RewardConfig, name: str) -> RewardBase:
    if options.pattern is None:
        _refuse(config, name, _WORKER_KEYS, "which runs in process and always ends where it has no pattern")
        if "dot_matches_newline" in options.model_fields_set:
            raise ConfigError(f"options.dot_matches_newline has no effect on reward {name!r} without a pattern")
        return BoxFormatReward(options, name)
    for key in ("think_tag", "require_think"):
        if key in options.model_fields_set:
            raise ConfigError(f"options.{key} has no effect on reward {name!r}: a pattern matches the whole reply")
    try:
        re.compile(options.pattern)
    except re.error as error:
        raise ConfigError(f"options.pattern of reward {name!r} is not a regular expression: {error}") from error
    judge = {"kind": "pattern", "pattern": options.pattern, "dot_matches_newline": options.dot_matches_newline}
    return PatternReward(name, _pool(config, name, judge), config.deadline_s)


def _reasoning_gym(options: ReasoningGymOptions, config: RewardConfig, name: str) -> PooledReward:
    source = {"dataset": "leg_counting", "seed": 0, "size": 1, "options": {}, "index": 0, "entry": {"answer": "4"}}
    probes = [Probe({"source": source, "answer": "4"}, 1.0), Probe({"source": source, "answer": "5"}, 0.0)]
    return ReasoningGymReward(options, _pool(config, name, {"kind": "reasoning_gym"}, probes), config.deadline_s, name)


def _reward_model(options: RewardModelOptions, config: RewardConfig, name: str) -> RewardModelReward:
    _refuse(config, name, ("memory_bytes", "num_workers"), "which is served on a thread of this process")
    return RewardModelReward(options, config.deadline_s, name)


def _from_entry_point(config: RewardConfig, where: str, name: str) -> Reward:
    """A third party's reward: what its entry point names is a Reward class, called with the options, or a function."""
    point = next((point for point in entry_points(group=GROUP) if point.name == config.type), None)
    if point is None:
        names = reward_names()
        match = nearest(config.type, names)
        advice = f"did you mean {match!r}?" if match else f"known: {', '.join(names)}"
        raise ConfigError(
            f"{where}.type = {config.type!r} is not a reward; {advice} (a function of yours is 'module:function')"
        )
    loaded = point.load()
    if isinstance(loaded, type):
        _refuse(config, name, _WORKER_KEYS, "which its own package runs")
        built: Reward = loaded(**config.options)
        return built
    if config.options:
        raise ConfigError(f"{where}.options have no effect: a reward function takes no options ({config.type})")
    judge = {"kind": "function", "reference": point.value, "name": name}
    return FunctionReward(name, _pool(config, name, judge), config.deadline_s)


BUILT_INS: dict[str, BuiltIn] = {
    "exact": BuiltIn(ExactOptions, _in_process(ExactReward), "the reply is the answer, character by character"),
    "last_number": BuiltIn(ReasoningOptions, _in_process(LastNumberReward), "the last number of the reply is right"),
    "boxed": BuiltIn(ReasoningOptions, _in_process(BoxedReward), r"the last \boxed{} holds the answer"),
    "math": BuiltIn(MathOptions, _math, "the boxed answer is the same mathematics (math-verify, in a worker)"),
    "format": BuiltIn(FormatOptions, _format, r"the reply has a complete \boxed{}, or matches options.pattern"),
    "reward_model": BuiltIn(RewardModelOptions, _reward_model, "a learned reward, from headrace reward-model"),
    "reasoning_gym": BuiltIn(ReasoningGymOptions, _reasoning_gym, "the task's own reasoning-gym scorer"),
}

__all__ = [
    "BUILT_INS",
    "BuiltIn",
    "CallableReward",
    "Part",
    "RewardFunction",
    "build_reward",
    "build_rewards",
    "reward_names",
]
