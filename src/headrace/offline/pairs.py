"""Preference pairs to samples, and the accuracy of a difference with its interval by prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.environments.preferences import Pair
from headrace.environments.tasks_file import prompt_key
from headrace.evaluation.statistics import Interval, accuracy_interval
from headrace.types import Sample

CONTENT_FREE = ("", ".", ":", "...", "Solution:", "Let me think about this step by step.", "I hope this helps!")
"""Replies that say nothing; some reward models and judges pay for them (arXiv 2507.08794)."""

MakeSample = Callable[[Pair, str, int, str], Sample]
"""(pair, reply, row, name) -> sample."""


def pair_samples(pairs: Sequence[Pair], make: MakeSample, first_row: int = 0) -> list[tuple[Sample, Sample]]:
    """(chosen, rejected) of each pair, weighing +1 and -1, with one key, so that they lie in one micro-batch."""
    found = []
    for row, pair in enumerate(pairs, start=first_row):
        chosen = replace(make(pair, pair.chosen, row, "chosen"), weight=1.0)
        rejected = replace(make(pair, pair.rejected, row, "rejected"), weight=-1.0)
        found.append((chosen, rejected))
    return found


def content_free_pairs(pairs: Sequence[Pair], share: float, seed: int) -> list[Pair]:
    """round(share x number) further pairs: a chosen reply against one that says nothing."""
    rng = random.Random(f"content-free/{seed}")
    drawn = rng.sample(list(pairs), k=round(share * len(pairs)))
    return [
        replace(pair, rejected=rng.choice([t for t in CONTENT_FREE if t != pair.chosen.strip()]), margin=0.0)
        for pair in drawn
    ]


def pair_accuracy(pairs: Sequence[Pair], differences: Sequence[float]) -> Interval:
    """Share of pairs whose difference is above 0 (ties count half), with a bootstrap interval over prompts."""
    by_prompt: dict[str, list[float]] = {}
    for pair, d in zip(pairs, differences, strict=True):
        by_prompt.setdefault(prompt_key(pair.messages), []).append(1.0 if d > 0 else 0.5 if d == 0 else 0.0)
    return accuracy_interval(list(by_prompt.values()), is_share=True)
