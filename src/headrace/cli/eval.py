"""``headrace eval RUN_OR_MODEL``: accuracy on held-out tasks, greedy and sampled, alone or against another one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.common import add_command
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers

_DESCRIPTION = """\
Examples:
  headrace eval runs/demo                              the run's last checkpoint on the run's held-out tasks
  headrace eval runs/demo --against smollm2-135m       compared, task by task, with the model it started from
  headrace eval smollm2-135m --tasks run.toml          a model on the tasks and rewards that a run's file names
  headrace eval gpt-x --tasks served.toml              one that a server has, where engine.type is "openai" there"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "eval", "Measure accuracy on held-out tasks, with intervals", _DESCRIPTION)
    parser.add_argument(
        "target", metavar="RUN_OR_MODEL", help="a run, one of its checkpoints, or what model.path takes"
    )
    parser.add_argument("--against", metavar="OTHER", help="a second one, for a paired comparison")
    parser.add_argument(
        "--tasks",
        type=Path,
        metavar="RUN.TOML",
        help="whose tasks, rewards, gold standard and sampling; default: the target run's own",
    )
    parser.add_argument("--num-tasks", type=int, metavar="N", help="the first N held-out tasks; default: as configured")
    parser.add_argument("--num-samples", type=int, metavar="N", help="sampled replies a task; default: as configured")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="write the result there too; not with --against"
    )
    parser.set_defaults(handler=_eval)


def _eval(args: argparse.Namespace) -> int:
    from headrace.loop_eval import evaluate_checkpoint

    if args.output is not None and args.against is not None:
        raise ConfigError("--output holds one result; evaluate the two one after the other, or leave out --against")
    [result, *_] = evaluate_checkpoint(
        args.target,
        against=args.against,
        tasks_from=args.tasks,
        num_tasks=args.num_tasks,
        num_samples=args.num_samples,
    )
    if args.output is not None:
        args.output.write_text(result.to_json(), encoding="utf-8")
    return 0
