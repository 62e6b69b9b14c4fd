"""Algorithms by name: the presets of this room, then other people's, through entry points.

Somebody else's algorithm is one file with ``f(config, *, asynchronous, max_new_tokens) -> Algorithm``, registered as::

    [project.entry-points."headrace.algorithms"]
    my_algorithm = "my_package.my_file:build"

It may build a :class:`~headrace.algorithms.composed.ComposedAlgorithm` from parts, subclass it, or start from nothing;
the trainer does not know which algorithm runs. It checks its own options (I20).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from headrace.algorithms.composed import ComposedAlgorithm
from headrace.algorithms.presets import PRESETS
from headrace.algorithms.resolve import resolve, unknown_preset
from headrace.config.critic import CriticConfig
from headrace.config.schema import AlgorithmConfig, RunConfig
from headrace.errors import ConfigError
from headrace.protocols import Algorithm

ENTRY_POINT_GROUP = "headrace.algorithms"


def build_algorithm(
    config: AlgorithmConfig,
    *,
    asynchronous: bool,
    max_new_tokens: int,
    min_group_size: int | None = None,
    critic: CriticConfig | None = None,
) -> Algorithm:
    """The algorithm that ``config`` describes.

    ``asynchronous``: episodes may be older than the policy that is trained, which turns the default correction on.
    ``max_new_tokens``: ``sampling.max_new_tokens``. ``min_group_size``: ``rollout.min_group_size``, checked where
    given. ``critic``: the run's, for GAE's discount and lambda. Raises ConfigError as
    :func:`~headrace.algorithms.resolve.resolve` does, and for groups of one under a group-relative advantage.
    """
    if config.preset not in PRESETS:
        others = _third_party()
        if config.preset not in others:
            raise ConfigError(unknown_preset(config.preset, [*PRESETS, *others]))
        factory = others[config.preset].load()
        algorithm: Algorithm = factory(config, asynchronous=asynchronous, max_new_tokens=max_new_tokens)
        return algorithm
    resolved = resolve(config, asynchronous=asynchronous, max_new_tokens=max_new_tokens, critic=critic)
    if resolved.is_group_relative and min_group_size is not None and min_group_size < 2:
        raise ConfigError(
            f"rollout.min_group_size is {min_group_size}, but advantage '{resolved.advantage}' compares the members of "
            "a group: it must be 2 or more"
        )
    return ComposedAlgorithm(resolved)


def algorithm_of(config: RunConfig) -> Algorithm:
    """That of a run. Raises ConfigError as :func:`build_algorithm`."""
    return build_algorithm(
        config.algorithm,
        asynchronous=config.rollout.max_staleness > 0,
        max_new_tokens=config.sampling.max_new_tokens,
        min_group_size=config.rollout.min_group_size,
        critic=config.critic,
    )


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
