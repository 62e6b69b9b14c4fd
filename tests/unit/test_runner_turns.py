"""The episode runner over a scripted engine and environments: turns, branches, limits, failures (I1, I2, I19)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.control.samples import samples_from_episode
from headrace.control.watchdog import Watchdog
from headrace.environments.runner import EpisodeRunner, attempt_seed
from headrace.errors import PartLost
from headrace.protocols import EngineCapabilities, Observation
from headrace.scripted import (
    END,
    Reply,
    ScriptedEngine,
    ScriptedEnvironment,
    ScriptedRenderer,
    run_in_virtual_time,
)
from headrace.types import AttemptKey, Episode, GenerationRequest, Message, Outcome, Sampling, Task

TASK = Task(id="t", messages=({"role": "user", "content": "a?"},), answer="b")
KEY = AttemptKey(3, 1)


def turn_of(request: GenerationRequest) -> int:
    return int(request.id.rpartition("t")[2])


def play(
    environment: ScriptedEnvironment,
    *,
    engine: ScriptedEngine | None = None,
    renderer: ScriptedRenderer | None = None,
    sampling: Sampling | None = None,
    **options: Any,
) -> Episode:
    """One episode in virtual time."""

    async def main() -> Episode:
        clock = asyncio.get_running_loop().time
        runner = EpisodeRunner(
            engine=engine or ScriptedEngine(lambda r: Reply(text=f"r{turn_of(r)}", duration_s=1.0)),
            renderer=renderer or ScriptedRenderer(),
            make_environment=lambda task: environment,
            watchdog=Watchdog(clock, 300.0),
            clock=clock,
            run_seed=7,
            **{"max_turns": 8, **options},
        )
        episode = await runner.run(KEY, TASK, sampling=sampling or Sampling(max_new_tokens=8))
        assert not runner.watchdog.waits(), "a wait was left open"
        return episode

    return run_in_virtual_time(main)


def sources(episode: Episode) -> list[tuple[str, int]]:
    """(source, parent) of each segment."""
    return [(segment.source.value, segment.parent) for segment in episode.trace.segments]


# ------------------------------------------------------------------------------------------- turns and traces


def test_an_append_only_template_extends_one_trace() -> None:
    """I1: the second prompt is the first one, the sampled ids as they were sampled, and what the environment said;
    nothing is tokenised anew, and one sample comes out."""
    environment = ScriptedEnvironment(["more", "more"])
    engine = ScriptedEngine(lambda r: Reply(text=f"r{turn_of(r)}"))
    episode = play(environment, engine=engine)
    assert episode.outcome is Outcome.DONE and episode.error is None
    assert environment.actions == ["r0", "r1", "r2"] and environment.num_closed == 1
    assert sources(episode) == [
        ("template", -1),
        ("policy", 0),
        ("environment", 1),
        ("policy", 2),
        ("environment", 3),
        ("policy", 4),
    ]
    first, second, third = (r.prompt_ids for r in engine.requests)
    segments = episode.trace.segments
    assert second == first + segments[1].ids + segments[2].ids
    assert third == second + segments[3].ids + segments[4].ids
    assert second[: len(first) + 3] == (*first, ord("r"), ord("0"), END)
    (sample,) = samples_from_episode(episode, "g", 1.0)
    assert sample.num_trained == 9 and len(sample.ids) == len(third) + 3
    assert [t.reply for t in episode.turns] == ["r0", "r1", "r2"]


def test_a_template_that_rewrites_history_starts_a_new_branch() -> None:
    """I1: reasoning is dropped from earlier turns, so the second prompt does not begin with what was sampled; both
    branches are trained, each sampled id once."""

    def without_thoughts(messages: list[Message]) -> list[Message]:
        return [{**m, "content": str(m["content"]).replace("hm", "")} for m in messages]

    engine = ScriptedEngine(lambda r: Reply(text=f"hm{turn_of(r)}"))
    episode = play(ScriptedEnvironment(["more"]), engine=engine, renderer=ScriptedRenderer(without_thoughts))
    assert sources(episode) == [("template", -1), ("policy", 0), ("template", -1), ("policy", 2)]
    assert len(list(episode.trace.branches())) == 2
    assert engine.requests[1].prompt_ids == episode.trace.segments[2].ids
    assert ord("h") not in engine.requests[1].prompt_ids
    samples = samples_from_episode(episode, "g", 1.0)
    assert [s.num_trained for s in samples] == [4, 4]
    assert [s.id for s in samples] == ["g3m1/0", "g3m1/1"]


def test_a_reply_cut_by_its_limit_goes_on_as_a_branch_of_what_was_sampled() -> None:
    """I1, I2: the cut reply has no end-of-turn id, the rendered history has one: what was not sampled is the
    environment's and is never trained."""
    engine = ScriptedEngine(lambda r: Reply(text="12345678" if turn_of(r) == 0 else "1"))
    episode = play(ScriptedEnvironment(["more"]), engine=engine, sampling=Sampling(max_new_tokens=4))
    engine_ids = episode.trace.segments[1].ids
    assert engine_ids == tuple(map(ord, "1234"))
    assert sources(episode)[2] == ("environment", 1)
    assert episode.trace.segments[2].ids[0] == END
    (sample,) = samples_from_episode(episode, "g", 1.0)
    assert sample.num_trained == 4 + 2


def test_seeds_and_prefix_keys_of_the_turns_differ_and_repeat() -> None:
    """I18: a turn's stream depends on run seed, attempt and turn alone."""
    requests = []
    for _ in range(2):
        engine = ScriptedEngine()
        play(ScriptedEnvironment(["more"]), engine=engine)
        requests.append([(r.seed, r.prefix_key) for r in engine.requests])
    assert requests[0] == requests[1]
    (seed_0, key_0), (seed_1, key_1) = requests[0]
    assert seed_0 == attempt_seed(7, KEY, 0) and seed_0 != seed_1 and key_0 != key_1


# ------------------------------------------------------------------------------------------------------ limits


def test_the_turn_limit_ends_the_episode() -> None:
    environment = ScriptedEnvironment(["more"] * 10)
    episode = play(environment, max_turns=3)
    assert episode.outcome is Outcome.TURN_LIMIT and len(episode.turns) == 3
    assert not episode.outcome.is_failure and environment.num_closed == 1


def test_done_on_the_last_turn_is_done() -> None:
    assert play(ScriptedEnvironment(["more", "more"]), max_turns=3).outcome is Outcome.DONE


def test_a_last_reply_cut_by_its_limit_is_truncated() -> None:
    engine = ScriptedEngine(Reply(text="123456789", finish="length"))
    assert play(ScriptedEnvironment(), engine=engine).outcome is Outcome.TRUNCATED


def test_an_environment_that_is_done_at_reset_needs_no_turn() -> None:
    class Done(ScriptedEnvironment):
        async def reset(self, task: Task, seed: int) -> Observation:
            return Observation(messages=task.messages, done=True)

    engine = ScriptedEngine()
    episode = play(Done(), engine=engine)
    assert episode.outcome is Outcome.DONE and not episode.turns and not engine.requests


def test_a_prompt_that_leaves_no_room_ends_with_context_limit() -> None:
    """Never cut: what was sampled before is kept and can be trained."""
    capabilities = EngineCapabilities(max_context=24)
    engine = ScriptedEngine(Reply(text="123"), capabilities=capabilities)
    episode = play(ScriptedEnvironment(["more"] * 5), engine=engine)
    assert episode.outcome is Outcome.CONTEXT_LIMIT and not episode.outcome.is_failure
    assert "exceed the context of 24" in str(episode.error)
    assert all(len(r.prompt_ids) + 8 <= 24 for r in engine.requests) and engine.requests


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("call", ["reset", "step", "close"])
def test_an_environment_that_raises_is_an_environment_error(call: str) -> None:
    environment = ScriptedEnvironment(fail_on=call)
    episode = play(environment)
    assert episode.outcome is Outcome.ENVIRONMENT_ERROR and episode.outcome.is_failure
    assert episode.error == f"{call} of single_turn: OSError: {call} failed as scripted"
    assert environment.num_closed == 1


def test_an_environment_whose_worker_is_gone_is_the_machinerys_failure() -> None:
    """F106: the environment itself did nothing wrong."""
    episode = play(ScriptedEnvironment(["more", PartLost("its worker was killed")]))
    assert episode.outcome is Outcome.INFRASTRUCTURE_ERROR and "its worker was killed" in str(episode.error)


def test_an_environment_that_raises_in_a_later_turn_keeps_what_was_sampled() -> None:
    episode = play(ScriptedEnvironment(["more", ValueError("bad state")]))
    assert episode.outcome is Outcome.ENVIRONMENT_ERROR and "ValueError: bad state" in str(episode.error)
    assert episode.trace.num_policy_tokens == 6


def test_a_failing_close_does_not_hide_the_error_before_it() -> None:
    class Both(ScriptedEnvironment):
        async def step(self, action: str) -> Observation:
            raise ValueError("first")

    episode = play(Both(fail_on="close"))
    assert "ValueError: first" in str(episode.error)


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        (ScriptedEnvironment(hang_on="reset"), "environment single_turn for reset"),
        (ScriptedEnvironment(hang_on="step"), "environment single_turn for step"),
    ],
)
def test_an_environment_that_hangs_is_a_timeout_that_names_it(environment: ScriptedEnvironment, what: str) -> None:
    """I19."""
    episode = play(environment, episode_deadline_s=60.0)
    assert episode.outcome is Outcome.TIMEOUT
    assert f"episode g3m1 waited 60.0 s on {what}" in str(episode.error)
    assert environment.num_closed == 1


def test_a_generation_that_hangs_is_a_timeout_and_is_aborted() -> None:
    engine = ScriptedEngine(lambda r: Reply(duration_s=float("inf")))
    episode = play(ScriptedEnvironment(), engine=engine, generation_deadline_s=30.0)
    assert episode.outcome is Outcome.TIMEOUT and "30.0 s on engine for generation of turn 0" in str(episode.error)
    assert engine.log == ["abort"]


def test_many_short_turns_cannot_outlast_the_episode() -> None:
    """I19: the deadline of the whole episode, not of each wait."""
    environment = ScriptedEnvironment(["more"] * 1000)
    engine = ScriptedEngine(Reply(text="1", duration_s=10.0))
    episode = play(environment, engine=engine, max_turns=1000, episode_deadline_s=60.0)
    assert episode.outcome is Outcome.TIMEOUT and "rollout.episode_deadline_s" in str(episode.error)
    assert len(episode.turns) <= 8 and episode.ended_s <= 80.0


def test_an_engine_that_raises_is_an_infrastructure_error() -> None:
    episode = play(ScriptedEnvironment(), engine=ScriptedEngine(Reply(error=OSError("gone"))))
    assert episode.outcome is Outcome.INFRASTRUCTURE_ERROR and episode.error == "engine: OSError: gone"


def test_a_history_that_cannot_be_rendered_is_an_environment_error() -> None:
    """What the environment said has a role that the template does not know: its episode fails, not the run."""
    strange = Observation(messages=({"role": "narrator", "content": "night falls"},))
    episode = play(ScriptedEnvironment([strange]))
    assert episode.outcome is Outcome.ENVIRONMENT_ERROR
    assert "KeyError: 'narrator'" in str(episode.error) and "turn 1" in str(episode.error)


# -------------------------------------------------------------------------------------------------- cancelling


def cancelled_after(delay_s: float, environment: ScriptedEnvironment, engine: ScriptedEngine) -> float:
    """Cancel a running episode; returns the virtual time at which it was over."""

    async def main() -> float:
        clock = asyncio.get_running_loop().time
        runner = EpisodeRunner(
            engine=engine,
            renderer=ScriptedRenderer(),
            make_environment=lambda task: environment,
            watchdog=Watchdog(clock, 300.0),
            clock=clock,
            run_seed=7,
        )
        task = asyncio.create_task(runner.run(KEY, TASK, sampling=Sampling(max_new_tokens=8)))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not runner.watchdog.waits()
        return clock()

    return run_in_virtual_time(main)


def test_cancelling_aborts_the_request_and_closes_the_environment() -> None:
    engine, environment = ScriptedEngine(Reply(duration_s=100.0)), ScriptedEnvironment()
    assert cancelled_after(5.0, environment, engine) == pytest.approx(5.0)
    assert engine.log == ["abort"] and environment.num_closed == 1


@pytest.mark.parametrize("hangs", ["abort", "close"])
def test_cancelling_ends_although_engine_or_environment_hang(hangs: str) -> None:
    """I19: the clean-up after a cancellation has a deadline, too."""
    engine = ScriptedEngine(Reply(duration_s=100.0))
    engine.hang_on.add(hangs)
    environment = ScriptedEnvironment(hang_on=hangs)
    assert cancelled_after(5.0, environment, engine) <= 5.0 + 2 * 10.0
    assert environment.num_closed == 1
