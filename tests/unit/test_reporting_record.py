"""What a batch says about itself: metrics over its optimizer steps, episodes on disk, alarms that stop."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from loop_runs import metric
from loop_scripted import TASKS, run_scripted, scripted_config

from headrace.algorithms.fields import Minibatch, Totals
from headrace.record.episodes import read_episodes
from headrace.record.metrics import read_metrics
from headrace.reporting import HealthError, TrainRecord, failure_class, named_train_metrics
from headrace.scripted import Reply, ScriptedEngine, ScriptedThread, ScriptedTrainer
from headrace.testing import make_sample
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Outcome,
    PolicyVersion,
    RolloutBatch,
    Score,
    ScoreError,
    Trace,
)

SAMPLES = tuple(make_sample([1, 2], [3, 4], member=m) for m in range(2))


def minibatch(advantage: float) -> Minibatch:
    return Minibatch(
        samples=SAMPLES,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * advantage for s in SAMPLES],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=4, num_episodes=2, max_length=4),
    )


def test_metrics_of_several_steps_are_summed_maximised_or_averaged_by_what_they_are() -> None:
    batch = RolloutBatch(index=0, groups=(), samples=SAMPLES, version=PolicyVersion(0, 0))
    record = TrainRecord(batch)
    first, second = torch.tensor([-1.0]), torch.tensor([-9.0])
    record.add(minibatch(0.5), {"loss": 1.0, "num_samples": 2.0, "max_ratio_error": 0.1}, {SAMPLES[0].id: first})
    record.add_step({"grad_norm": 1.0})
    record.add(minibatch(-2.0), {"loss": 3.0, "num_samples": 2.0, "max_ratio_error": 0.4}, {SAMPLES[0].id: second})
    record.add_step({"grad_norm": 2.0})
    metrics = record.metrics()
    assert metrics["train/loss"] == 2.0 and metrics["train/num_samples"] == 4.0
    assert metrics["policy/max_ratio_error"] == 0.4 and metrics["train/grad_norm"] == 1.5
    assert record.logprobs[SAMPLES[0].id] is first, "what the first pass over a sample computed"
    assert metrics["train/advantage_max_abs"] == 0.5


def test_a_critics_foresight_is_measured_over_the_rl_stream() -> None:
    """Values and returns of behaviour time, once for each sample and token; supervised tokens have no return."""
    taught = make_sample([1, 2], [3, 4], member=2, stream="supervised")
    samples = (*SAMPLES, taught)
    targets = [torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 3.0, 4.0]), torch.zeros(4)]
    step = dataclasses.replace(
        minibatch(1.0),
        samples=samples,
        advantages=[torch.zeros(4)] * 3,
        values=[torch.tensor([9.0, 9.0, v, v + 1.0]) for v in (2.0, 4.0, 99.0)],  # one too much each: no variance
        value_targets=targets,
    )
    record = TrainRecord(RolloutBatch(index=0, groups=(), samples=samples, version=PolicyVersion(0, 0)))
    for _ in range(2):
        record.add(step, {}, {})
    metrics = record.metrics()
    assert (metrics["critic/value_mean"], metrics["critic/return_mean"]) == (3.5, 2.5)
    assert metrics["critic/explained_variance"] == 1.0


def test_names_go_into_the_namespaces_of_the_record() -> None:
    named = named_train_metrics({"loss": 1.0, "entropy": 2.0, "policy/clipped_low": 0.1, "ratio_mean": 1.0})
    assert named == {
        "train/loss": 1.0,
        "policy/entropy_mean": 2.0,
        "policy/clip_low_share": 0.1,
        "policy/ratio_mean": 1.0,
    }


def test_a_failed_attempt_is_named_by_its_outcome_or_its_rewards_error() -> None:
    def episode(outcome: Outcome, score: object = None) -> Episode:
        return Episode(key=AttemptKey(0, 0), task=TASKS[0], turns=(), trace=Trace(), outcome=outcome, score=score)

    error = ScoreError(error_class=ErrorClass.MEMORY, message="")
    assert failure_class(episode(Outcome.TIMEOUT)) == "timeout"
    assert failure_class(episode(Outcome.DONE, error)) == "score_memory"


def test_every_batch_has_one_line_and_every_attempt_one_record(tmp_path: Path) -> None:
    """Lines carry books, rates and times of their batch; dropped and failed attempts are on disk too."""

    def judge(episode: Episode) -> Score | ScoreError:
        if episode.key == (2, 0, 0):
            return ScoreError(error_class=ErrorClass.EXCEPTION, message="as scripted", reward="scripted")
        return Score(value=float(episode.key.member))

    config = scripted_config(tmp_path)
    _, error, _ = run_scripted(
        config,
        judge=judge,
        engine=ScriptedEngine(Reply(text="12", duration_s=3.0)),
        thread=ScriptedThread({"forward_backward": 2.0}),
    )
    assert error is None
    lines = list(read_metrics(config.run_dir))
    assert [(line["update"], line["step"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert [line["ledger/trained_uncommitted"] + line["ledger/trained"] for line in lines] == [4, 8, 12, 16]
    assert lines[0]["time/gather_s"] == 3.0 and lines[0]["time/train_s"] == 2.0
    assert lines[0]["rate/trained_tokens_per_s"] == pytest.approx(12 / 2.0)
    assert lines[0]["rate/samples_per_s"] == pytest.approx(4 / 5.0)
    assert lines[1]["time/gather_s"] == 6.0, "the retry is a wave of its own"
    records = list(read_episodes(config.run_dir))
    assert len(records) == 17
    assert sorted(r["status"] for r in records) == ["failed:score_exception"] + ["trained"] * 16
    assert all(r["update"] == 2 for r in records if r["group"] in (2, 3))


def test_a_skipped_sample_has_no_trainer_log_probabilities(tmp_path: Path) -> None:
    """A group without signal is not scored by the trainer; its episodes are recorded all the same."""

    class Skips(ScriptedTrainer):
        def last_logprobs(self) -> dict[str, torch.Tensor]:
            return {name: t for name, t in super().last_logprobs().items() if not name.startswith("g1m")}

    config = scripted_config(tmp_path, trainer={"num_batches": 1})
    _, error, _ = run_scripted(config, trainer=Skips())
    assert error is None
    found = {(r["group"], r["member"]): r["trainer_logprobs"] for r in read_episodes(config.run_dir)}
    assert found[1, 0] is None and found[1, 1] is None
    assert found[0, 0] is not None and [x for x in found[0, 0] if x is not None] == [-1.0, -1.0]


def test_a_health_check_that_stops_leaves_the_line_that_says_why(tmp_path: Path) -> None:
    """The metrics line of the batch is on disk, alarms and all, before the run ends."""
    config = scripted_config(
        tmp_path, trainer={"num_batches": 60}, guards={"collapse_window": 4, "on_collapse": "stop"}
    )
    _, error, _ = run_scripted(
        config, judge=lambda e: Score(value=float(e.key.group < 40 or (e.key.group, e.key.member) == (60, 0)))
    )
    assert isinstance(error, HealthError) and "collapse" in str(error)
    alarms = metric(config.run_dir, "health/alarms")
    assert any("collapse" in alarm for alarm in alarms[max(alarms)]) and max(alarms) < 60


def test_who_waited_on_whom_and_who_was_idle_stands_in_every_line(tmp_path: Path) -> None:
    """Wait causes and idle time per actor: two episodes of 8 s each wait on the engine while the trainer is idle."""
    thread = ScriptedThread({"forward_backward": 3.0, "optim_step": 2.0})
    engine = ScriptedEngine(Reply(text="1", duration_s=8.0))
    config = scripted_config(tmp_path, trainer={"num_batches": 2}, rollout={"groups_per_batch": 1})
    _, error, _ = run_scripted(config, engine=engine, thread=thread)
    assert error is None
    for line in read_metrics(tmp_path / "run"):
        assert line["wait/episode_on_engine_s"] == pytest.approx(2 * 8.0)
        assert line["wait/loop_on_rollouts_s"] == line["idle/trainer_s"] == pytest.approx(8.0)
        assert line["wait/loop_on_trainer_s"] == pytest.approx(5.0)
        assert line["idle/engine_s"] == pytest.approx(13.0)  # a scripted engine computes nothing
