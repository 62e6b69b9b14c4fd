"""The gold standard and the over-optimisation alarm: the rule by hand, its false alarms, and how it is wired."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config.checks import check_config
from headrace.config.load import restore_config
from headrace.config.schema import GuardsConfig
from headrace.errors import ConfigError
from headrace.evaluation.gold import GoldCheck, recorded_evaluations
from headrace.evaluation.result import Attempt, EvaluationResult, TaskResult
from headrace.monitor.health import HealthMonitor
from headrace.rewards.composite import CompositeReward, Part, with_gold
from headrace.rewards.in_process import CallableReward
from headrace.types import AttemptKey, Episode, Outcome, PolicyVersion, Score, Task, Trace, Turn

NUM_TASKS = 64


def result(proxy: Sequence[float], gold: Sequence[float], update: int = 0, lineage: int = 0) -> EvaluationResult:
    """One sampled reply for each task."""
    tasks = tuple(
        TaskResult(
            task_id=str(i),
            content_hash=str(i),
            sampled=(Attempt(score=p, components={"reward": p, "gold": g}),),
        )
        for i, (p, g) in enumerate(zip(proxy, gold, strict=True))
    )
    return EvaluationResult(
        tasks=tasks, num_samples=1, greedy=False, versions=(PolicyVersion(lineage, update),), duration_s=1.0
    )


def noisy(proxy: float, gold: float, rng: random.Random, num: int = NUM_TASKS, update: int = 0) -> EvaluationResult:
    return result([rng.gauss(proxy, 0.5) for _ in range(num)], [rng.gauss(gold, 0.3) for _ in range(num)], update)


def alarms(curve: Sequence[tuple[float, float]], seed: int = 0, num: int = NUM_TASKS) -> list[float]:
    """``gold/over_optimised`` after each (proxy, gold) mean."""
    check, rng = GoldCheck(), random.Random(seed)
    found = []
    for update, (proxy, gold) in enumerate(curve):
        proxies = {str(i): rng.gauss(proxy, 0.5) for i in range(num)}
        metrics = check.judge(update, proxies, {str(i): rng.gauss(gold, 0.3) for i in range(num)})
        found.append(metrics["gold/over_optimised"])
    return found


def test_alarm_needs_two_checks_in_a_row() -> None:
    """FAILURES 168: proxy up, gold down, both beyond chance, twice."""
    rising = [(0.0, 0.0), (1.0, 0.5), (2.0, 0.0), (2.5, -0.5), (2.5, -0.5)]
    assert alarms(rising) == [0.0, 0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "curve",
    [
        [(i, i / 10) for i in range(8)],  # both rise
        [(i, 0.5) for i in range(8)],  # gold stands
        [(-i, -i / 10) for i in range(8)],  # both fall: that is a collapse
        [(1.0, -i / 10) for i in range(8)],  # the proxy stands
        [(0.0, 0.5), (2.0, 0.0), (2.0, 0.6), (3.0, 0.0), (3.0, 0.7)],  # one low check at a time
    ],
)
def test_no_alarm_without_its_parts(curve: Sequence[tuple[float, float]]) -> None:
    for seed in range(5):
        assert not any(alarms(curve, seed))


def test_the_alarm_ends_when_gold_comes_back() -> None:
    assert alarms([(0, 0.5), (2, -0.5), (2, -0.5), (2, 0.6)]) == [0.0, 0.0, 1.0, 0.0]


def test_the_reference_is_the_best_check_so_far() -> None:
    """Gold that rose first and fell later has fallen, although it stands above its start."""
    check, rng = GoldCheck(), random.Random(0)
    for update, (p, g) in enumerate([(0, -0.5), (1, 0.8), (2, 0.2), (2.5, 0.2)]):
        metrics = check.add(10 * update, noisy(p, g, rng))
    assert metrics["gold/over_optimised"] == 1.0
    assert metrics["gold/reference_update"] == 10.0
    assert metrics["gold/change"] == pytest.approx(-0.6, abs=0.15)
    assert metrics["gold/change"] < metrics["gold/change_high"] < 0 < metrics["gold/proxy_change_low"]


def test_false_alarms_are_rare() -> None:
    """Proxy rises, gold stands: over 40 evaluations of each of 100 runs, at most 2 runs raise the alarm."""
    curve = [(i / 4, 0.3) for i in range(40)]
    assert sum(any(alarms(curve, seed, num=24)) for seed in range(100)) <= 2


def test_a_fall_of_one_standard_deviation_is_seen() -> None:
    """Power: with 64 tasks a lasting fall by the spread of single replies is found in every one of 50 runs."""
    curve = [(0.0, 0.0), (1.0, 0.3), (2.0, 0.0), (2.0, 0.0), (2.0, 0.0)]
    assert all(alarms(curve, seed)[-1] for seed in range(50))


def test_few_tasks_and_invalid_results_are_silent() -> None:
    assert not any(alarms([(0, 1), (5, -1), (5, -1), (5, -1)], num=7))
    check = GoldCheck()
    broken = EvaluationResult(
        tasks=(TaskResult(task_id="0", content_hash="0", sampled=(Attempt(score=None, error="x"),)),),
        num_samples=1,
        greedy=False,
        versions=(),
    )
    assert check.add(0, broken) == {}


def test_health_says_what_to_do_and_may_stop() -> None:
    for level in ("warn", "stop"):
        monitor = HealthMonitor(GuardsConfig(), on_over_optimisation=level)  # type: ignore[arg-type]
        check, rng = GoldCheck(), random.Random(0)
        for step, (p, g) in enumerate([(0, 0), (1, 0.5), (2, -0.5), (2, -0.5)], start=1):
            found = monitor.update({"step": step, **check.add(step, noisy(p, g, rng))})
        [alarm] = found
        assert alarm.name == "over_optimisation" and alarm.level == level and alarm.is_new
        assert "since update 2" in alarm.message and "algorithm.kl.coefficient" in alarm.message
        # between evaluations it goes on
        [again] = monitor.update({"step": 5})
        assert not again.is_new


def test_a_resumed_run_remembers_its_reference(tmp_path: Path) -> None:
    """Recorded evaluations of the surviving branch, the last lineage's where two have one number."""
    folder = tmp_path / "evaluations"
    folder.mkdir()
    for update, lineage, gold in ((0, 0, 0.1), (5, 0, 0.2), (5, 1, 0.3), (10, 0, 0.4)):
        item = result([0.0] * 8, [gold] * 8, update, lineage)
        (folder / f"version-{lineage}.{update}.json").write_text(item.to_json())
    found = recorded_evaluations(tmp_path, 5)
    assert [(u, r.component("gold").mean) for u, r in found] == [  # type: ignore[union-attr]
        (0, pytest.approx(0.1)),
        (5, pytest.approx(0.3)),
    ]


# --------------------------------------------------------------------------------------------------- wiring


def test_gold_is_a_component_that_pays_nothing() -> None:
    """Never trained on: the value is the reward's alone."""
    proxy = CompositeReward([Part(CallableReward(lambda reply: 0.25, name="learned"), 2.0)])
    gold = CompositeReward([Part(CallableReward(lambda reply: 0.75, name="rule"), 1.0)])
    both = with_gold(proxy, gold)
    episode = Episode(
        key=AttemptKey(0, 0),
        task=Task(id="t", messages=()),
        turns=(Turn(reply="x"),),
        trace=Trace(),
        outcome=Outcome.DONE,
    )
    score = asyncio.run(both.score(episode))
    assert isinstance(score, Score)
    assert score.value == 0.5 and both.value_range == proxy.value_range
    assert score.components["gold"] == 0.75 and score.components["reward"] == 0.5
    assert score.components["gold/rule"] == 0.75 and score.components["reward/learned"] == 0.25


def run_data(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": "x"},
        "tasks": {"type": "arithmetic"},
        "rewards": [{"type": "last_number"}],
        "gold": {"rewards": [{"type": "exact"}]},
        **sections,
    }


def test_gold_without_evaluation_is_an_error() -> None:
    """I20: it would never be asked."""
    with pytest.raises(ConfigError, match=r"gold has no effect.*evaluation is off"):
        check_config(restore_config(run_data(), "x"))
    check_config(restore_config(run_data(evaluation={"every": 5}), "x"))


def test_wrong_gold_reward_names_its_key() -> None:
    from headrace.wiring import check_before_work

    data = run_data(evaluation={"every": 5}, gold={"rewards": [{"type": "exakt"}]})
    with pytest.raises(ConfigError, match=r"gold\.rewards\[0\]\.type = 'exakt'.*did you mean 'exact'"):
        check_before_work(restore_config(data, "x"))
