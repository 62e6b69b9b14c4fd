"""What only the wiring can refuse, since it knows configuration and algorithm at once."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.wiring import check_before_work


def run(preset: str, *, sections: dict[str, Any] | None = None, **parallel: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "tasks": {"type": "arithmetic"},
            "rewards": [{"type": "last_number"}],
            "algorithm": {"preset": preset},
            "trainer": {"num_minibatches": 2},
            "parallel": parallel,
            **(sections or {}),
        }
    )


def test_a_choice_over_the_whole_minibatch_is_refused_on_several_processes() -> None:
    """I20, F55: each process would choose over its own part only, or not at all."""
    with pytest.raises(ConfigError, match="chooses tokens or weights over a whole minibatch"):
        check_before_work(run("clip_cov", dp_shard=2))
    assert check_before_work(run("clip_cov")).algorithm.needs.prepare
    assert not check_before_work(run("grpo", dp_shard=2)).algorithm.needs.prepare


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_is_refused_on_several_processes(kind: str) -> None:
    """I20: one error, before work, instead of a critic that trains nowhere."""
    sections = {"critic": {"type": kind}}
    with pytest.raises(ConfigError) as caught:
        check_before_work(run("ppo_critic", sections=sections, dp_shard=2))
    (problem,) = caught.value.problems
    assert problem.startswith("[critic] with 2 processes: a critic trains in one process only")
    assert check_before_work(run("ppo_critic", sections=sections)).algorithm.needs.values


def test_several_processes_compute_on_the_cpu() -> None:
    """I20: their mesh is of CPUs, so that a GPU which was asked for would go unused, or hold one half of the run."""
    model = {"path": "unused", "device": "cuda"}
    with pytest.raises(ConfigError) as caught:
        check_before_work(run("grpo", sections={"model": model}, tp=2))
    (problem,) = caught.value.problems
    assert problem.startswith('model.device = "cuda" with 2 processes')
    assert check_before_work(run("grpo", sections={"model": model}))
    assert check_before_work(run("grpo", sections={"model": {"path": "unused"}}, tp=2))
