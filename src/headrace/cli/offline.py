"""``headrace sft``, ``headrace reward-model`` and ``headrace dpo``: training without rollouts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.common import INTERRUPTED, add_command

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers

COMMANDS_WITH_OVERRIDES = ("sft", "reward-model", "dpo")

_HELP = """\
Rows: {rows}
The run's folder is runs/<name>; what comes out lies in its export/. Any key of the file can be overridden:
  headrace {name} {name}.toml --trainer.learning_rate 1e-4 --name second"""


def add_parsers(subparsers: Subparsers) -> None:
    _add(subparsers, "sft", "Fine-tune a model on conversations", '{"messages": [{"role": ..., "content": ...}, ...]}')
    pairs = '{"prompt": ... or "messages": [...], "chosen": ..., "rejected": ..., "margin"?: ...}'
    _add(subparsers, "reward-model", "Train a reward model from preference pairs", pairs)
    _add(subparsers, "dpo", "Train a model from preference pairs directly", pairs)


def _add(subparsers: Subparsers, name: str, summary: str, rows: str) -> None:
    parser = add_command(subparsers, name, summary, _HELP.format(rows=rows, name=name))
    parser.add_argument("config", type=Path, metavar="FILE.TOML")
    parser.add_argument("--resume", action="store_true", help="go on from the run's last complete checkpoint")
    parser.add_argument(
        "--dry-run", action="store_true", help="check file and rows, print the resolved configuration, then stop"
    )
    parser.set_defaults(handler=_run, offline_command=name)


def _run(args: argparse.Namespace) -> int:
    from headrace.config.load import load_as
    from headrace.config.offline import check_offline

    schema, read = _kind(args.offline_command)
    config = load_as(schema, args.config, args.overrides)
    check_offline(config)
    if args.dry_run:
        from headrace.config.dump import dump_toml

        rows = read(config.data)
        print("# Resolved configuration; lines that begin with # are defaults.\n")
        print(dump_toml(config))
        print(f"# {len(rows.train)} rows to train on, {len(rows.held_out)} held out")
        return 0
    result = _train(args.offline_command)(config, resume=args.resume)
    if result.stopped:
        overrides = [text for key, value in args.overrides for text in (f"--{key}", value)]
        command = shlex.join(["headrace", args.offline_command, str(args.config), *overrides, "--resume"])
        print(f"stopped after {result.num_steps} steps; go on with: {command}")
        return INTERRUPTED
    print(f"exported: {result.export}")
    return 0


def _kind(command: str) -> tuple[type[Any], Callable[[Any], Any]]:
    """(configuration, reader of its rows), without torch."""
    from headrace.config.offline import DpoConfig, RewardModelConfig, SftConfig
    from headrace.environments.preferences import read_conversations, read_pairs

    if command == "sft":
        return SftConfig, read_conversations
    return (RewardModelConfig, read_pairs) if command == "reward-model" else (DpoConfig, read_pairs)


def _train(command: str) -> Callable[..., Any]:
    if command == "sft":
        from headrace.offline.sft import train_sft

        return train_sft
    if command == "reward-model":
        from headrace.offline.reward_model import train_reward_model

        return train_reward_model
    from headrace.offline.dpo import train_dpo

    return train_dpo
