"""``headrace``: parse the command line, run one subcommand, and turn errors into messages and exit codes.

Exit codes: 0 done; 1 a defect of headrace (with traceback); 2 something that the user can mend (one message);
130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import headrace
from headrace.cli import eval as eval_command
from headrace.cli import inspect as inspect_command
from headrace.cli import launch, model, offline, plan, preflight, reward, simulate, train
from headrace.cli.common import INTERRUPTED, split_overrides
from headrace.errors import HeadraceError

_EPILOG = """\
A run is one TOML file; its folder is runs/<name>. Start with:  headrace train run.toml --dry-run
"""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Each subcommand sets ``handler``, which takes the arguments and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Reinforcement-learning post-training of language models and agents.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"headrace {headrace.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    train.add_parsers(subparsers)
    plan.add_parser(subparsers)
    preflight.add_parser(subparsers)
    launch.add_parser(subparsers)
    offline.add_parsers(subparsers)
    eval_command.add_parser(subparsers)
    inspect_command.add_parsers(subparsers)
    model.add_parser(subparsers)
    reward.add_parser(subparsers)
    simulate.add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    args: argparse.Namespace | None = None
    try:
        overrides: list[tuple[str, str]] = []
        if arguments[:1] and arguments[0] in (*train.COMMANDS_WITH_OVERRIDES, *offline.COMMANDS_WITH_OVERRIDES):
            arguments, overrides = split_overrides(arguments)
        args = build_parser().parse_args(arguments)
        args.overrides = overrides
        handler: Callable[[argparse.Namespace], int] = args.handler
        return handler(args)
    except HeadraceError as error:
        print(f"headrace: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"headrace: interrupted{_how_to_resume(args)}", file=sys.stderr)
        return INTERRUPTED


def _how_to_resume(args: argparse.Namespace | None) -> str:
    """Where the interrupted command has a run's folder: the command that goes on with it."""
    run_dir: Path | None = getattr(args, "run_dir", None)
    if run_dir is None or not (run_dir / "checkpoints").is_dir():
        return ""
    return f"; go on with: headrace resume {run_dir}"


if __name__ == "__main__":
    sys.exit(main())
