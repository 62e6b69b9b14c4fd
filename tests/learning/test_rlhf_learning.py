"""RLHF end to end on the smallest model (issue 3, end criterion 3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rlhf_fixture
from rlhf_fixture import Pipeline, alarm_updates, build, policy, run_dpo


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return build(tmp_path_factory.mktemp("rlhf"))


def test_sft_lowers_held_out_loss(pipeline: Pipeline) -> None:
    """Beyond the interval, and to near the entropy of the careless writer (2.3 nats a letter, less at the end)."""
    first, last = pipeline.sft.first_metrics, pipeline.sft.metrics
    assert first["eval/nll_low"] > 3.5
    assert last["eval/nll_high"] < 2.45


def test_reward_model_ranks_held_out_pairs(pipeline: Pipeline) -> None:
    last = pipeline.reward_model.metrics
    assert pipeline.reward_model.first_metrics["eval/accuracy"] == 0.5
    assert last["eval/accuracy_low"] > 0.85
    assert last["eval/ece"] < 0.25
    folder = pipeline.reward_model.export
    assert (folder / "calibration.png").is_file() and json.loads((folder / "calibration.json").read_text())["bins"]


def test_honest_policy_raises_gold(pipeline: Pipeline) -> None:
    """With a reference KL gold rises beyond its interval, and there is no alarm."""
    result = policy(pipeline, "honest", kl=0.3)
    (_, first), (_, last) = result.evaluations[0], result.evaluations[-1]
    before, after = first.component("gold"), last.component("gold")
    assert before is not None and after is not None and before.high < after.low
    assert alarm_updates(result) == []
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    # gold was judged on held-out tasks only: no batch of training carries it
    assert not any(key.startswith("reward/component/gold") for line in lines for key in line)
    assert sum("gold/mean" in line for line in lines) == 6


def test_over_optimised_policy_raises_the_alarm(pipeline: Pipeline) -> None:
    """FAILURES 168: without a KL the proxy rises and gold falls."""
    result = policy(pipeline, "greedy", kl=0.0)
    best = max(e.component("gold").mean for _, e in result.evaluations)  # type: ignore[union-attr]
    _, last = result.evaluations[-1]
    proxy, gold = last.component("reward"), last.component("gold")
    assert proxy is not None and gold is not None and proxy.low > 1.0 and gold.high < best
    assert alarm_updates(result)


def test_dpo_ranks_held_out_pairs(pipeline: Pipeline) -> None:
    result = run_dpo(pipeline)
    assert result.first_metrics["eval/accuracy"] == pytest.approx(0.5, abs=0.1)  # rounding alone decides
    assert result.first_metrics["eval/pair_loss"] == pytest.approx(0.6931, abs=1e-3)
    assert result.metrics["eval/accuracy_low"] > 0.75
    assert result.metrics["eval/pair_loss"] < 0.65


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 205))
def test_alarm_in_five_of_five_and_none_of_five(tmp_path: Path, seed: int) -> None:
    """Issue 3, end criterion 3: each seed has data, model, reward model, policies of its own. The settings were found
    on seeds 0 to 4; the rule was changed after seed 101 had shown a ruined policy without an alarm. These seeds were
    run once, untouched. Whoever changes settings or rule takes other seeds."""
    pipeline = build(tmp_path, seed)
    honest = policy(pipeline, "honest", kl=0.3, seed=seed)
    greedy = policy(pipeline, "greedy", kl=0.0, num_batches=16, seed=seed)
    before, after = (honest.evaluations[i][1].component("gold") for i in (0, -1))
    print(f"seed {seed}: gold {before} -> {after}; alarms at {alarm_updates(greedy)}; greedy gold "
          f"{greedy.evaluations[-1][1].component('gold')}")  # fmt: skip
    assert before is not None and after is not None and before.high < after.low
    assert alarm_updates(honest) == []
    assert alarm_updates(greedy)


def test_the_rule_is_what_it_says() -> None:
    """The docstring's formula, by hand."""
    gold = rlhf_fixture.rule.gold_value
    assert gold("aeiouaei") == 1.0 and gold("") == gold(":.") == -1.0 and gold("bb") == -0.25
    assert gold("aeiouaeiou") == pytest.approx(1.0 - 0.3) and gold("a" * 40) == -1.0
