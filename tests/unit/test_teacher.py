"""[teacher]: what it says of a batch, how samples change streams, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.fields import Minibatch, Totals
from headrace.checked import check_before_work
from headrace.config.checks import check_config
from headrace.config.load import restore_config
from headrace.config.schema import RunConfig, TrainerConfig
from headrace.errors import ConfigError
from headrace.model.load import load_model
from headrace.teacher import Teacher
from headrace.testing import ALPHABET, SMALL_ALPHABET, make_sample, save_tiny
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, RolloutBatch, Sample


def config(teacher: dict[str, Any] | None, model: str = "x", **sections: Any) -> RunConfig:
    data = {"model": {"path": model}, "tasks": {"type": "arithmetic"}, "rewards": [{"type": "exact"}], **sections}
    return restore_config(data if teacher is None else {**data, "teacher": teacher}, "x")


def samples() -> list[Sample]:
    """Two replies to one prompt, one sampled at temperature 0.5."""
    first, second = (make_sample([9, 10, 11], [12, 13 + m, 14], group=0, member=m) for m in range(2))
    return [first, replace(second, temperature=0.5)]


def batch(of: list[Sample]) -> RolloutBatch:
    return RolloutBatch(index=0, groups=(), samples=tuple(of), version=PolicyVersion(0, 0))


def teacher(tmp_path: Path, **section: Any) -> Teacher:
    path = str(save_tiny(tmp_path / "teacher", seed=3))
    policy = load_model(save_tiny(tmp_path / "policy"))
    made = Teacher.load(config({"path": path, **section}), policy)
    assert made is not None
    return made


def test_marks_each_id_with_its_probability_under_the_teacher(tmp_path: Path) -> None:
    """I1, I4: the same numbers as a trainer over the teacher's own weights gives, at the sample's temperature."""
    made = teacher(tmp_path)
    marked = made.mark(batch(samples())).samples
    expected = PolicyTrainer(load_model(tmp_path / "teacher"), TrainerConfig(), num_steps=1).forward(samples())
    other = PolicyTrainer(load_model(tmp_path / "policy"), TrainerConfig(), num_steps=1).forward(samples())
    for sample, expected_T, other_T in zip(marked, expected, other, strict=True):
        assert sample.teacher_logprobs is not None and sample.stream == "rl"
        torch.testing.assert_close(torch.tensor(sample.teacher_logprobs), expected_T, rtol=0, atol=1e-6)
        assert float((expected_T - other_T).abs().max()) > 1e-3


def test_alone_it_moves_samples_to_its_own_stream(tmp_path: Path) -> None:
    """The rl stream is empty then, and its counts are 0; beside rewards nothing moves."""
    for stream, num_rl, num_distilled in (("rl", 6, 6), ("distillation", 0, 6)):
        made = teacher(tmp_path / stream, stream=stream)
        marked = made.mark(batch(samples())).samples
        minibatch = Minibatch(
            samples=marked,
            advantages=[torch.ones(6) for _ in marked],
            proximal_logprobs=None,
            reference_logprobs=None,
            totals=Totals.count(marked, 7),
        )
        (assigned,) = made.assign([minibatch])
        assert {s.stream for s in assigned.samples} == {stream}
        assert (assigned.totals.num_tokens, assigned.totals.distillation.num_tokens) == (num_rl, num_distilled)
        assert assigned.totals.max_length == 7


def test_options_without_effect_are_refused() -> None:
    """I20."""
    check_config(config({"path": "t"}, algorithm={"distillation": {"coefficient": 0.5}}))
    check_config(config({"path": "t", "stream": "distillation"}, algorithm={"preset": "grpo"}))
    with pytest.raises(ConfigError, match=r"algorithm\.distillation has no effect.*teacher\.path"):
        check_config(config(None, algorithm={"distillation": {"coefficient": 0.5}}))
    with pytest.raises(ConfigError, match=r"teacher has no effect: algorithm\.distillation\.coefficient is 0"):
        check_config(config({"path": "t"}, algorithm={"distillation": {"coefficient": 0.0}}))
    with pytest.raises(ConfigError, match=r"algorithm\.clip_high has no effect: teacher\.stream"):
        algorithm = {"preset": "grpo", "clip_high": 0.3}
        trainer = {"num_minibatches": 2}
        check_config(config({"path": "t", "stream": "distillation"}, algorithm=algorithm, trainer=trainer))


def test_dynamic_sampling_by_rewards_is_refused_where_they_do_not_train() -> None:
    with pytest.raises(ConfigError, match=r"'dapo' replaces groups by their rewards"):
        check_before_work(config({"path": "t", "stream": "distillation"}, algorithm={"preset": "dapo"}))


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Another tokenizer means other text by the same id; too short a context cannot score every reply."""
    policy = load_model(save_tiny(tmp_path / "policy", alphabet=SMALL_ALPHABET, max_context=64))
    other = str(save_tiny(tmp_path / "other", alphabet=ALPHABET, max_context=64))
    with pytest.raises(ConfigError, match=r"teacher\.path: its tokenizer is not the policy's"):
        Teacher.load(config({"path": other}), policy)
    short = str(save_tiny(tmp_path / "short", alphabet=SMALL_ALPHABET, max_context=32))
    with pytest.raises(ConfigError, match=r"allows 32 tokens, but prompt and reply may have 64"):
        Teacher.load(config({"path": short}), policy)
