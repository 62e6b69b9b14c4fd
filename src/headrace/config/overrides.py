"""Dotted overrides from the command line: ``trainer.learning_rate=1e-5``, ``rewards.0.weight=2``.

A value is read as TOML (numbers, true, lists, quoted text) and, where it is not valid TOML, taken as text.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError

Overrides = Sequence[tuple[str, str]]
"""(dotted key, raw value) pairs, applied in order; the last one of a key wins."""


def parse_value(raw: str) -> Any:
    """``raw`` as a TOML literal, or as plain text where it is none."""
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return raw
    # A line break could smuggle in a second key; a date is text to every option that we have.
    if set(parsed) != {"value"} or not isinstance(parsed["value"], (str, bool, int, float, list, dict)):
        return raw
    return parsed["value"]


def apply_overrides(data: dict[str, Any], overrides: Overrides) -> None:
    """Set each override in ``data`` in place, making sections that are not there yet.

    Raises:
        ConfigError: where a key leads through a value that has no keys, or beyond the end of a list.
    """
    for dotted, raw in overrides:
        keys = dotted.split(".")
        if not all(keys):
            raise ConfigError(f"command line: --{dotted} is not a dotted key such as --trainer.learning_rate")
        node: Any = data
        for depth, key in enumerate(keys[:-1]):
            node = _child(node, key, dotted, ".".join(keys[:depth]))
        _assign(node, keys[-1], parse_value(raw), dotted, ".".join(keys[:-1]))


def _child(node: Any, key: str, dotted: str, parent: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, dotted, parent)]
    if not isinstance(node, dict):
        raise ConfigError(f"command line: --{dotted} cannot be set, because {parent} is {node!r} and has no keys")
    return node.setdefault(key, {})


def _assign(node: Any, key: str, value: Any, dotted: str, parent: str) -> None:
    if isinstance(node, list):
        node[_index(node, key, dotted, parent)] = value
    elif isinstance(node, dict):
        node[key] = value
    else:
        raise ConfigError(f"command line: --{dotted} cannot be set, because {parent} is {node!r} and has no keys")


def _index(node: list[Any], key: str, dotted: str, parent: str) -> int:
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(
            f"command line: --{dotted} cannot be set: {parent} is a list of {len(node)}, so '{key}' must be a number "
            f"from 0 to {len(node) - 1}; add entries in the file"
        )
    return int(key)
