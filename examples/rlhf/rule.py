"""The stated rule of the RLHF example, and the data that it makes: everything here is seeded, nothing is downloaded.

A prompt is a word of three letters. The gold standard of a reply is

    (vowels - other characters, among its first eight) / 8 - 0.15 x (characters beyond the eighth), not below -1

and -1 for a reply without any letter. So the best reply has eight vowels and then ends. Nobody tells the policy: people
saw pairs of careless replies of which none was longer than eight characters, and preferred the better one by this rule.
A reward model that learns from them likes vowels, and cannot know where more of them stop being better. Training
against it without holding back makes replies longer and longer: over-optimisation, which the gold standard shows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import headrace
from headrace.environments.task_list import TaskList
from headrace.types import Task

VOWELS = "aeiou"
OTHERS = "bdgkm"
MAX_LENGTH = 8
"""Of a written reply, in characters; the rule's, too."""
PENALTY = 0.15


def gold_value(reply: str) -> float:
    """The rule."""
    if not any(letter.isalpha() for letter in reply):
        return -1.0
    kept = reply[:MAX_LENGTH]
    num_vowels = sum(letter in VOWELS for letter in kept)
    value = (2 * num_vowels - len(kept)) / MAX_LENGTH
    return max(-1.0, value - PENALTY * max(0, len(reply) - MAX_LENGTH))


@headrace.reward(value_range=(-1.0, 1.0))
def gold(reply: str) -> float:
    """The rule as a reward, for the gold check and the evaluation."""
    return gold_value(reply)


def words(seed: int = 0) -> list[str]:
    """All 720 words of three different letters, shuffled."""
    found = ["".join(letters) for letters in permutations(VOWELS + OTHERS, 3)]
    random.Random(f"words/{seed}").shuffle(found)
    return found


def task(word: str) -> Task:
    return Task(id=word, messages=({"role": "user", "content": word},))


def tasks(num_held_out: int = 96, seed: int = 0) -> tuple[TaskList, TaskList]:
    """(train, held out): what ``tasks.factory`` calls."""
    every = words(seed)
    return TaskList(map(task, every[num_held_out:])), TaskList(map(task, every[:num_held_out]))


def written_reply(rng: random.Random) -> str:
    """A reply as somebody careless would write it: 1 to 8 letters, any of them."""
    return "".join(rng.choice(VOWELS + OTHERS) for _ in range(rng.randint(1, MAX_LENGTH)))


def conversations(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows for ``headrace sft``: careless replies, so that there is something left to learn."""
    rng = random.Random(f"conversations/{seed}")
    pool = words(seed)
    return [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": written_reply(rng)}]}
        for w in rng.choices(pool, k=num)
    ]


def pairs(num: int, seed: int = 0) -> list[dict[str, str]]:
    """Rows for ``headrace reward-model`` and ``headrace dpo``: two careless replies, the better by the rule chosen.
    Replies that the rule values alike make no pair."""
    rng = random.Random(f"pairs/{seed}")
    pool = words(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < num:
        word = rng.choice(pool)
        first, second = written_reply(rng), written_reply(rng)
        difference = gold_value(first) - gold_value(second)
        if difference:
            chosen, rejected = (first, second) if difference > 0 else (second, first)
            rows.append({"prompt": word, "chosen": chosen, "rejected": rejected})
    return rows


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
