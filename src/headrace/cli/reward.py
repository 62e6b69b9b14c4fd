"""``headrace reward``: score one reply as JSON, self-test a reward, list them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from headrace.config.schema import RewardConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.rewards.base import error_fields
from headrace.rewards.build import BUILT_INS, build_rewards, reward_names
from headrace.types import AttemptKey, Episode, Outcome, ScoreError, ScoreResult, Task, Trace, Turn

OK, ERROR, USAGE = 0, 1, 2


def add_parser(subparsers: Any) -> None:
    """Add ``reward`` with its commands ``score``, ``check`` and ``list``."""
    parser = subparsers.add_parser("reward", help="score one reply, self-test a reward, list rewards")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    score = commands.add_parser("score", help="score one reply and print the Score, or its classed error, as JSON")
    _add_reward_arguments(score)
    score.add_argument("--gold", help="the reference answer")
    score.add_argument("--reply", required=True, help="what the policy said; - reads it from standard input")
    score.add_argument("--prompt", default="", help="what the policy was asked, for rewards that read the task")
    score.add_argument("--metadata", default="{}", help="the task's metadata as a JSON object")
    score.set_defaults(handler=run_score)

    check = commands.add_parser("check", help="start a reward's workers and run their self-test")
    _add_reward_arguments(check)
    check.set_defaults(handler=run_check)

    listing = commands.add_parser("list", help="names of the rewards that are there")
    listing.set_defaults(handler=run_list)


def _add_reward_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="a reward's name (see 'headrace reward list'), or module:function")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the reward; repeatable"
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="longest time of one score")


def run_score(args: argparse.Namespace) -> int:
    """Exit status 0 for a score, 1 for a classed error, 2 for what the user must mend."""
    return _report_usage(lambda: _score(args))


def run_check(args: argparse.Namespace) -> int:
    """Exit status 0 where the self-test passed, 1 where it failed, 2 for what the user must mend."""
    return _report_usage(lambda: _check(args))


def run_list(args: argparse.Namespace) -> int:
    for name in reward_names():
        summary = BUILT_INS[name].summary if name in BUILT_INS else "(from an installed package)"
        print(f"{name:<16}{summary}")
    print(f"{'module:function':<16}a function of yours, decorated with @headrace.reward or not")
    return OK


def _report_usage(work: Any) -> int:
    try:
        status: int = work()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    return status


def _score(args: argparse.Namespace) -> int:
    metadata = _json_object(args.metadata)
    reply = sys.stdin.read() if args.reply == "-" else args.reply
    task = Task(
        id="command-line", messages=({"role": "user", "content": args.prompt},), answer=args.gold, metadata=metadata
    )
    episode = Episode(key=AttemptKey(0, 0), task=task, turns=(Turn(reply=reply),), trace=Trace(), outcome=Outcome.DONE)
    result = asyncio.run(_judge(_config(args), episode))
    print(json.dumps(_as_json(result), ensure_ascii=False))
    return ERROR if isinstance(result, ScoreError) else OK


async def _judge(config: RewardConfig, episode: Episode) -> ScoreResult:
    reward = build_rewards([config])
    try:
        await reward.start()
        # The part alone: a single score needs neither weight nor the sum's prefix of component names.
        return await reward.parts[0].reward.score(episode)
    finally:
        await reward.close()


def _check(args: argparse.Namespace) -> int:
    asyncio.run(_start_and_close(_config(args)))
    print(json.dumps({"reward": args.name, "self_test": "passed"}))
    return OK


async def _start_and_close(config: RewardConfig) -> None:
    reward = build_rewards([config])
    try:
        await reward.start()
    finally:
        await reward.close()


def _as_json(result: ScoreResult) -> dict[str, Any]:
    if isinstance(result, ScoreError):
        return {"error": dict(error_fields(result))}
    fields: dict[str, Any] = {"value": result.value, "components": dict(result.components)}
    return fields if result.value_T is None else {**fields, "value_T": list(result.value_T)}


def _config(args: argparse.Namespace) -> RewardConfig:
    fields: dict[str, Any] = {"type": args.name, "options": dict(_option(text) for text in args.option)}
    if args.deadline is not None:
        if not args.deadline > 0:
            raise ConfigError(f"--deadline {args.deadline:g}: must be above 0 seconds")
        fields["deadline_s"] = args.deadline
    return RewardConfig(**fields)


def _option(text: str) -> tuple[str, Any]:
    """``key=value``; the value as JSON where it is JSON, as text otherwise."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--option {text!r}: must be KEY=VALUE")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--metadata is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--metadata must be a JSON object {{...}}, not {type(value).__name__}")
    return value
