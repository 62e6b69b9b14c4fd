"""Built-in one-step arithmetic, both orders of the operands, split by UNORDERED pair.

3 * 4 and 4 * 3 are one fact: they stand on the same side of the split, so that no held-out problem has its commuted
twin among the training problems.
"""

from __future__ import annotations

import operator
import random

from headrace.config.schema import ArithmeticTasks
from headrace.environments.task_list import TaskList, TaskSplits
from headrace.errors import ConfigError
from headrace.types import Task

_OPERATIONS = {"multiply": ("*", operator.mul), "add": ("+", operator.add)}


def arithmetic_tasks(config: ArithmeticTasks) -> TaskSplits:
    """All problems with operands from ``min_operand`` to ``max_operand``, in an order that ``seed`` fixes.

    Raises:
        ConfigError: for an empty range, or one with too few pairs to hold any out.
    """
    low, high = config.min_operand, config.max_operand
    if low > high:
        raise ConfigError(f"tasks.min_operand = {low} is above tasks.max_operand = {high}: there is no problem to pose")
    pairs = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
    if len(pairs) < 2:
        raise ConfigError(
            f"operands {low} to {high} make a single problem, and one side of the split would be empty; "
            "raise tasks.max_operand"
        )
    rng = random.Random(config.seed)
    rng.shuffle(pairs)
    num_held_out = min(max(round(len(pairs) * config.held_out_fraction), 1), len(pairs) - 1)
    return TaskSplits(
        train=TaskList(_problems(pairs[num_held_out:], config, rng)),
        held_out=TaskList(_problems(pairs[:num_held_out], config, rng)),
    )


def _problems(pairs: list[tuple[int, int]], config: ArithmeticTasks, rng: random.Random) -> list[Task]:
    """Both orders of each pair, shuffled, so that the twins of a pair do not stand side by side in a batch."""
    symbol, operate = _OPERATIONS[config.operation]
    ordered = [pair for a, b in pairs for pair in dict.fromkeys(((a, b), (b, a)))]
    rng.shuffle(ordered)
    return [
        Task(
            id=f"{config.operation}-{a}-{b}",
            messages=({"role": "user", "content": f"What is {a} {symbol} {b}?"},),
            answer=str(operate(a, b)),
        )
        for a, b in ordered
    ]
