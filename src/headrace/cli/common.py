"""What the subcommands share: dotted overrides taken off the command line, and printing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

TOP_LEVEL_KEYS = ("name", "output_dir", "seed")
"""Keys of a run that stand in no section, so that their flag has no dot."""

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_OVERRIDE = re.compile(rf"--([A-Za-z_][\w+-]*(?:\.[\w+-]+)+|{'|'.join(TOP_LEVEL_KEYS)})(?:=(.*))?", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split ``--section.key value`` and ``--section.key=value`` off; returns (the rest, (key, value) pairs).

    argparse cannot do it: it would take the value of a flag that it does not know for the run's file.

    Raises:
        ConfigError: for a key without value.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        match = _OVERRIDE.fullmatch(argument)
        if match is None:
            rest.append(argument)
            continue
        key, value = match.groups()
        if value is None:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"command line: --{key} needs a value, as in --{key} VALUE or --{key}=VALUE")
            value = remaining.pop(0)
        overrides.append((key, value))
    return rest, overrides


def add_command(subparsers: Subparsers, name: str, summary: str, description: str = "") -> argparse.ArgumentParser:
    """A subcommand whose ``--help`` keeps the line breaks of its description."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary}.\n\n{description}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser
