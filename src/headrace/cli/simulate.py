"""``headrace simulate control``: the real loop in virtual time, over actors that fail as a seed says."""

from __future__ import annotations

import argparse
from typing import Any

NUM_SHOWN = 80
"""Events before a failure."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="run the real loop in virtual time over actors and messages that fail (no model, seconds)",
        description="The real loop, control rules and record in virtual time: engines, judges, environments, trainer "
        "and controller are killed and messages are lost, late, doubled and out of order, as the seed says. Every "
        "invariant is checked at every event. A seed that fails prints one line; replayed alone, its last events too.",
    )
    parser.add_argument("what", choices=["control"], help="what is simulated")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; alone it is replayed with its events")
    parser.add_argument("--num-seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--events", type=int, default=NUM_SHOWN, help="events that a replay shows, newest last")
    parser.set_defaults(handler=simulate)


def simulate(args: argparse.Namespace) -> int:
    from headrace.simulate.control import simulate as simulate_seed

    num_broken = 0
    for seed in range(args.seed, args.seed + args.num_seeds):
        outcome = simulate_seed(seed)
        num_broken += bool(outcome.broken)
        if args.num_seeds == 1:
            print("\n".join(outcome.log[max(0, len(outcome.log) - args.events) :]))
            print(f"seed {seed}: {outcome.num_checks} checked events, lives: {'; '.join(outcome.lives)}")
        if outcome.broken:
            print(outcome.line(), flush=True)
    print(f"{args.num_seeds} seeds, {num_broken} broken")
    return 1 if num_broken else 0
