"""I19 and I13 on real processes: a hanging or dying part ends the process in time, with a report that names it.

``test_loop_waits.py`` has the same, and more, in virtual time. Here are real threads, workers and exit codes: a process
that cannot end because some thread of it hangs would be found by these tests alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from loop_runs import assert_same_weights, books, metric, run_to_end, small_data, surviving, write_toml

REWARDS = Path(__file__).parents[1] / "loop_rewards.py"
FAST: dict[str, Any] = {
    "trainer": {"num_batches": 3, "schedule": {"warmup_steps": 1}},
    "checkpoint": {"every": 1},
}


def run(folder: Path, before: str | None = None, timeout_s: float = 60.0, **settings: Any) -> tuple[int, str, Path]:
    assert not settings.keys() & FAST.keys()
    toml = write_toml(folder / "run.toml", small_data(folder, "run", **FAST, **settings))
    status, output = run_to_end("train", str(toml), log=folder / "log", before=before, timeout_s=timeout_s)
    return status, output, folder / "run"


def resumed(folder: Path) -> Path:
    status, output = run_to_end("resume", str(folder / "run"), log=folder / "log-2")
    assert status == 0, output
    return folder / "run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with nothing broken."""
    status, output, run_dir = run(tmp_path_factory.mktemp("whole"))
    assert status == 0, output
    return run_dir


def assert_told(status: int, output: str, run_dir: Path, *expected: str) -> None:
    """Exit code 2, one error that says what and how to go on, the report of waits, and the run's own report."""
    assert status == 2, output
    assert output.count("headrace: error:") == 1 and "Traceback" not in output
    for text in expected:
        assert text in output
    assert f"headrace resume {run_dir}" in output
    assert (run_dir / "stall-report.txt").read_text()
    assert (run_dir / "report.html").is_file()
    books(run_dir)


def test_a_reward_that_hangs_on_some_replies_costs_those_attempts_only(tmp_path: Path) -> None:
    """I14, I15, F120: each hanging score is killed at its deadline and booked as an error; the run completes."""
    status, output, run_dir = run(
        tmp_path, rewards=[{"type": f"{REWARDS}:hangs_on_some", "deadline_s": 0.5, "num_workers": 2}]
    )
    assert status == 0, output
    summary = books(run_dir).summary()
    assert summary["failed:score_timeout"] > 0 and summary["failed"] == summary["failed:score_timeout"]
    assert len(metric(run_dir, "update")) == 3


def test_a_reward_that_always_hangs_ends_the_run_and_says_so(tmp_path: Path) -> None:
    """I14: nothing can be judged: the run ends with the class of the errors, not with rewards of 0."""
    status, output, run_dir = run(tmp_path, rewards=[{"type": f"{REWARDS}:hangs", "deadline_s": 0.5, "num_workers": 4}])
    assert_told(status, output, run_dir, "I14", "100% have no score", "timeout")
    assert not metric(run_dir, "update")


@pytest.mark.parametrize(
    ("reward", "error_class"),
    [("nan_on_some", "invalid_score"), ("too_large_on_some", "invalid_score"), ("fails_on_some", "exception")],
)
def test_what_a_reward_must_not_return_is_a_classed_error(reward: str, error_class: str, tmp_path: Path) -> None:
    """I14: NaN, out of range, an exception: never a reward."""
    status, output, run_dir = run(tmp_path, rewards=[{"type": f"{REWARDS}:{reward}"}], guards={"max_error_share": 0.9})
    assert status == 0, output
    summary = books(run_dir).summary()
    assert summary["failed"] == summary[f"failed:score_{error_class}"] > 0
    assert all(0.0 <= mean <= 1.0 for mean in metric(run_dir, "reward/mean").values())


def test_a_decode_step_that_hangs_ends_the_process(whole: Path, tmp_path: Path) -> None:
    """The engine's thread blocks in the second batch for good: attempts time out, the run ends, the process exits
    although that thread never will; a resume completes to the same weights."""
    status, output, run_dir = run(
        tmp_path,
        before="loop_breaks:hang_in_decode_after_first_update",
        rollout={"generation_deadline_s": 1.0, "on_failure": "refill", "max_retries": 0},
    )
    assert_told(status, output, run_dir, "100% have no score", "timeout")
    assert list(metric(run_dir, "update")) == [1]
    said = (run_dir / "stall-report.txt").read_text()
    assert "headrace-engine" in said, "the stacks show where it hangs"


def test_a_decode_step_that_raises_ends_the_run_as_a_dead_engine(whole: Path, tmp_path: Path) -> None:
    status, output, run_dir = run(tmp_path, before="loop_breaks:die_in_decode_after_first_update")
    assert_told(status, output, run_dir, "the engine died", "RuntimeError: device lost")
    assert_same_weights(resumed(tmp_path), whole)
    assert surviving(run_dir) == surviving(whole)


def test_a_gradient_that_hangs_ends_the_process_at_its_deadline(whole: Path, tmp_path: Path) -> None:
    started_s = time.monotonic()
    status, output, run_dir = run(
        tmp_path, before="loop_breaks:hang_in_gradient_after_first_update", waits={"forward_backward_s": 2.0}
    )
    assert_told(status, output, run_dir, "loop waited 2.0 s on trainer for gradient of step 1 of 1 of batch 1")
    assert time.monotonic() - started_s < 60.0
    assert_same_weights(resumed(tmp_path), whole)


def test_weights_that_are_not_finite_are_never_published(whole: Path, tmp_path: Path) -> None:
    """I13: the optimizer writes a NaN; that version never reaches the engine or a checkpoint, and a resume from the one
    before completes to the weights of the run in which nothing was broken."""
    status, output, run_dir = run(tmp_path, before="loop_breaks:poison_weights_after_first_update")
    assert_told(status, output, run_dir, "is not finite, so this version is not published")
    assert books(run_dir).committed_update == 1
    assert_same_weights(resumed(tmp_path), whole)


def test_a_gradient_that_is_not_finite_is_never_stepped(whole: Path, tmp_path: Path) -> None:
    """I13."""
    status, output, run_dir = run(tmp_path, before="loop_breaks:poison_gradient_after_first_update")
    assert_told(status, output, run_dir, "first tensor with a non-finite gradient")
    assert_same_weights(resumed(tmp_path), whole)


def test_an_engine_that_samples_at_another_temperature_is_found_in_the_first_batch(tmp_path: Path) -> None:
    """I5: ratio is not 1; nothing is trained."""
    status, output, run_dir = run(tmp_path, before="loop_breaks:wrong_temperature")
    assert_told(status, output, run_dir, "I5: batch 0, before its first optimizer step", "temperature")
    assert not metric(run_dir, "update")


def test_a_copied_engine_that_misses_a_tensor_is_found_at_the_sync(tmp_path: Path) -> None:
    """I6: named, in a real asynchronous run."""
    status, output, run_dir = run(
        tmp_path,
        before="loop_breaks:forget_a_tensor",
        engine={"weights": "copy"},
        rollout={"max_staleness": 1},
    )
    assert_told(status, output, run_dir, "these tensors differ", "model.layers.1.mlp.up_proj.weight")
    assert not metric(run_dir, "update")


def test_a_slow_but_living_run_is_not_ended(tmp_path: Path) -> None:
    """I19 cuts both ways: 0.2 s for each gradient is no stall."""
    status, output, run_dir = run(tmp_path, before="loop_breaks:slow_gradient", waits={"forward_backward_s": 30.0})
    assert status == 0, output
    assert not (run_dir / "stall-report.txt").exists()
