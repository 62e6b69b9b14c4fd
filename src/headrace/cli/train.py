"""``headrace train run.toml`` and ``headrace resume RUN_DIR``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common import INTERRUPTED, add_command
from headrace.config.schema import RunConfig

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers

COMMANDS_WITH_OVERRIDES = ("train", "resume", "plan")

_OVERRIDES_HELP = """\
Any key of the file can be overridden by its dotted name:
  headrace train run.toml --trainer.learning_rate 1e-5 --rollout.group_size=16 --rewards.0.weight 2
Values are read as TOML (numbers, true, [lists]); anything else is text."""


def add_parsers(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "train", "Train a model as a TOML file says", _OVERRIDES_HELP)
    parser.add_argument("config", type=Path, metavar="RUN.TOML")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and what would run, then stop"
    )
    parser.set_defaults(handler=_train)

    parser = add_command(
        subparsers,
        "resume",
        "Go on with a run from its last complete checkpoint",
        "Keys of what does not change the training itself can be overridden, for example\n"
        "  headrace resume runs/demo --trainer.num_batches 200",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.set_defaults(handler=_resume)


def _train(args: argparse.Namespace) -> int:
    from headrace.config.checks import check_config
    from headrace.config.load import load_config

    config = load_config(args.config, args.overrides)
    check_config(config)  # before torch is imported; the loop checks again, knowing engine and algorithm
    if args.dry_run:
        from headrace.cli.dry_run import print_dry_run

        print_dry_run(config)
        return 0
    return _run(config, args, resume_from=None)


def _resume(args: argparse.Namespace) -> int:
    from headrace.record.recorded_config import recorded_config

    run_dir: Path = args.run_dir.absolute()
    return _run(recorded_config(run_dir, args.overrides), args, resume_from=run_dir)


def _run(config: RunConfig, args: argparse.Namespace, resume_from: Path | None) -> int:
    from headrace.run import train

    args.run_dir = config.run_dir
    result = train(config, resume_from=resume_from)
    print(f"report: {result.report}")
    if result.stopped:
        print(f"stopped after {result.num_updates} updates; go on with: headrace resume {result.run_dir}")
        return INTERRUPTED
    return 0
