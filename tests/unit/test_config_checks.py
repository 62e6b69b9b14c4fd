"""I20: each option without effect, and each contradiction, ends the run before it starts, naming key and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.checks import AlgorithmTraits, check_config
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.protocols import EngineCapabilities

CAPABLE = EngineCapabilities(kept_ids=True, in_flight_updates=True, max_context=2048)
GRPO = AlgorithmTraits(group_relative=True, dynamic_sampling=False)


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": "smollm2-135m"},
        "tasks": {"type": "arithmetic"},
        "rewards": [{"type": "last_number"}],
    }
    return RunConfig.model_validate(base | sections)


def problems(run: RunConfig, **facts: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check_config(run, **facts)
    return caught.value.problems


FILE = {"type": "file", "path": "tasks.jsonl"}

WITHOUT_EFFECT_OR_CONTRADICTORY: list[tuple[dict[str, Any], str]] = [
    ({"rollout": {"on_overage": "mask"}}, "rollout.on_overage has no effect: rollout.max_staleness is 0"),
    ({"rollout": {"on_overage": "wait"}}, "rollout.on_overage has no effect"),
    ({"engine": {"kv_policy": "recompute"}}, "engine.kv_policy has no effect: rollout.max_staleness is 0"),
    ({"engine": {"weights": "copy"}}, 'engine.weights = "copy" has no effect but memory'),
    ({"rollout": {"group_size": 2, "min_group_size": 3}}, "rollout.min_group_size = 3 is above rollout.group_size = 2"),
    ({"rollout": {"group_size": 1}}, "rollout.min_group_size = 2 is above rollout.group_size = 1"),
    ({"rollout": {"group_size": 8, "max_concurrent": 4}}, "rollout.max_concurrent = 4 is below rollout.group_size"),
    ({"rollout": {"on_failure": "shrink", "max_retries": 1}}, "rollout.max_retries has no effect"),
    ({"rollout": {"on_failure": "discard", "max_retries": 1}}, "rollout.max_retries has no effect"),
    ({"rollout": {"on_failure": "discard", "min_group_size": 2}}, "rollout.min_group_size has no effect"),
    ({"rollout": {"generation_deadline_s": 9, "episode_deadline_s": 8}}, "rollout.generation_deadline_s = 9.0 has no"),
    (
        {"rollout": {"groups_per_batch": 2, "group_size": 2}, "trainer": {"num_minibatches": 5}},
        "trainer.num_minibatches = 5 is above the 4 episodes",
    ),
    ({"sampling": {"top_p": 0.9}, "engine": {"carry_kept_ids": False}}, "sampling.top_p = 0.9 with engine.carry_kept"),
    ({"sampling": {"top_k": 5}, "engine": {"carry_kept_ids": False}}, "sampling.top_k = 5 with engine.carry_kept_ids"),
    ({"engine": {"carry_kept_ids": True}}, "engine.carry_kept_ids has no effect: sampling is not truncated"),
    ({"sampling": {"stop_strings": ["a", ""]}}, "would end every reply at once"),
    ({"engine": {"max_context": 64}, "sampling": {"max_new_tokens": 64}}, "leaves no room for a prompt"),
    ({"tasks": {"type": "arithmetic", "min_operand": 5, "max_operand": 4}}, "tasks.min_operand = 5 is above"),
    ({"tasks": {"type": "arithmetic", "min_operand": 4, "max_operand": 4}}, "one problem cannot be split"),
    ({"tasks": FILE | {"held_out_path": "b.jsonl", "held_out_fraction": 0.1}}, "are both set"),
    ({"tasks": FILE, "evaluation": {"at_end": True}}, "evaluation is on, but there are no held-out tasks"),
    (
        {"trainer": {"router_aux_coefficient": 0.1, "skip_zero_gradient": True}},
        "trainer.skip_zero_gradient has no effect: with trainer.router_aux_coefficient = 0.1",
    ),
    (
        {"trainer": {"router_replay": True}, "critic": {"type": "shared"}},
        "trainer.router_replay with [critic]",
    ),
    ({"trainer": {"schedule": {"final_fraction": 0.1}}}, "trainer.schedule.final_fraction has no effect"),
    (
        {"trainer": {"num_batches": 5, "schedule": {"warmup_steps": 5}}},
        "trainer.schedule.warmup_steps = 5, but the run",
    ),
    ({"guards": {"max_ratio_error_bfloat16": 0.1}}, "guards.max_ratio_error_bfloat16 has no effect"),
    (
        {"model": {"path": "x", "dtype": "bfloat16"}, "guards": {"max_ratio_error_float32": 0.1}},
        "guards.max_ratio_error_float32 has no effect",
    ),
    ({"evaluation": {"num_tasks": 5}}, "evaluation.num_tasks has no effect: evaluation is off"),
    ({"evaluation": {"num_samples": 5}}, "evaluation.num_samples has no effect"),
    ({"evaluation": {"greedy": False}}, "evaluation.greedy has no effect"),
    ({"evaluation": {"deadline_s": 5}}, "evaluation.deadline_s has no effect"),
    ({"monitor": {"sink_options": {"wandb": {}}}}, "monitor.sink_options.wandb has no effect"),
    ({"monitor": {"sinks": ["wandb", "wandb"]}}, 'monitor.sinks lists "wandb" twice'),
    ({"checkpoint": {"overlap": True, "every": 0}}, "checkpoint.overlap has no effect: checkpoint.every is 0"),
    ({"checkpoint": {"overlap": True}, "parallel": {"tp": 2}}, "checkpoint.overlap with 2 processes"),
    ({"name": ".."}, 'name = ".." would put the run outside'),
]


@pytest.mark.parametrize(("sections", "expected"), WITHOUT_EFFECT_OR_CONTRADICTORY)
def test_refused(sections: dict[str, Any], expected: str) -> None:
    """I20, and nothing else is refused: exactly one problem, and it is this one."""
    found = problems(config(**sections))
    assert len(found) == 1, found
    assert expected in found[0]


ACCEPTED: list[dict[str, Any]] = [
    {},
    {"rollout": {"max_staleness": 1, "on_overage": "mask"}, "engine": {"kv_policy": "keep", "weights": "copy"}},
    {"rollout": {"group_size": 1, "min_group_size": 1}},
    {"rollout": {"max_retries": 0}},
    {"rollout": {"on_failure": "shrink", "min_group_size": 3}},
    {"rollout": {"generation_deadline_s": 9.0}},
    {"rollout": {"episode_deadline_s": 9.0}},
    {"rollout": {"groups_per_batch": 2, "group_size": 2}, "trainer": {"num_minibatches": 4}},
    {"sampling": {"top_p": 0.9}, "engine": {"carry_kept_ids": True}},
    {"sampling": {"top_k": 0, "top_p": 1.0}},
    {"engine": {"max_context": 65}, "sampling": {"max_new_tokens": 64}},
    {"tasks": FILE},
    {"tasks": FILE | {"held_out_fraction": 0.1}, "evaluation": {"every": 5, "num_tasks": 3}},
    {"trainer": {"num_batches": 5, "schedule": {"type": "linear", "warmup_steps": 4, "final_fraction": 0.1}}},
    {"trainer": {"num_batches": 2}, "evaluation": {"every": 10}, "checkpoint": {"every": 10}},
    {"trainer": {"router_aux_coefficient": 0.1, "skip_zero_gradient": False}},
    {"trainer": {"router_aux_coefficient": 0.0, "skip_zero_gradient": True}},
    {"guards": {"max_ratio_error_float32": 0.01}},
    {"evaluation": {"at_start": True, "greedy": False}},
    {"monitor": {"sinks": ["wandb"], "sink_options": {"wandb": {}}}},
]


@pytest.mark.parametrize("sections", ACCEPTED)
def test_accepted_where_the_option_has_an_effect(sections: dict[str, Any]) -> None:
    """The counterpart of each refusal: with its effect present, the option passes (a check that always fires fails)."""
    before = config(**sections)
    check_config(before, engine_capabilities=CAPABLE)
    assert before == config(**sections)


def test_all_problems_come_in_one_error() -> None:
    found = problems(config(rollout={"on_overage": "mask"}, evaluation={"greedy": True}))
    assert [problem.split()[0] for problem in found] == ["rollout.on_overage", "evaluation.greedy"]


# ---------------------------------------------------------------------------- what engine and algorithm can do


def test_group_of_one_is_an_error_for_group_relative_advantages_only() -> None:
    """DESIGN.md, noun Group: size 1 is an error for group-relative advantages."""
    run = config(rollout={"group_size": 1, "min_group_size": 1})
    assert "rollout.group_size = 1 with the group-relative advantages" in problems(run, algorithm=GRPO)[0]
    check_config(run, algorithm=AlgorithmTraits(group_relative=False, dynamic_sampling=False))


def test_filter_factor_needs_dynamic_sampling() -> None:
    run = config(rollout={"max_filter_factor": 4})
    assert "rollout.max_filter_factor has no effect" in problems(run, algorithm=GRPO)[0]
    check_config(run, algorithm=AlgorithmTraits(group_relative=True, dynamic_sampling=True))


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}])
def test_truncated_sampling_needs_an_engine_that_carries_kept_ids(option: dict[str, Any]) -> None:
    """Issue 2, end criterion 6: top-p with importance ratios where the engine cannot carry it."""
    run = config(sampling=option)
    (message,) = problems(run, engine_capabilities=EngineCapabilities(in_flight_updates=True))
    assert "cannot return the kept ids" in message and "two different distributions" in message
    check_config(run, engine_capabilities=CAPABLE)


def test_asynchronous_run_needs_weights_that_change_under_requests() -> None:
    run = config(rollout={"max_staleness": 2})
    for engine, lack in (
        (EngineCapabilities(), "cannot change weights while requests run"),
        (EngineCapabilities(in_flight_updates=True, version_spans=False), "cannot tell which version sampled a token"),
    ):
        assert lack in problems(run, engine_capabilities=engine)[0]
    check_config(run, engine_capabilities=CAPABLE)


def test_engine_context_and_logprobs() -> None:
    run = config(sampling={"max_new_tokens": 64})
    assert "leaves no room for a prompt" in problems(run, engine_capabilities=EngineCapabilities(max_context=64))[0]
    assert "returns no log-probabilities" in problems(run, engine_capabilities=EngineCapabilities(logprobs=False))[0]
    check_config(run, engine_capabilities=EngineCapabilities(max_context=65))


def test_router_replay_needs_an_engine_that_records() -> None:
    run = config(trainer={"router_replay": True})
    (message,) = problems(run, engine_capabilities=EngineCapabilities())
    assert "engine 'transformers' does not record which experts its routers chose" in message
    check_config(run, engine_capabilities=EngineCapabilities(routing_ids=True))


def test_clip_bounds_without_a_second_step_are_refused() -> None:
    """I20, F63: with one optimizer step per rollout batch the ratio is 1, so a clip bound that was set does nothing."""
    with pytest.raises(ConfigError, match=r"algorithm\.clip_high has no effect"):
        check_config(config(algorithm={"clip_high": 0.3}))
    check_config(config(algorithm={"clip_high": 0.3}, trainer={"num_minibatches": 2}))
