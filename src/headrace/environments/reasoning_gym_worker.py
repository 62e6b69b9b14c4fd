"""``python -m headrace.environments.reasoning_gym_worker``: makes tasks with reasoning-gym, in a process of its own.

A process of its own for three reasons: four of its generators depend on PYTHONHASHSEED, which is 0 here and anything
in the trainer; its dependencies stay out of the trainer; and a generator that never ends can be killed.

Reads one JSON request from standard input and writes one JSON answer to standard output.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> int:
    request = json.load(sys.stdin)
    # Generators may print; the answer alone may stand on standard output.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    json.dump(answer(request), out)
    out.close()
    return 0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """``{"train": [...], "held_out": [...]}``, or ``{"error": code, ...}`` for what the user can mend."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        return {"error": "not_installed", "message": str(error)}
    if request["dataset"] not in DATASETS:
        return {"error": "unknown_dataset", "names": sorted(DATASETS)}
    num_train, num_held_out = request["size"], request["held_out_size"]
    size = num_train + 4 * num_held_out
    try:
        dataset = create_dataset(request["dataset"], seed=request["seed"], size=size, **request["options"])
    except (TypeError, ValueError, AssertionError, KeyError, AttributeError) as error:
        return {"error": "bad_options", "message": f"{type(error).__name__}: {error}"}
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    questions: set[str] = set()
    for index in range(size):
        if len(held_out) == num_held_out:
            break
        entry = dataset[index]
        if index < num_train:
            questions.add(entry["question"])
            train.append(_row(entry, index))
        elif entry["question"] not in questions:
            questions.add(entry["question"])
            held_out.append(_row(entry, index))
    return {"train": train, "held_out": held_out, "size": size}


def _row(entry: dict[str, Any], index: int) -> dict[str, Any]:
    """The entry itself only where JSON carries it unchanged; otherwise it is made again, from its index, to score."""
    try:
        text = json.dumps(entry)
        exact = _same(json.loads(text), entry)
    except (TypeError, ValueError):
        exact = False
    return {
        "index": index,
        "question": entry["question"],
        "answer": None if entry["answer"] is None else str(entry["answer"]),
        "entry": entry if exact else None,
    }


def _same(a: Any, b: Any) -> bool:
    """Equal in value and type all the way down (a tuple is not a list, a key 1 is not "1")."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


if __name__ == "__main__":
    sys.exit(main())
