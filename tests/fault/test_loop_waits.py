"""I19: whatever hangs or dies, the run ends in time, says who waited on whom, and leaves its record whole.

In virtual time over scripted parts; ``test_loop_hangs.py`` does the same to real processes.
"""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest
from loop_runs import books, metric, trained_by_update
from loop_scripted import TASKS, run_scripted, scripted_config

from headrace.control.checks import GuardError
from headrace.control.watchdog import DeadlineError
from headrace.loop import EngineDied, Loop
from headrace.record.episodes import read_episodes
from headrace.run import StallError
from headrace.scripted import (
    Reply,
    ScriptedEngine,
    ScriptedEnvironment,
    ScriptedReward,
    ScriptedThread,
    ScriptedTrainer,
)
from headrace.types import GenerationRequest, Score

DEADLINES: dict[str, Any] = {
    "waits": {
        "forward_backward_s": 50.0,
        "optim_step_s": 40.0,
        "publish_s": 30.0,
        "checkpoint_s": 20.0,
        "rollout_batch_s": 500.0,
    },
    "rollout": {"generation_deadline_s": 60.0, "episode_deadline_s": 90.0},
    "checkpoint": {"every": 2},
}


def config_with(folder: Path, **sections: Any) -> Any:
    merged = {k: {**DEADLINES.get(k, {}), **sections.get(k, {})} for k in DEADLINES.keys() | sections.keys()}
    return scripted_config(folder, **merged)


# ------------------------------------------------------------------------------------------------ the trainer


@pytest.mark.parametrize(
    ("call", "what", "deadline_s"),
    [
        ("plan", "plan of batch 0", 50.0),
        ("forward_backward", "gradient of step 1 of 1 of batch 0", 50.0),
        ("optim_step", "step 1 of 1 of batch 0", 40.0),
        ("publish", "publish", 30.0),
        ("save_checkpoint", "checkpoint 2", 20.0),
        ("compact", "compacting episodes", 20.0),
    ],
)
def test_a_hanging_trainer_ends_the_run_at_its_deadline(
    call: str, what: str, deadline_s: float, tmp_path: Path
) -> None:
    config = config_with(tmp_path)
    _, error, took_s = run_scripted(config, thread=ScriptedThread({call: math.inf}))
    assert isinstance(error, DeadlineError)
    assert (error.waiter, error.on, error.what, error.deadline_s) == ("loop", "trainer", what, deadline_s)
    assert took_s <= deadline_s + 10.0
    books(config.run_dir)


# ------------------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_engine_that_never_answers_fails_every_attempt_and_ends_the_run(max_staleness: int, tmp_path: Path) -> None:
    """Each attempt ends as timeout at its deadline and is booked as failed; the share of errors then ends the run."""
    config = config_with(tmp_path, rollout={"max_staleness": max_staleness})
    engine = ScriptedEngine(Reply(duration_s=math.inf))
    _, error, took_s = run_scripted(config, engine=engine)
    assert isinstance(error, GuardError) and error.invariant == "I14"
    assert "timeout" in str(error)
    assert took_s < 61.0
    assert books(config.run_dir).summary()["failed:timeout"] >= 4
    assert "abort" in engine.log
    said = next(read_episodes(config.run_dir))["error"]
    assert re.search(r"episode g\dm\d waited 60.0 s on engine for generation of turn 0", said)


def test_one_request_that_hangs_is_tried_again(tmp_path: Path) -> None:
    """A lost request costs its deadline, not the run."""
    config = config_with(tmp_path)

    def script(request: GenerationRequest) -> Reply:
        return Reply(duration_s=math.inf if request.id == "rollout-g1m0t0" else 1.0)

    _, error, _ = run_scripted(config, engine=ScriptedEngine(script))
    assert error is None
    assert books(config.run_dir).summary()["failed:timeout"] == 1
    assert (1, 0, 1) in {key for keys in trained_by_update(config.run_dir).values() for key in keys}


@pytest.mark.parametrize("call", ["pause", "update_weights", "probe", "resume"])
def test_an_engine_that_hangs_in_a_call_of_the_sync_ends_the_run(call: str, tmp_path: Path) -> None:
    config = config_with(tmp_path)
    engine = ScriptedEngine()
    engine.hang_on.add(call)
    _, error, took_s = run_scripted(config, engine=engine)
    assert isinstance(error, DeadlineError) and error.on == "engine"
    assert took_s <= 31.0
    books(config.run_dir)


@pytest.mark.parametrize("call", ["abort", "healthy"])
def test_an_engine_that_answers_nothing_at_all_ends_the_run(call: str, tmp_path: Path) -> None:
    """Not only generate hangs: the calls that should clean up after it do, too."""
    config = config_with(tmp_path)
    engine = ScriptedEngine(Reply(duration_s=math.inf))
    engine.hang_on.add(call)
    _, error, took_s = run_scripted(config, engine=engine)
    assert isinstance(error, GuardError if call == "abort" else EngineDied), error
    assert took_s < 200.0
    books(config.run_dir)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_engine_that_dies_ends_the_run_with_its_last_words(max_staleness: int, tmp_path: Path) -> None:
    """Nothing of what it was doing is scored; what was in flight is issued again by a resume, which completes."""
    config = config_with(tmp_path, rollout={"max_staleness": max_staleness}, checkpoint={"every": 1})

    def script(request: GenerationRequest) -> Reply:
        if engine.version.number >= 1:
            engine.is_healthy = False
            return Reply(duration_s=0.5, error=OSError("device lost"))
        return Reply(duration_s=1.0)

    engine = ScriptedEngine(script)
    _, error, _ = run_scripted(config, engine=engine)
    assert isinstance(error, EngineDied)
    assert "device lost" in str(error) and "attempt g" in str(error)
    assert books(config.run_dir).committed_update >= 1
    _, error, _ = run_scripted(config, engine=ScriptedEngine(Reply(duration_s=1.0)))
    assert error is None
    ledger = books(config.run_dir)
    assert ledger.surviving().summary()["trained"] == 16 and not ledger.in_flight
    assert sorted(metric(config.run_dir, "update")) == [1, 2, 3, 4]


def test_an_engine_that_fails_one_request_and_lives_costs_one_attempt(tmp_path: Path) -> None:
    config = config_with(tmp_path)

    def script(request: GenerationRequest) -> Reply:
        return Reply(error=ConnectionResetError("peer")) if request.id == "rollout-g2m1t0" else Reply()

    _, error, _ = run_scripted(config, engine=ScriptedEngine(script))
    assert error is None
    summary = books(config.run_dir).summary()
    assert summary["failed:infrastructure_error"] == 1 and summary["trained"] == 16
    failed = [r for r in read_episodes(config.run_dir) if r["status"] == "failed:infrastructure_error"]
    assert failed[0]["reward"] is None and "ConnectionResetError: peer" in failed[0]["error"]


def test_an_engine_that_aborts_on_its_own_is_not_the_policys_fault(tmp_path: Path) -> None:
    config = config_with(tmp_path)

    def script(request: GenerationRequest) -> Reply:
        return Reply(text="1", finish="abort") if request.id == "rollout-g0m1t0" else Reply()

    _, error, _ = run_scripted(config, engine=ScriptedEngine(script))
    assert error is None
    assert books(config.run_dir).summary()["failed:cancelled"] == 1


# ---------------------------------------------------------------------------------- reward and environment


def test_a_reward_that_hangs_is_a_classed_error_at_its_deadline(tmp_path: Path) -> None:
    """The reward's own deadline is 10 s; it did not notice, so the player ends it 5 s later. No value is made up."""
    config = config_with(tmp_path)
    reward = ScriptedReward(
        lambda e: Score(value=float(e.key.member)),
        duration_s=lambda e: math.inf if (e.key.group, e.key.retry) == (1, 0) else 0.0,
    )
    _, error, took_s = run_scripted(config, reward=reward)
    assert error is None and took_s < 20.0
    assert books(config.run_dir).summary()["failed:score_timeout"] == 2
    failed = [r for r in read_episodes(config.run_dir) if r["status"] == "failed:score_timeout"]
    assert all("waited 15.0 s on reward for score of scripted" in r["score"]["message"] for r in failed)


def test_a_reward_class_that_raises_is_a_classed_error(tmp_path: Path) -> None:
    """I14: also where a third party's reward breaks the protocol by raising."""

    def judge(episode: Any) -> Score:
        if episode.key == (0, 1, 0):
            raise ZeroDivisionError("mean of nothing")
        return Score(value=float(episode.key.member))

    config = config_with(tmp_path)
    _, error, _ = run_scripted(config, judge=judge)
    assert error is None
    failed = [r for r in read_episodes(config.run_dir) if r["status"] == "failed:score_exception"]
    assert [r["score"]["message"] for r in failed] == ["ZeroDivisionError: mean of nothing"]


@pytest.mark.parametrize("call", ["reset", "step", "close"])
def test_an_environment_that_hangs_is_a_timeout_of_its_episode(call: str, tmp_path: Path) -> None:
    config = config_with(tmp_path)
    made: list[ScriptedEnvironment] = []

    def make(task: Any) -> ScriptedEnvironment:
        made.append(ScriptedEnvironment(hang_on=call if len(made) == 1 else ""))
        return made[-1]

    _, error, took_s = run_scripted(config, make_environment=make)
    assert error is None and took_s < 100.0
    assert books(config.run_dir).summary()["failed:timeout"] == 1
    failed = next(r for r in read_episodes(config.run_dir) if r["status"] == "failed:timeout")
    assert f"waited 90.0 s on environment single_turn for {call}" in failed["error"]


def test_an_environment_that_cannot_be_made_is_an_error_of_its_episode(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    num_made = []

    def make(task: Any) -> ScriptedEnvironment:
        num_made.append(task)
        if len(num_made) == 2:
            raise FileNotFoundError("no image")
        return ScriptedEnvironment()

    _, error, _ = run_scripted(config, make_environment=make)
    assert error is None
    assert books(config.run_dir).summary()["failed:environment_error"] == 1


# ----------------------------------------------------------------------------------------- the loop's own waits


def test_a_batch_that_is_never_full_ends_at_its_deadline_and_says_what_is_missing(tmp_path: Path) -> None:
    """Episodes that come too slowly: the wait for the batch has a deadline of its own, which names the groups."""
    config = config_with(tmp_path, rollout={"generation_deadline_s": 1e5, "episode_deadline_s": 1e5})
    _, error, took_s = run_scripted(config, engine=ScriptedEngine(Reply(duration_s=9e4)))
    assert isinstance(error, DeadlineError)
    assert (error.waiter, error.on) == ("loop", "rollouts")
    assert "batch 0 (2 groups missing" in error.what
    assert took_s == pytest.approx(500.0)


def test_a_stall_makes_a_report_and_then_ends_the_run(tmp_path: Path) -> None:
    """No progress for 300 s: a report of who waits on whom; twice as long: the end. Never silence."""
    forever = {"waits": {"rollout_batch_s": 1e6}, "rollout": {"generation_deadline_s": 1e6, "episode_deadline_s": 1e6}}
    config = config_with(tmp_path, **forever)
    reported_at_s: list[float] = []

    async def watch(loop: Loop) -> None:
        report = config.run_dir / "stall-report.txt"
        while not report.exists():
            await asyncio.sleep(1.0)
        reported_at_s.append(asyncio.get_running_loop().time())

    _, error, took_s = run_scripted(config, engine=ScriptedEngine(Reply(duration_s=math.inf)), during=watch)
    assert isinstance(error, StallError)
    assert 300.0 < reported_at_s[0] < 310.0 and 600.0 < took_s < 620.0
    text = (config.run_dir / "stall-report.txt").read_text()
    assert "episode g0m0 waits on engine for generation of turn 0" in text
    assert "loop waits on rollouts for batch 0" in text
    assert f"headrace resume {config.run_dir}" in str(error)


def test_a_stop_does_not_wait_for_an_environment_that_will_not_close(tmp_path: Path) -> None:
    """Ctrl-C: attempts are cancelled, and one whose environment hangs in close holds the run only so long."""
    config = config_with(tmp_path)

    async def stop(loop: Loop) -> None:
        await asyncio.sleep(5.0)
        loop.stop()

    _, error, took_s = run_scripted(
        config,
        engine=ScriptedEngine(Reply(duration_s=50.0)),
        make_environment=lambda task: ScriptedEnvironment(hang_on="close"),
        during=stop,
    )
    assert error is None
    assert took_s < 100.0


def test_a_stop_does_not_wait_for_an_evaluation(tmp_path: Path) -> None:
    """Ctrl-C during a long evaluation: it is given up, the batch it followed is recorded, and the run checkpoints."""
    config = config_with(tmp_path, evaluation={"every": 1, "num_samples": 1}, checkpoint={"every": 0})

    async def stop(loop: Loop) -> None:
        await asyncio.sleep(5.0)
        loop.stop()

    slow = ScriptedEngine(lambda r: Reply(duration_s=50.0 if r.id.startswith("evaluation") else 1.0))
    loop, error, took_s = run_scripted(config, engine=slow, held_out=TASKS[:2], during=stop)
    assert error is None and took_s < 10.0
    assert loop.batch_index == 1 and not loop.evaluations
    assert list(metric(config.run_dir, "update")) == [1]
    assert books(config.run_dir).committed_update == 1


def test_a_trainer_that_raises_ends_the_run_with_that_error(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    trainer = ScriptedTrainer()
    trainer.errors["optim_step"] = RuntimeError("out of memory")
    _, error, _ = run_scripted(config, trainer=trainer)
    assert isinstance(error, RuntimeError) and "out of memory" in str(error)
    ledger = books(config.run_dir)
    assert len(ledger.in_flight) == 4 and ledger.summary()["trained_uncommitted"] == 0
