"""I20: options of the algorithm that the rest of the configuration leaves without effect."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.checked import check_before_work
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {
    "algorithm.clip_low": {"clip_low": 0.1},
    "algorithm.clip_high": {"preset": "gmpo", "clip_high": 0.1},
    "algorithm.dual_clip": {"dual_clip": 3.0},
    "algorithm.ratio_level": {"ratio_level": "sequence"},
    "algorithm.temperature_positive": {"preset": "sapo", "temperature_positive": 2.0},
    "algorithm.temperature_negative": {"preset": "sapo", "temperature_negative": 2.0},
    "algorithm.trust_low": {"preset": "dppo_tv", "ratio_anchor": "proximal", "trust_low": 0.2},
    "algorithm.trust_high": {"preset": "dppo_kl", "ratio_anchor": "proximal", "trust_high": 0.2},
    "algorithm.ratio_cap": {"preset": "dppo_kl", "ratio_anchor": "proximal", "ratio_cap": 2.0},
    "algorithm.penalty": {"preset": "dro", "penalty": 0.2},
    "algorithm.correction.max_drift": {"correction": {"max_drift": 0.1}},
    "algorithm.selection.penalty": {"preset": "kl_cov", "selection": {"penalty": 0.1}},
}


def run(algorithm: dict[str, Any], num_minibatches: int = 1, reward: dict[str, Any] | None = None) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "tasks": {"type": "arithmetic"},
            "rewards": [reward or {"type": "exact"}],
            "algorithm": algorithm,
            "trainer": {"num_minibatches": num_minibatches},
        }
    )
    check_before_work(config)


@pytest.mark.parametrize("key", OPTIONS)
def test_options_of_the_ratio_need_a_second_step(key: str) -> None:
    """F63: on the only step of a batch the ratio to the proximal policy is 1, and nothing can act on it."""
    with pytest.raises(ConfigError) as caught:
        run(OPTIONS[key])
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [key]
    run(OPTIONS[key], num_minibatches=2)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "dppo_tv", "trust_low": 0.2},
        {"preset": "aipo", "clip_high": 1.0},
        {"preset": "m2po", "selection": {"threshold": 0.1}},
        {"preset": "m2po", "ratio_anchor": "proximal", "selection": {"threshold": 0.1}},
        {"ratio_anchor": "behaviour", "clip_high": 0.1, "correction": {"max_drift": 0.1}},
        {"clip_high": 0.1, "correction": {"proximal": "interpolated"}},
    ],
    ids=str,
)
def test_another_anchor_gives_one_step_a_ratio(algorithm: dict[str, Any]) -> None:
    """Against the policy that sampled, or an interpolated one, the ratio is not 1 on the first step either."""
    run(algorithm)


@pytest.mark.parametrize("section", ["supervised", "distillation"])
def test_streams_that_a_run_does_not_make_are_refused(section: str) -> None:
    """A training run has no supervised sample and no teacher."""
    with pytest.raises(ConfigError, match=rf"algorithm\.{section} has no effect"):
        run({section: {"coefficient": 0.5}})


def test_negative_rewards_are_refused_at_start_where_the_mean_divides() -> None:
    """FAILURES 66: MaxRL takes rewards from 0 up; a reward that can be negative is refused before any work."""
    negative = {"type": "exact", "weight": -1.0}
    with pytest.raises(ConfigError, match="divides by the mean reward of a group"):
        run({"preset": "maxrl"}, reward=negative)
    run({"preset": "maxrl"})
    run({"preset": "opo"}, reward=negative)


def test_remax_takes_groups_of_one() -> None:
    """Each episode is compared with the greedy reply, not with the group."""
    config = RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "tasks": {"type": "arithmetic"},
            "rewards": [{"type": "exact"}],
            "algorithm": {"preset": "remax"},
            "rollout": {"group_size": 1, "min_group_size": 1},
        }
    )
    assert check_before_work(config).algorithm.needs.greedy_baseline
