"""``headrace train run.toml`` and ``headrace resume RUN_DIR``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.child_process import EXIT_LOST, die_with_parent
from headrace.cli.common import INTERRUPTED, add_command
from headrace.config.schema import RunConfig
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers

COMMANDS_WITH_OVERRIDES = ("train", "resume", "plan", "launch", "preflight")

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
    _add_supervision(parser)
    parser.set_defaults(handler=_train)

    parser = add_command(
        subparsers,
        "resume",
        "Go on with a run from its last complete checkpoint",
        "Keys of what does not change the training itself can be overridden, for example\n"
        "  headrace resume runs/demo --trainer.num_batches 200",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    _add_supervision(parser)
    parser.set_defaults(handler=_resume)


def _add_supervision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--supervise",
        action="store_true",
        help="start the run again from its newest checkpoint whenever a process or a node of it is lost; goes on with "
        "a run that is there already",
    )
    parser.add_argument("--supervised", type=int, help=argparse.SUPPRESS)  # by this process: see supervise.py


def _train(args: argparse.Namespace) -> int:
    from headrace.config.checks import check_config
    from headrace.config.load import load_config

    config = load_config(args.config, args.overrides)
    check_config(config)  # before torch is imported; the loop checks again, knowing engine and algorithm
    if args.dry_run:
        from headrace.cli.dry_run import print_dry_run

        print_dry_run(config)
        return 0
    if args.supervise:
        overrides = [part for key, value in args.overrides for part in (f"--{key}", value)]
        return _supervise(config, ["train", str(args.config.absolute()), *overrides])
    return _run(config, args, resume_from=None)


def _resume(args: argparse.Namespace) -> int:
    from headrace.record.recorded_config import recorded_config

    run_dir: Path = args.run_dir.absolute()
    config = recorded_config(run_dir, args.overrides)
    if args.supervise:
        overrides = [part for key, value in args.overrides for part in (f"--{key}", value)]
        return _supervise(config, ["resume", str(run_dir), *overrides], is_resume=True)
    return _run(config, args, resume_from=run_dir)


def _supervise(config: RunConfig, arguments: list[str], *, is_resume: bool = False) -> int:
    """Controllers, one after the other, until the run is done. ``arguments``: of the first one's command."""
    from headrace.config.cluster import RayCluster
    from headrace.supervise import ChildController, RayController, check_same_run, supervise

    if not is_resume:
        check_same_run(config)
    cluster = config.cluster

    def start(resume_from: Path | None, number: int) -> ChildController | RayController:
        if isinstance(cluster, RayCluster):
            return RayController(config, cluster, resume_from, number)
        is_first = is_resume or resume_from is None
        return ChildController(arguments if is_first else ["resume", str(config.run_dir.absolute())])

    ending = supervise(config, start, note=lambda text: print(f"headrace: {text}", file=sys.stderr, flush=True))
    if ending.kind == "failed" and isinstance(cluster, RayCluster):
        raise HeadraceError(ending.message)  # a child process has told it already
    print(ending.message)
    return {"done": 0, "stopped": INTERRUPTED}.get(ending.kind, 2)


def _run(config: RunConfig, args: argparse.Namespace, resume_from: Path | None) -> int:
    from headrace.run import train

    args.run_dir = config.run_dir
    if args.supervised is not None:
        die_with_parent(args.supervised)
    try:
        result = train(config, resume_from=resume_from)
    except HeadraceError as error:
        if args.supervised is None or not getattr(error, "part_lost", False):
            raise
        print(f"headrace: error: {error}", file=sys.stderr)
        return EXIT_LOST
    print(f"report: {result.report}")
    if result.stopped:
        print(f"stopped after {result.num_updates} updates; go on with: headrace resume {result.run_dir}")
        return INTERRUPTED
    return 0
