"""On-policy distillation: a half-taught model learns from a better one's probabilities of its own replies alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import reversal

from headrace.config.schema import RunConfig
from headrace.run import train


@pytest.mark.timeout(600)
def test_the_policy_learns_from_a_teacher_without_rewards(tmp_path: Path) -> None:
    """String reversal: sampled accuracy on fresh words gains at least 0.15, no token of the rl stream is trained, and
    the divergence from the teacher falls."""
    student = reversal.warmed_up_model(tmp_path / "student", seed=0, accuracy=0.35)
    teacher = reversal.warmed_up_model(tmp_path / "teacher", seed=0, accuracy=0.9)
    data = reversal.run_config(
        student,
        tmp_path,
        "distilled",
        teacher={"path": str(teacher), "stream": "distillation"},
        algorithm={"preset": "grpo"},
        trainer={"num_batches": 40},
        evaluation={"at_start": True, "at_end": True, "greedy": False, "num_samples": 2},
    )
    result = train(RunConfig.model_validate(data))
    before, after = (e.metrics()["eval/sampled_accuracy"] for _, e in result.evaluations)
    assert after - before >= 0.15, (before, after)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    kl = [line["distillation/kl"] for line in lines]
    assert len(kl) == 40 and sum(kl[-10:]) < 0.7 * sum(kl[:10])
