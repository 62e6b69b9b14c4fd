"""What only the wiring can refuse, since it knows configuration and algorithm at once."""

from __future__ import annotations

from typing import Any

import pytest

from headrace import checked as checking
from headrace import wiring
from headrace.checked import check_before_work
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError


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


def test_several_processes_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """I20: their mesh is of CPUs, so that a GPU which was asked for is refused, and one that is there is left alone."""
    model = {"path": "unused", "device": "cuda"}
    with pytest.raises(ConfigError) as caught:
        check_before_work(run("grpo", sections={"model": model}, tp=2))
    (problem,) = caught.value.problems
    assert problem.startswith('model.device = "cuda" with 2 processes')
    devices = []

    def load(*_: Any, device: str, **__: Any) -> None:
        devices.append(device)
        raise InterruptedError

    monkeypatch.setattr(checking, "load_model", load)
    for config in (run("grpo"), run("grpo", sections={"model": model}), run("grpo", tp=2)):
        assert check_before_work(config)
        with pytest.raises(InterruptedError):
            checking.load_policy(config)
    assert devices == ["auto", "cuda", "cpu"]


def test_the_policys_schedule_leaves_the_warm_up_out() -> None:
    """F69: a schedule counts the optimizer steps that it is read for."""
    sections = {"critic": {"type": "shared", "warmup_batches": 3}, "trainer": {"num_batches": 10, "num_minibatches": 2}}
    checked = check_before_work(run("ppo_critic", sections=sections))
    assert wiring._trainer_options(checked)["num_steps"] == 7 * 2
