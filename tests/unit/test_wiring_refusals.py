"""What only the wiring can refuse, since it knows configuration and algorithm at once."""

from __future__ import annotations

import pytest

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.wiring import check_before_work


def run(preset: str, **parallel: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "tasks": {"type": "arithmetic"},
            "rewards": [{"type": "last_number"}],
            "algorithm": {"preset": preset},
            "trainer": {"num_minibatches": 2},
            "parallel": parallel,
        }
    )


def test_a_choice_over_the_whole_minibatch_is_refused_on_several_processes() -> None:
    """I20, F55: each process would choose over its own part only, or not at all."""
    with pytest.raises(ConfigError, match="chooses tokens or weights over a whole minibatch"):
        check_before_work(run("clip_cov", dp_shard=2))
    assert check_before_work(run("clip_cov")).algorithm.needs.prepare
    assert not check_before_work(run("grpo", dp_shard=2)).algorithm.needs.prepare
