"""The loop in virtual time: bounded staleness, overlap, groups with failed members, dynamic sampling (I7 to I10)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from loop_runs import assert_trained_once, books, oldest_trained_token_age, trained_by_update
from loop_scripted import TASKS, run_scripted, scripted_config

from headrace.loop import Loop
from headrace.record.episodes import read_episodes
from headrace.record.spans import overlap_s, read_spans
from headrace.scripted import Reply, ScriptedEngine, ScriptedThread
from headrace.types import Episode, ErrorClass, GenerationRequest, Score, ScoreError, ScoreResult

THREE_S = Reply(text="12", duration_s=3.0)


def group_of(request: GenerationRequest) -> int:
    """Of a rollout request: ``rollout-g3m1t0``."""
    return int(request.id.split("-g")[1].split("m")[0])


def slow_groups(**duration_s: float) -> ScriptedEngine:
    """Groups named ``g<number>`` take so long, the others a second."""
    return ScriptedEngine(lambda r: Reply(text="12", duration_s=duration_s.get(f"g{group_of(r)}", 1.0)))


def trained_groups(run_dir: Path) -> list[list[int]]:
    return [sorted({group for group, _, _ in keys}) for keys in trained_by_update(run_dir).values()]


def all_trained_groups(run_dir: Path) -> list[int]:
    return [group for groups in trained_groups(run_dir) for group in groups]


# -------------------------------------------------------------------------------------- synchronous, overlap


def test_a_synchronous_run_takes_turns(tmp_path: Path) -> None:
    """I8: 4 x (3 s of generation + 2 s of training), never both."""
    config = scripted_config(tmp_path)
    loop, error, took_s = run_scripted(
        config, engine=ScriptedEngine(THREE_S), thread=ScriptedThread({"forward_backward": 2.0})
    )
    assert error is None and loop.batch_index == 4
    assert took_s == pytest.approx(20.0)
    assert overlap_s(read_spans(config.run_dir), "engine", "trainer") == 0.0


def test_an_asynchronous_run_generates_while_it_trains(tmp_path: Path) -> None:
    """Generation and training overlap, and the run is the shorter for it; the books hold and no token is too old."""
    config = scripted_config(tmp_path, rollout={"max_staleness": 2})
    loop, error, took_s = run_scripted(
        config, engine=ScriptedEngine(THREE_S), thread=ScriptedThread({"forward_backward": 2.0})
    )
    assert error is None and loop.batch_index == 4
    assert took_s < 15.0
    assert overlap_s(read_spans(config.run_dir), "engine", "trainer") >= 2.0
    assert oldest_trained_token_age(config.run_dir) <= 2
    assert_trained_once(config.run_dir)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_admission_bounds_what_is_outstanding(max_staleness: int, tmp_path: Path) -> None:
    """I7: at version v, no group beyond (max_staleness + v + 1) x groups_per_batch was ever issued."""
    config = scripted_config(tmp_path, rollout={"max_staleness": max_staleness}, trainer={"num_batches": 6})
    seen: list[tuple[int, int]] = []

    def script(request: GenerationRequest) -> Reply:
        seen.append((group_of(request), engine.version.number))
        return Reply(text="12", duration_s=1.0 + group_of(request) % 3)

    engine = ScriptedEngine(script)
    _, error, _ = run_scripted(config, engine=engine, thread=ScriptedThread({"forward_backward": 2.5}))
    assert error is None
    assert all(group < 2 * (max_staleness + version + 1) for group, version in seen)
    assert any(group >= 2 * (max_staleness + version) for group, version in seen), "the bound is never used"
    assert oldest_trained_token_age(config.run_dir) <= max_staleness


# -------------------------------------------------------------------------------------------------- overage


def test_wait_holds_the_step_for_the_slow_group_and_names_it(tmp_path: Path) -> None:
    """I7, I9: group 1 takes a hundred seconds; the step that would make it too old waits for it by name, and nothing is
    dropped."""
    config = scripted_config(tmp_path, rollout={"max_staleness": 1}, trainer={"num_batches": 6})
    named: list[str] = []

    async def watch(loop: Loop) -> None:
        while True:
            await asyncio.sleep(1.0)
            named.extend(w.what for w in loop.parts.watchdog.waits() if w.waiter == "loop")

    _, error, took_s = run_scripted(config, engine=slow_groups(g1=100.0), during=watch)
    assert error is None and took_s >= 100.0
    assert any("held by the age of groups (1,) in flight" in what for what in named)
    assert oldest_trained_token_age(config.run_dir) <= 1
    assert sorted(all_trained_groups(config.run_dir)) == list(range(12))
    assert books(config.run_dir).summary()["dropped"] == 0


def test_mask_never_waits_and_trains_no_old_token(tmp_path: Path) -> None:
    """I7: the slow group stays a member with its young tokens only; old ones have mask 0 in the record."""
    config = scripted_config(tmp_path, rollout={"max_staleness": 1, "on_overage": "mask"}, trainer={"num_batches": 6})
    engine = ScriptedEngine(lambda r: Reply(text="123456", duration_s=12.0 if group_of(r) == 1 else 1.0))
    _, error, _ = run_scripted(config, engine=engine, thread=ScriptedThread({"forward_backward": 2.0}))
    assert error is None
    assert oldest_trained_token_age(config.run_dir) <= 1
    slow = [r for r in read_episodes(config.run_dir) if r["group"] == 1 and r["status"] == "trained"]
    assert slow and all(0 < sum(r["mask"]) < 7 for r in slow), [r["mask"] for r in slow]
    assert books(config.run_dir).summary()["dropped"] == 0


def test_drop_cancels_what_is_too_old_and_books_it(tmp_path: Path) -> None:
    """I7, I9: dropped as stale, by name, and only because on_overage says so; its place is filled by another group."""
    config = scripted_config(tmp_path, rollout={"max_staleness": 1, "on_overage": "drop"}, trainer={"num_batches": 6})
    engine = slow_groups(g1=1e6)
    _, error, took_s = run_scripted(config, engine=engine, thread=ScriptedThread({"forward_backward": 2.0}))
    assert error is None and took_s < 100.0
    summary = books(config.run_dir).summary()
    assert summary["dropped:stale"] == 2 and summary["dropped"] == 2 and summary["in_flight"] == 0
    assert summary["trained"] == 6 * 4
    assert 1 not in all_trained_groups(config.run_dir)
    assert "abort" in engine.log, "the engine must be told to stop what nobody will train"


def test_weights_are_published_while_episodes_are_in_flight(tmp_path: Path) -> None:
    """Section 5: one reply can carry several versions, in order, and each token says which sampled it."""
    config = scripted_config(tmp_path, rollout={"max_staleness": 3}, trainer={"num_batches": 4})
    engine = ScriptedEngine(lambda r: Reply(text="123456", duration_s=6.0 if group_of(r) == 2 else 1.0))
    _, error, _ = run_scripted(config, engine=engine, thread=ScriptedThread({"forward_backward": 1.0}))
    assert error is None
    spans = [r["version_spans"] for r in read_episodes(config.run_dir) if r["group"] == 2]
    assert spans and all(len(s) > 1 for s in spans)
    assert all([span[2] for span in s] == sorted(span[2] for span in s) for s in spans)


def test_evaluation_in_an_asynchronous_run_sees_one_version(tmp_path: Path) -> None:
    """Held-out replies that take longer than a batch are all sampled by the version that was current when the
    evaluation began, while rollouts go on beside them."""
    config = scripted_config(
        tmp_path,
        rollout={"max_staleness": 2},
        evaluation={"every": 2, "num_samples": 2, "greedy": True},
    )
    engine = ScriptedEngine(lambda r: Reply(text="1", duration_s=20.0 if r.id.startswith("evaluation") else 1.0))
    loop, error, _ = run_scripted(config, engine=engine, held_out=TASKS[50:54])
    assert error is None
    assert [number for number, _ in loop.evaluations] == [2, 4]
    for number, result in loop.evaluations:
        assert [v.number for v in result.versions] == [number]
        assert result.metrics()["eval/sampled_accuracy"] == pytest.approx(0.5)
    spans = [s for s in read_spans(config.run_dir) if s["actor"] == "engine"]
    assert spans


# ------------------------------------------------------------------------------- failed members of a group


def failing(*keys: tuple[int, int], retries: int = 0) -> Any:
    """Members (group, member) whose reward raises, also in so many retries."""

    def judge(episode: Episode) -> ScoreResult:
        key = episode.key
        if (key.group, key.member) in keys and key.retry <= retries:
            return ScoreError(error_class=ErrorClass.EXCEPTION, message="as scripted", reward="scripted")
        return Score(value=float(key.member % 2))

    return judge


FOUR = {"groups_per_batch": 2, "group_size": 4}


def test_refill_tries_the_member_again(tmp_path: Path) -> None:
    """I14: the error is booked under its class and never becomes a reward; the retry takes its place."""
    config = scripted_config(tmp_path, rollout={**FOUR, "on_failure": "refill", "max_retries": 2})
    _, error, _ = run_scripted(config, judge=failing((1, 2), (3, 0), retries=1))
    assert error is None
    summary = books(config.run_dir).summary()
    assert summary["failed:score_exception"] == 4 and summary["trained"] == 4 * 8
    trained = [key for keys in trained_by_update(config.run_dir).values() for key in keys]
    assert (1, 2, 2) in trained and (3, 0, 2) in trained and (1, 2, 0) not in trained


def test_refill_goes_on_without_a_member_after_its_retries(tmp_path: Path) -> None:
    """I14: excluded from the baseline: three members with rewards 1, 0, 1 have mean 2/3."""
    config = scripted_config(
        tmp_path,
        rollout={**FOUR, "max_retries": 1},
        algorithm={"preset": "dr_grpo"},
    )
    _, error, _ = run_scripted(config, judge=failing((1, 2), retries=99))
    assert error is None
    records = [r for r in read_episodes(config.run_dir) if r["group"] == 1]
    assert sorted((r["member"], r["retry"], r["status"]) for r in records) == [
        (0, 0, "trained"),
        (1, 0, "trained"),
        (2, 0, "failed:score_exception"),
        (2, 1, "failed:score_exception"),
        (3, 0, "trained"),
    ]
    advantages = {r["member"]: max(r["advantages"][-2:]) for r in records if r["status"] == "trained"}
    assert advantages == {0: pytest.approx(-2 / 3), 1: pytest.approx(1 / 3), 3: pytest.approx(1 / 3)}
    assert all(r["reward"] is None for r in records if r["member"] == 2)


def test_shrink_goes_on_with_fewer_at_once(tmp_path: Path) -> None:
    config = scripted_config(tmp_path, rollout={**FOUR, "on_failure": "shrink"})
    _, error, _ = run_scripted(config, judge=failing((0, 0), (0, 1)))
    assert error is None
    summary = books(config.run_dir).summary()
    assert summary["failed"] == 2 and summary["trained"] == 4 * 8 - 2 and summary["dropped"] == 0


def test_discard_replaces_the_group(tmp_path: Path) -> None:
    """Its scored members are dropped by name, and another group makes the batch full."""
    config = scripted_config(tmp_path, rollout={**FOUR, "on_failure": "discard"})
    _, error, _ = run_scripted(config, judge=failing((2, 0)))
    assert error is None
    summary = books(config.run_dir).summary()
    assert summary["failed"] == 1 and summary["dropped:member_failed"] == 3 and summary["trained"] == 4 * 8
    assert trained_groups(config.run_dir) == [[0, 1], [3, 4], [5, 6], [7, 8]]


def test_a_group_with_too_few_scored_members_is_not_trained(tmp_path: Path) -> None:
    config = scripted_config(tmp_path, rollout={**FOUR, "on_failure": "shrink", "min_group_size": 3})
    _, error, _ = run_scripted(config, judge=failing((1, 0), (1, 3)))
    assert error is None
    summary = books(config.run_dir).summary()
    assert summary["dropped:too_few_scored"] == 2 and summary["trained"] == 4 * 8
    assert 1 not in all_trained_groups(config.run_dir)


# ---------------------------------------------------------------------------------------- dynamic sampling


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_groups_without_signal_are_filtered_and_replaced(max_staleness: int, tmp_path: Path) -> None:
    """I9: every third group has equal rewards; it is booked as filtered, and batches stay full."""
    config = scripted_config(
        tmp_path, rollout={**FOUR, "max_staleness": max_staleness}, algorithm={"dynamic_sampling": True}
    )
    _, error, _ = run_scripted(
        config,
        judge=lambda e: Score(value=1.0 if e.key.group % 3 == 0 else float(e.key.member % 2)),
        engine=ScriptedEngine(lambda r: Reply(text="12", duration_s=1.0 + group_of(r) % 2)),
    )
    assert error is None
    groups = trained_groups(config.run_dir)
    assert [len(g) for g in groups] == [2, 2, 2, 2]
    assert all(g % 3 for g in all_trained_groups(config.run_dir))
    summary = books(config.run_dir).summary()
    assert summary["dropped:filtered"] == summary["dropped"] >= 8 and summary["dropped"] % 4 == 0
    assert summary["in_flight"] == 0 or max_staleness


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_dynamic_sampling_gives_up_after_its_bound(max_staleness: int, tmp_path: Path) -> None:
    """No group ever has a signal: (max_filter_factor - 1) batches' worth are filtered, then it trains what there is."""
    config = scripted_config(
        tmp_path,
        rollout={**FOUR, "max_staleness": max_staleness, "max_filter_factor": 3},
        algorithm={"dynamic_sampling": True},
        trainer={"num_batches": 2},
    )
    _, error, _ = run_scripted(config, judge=lambda e: Score(value=1.0))
    assert error is None
    groups = trained_groups(config.run_dir)
    assert [len(g) for g in groups] == [2, 2]
    summary = books(config.run_dir).summary()
    assert 4 * 4 <= summary["dropped:filtered"] <= 2 * 4 * 4
