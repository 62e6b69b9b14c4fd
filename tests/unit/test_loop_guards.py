"""Guards on every batch and every sync, each shown to stop a run that is wrong (I1, I2, I5, I6, I13, I14)."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
from loop_runs import books, metric
from loop_scripted import run_scripted, scripted_config, scripted_parts

from headrace.control.checks import GuardError
from headrace.protocols import WeightUpdate
from headrace.record.episodes import read_episodes
from headrace.record.files import RecordError
from headrace.scripted import ScriptedEngine, ScriptedReward, ScriptedTrainer, run_in_virtual_time
from headrace.trainer.weights import NonFiniteError
from headrace.types import ErrorClass, Generation, GenerationRequest, Score, ScoreError, ScoreResult
from headrace.weights.canary import SyncError


class Lying(ScriptedEngine):
    """Changes what it answers to one request."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.changes = changes

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        if request.id != "rollout-g1m1t0":
            return generation
        fields = {name: getattr(generation, name) for name in generation.__dataclass_fields__}
        return Generation(**{**fields, **self.changes})


# ------------------------------------------------------------------------------------------------ the engine


def test_a_log_probability_above_0_stops_the_run(tmp_path: Path) -> None:
    """I2: it names the sample, the id and the value; nothing is trained."""
    trainer = ScriptedTrainer()
    _, error, _ = run_scripted(scripted_config(tmp_path), engine=Lying(logprobs=(0.5, -1.0)), trainer=trainer)
    assert isinstance(error, GuardError) and error.invariant == "I2"
    assert "sample g1m1/0" in str(error) and "0.5" in str(error)
    assert trainer.step == 0


@pytest.mark.parametrize("logprobs", [(math.nan, -1.0), (-math.inf, -1.0)])
def test_a_log_probability_that_is_not_finite_stops_the_run(logprobs: tuple[float, ...], tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    _, error, _ = run_scripted(scripted_config(tmp_path), engine=Lying(logprobs=logprobs), trainer=trainer)
    assert isinstance(error, GuardError) and error.invariant == "I2"
    assert trainer.step == 0


def test_a_generation_with_too_few_log_probabilities_fails_its_attempt(tmp_path: Path) -> None:
    """I2: such an answer cannot even be made; it is the engine's failure, never a sample."""
    config = scripted_config(tmp_path)
    _, error, _ = run_scripted(config, engine=Lying(logprobs=(-1.0,)))
    assert error is None
    failed = [r for r in read_episodes(config.run_dir) if r["status"] == "failed:infrastructure_error"]
    assert len(failed) == 1 and "2 ids but 1 log-probabilities" in failed[0]["error"]


def test_an_answer_to_another_request_fails_its_attempt(tmp_path: Path) -> None:
    """D12: what an engine mixes up must not be trained under another prompt."""
    config = scripted_config(tmp_path)
    _, error, _ = run_scripted(config, engine=Lying(request_id="rollout-g0m0t0"))
    assert error is None
    failed = [r for r in read_episodes(config.run_dir) if r["status"] == "failed:infrastructure_error"]
    assert len(failed) == 1
    assert "answered request rollout-g0m0t0 where rollout-g1m1t0 was asked" in failed[0]["error"]


def test_tokens_of_a_version_that_was_never_published_stop_the_run(tmp_path: Path) -> None:
    """D9: an engine ahead of the trainer."""
    from headrace.types import PolicyVersion, VersionSpan

    engine = Lying(version_spans=(VersionSpan(PolicyVersion(0, 7), 0, 2),))
    _, error, _ = run_scripted(scripted_config(tmp_path), engine=engine)
    assert isinstance(error, GuardError) and error.invariant == "D9" and "version 0.7" in str(error)


def test_a_ratio_that_is_not_1_stops_the_run_before_its_first_step(tmp_path: Path) -> None:
    """I5: trainer and engine score different distributions."""
    trainer = ScriptedTrainer()
    trainer.ratio_error = 2e-3
    _, error, _ = run_scripted(scripted_config(tmp_path), trainer=trainer)
    assert isinstance(error, GuardError) and error.invariant == "I5"
    assert "batch 0" in str(error) and "temperature" in str(error)
    assert trainer.step == 0


def test_a_ratio_that_is_nan_stops_the_run(tmp_path: Path) -> None:
    trainer = ScriptedTrainer()
    trainer.ratio_error = math.nan
    _, error, _ = run_scripted(scripted_config(tmp_path), trainer=trainer)
    assert isinstance(error, GuardError) and error.invariant == "I5" and trainer.step == 0


def test_an_engine_that_serves_other_weights_at_start_serves_nothing(tmp_path: Path) -> None:
    """I6: the first version is proved like every other one."""
    engine = ScriptedEngine()
    engine.probe_gap = 0.01
    _, error, _ = run_scripted(scripted_config(tmp_path), engine=engine)
    assert isinstance(error, SyncError) and "version 0.0" in str(error)
    assert not engine.requests


def test_an_engine_that_serves_other_weights_stops_the_run_at_the_sync(tmp_path: Path) -> None:
    """I6: nothing is served by the version that is not proved."""

    class Drifting(ScriptedEngine):
        async def update_weights(self, update: WeightUpdate) -> None:
            await super().update_weights(update)
            self.probe_gap = 0.01

    engine = Drifting()
    _, error, _ = run_scripted(scripted_config(tmp_path), engine=engine)
    assert isinstance(error, SyncError) and "canary of version 0.1" in str(error)
    assert "resume" not in engine.log
    assert len(engine.requests) == 4, "only the first batch was ever asked for"


def test_an_engine_that_keeps_its_old_version_stops_the_run(tmp_path: Path) -> None:
    class Stuck(ScriptedEngine):
        async def update_weights(self, update: Any) -> None:
            """Says nothing, does nothing."""

    _, error, _ = run_scripted(scripted_config(tmp_path), engine=Stuck())
    assert isinstance(error, SyncError)
    assert "serves version 0.0, the trainer published 0.1" in str(error)


# ----------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("call", ["forward_backward", "optim_step", "publish"])
def test_what_is_not_finite_never_reaches_the_engine(call: str, tmp_path: Path) -> None:
    """I13: in loss, gradient or weights."""
    trainer, engine = ScriptedTrainer(), ScriptedEngine()
    trainer.errors[call] = NonFiniteError("as scripted")
    config = scripted_config(tmp_path)
    _, error, _ = run_scripted(config, trainer=trainer, engine=engine)
    assert isinstance(error, NonFiniteError)
    assert engine.version.number == 0 and "update_weights" not in engine.log
    books(config.run_dir)


# --------------------------------------------------------------------------------------------------- rewards


def judge_with(result: Any) -> Any:
    """Member 1 of group 0 gets ``result`` at its first try; the others 0 and 1 in turn."""

    def judge(episode: Any) -> ScoreResult:
        return result if episode.key == (0, 1, 0) else Score(value=float(episode.key.member))

    return judge


@pytest.mark.parametrize("result", [1.5, None, math.nan, Score(value=2.0), Score(value=-0.1)])
def test_what_is_no_score_in_range_is_an_error_and_no_reward(result: Any, tmp_path: Path) -> None:
    """I14: nothing is clamped or read as 0; the attempt fails under its class, and the retry takes its place."""
    config = scripted_config(tmp_path)
    _, error, _ = run_scripted(config, judge=judge_with(result))
    assert error is None
    summary = books(config.run_dir).summary()
    assert summary["failed:score_invalid_score"] == 1 and summary["trained"] == 16
    assert metric(config.run_dir, "reward/mean")[1] == 0.5


def half_bad(episode: Any) -> ScoreResult:
    """Odd members cannot be judged; members 0 and 2 score 0 and 1."""
    if episode.key.member % 2:
        return ScoreError(error_class=ErrorClass.MEMORY, message="as scripted")
    return Score(value=float(episode.key.member > 1))


def test_a_share_of_errors_above_the_bound_stops_the_run(tmp_path: Path) -> None:
    """I14: with a quarter allowed, half the members failing in every try is too much; the classes are named."""
    config = scripted_config(
        tmp_path, guards={"max_error_share": 0.25}, rollout={"group_size": 4, "on_failure": "shrink"}
    )
    _, error, _ = run_scripted(config, judge=half_bad)
    assert isinstance(error, GuardError) and error.invariant == "I14"
    assert "50% have no score" in str(error) and "memory" in str(error)


def test_a_share_of_errors_below_the_bound_does_not(tmp_path: Path) -> None:
    config = scripted_config(
        tmp_path, guards={"max_error_share": 0.5}, rollout={"group_size": 4, "on_failure": "shrink"}
    )
    _, error, _ = run_scripted(config, judge=half_bad)
    assert error is None
    assert metric(config.run_dir, "reward/mean")[1] == 0.5, "mean of the scored members 0 and 2"


# ------------------------------------------------------------------------------------------------- full disks


@pytest.mark.parametrize("victim", ["ledger", "metrics.jsonl", "checkpoints", "episodes"])
def test_a_full_disk_ends_the_run_and_a_resume_goes_on(
    victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F: from the third update on, writing into one part of the record fails. One clear error, what was committed
    before is whole, and with space again a resume completes the run."""
    config = scripted_config(tmp_path, trainer={"num_batches": 6}, checkpoint={"every": 1})
    write, flush = os.write, os.fsync
    trainer = ScriptedTrainer()

    def is_victim(fd: int) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return trainer.version.number >= 3 and victim in path.relative_to(config.run_dir).parts[0]

    def full_write(fd: int, data: bytes) -> int:
        if is_victim(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    def full_flush(fd: int) -> None:
        if is_victim(fd):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_write)
        patch.setattr(os, "fsync", full_flush)
        _, error, _ = run_scripted(config, trainer=trainer)
        assert isinstance(error, RecordError), error
        assert "the disk is full" in str(error) and victim in str(error) and "resume" in str(error)
    committed = books(config.run_dir).committed_update
    assert 2 <= committed <= 3
    assert set(metric(config.run_dir, "update")) >= set(range(1, committed + 1)) - {3}
    _, error, _ = run_scripted(config)
    assert error is None
    ledger = books(config.run_dir)
    assert ledger.surviving().summary()["trained"] == 6 * 4 and not ledger.in_flight


# -------------------------------------------------------------------------------------------------- the end


def test_a_close_that_is_cut_short_has_not_begun_what_follows(tmp_path: Path) -> None:
    """A process that is killed while its engine closes must not leave a coroutine that nobody awaits."""
    closed: list[str] = []

    class Counted(ScriptedReward):
        def close(self) -> Any:
            closed.append("reward")
            return super().close()

    async def main() -> None:
        engine = ScriptedEngine()
        engine.hang_on.add("close")
        parts = scripted_parts(scripted_config(tmp_path), engine=engine, reward=Counted(lambda e: Score(value=1.0)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.close(), 1.0)
        assert closed == []
        await parts.close()
        assert closed == ["reward"]

    run_in_virtual_time(main)
