"""The gold standard and the over-optimisation alarm: the rule by hand, its false alarms, and how it is wired."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.config.checks import check_config
from headrace.config.load import restore_config
from headrace.config.schema import GuardsConfig
from headrace.errors import ConfigError
from headrace.evaluation.gold import GoldCheck, recorded_evaluations
from headrace.evaluation.result import Attempt, EvaluationResult, TaskResult, compare
from headrace.loop_eval import evaluate_checkpoint
from headrace.monitor.health import HealthMonitor
from headrace.rewards.composite import CompositeReward, Part, with_gold
from headrace.rewards.in_process import CallableReward
from headrace.testing import SMALL_ALPHABET, save_tiny
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


def test_gold_may_be_at_its_best_when_the_proxy_has_done_its_way() -> None:
    """A run that was seen: gold is ruined while the proxy creeps on, less than a clear step above the best check."""
    curve = [(0.0, 0.0), (0.4, 0.1), (0.8, 0.15), (1.0, -0.1), (1.0, -0.45), (1.05, -0.6), (1.1, -0.6)]
    for seed in range(20):
        assert alarms(curve, seed)[-1] == 1.0


def test_where_both_fall_after_a_rise_it_is_a_collapse() -> None:
    for seed in range(20):
        assert not any(alarms([(0.0, 0.0), (1.0, 0.5), (2.0, 0.8), (1.0, 0.2), (0.8, 0.0), (0.8, 0.0)], seed))


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
    assert metrics["gold/change"] < metrics["gold/change_high"] < 0 < metrics["gold/proxy_rise_low"]
    assert metrics["gold/proxy_rise_low"] < metrics["gold/proxy_rise"] == pytest.approx(2.5, abs=0.3)
    assert metrics["gold/proxy_change"] == pytest.approx(1.5, abs=0.3)


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
    from headrace.checked import check_before_work

    data = run_data(evaluation={"every": 5}, gold={"rewards": [{"type": "exakt"}]})
    with pytest.raises(ConfigError, match=r"gold\.rewards\[0\]\.type = 'exakt'.*did you mean 'exact'"):
        check_before_work(restore_config(data, "x"))


# ------------------------------------------------------------------------------------------ headrace eval


RULE = Path(__file__).parents[2] / "examples" / "rlhf" / "rule.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    one, other = (
        save_tiny(folder / str(seed), alphabet=SMALL_ALPHABET, hidden_size=16, num_layers=1, num_heads=2, seed=seed)
        for seed in (0, 1)
    )
    return one, other


def run_file(folder: Path, model: Path, gold: str) -> Path:
    (folder / "proxy.py").write_text(
        "import headrace\n\n@headrace.reward(value_range=(0.0, 100.0))\n"
        "def proxy(reply: str) -> float:\n    return float(len(reply))\n"
    )
    file = folder / "run.toml"
    file.write_text(
        f'[model]\npath = "{model}"\n[tasks]\ntype = "python"\nfactory = "{RULE}:tasks"\n'
        f'[[rewards]]\ntype = "{folder / "proxy.py"}:proxy"\n{gold}[sampling]\nmax_new_tokens = 6\n'
        "[evaluation]\nevery = 1\nnum_samples = 2\nnum_tasks = 12\ngreedy = false\n[engine]\nnum_threads = 1\n"
    )
    return file


def test_eval_reports_the_gold_standard(
    tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``headrace eval`` judges by [gold], too: a column with its interval, a row of the comparison, both in the file;
    the value stays the reward's."""
    monkeypatch.setenv("COLUMNS", "240")
    one, other = models
    with_gold_file = str(run_file(tmp_path, one, f'[gold]\n[[gold.rewards]]\ntype = "{RULE}:gold"\n'))
    written = tmp_path / "result.json"
    assert main(["eval", str(one), "--tasks", with_gold_file, "--output", str(written)]) == 0
    out = capsys.readouterr().out
    found = EvaluationResult.from_json(written.read_text())
    gold, value = found.gold(), found.accuracy("sampled")
    assert gold is not None and value is not None and "gold" in out.splitlines()[2] and str(gold) in out
    assert -1.0 <= gold.mean < 1.0 and value.mean > 1.0  # a length is no rule
    assert main(["eval", str(one), "--tasks", with_gold_file, "--against", str(other)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.strip("│ ").startswith("gold")]
    assert main(["eval", str(one), "--tasks", with_gold_file, "--against", str(other), "--output", str(written)]) == 2
    assert "--output holds one result" in capsys.readouterr().err


def test_eval_without_a_gold_standard_shows_none(
    tmp_path: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward that is called gold is no gold standard."""
    monkeypatch.setenv("COLUMNS", "240")
    file = run_file(tmp_path, models[0], "")
    file.write_text(file.read_text().replace(f"{tmp_path / 'proxy.py'}:proxy", f"{RULE}:gold"))
    [found] = evaluate_checkpoint(str(models[0]), tasks_from=file)
    assert found.component("gold") is not None and found.gold() is None and compare(found, found).gold is None
    assert "gold" not in capsys.readouterr().out


def test_dry_run_lists_the_gold_check(
    tmp_path: Path, models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'[gold]\non_over_optimisation = "stop"\n[[gold.rewards]]\ntype = "{RULE}:gold"\n'
    assert main(["train", str(run_file(tmp_path, models[0], text)), "--dry-run"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gold check")]
    assert f"{RULE}:gold x 1, on the sampled replies of each evaluation" in line and line.endswith("stops the run")
    assert main(["train", str(run_file(tmp_path, models[0], "")), "--dry-run"]) == 0
    assert "gold check" not in capsys.readouterr().out
