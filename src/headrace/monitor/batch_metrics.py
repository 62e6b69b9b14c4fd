"""One rollout batch -> the flat metrics of its line in metrics.jsonl.

Everything is computed from the raw episodes, never from training tensors (masked or padded): F179.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

from headrace.types import Episode, Group, Outcome, PolicyVersion, RolloutBatch, Score, ScoreError

T = TypeVar("T")


def batch_metrics(batch: RolloutBatch, *, attempted: Sequence[Episode], success_threshold: float) -> dict[str, float]:
    """``attempted``: every episode that ended since the last batch, the failed and filtered ones too.

    ``success_threshold``: a reward of at least this counts as right, for lengths by correctness."""
    episodes = batch.episodes
    rewards = [e.score.value for e in episodes if isinstance(e.score, Score)]
    metrics: dict[str, float] = {"reward/num": float(len(rewards))}
    if rewards:
        mean = fmean(rewards)
        half_width = 1.96 * pstdev(rewards) / math.sqrt(len(rewards))
        metrics |= {
            "reward/mean": mean,
            "reward/std": pstdev(rewards),
            "reward/low": mean - half_width,
            "reward/high": mean + half_width,
        }
    metrics["reward/zero_variance_share"] = _share(batch.groups, _is_uniform)
    metrics |= _components(episodes)
    metrics |= _lengths(episodes, success_threshold)
    metrics["episode/truncated_share"] = _share(episodes, lambda e: e.outcome is Outcome.TRUNCATED)
    metrics["episode/distinct_reply_share"] = fmean(
        [len({e.reply for e in g.episodes}) / len(g.episodes) for g in batch.groups] or [0.0]
    )
    metrics |= _errors(attempted)
    metrics |= staleness_metrics(batch)
    return metrics


def staleness_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Age of the trained tokens in versions, weighted by token."""
    num_by_age: Counter[int] = Counter()
    for sample in batch.samples:
        for trained, version in zip(sample.mask, sample.versions, strict=True):
            if trained and version is not None:
                num_by_age[_age(batch.version, version)] += 1
    num_tokens = sum(num_by_age.values())
    metrics = {f"staleness/tokens_at_{age}": float(num) for age, num in sorted(num_by_age.items())}
    metrics["staleness/mean"] = sum(a * n for a, n in num_by_age.items()) / num_tokens if num_tokens else 0.0
    metrics["staleness/max"] = float(max(num_by_age, default=0))
    return metrics


def _age(trainer: PolicyVersion, token: PolicyVersion) -> int:
    return trainer.number - token.number


def _is_uniform(group: Group) -> bool:
    rewards = group.rewards
    return bool(rewards) and min(rewards) == max(rewards)


def _share(items: Sequence[T], predicate: Callable[[T], bool]) -> float:
    return sum(predicate(item) for item in items) / len(items) if items else 0.0


def _components(episodes: Sequence[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in episodes:
        if isinstance(episode.score, Score):
            for name, value in episode.score.components.items():
                values.setdefault(name, []).append(value)
    return {f"reward/component/{name}": fmean(parts) for name, parts in sorted(values.items())}


def _lengths(episodes: Sequence[Episode], success_threshold: float) -> dict[str, float]:
    lengths: Mapping[str, list[int]] = {"": [], "right_": [], "wrong_": []}
    for episode in episodes:
        length = episode.trace.num_policy_tokens
        lengths[""].append(length)
        if episode.reward is not None:
            lengths["right_" if episode.reward >= success_threshold else "wrong_"].append(length)
    return {f"episode/length_{name}mean": fmean(values) for name, values in lengths.items() if values}


def _errors(attempted: Sequence[Episode]) -> dict[str, float]:
    """Share of attempts without a score, in total and by class: an error is never mixed into a mean (I14)."""
    classes: Counter[str] = Counter()
    for episode in attempted:
        if isinstance(episode.score, ScoreError):
            classes[f"score_{episode.score.error_class.value}"] += 1
        elif episode.outcome.is_failure:
            classes[episode.outcome.value] += 1
    total = len(attempted)
    metrics = {f"score/errors/{name}": float(num) for name, num in sorted(classes.items())}
    metrics["score/error_share"] = sum(classes.values()) / total if total else 0.0
    return metrics
