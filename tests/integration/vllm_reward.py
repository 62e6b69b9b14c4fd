"""The reward of the vLLM runs; a file of its own, since a reward's worker imports what is beside it."""

from __future__ import annotations

from headrace.types import Task


def share_of_letters(reply: str, task: Task) -> float:
    """A model of random weights has some of it, and can learn more."""
    return sum(c in "abcdefgh" for c in reply) / max(1, len(reply))
