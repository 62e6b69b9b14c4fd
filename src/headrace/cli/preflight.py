"""``headrace preflight RUN.TOML``: how fast are the ranks' collectives, and who holds the others up?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common import add_command
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers
    from headrace.model.parallel.preflight import Preflight


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "preflight",
        "Measure each collective on each axis of a run's [parallel] section, and name a slow rank",
        "Processes of this machine, gloo. Any key can be overridden:  headrace preflight run.toml --parallel.tp 2",
    )
    parser.add_argument("config", type=Path, metavar="RUN.TOML")
    parser.set_defaults(handler=_preflight)


def _preflight(args: argparse.Namespace) -> int:
    from headrace.config.checks import check_config
    from headrace.config.load import load_config
    from headrace.preflight import run_preflight

    config = load_config(args.config, args.overrides)
    check_config(config)
    found = run_preflight(config)
    _print_table(found)
    if found.slow:
        told = "; ".join(f"rank {s.rank}: {s.what} takes {s.factor:.1f} x the usual time" for s in found.slow)
        raise HeadraceError(f"slow: {told}. Every collective waits for the slowest; look at that process's node first")
    print("\nno rank holds the others up")
    return 0


def _print_table(found: Preflight) -> None:
    print(f"{'axis':<14}{'ranks':>6}  {'collective':<15}{'KiB':>8}{'ms':>10}{'MiB/s':>10}")
    for m in found.measurements:
        print(
            f"{m.axis:<14}{m.num_ranks:>6}  {m.operation:<15}{m.num_bytes / 1024:>8.0f}{m.median_s * 1e3:>10.2f}"
            f"{m.bytes_per_s / 2**20:>10.0f}"
        )
