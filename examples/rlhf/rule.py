"""The stated rule of the RLHF example, and the data that it makes: everything here is seeded, nothing is downloaded.

A prompt is a word of three different letters out of a to h. The gold standard of a reply is

    (share of the prompt's letters that the reply holds) - 0.15 x (characters beyond the sixth), not below -1

so a good reply names all three letters and is short. Nobody tells the policy: it sees pairs of replies of which the
better by this rule was preferred. No reply of a pair is longer than eight characters, and longer ones mostly hold more
of the letters, so that a reward model learns that longer is better and cannot know where that ends. Training against
it without holding back makes replies longer and longer: over-optimisation, which the gold standard shows.
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

LETTERS = "abcdefgh"
MAX_LENGTH = 8
"""Of a written reply, in characters."""
FREE_LENGTH = 6
PENALTY = 0.15


def gold_value(reply: str, word: str) -> float:
    """The rule."""
    share = len(set(word) & set(reply)) / len(set(word))
    return max(-1.0, share - PENALTY * max(0, len(reply) - FREE_LENGTH))


@headrace.reward(value_range=(-1.0, 1.0))
def gold(reply: str, task: Task) -> float:
    """The rule as a reward, for the gold check and the evaluation."""
    return gold_value(reply, task.answer)


def words(seed: int = 0) -> list[str]:
    """All 336 words, shuffled."""
    found = ["".join(letters) for letters in permutations(LETTERS, 3)]
    random.Random(f"words/{seed}").shuffle(found)
    return found


def task(word: str) -> Task:
    return Task(id=word, messages=({"role": "user", "content": word},), answer=word)


def tasks(num_held_out: int = 96, seed: int = 0) -> tuple[TaskList, TaskList]:
    """(train, held out): what ``tasks.factory`` calls."""
    every = words(seed)
    return TaskList(map(task, every[num_held_out:])), TaskList(map(task, every[:num_held_out]))


def written_reply(word: str, rng: random.Random) -> str:
    """A reply as somebody careless would write it: 1 to 8 letters, each of the word's with an even chance."""
    length = rng.randint(1, MAX_LENGTH)
    return "".join(rng.choice(word) if rng.random() < 0.5 else rng.choice(LETTERS) for _ in range(length))


def conversations(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows for ``headrace sft``: careless replies, so that there is something left to learn."""
    rng = random.Random(f"conversations/{seed}")
    pool = words(seed)
    return [
        {"messages": [{"role": "user", "content": w}, {"role": "assistant", "content": written_reply(w, rng)}]}
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
        first, second = written_reply(word, rng), written_reply(word, rng)
        difference = gold_value(first, word) - gold_value(second, word)
        if difference:
            chosen, rejected = (first, second) if difference > 0 else (second, first)
            rows.append({"prompt": word, "chosen": chosen, "rejected": rejected})
    return rows


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
