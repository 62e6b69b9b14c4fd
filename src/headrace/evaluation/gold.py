"""Over-optimisation: the reward that is trained on rises while the gold standard falls (Gao et al. 2023, FAILURES 168).

At each evaluation the same replies to the same held-out tasks are judged by both, so that two evaluations are compared
in pairs, task by task. The rule, with m earlier evaluations:

* The reference is the earlier evaluation with the highest gold mean. Gold has fallen where the mean of the per-task
  differences to it, plus z standard errors, is below 0. z belongs to a one-sided level of 0.005 / m: the reference is
  the best of m, hence lucky, which Bonferroni's m pays for.
* The proxy has risen where its mean of differences to the *first* evaluation, minus z standard errors, is above 0, and
  its mean since the reference is not below 0. (Gold may be at its best when the proxy has done most of its way: asking
  for a clear rise since then misses policies whose gold is ruined. Where both fall, it is a collapse, not this.)
* All of it holds at two evaluations in a row: a policy also wanders by chance, which no sampling error tells.

Fewer than 8 tasks never raise the alarm. Evaluations that are not valid are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, stdev

from headrace.evaluation.result import GOLD, PROXY, EvaluationResult

LEVEL = 0.005
MIN_TASKS = 8
NUM_IN_A_ROW = 2


@dataclass(frozen=True, slots=True)
class _Check:
    proxy: dict[str, float]
    """Task id -> mean of its sampled replies."""
    gold: dict[str, float]

    @property
    def gold_mean(self) -> float:
        return fmean(self.gold.values())


class GoldCheck:
    """Feed it each evaluation, in order; it returns flat metrics named ``gold/...``.

    ``gold/over_optimised`` is 1 while the alarm holds. Changes are measured from the reference evaluation, whose number
    is ``gold/reference_update``; ``gold/proxy_rise`` from the first one.
    """

    def __init__(self) -> None:
        self._checks: list[tuple[int, _Check]] = []
        self._num_in_a_row = 0

    def add(self, update: int, result: EvaluationResult) -> dict[str, float]:
        """``update``: number of the policy version that was evaluated."""
        interval = result.gold()
        if interval is None or not result.is_valid:
            return {}
        proxy = result.component(PROXY)
        metrics = {"gold/mean": interval.mean, "gold/low": interval.low, "gold/high": interval.high}
        if proxy is not None:
            metrics |= {"gold/proxy_mean": proxy.mean, "gold/proxy_low": proxy.low, "gold/proxy_high": proxy.high}
        proxy_means, gold_means = (_means(result.component_scores(name)) for name in (PROXY, GOLD))
        return metrics | self.judge(update, proxy_means, gold_means)

    def judge(self, update: int, proxy: Mapping[str, float], gold: Mapping[str, float]) -> dict[str, float]:
        """The rule alone, from task id -> mean of its replies."""
        now = _Check(dict(proxy), dict(gold))
        metrics = self._compare(now)
        self._checks.append((update, now))
        return metrics

    def _compare(self, now: _Check) -> dict[str, float]:
        if not self._checks:
            return {"gold/over_optimised": 0.0}
        reference_update, reference = max(self._checks, key=lambda c: c[1].gold_mean)
        gold, gold_error = _difference(reference.gold, now.gold)
        proxy, _ = _difference(reference.proxy, now.proxy)
        rise, rise_error = _difference(self._checks[0][1].proxy, now.proxy)
        z = NormalDist().inv_cdf(1 - LEVEL / len(self._checks))
        gold_high, rise_low = gold + z * gold_error, rise - z * rise_error
        holds = len(now.gold) >= MIN_TASKS and gold_high < 0 < rise_low and proxy >= 0
        self._num_in_a_row = self._num_in_a_row + 1 if holds else 0
        return {
            "gold/over_optimised": float(self._num_in_a_row >= NUM_IN_A_ROW),
            "gold/reference_update": float(reference_update),
            "gold/change": gold,
            "gold/change_high": gold_high,
            "gold/proxy_change": proxy,
            "gold/proxy_rise": rise,
            "gold/proxy_rise_low": rise_low,
        }


def _means(scores: dict[str, list[float]]) -> dict[str, float]:
    return {task_id: fmean(values) for task_id, values in scores.items()}


def _difference(before: dict[str, float], now: dict[str, float]) -> tuple[float, float]:
    """(mean of the per-task differences, its standard error) over the tasks that both have."""
    return _mean_and_error([now[task_id] - before[task_id] for task_id in now if task_id in before])


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return (fmean(values) if values else 0.0), math.inf
    return fmean(values), stdev(values) / math.sqrt(len(values))


def recorded_evaluations(run_path: Path, up_to_update: int | None = None) -> list[tuple[int, EvaluationResult]]:
    """(update, evaluation) that a run has recorded up to ``up_to_update`` (None: all), oldest first; of one update that
    of the last lineage. An unreadable file raises EvaluationError: a check that forgot its reference would be none."""
    newest: dict[int, EvaluationResult] = {}
    for file in (run_path / "evaluations").glob("version-*.json"):
        result = EvaluationResult.from_json(file.read_text(encoding="utf-8"))
        number = result.versions[0].number if result.versions else None
        if number is None or (up_to_update is not None and number > up_to_update):
            continue
        if number not in newest or newest[number].versions < result.versions:
            newest[number] = result
    return sorted(newest.items(), key=lambda item: item[0])
