"""Environments by name, and the single-turn one."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from headrace.environments.registry import check_environments, environment_factory, environment_names, make_environment
from headrace.environments.single_turn import SingleTurn
from headrace.environments.task_list import TaskList
from headrace.errors import ConfigError
from headrace.protocols import Environment
from headrace.types import Task

TASK = Task(id="a", messages=({"role": "user", "content": "3 * 4?"},), answer="12")


def test_single_turn_shows_the_task_and_ends_after_one_reply() -> None:
    async def play() -> None:
        environment = make_environment(TASK)
        assert isinstance(environment, Environment)
        first = await environment.reset(TASK, seed=0)
        assert (first.messages, first.done) == (TASK.messages, False)
        last = await environment.step("12")
        assert (last.messages, last.done) == ((), True)
        await environment.close()

    asyncio.run(play())


def test_single_turn_is_single_use() -> None:
    async def misuse() -> None:
        environment = SingleTurn()
        with pytest.raises(RuntimeError, match="reset\\(\\) comes first"):
            await environment.step("12")
        await environment.reset(TASK, seed=0)
        with pytest.raises(RuntimeError, match="make a new one"):
            await environment.reset(TASK, seed=0)
        await environment.step("12")
        with pytest.raises(RuntimeError, match="one step ends"):
            await environment.step("12")

    asyncio.run(misuse())


def test_unknown_environment_names_the_nearest() -> None:
    assert "single_turn" in environment_names()
    with pytest.raises(ConfigError, match="no environment 'single_trun'; did you mean 'single_turn'"):
        environment_factory("single_trun")


def test_a_task_of_an_unknown_environment_fails_before_work_starts() -> None:
    bad = Task(id="b", messages=TASK.messages, environment="browser_x")
    check_environments([TaskList([TASK])])
    with pytest.raises(ConfigError, match="task 'b': there is no environment 'browser_x'"):
        check_environments([TaskList([TASK]), TaskList([TASK, bad])])


def test_environments_and_rewards_import_without_torch() -> None:
    """DESIGN.md section 3: these rooms import without torch, vllm or ray (and without sympy or reasoning-gym)."""
    code = (
        "import sys, headrace.environments.tasks, headrace.environments.registry, headrace.rewards.build, "
        "headrace.cli.reward, headrace.rewards.judges; "
        "print([m for m in ('torch', 'vllm', 'ray', 'sympy', 'reasoning_gym', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
