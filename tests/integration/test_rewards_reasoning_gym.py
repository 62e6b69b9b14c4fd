"""reasoning-gym: tasks are made in a process of their own and scored by their own generator (I16)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config.schema import ReasoningGymTasks, RewardConfig
from headrace.environments.task_list import TaskSplits
from headrace.environments.tasks import build_tasks
from headrace.environments.tasks_reasoning_gym import reasoning_gym_tasks
from headrace.errors import ConfigError
from headrace.rewards.build import build_rewards
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, Task, Trace, Turn

GENERATORS = (
    "leg_counting",
    "basic_arithmetic",
    "chain_sum",
    "spell_backward",
    "polynomial_multiplication",
    "countdown",
)


def tasks_of(dataset: str, **fields: Any) -> TaskSplits:
    return build_tasks(ReasoningGymTasks(dataset=dataset, **{"size": 3, "held_out_size": 2, **fields}))


def episode(task: Task, reply: str) -> Episode:
    return Episode(key=AttemptKey(0, 0), task=task, turns=(Turn(reply=reply),), trace=Trace(), outcome=Outcome.DONE)


def test_gold_scores_full_marks_and_an_empty_answer_none() -> None:
    """I16, for each generator: gold 1, an empty answer 0, a wrong one less than 1."""

    async def run() -> None:
        reward = build_rewards([RewardConfig(type="reasoning_gym", deadline_s=60)])
        try:
            for dataset in GENERATORS:
                splits = tasks_of(dataset)
                for task in (splits.train[0], splits.held_out[0]):
                    gold = await reward.score(episode(task, f"<think>hm</think> {task.answer}"))
                    empty = await reward.score(episode(task, ""))
                    wrong = await reward.score(episode(task, "I cannot tell"))
                    assert isinstance(gold, Score) and gold.value == 1.0, (dataset, gold)
                    assert isinstance(empty, Score) and empty.value == 0.0, (dataset, empty)
                    assert isinstance(wrong, Score) and wrong.value < 1.0, (dataset, wrong)
        finally:
            await reward.close()

    asyncio.run(run())


def test_tasks_are_the_same_in_every_process_and_json() -> None:
    """I18: one of the four generators that depend on PYTHONHASHSEED, made twice; and the record can hold the task."""
    first, again = (tasks_of("polynomial_multiplication") for _ in range(2))
    assert first.train.fingerprint == again.train.fingerprint
    metadata = dict(first.train[0].metadata)
    assert json.loads(json.dumps(metadata)) == metadata
    assert "reasoning_gym" not in sys.modules


def test_held_out_problems_are_not_training_problems() -> None:
    """Neighbouring seeds of these generators share problems; a small problem space repeats them."""
    splits = tasks_of("chain_sum", size=60, held_out_size=20, options={"max_digits": 1, "max_terms": 2})
    train = {splits.train[i].messages[0]["content"] for i in range(60)}
    held_out = {splits.held_out[i].messages[0]["content"] for i in range(20)}
    assert len(held_out) == 20 and not train & held_out


def test_bad_configuration_is_one_clear_error() -> None:
    for fields, said in (
        ({"dataset": "leg_countin"}, "did you mean 'leg_counting'"),
        ({"dataset": "leg_counting", "options": {"nonsense": 1}}, "refuses tasks.options .*nonsense"),
        ({"dataset": "leg_counting", "options": {"seed": 1}}, "options.seed is set by tasks.seed"),
        (
            {"dataset": "chain_sum", "size": 400, "held_out_size": 300,
             "options": {"max_digits": 1, "max_terms": 2, "allow_negation": False}},
            "held-out problems differ",
        ),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            tasks_of(**fields)


def test_a_generator_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: making tasks has a deadline and a name."""
    config = ReasoningGymTasks(dataset="leg_counting", size=2, held_out_size=1)
    with pytest.raises(ConfigError, match=r"'leg_counting' did not make 2 \+ 1 problems in 0.01 s"):
        reasoning_gym_tasks(config, deadline_s=0.01)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is an extra: its absence is said with the way to install it."""
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('hidden by a test')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[environments\]'"):
        tasks_of("leg_counting")


def test_a_task_of_another_source_is_an_error() -> None:
    async def run() -> None:
        reward = build_rewards([RewardConfig(type="reasoning_gym")])
        try:
            task = Task(id="t", messages=({"role": "user", "content": "?"},), answer="1")
            result = await reward.score(episode(task, "1"))
        finally:
            await reward.close()
        assert isinstance(result, ScoreError) and result.error_class is ErrorClass.MISSING_ANSWER

    asyncio.run(run())
