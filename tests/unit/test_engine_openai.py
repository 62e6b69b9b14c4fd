"""An engine of text against a scripted server: what is sent, what is repeated, every way to fail, and no training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from http_loopback import Answer
from openai_scripted_server import ScriptedOpenAi, completion, serving

from headrace.config.checks import check_config
from headrace.config.engines import OpenAiEngineConfig
from headrace.config.schema import EvaluationConfig, RunConfig
from headrace.control.checks import GuardError
from headrace.control.samples import checked_samples
from headrace.control.watchdog import Watchdog
from headrace.engines import EngineError, RequestError, openai
from headrace.engines.http import HttpError
from headrace.engines.openai import OpenAiEngine, check_before_work, make_client
from headrace.environments.runner import EpisodeRunner
from headrace.environments.single_turn import SingleTurn
from headrace.errors import ConfigError
from headrace.protocols import ChatEngine, ChatReply, ChatRequest, Engine
from headrace.types import AttemptKey, Group, Outcome, PolicyVersion, Sampling, Score, Task

Steps = Callable[[OpenAiEngine, ScriptedOpenAi], Awaitable[Any]]
TASK = Task(id="t", messages=({"role": "user", "content": "3 * 4 ="},), answer="12")


def run(steps: Steps, server: ScriptedOpenAi | None = None, model: str = "large", **config: Any) -> ScriptedOpenAi:
    server = server or ScriptedOpenAi()

    async def main() -> None:
        async with serving(server) as url:
            settings = OpenAiEngineConfig(url=url, **{"request_deadline_s": 5.0, "start_deadline_s": 0.4, **config})
            engine = OpenAiEngine(settings, model, make_client(settings))
            try:
                await asyncio.wait_for(steps(engine, server), 10)
            finally:
                await engine.close()

    asyncio.run(main())
    return server


def asked(seed: int = 7, **sampling: Any) -> ChatRequest:
    return ChatRequest(
        id="r", messages=TASK.messages, sampling=Sampling(**{"max_new_tokens": 9, **sampling}), seed=seed
    )


def test_messages_go_in_and_text_comes_out() -> None:
    """Only what was asked for is sent, under the names that the server was said to take."""

    async def steps(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        assert isinstance(engine, ChatEngine) and not isinstance(engine, Engine)
        assert await engine.chat(asked()) == ChatReply(text="12", finish_reason="stop")
        await engine.chat(asked(temperature=0.0, top_p=0.5, stop_strings=("x",)))

    first, second = run(steps).bodies
    messages = [{"role": "user", "content": "3 * 4 ="}]
    assert first == {"model": "large", "messages": messages, "temperature": 1.0, "max_tokens": 9, "seed": 7}
    more = {"temperature": 0.0, "top_p": 0.5, "stop": ["x"]}
    assert second == first | more
    [third] = run(lambda e, s: e.chat(asked()), length_option="max_completion_tokens", send_seed=False).bodies
    assert third == {"model": "large", "messages": messages, "temperature": 1.0, "max_completion_tokens": 9}


def test_no_more_requests_run_at_once_than_allowed() -> None:
    async def steps(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        await asyncio.gather(*(engine.chat(asked(n)) for n in range(20)))

    assert run(steps, max_concurrent=3).num_most == 3


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """429 and 5xx, within one deadline."""
    monkeypatch.setattr("headrace.engines.http.FIRST_DELAY_S", 0.01)

    def script(body: dict[str, Any], number: int) -> Answer | None:
        return Answer({"error": "later"}, (429, 500, 503)[number]) if number < 3 else None

    async def steps(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        assert (await engine.chat(asked())).text == "12"

    assert len(run(steps, ScriptedOpenAi(script=script)).bodies) == 4

    async def fails(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        with pytest.raises(EngineError, match=r"answered /chat/completions with status 500: still broken"):
            await engine.chat(asked())

    run(fails, ScriptedOpenAi(script=lambda b, n: Answer({"error": "still broken"}, 500)), request_deadline_s=0.1)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer({"error": {"message": "too long"}}, 400), RequestError, "status 400: too long"),
        (Answer({"odd": 1}), EngineError, "has not the form of a chat completion"),
        (Answer("hello"), EngineError, "has not the form of a chat completion"),
        (completion("", "content_filter"), EngineError, "the server withheld the reply"),
        (completion(None, "tool_calls", tool_calls=[]), EngineError, "for a reason not known here: 'tool_calls'"),
        (completion("x", None), EngineError, "for a reason not known here: None"),
        (completion(None, refusal="no"), EngineError, "returned no text"),
    ],
)
def test_what_is_no_reply_is_an_error(answer: Answer, kind: type[EngineError], message: str) -> None:
    """An error is not a reward: never an empty reply that a task would score."""

    async def steps(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        with pytest.raises(kind, match=message):
            await engine.chat(asked())

    run(steps, ScriptedOpenAi(script=lambda body, number: answer))


def test_a_reply_that_ran_into_its_length_is_truncated() -> None:
    """Also where a reasoning model used all of it before its answer."""

    async def steps(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        assert await engine.chat(asked()) == ChatReply(text="", finish_reason="length")

    run(steps, ScriptedOpenAi(script=lambda body, number: completion(None, "length")))


@pytest.mark.parametrize(
    ("server", "model", "message"),
    [
        (ScriptedOpenAi(), "larg", r"serves no model 'larg'; it lists small, large"),
        (
            ScriptedOpenAi(key="k"),
            "large",
            r"refused a call without a key for /models \(401\).*engine.api_key_variable",
        ),
    ],
)
def test_what_is_wrong_with_the_server_is_told_at_start(server: ScriptedOpenAi, model: str, message: str) -> None:
    async def steps(engine: OpenAiEngine, server: ScriptedOpenAi) -> None:
        with pytest.raises(EngineError, match=message):
            await engine.check()

    run(steps, server, model)


def test_a_server_without_a_list_or_with_aliases_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k")
    run(lambda engine, server: engine.check(), ScriptedOpenAi(lists_models=False), "anything")
    run(lambda engine, server: engine.check(), model="alias")
    run(lambda engine, server: engine.check(), ScriptedOpenAi(key="k"), api_key_variable="MY_KEY")


def test_a_dead_address_is_told_before_any_work() -> None:
    """From inside an event loop too, as the wiring calls it."""
    config = OpenAiEngineConfig(url="http://127.0.0.1:1/v1", start_deadline_s=0.2)

    async def main() -> None:
        with pytest.raises(HttpError, match=r"nothing answers at http://127\.0\.0\.1:1/v1/models"):
            check_before_work(lambda: OpenAiEngine(config, "m", make_client(config)))

    asyncio.run(main())


# ----------------------------------------------------------------------------------- episodes, and no training


class Scripted:
    """Text as told, or an error."""

    def __init__(self, *replies: ChatReply | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[ChatRequest] = []

    version = PolicyVersion(0, 0)

    async def chat(self, request: ChatRequest) -> ChatReply:
        self.requests.append(request)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def close(self) -> None:
        pass


def play(engine: Scripted) -> Any:
    async def main() -> Any:
        clock = asyncio.get_running_loop().time
        runner = EpisodeRunner(
            engine=engine,
            renderer=None,
            make_environment=lambda task: SingleTurn(),
            watchdog=Watchdog(clock, 300.0),
            clock=clock,
            run_seed=7,
            generation_deadline_s=5.0,
        )
        return await runner.run(AttemptKey(0, 0), TASK, sampling=Sampling(max_new_tokens=8))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (ChatReply(text="12", finish_reason="stop"), Outcome.DONE),
        (ChatReply(text="1", finish_reason="length"), Outcome.TRUNCATED),
        (EngineError("gone"), Outcome.INFRASTRUCTURE_ERROR),
    ],
)
def test_an_episode_of_text_has_turns_and_no_trace(reply: Any, outcome: Outcome) -> None:
    """The messages go as they are; what was sampled is not known, so that nothing is said about it."""
    engine = Scripted(reply)
    episode = play(engine)
    assert episode.outcome is outcome
    assert episode.trace.segments == () and episode.trace.versions == ()
    assert engine.requests[0].messages == TASK.messages
    if not isinstance(reply, Exception):
        assert episode.reply == reply.text


def test_an_episode_of_text_is_never_trained() -> None:
    """I2: refused where samples are made, whatever let it get there."""
    import dataclasses

    episode = play(Scripted(ChatReply(text="12", finish_reason="stop")))
    scored = dataclasses.replace(episode, score=Score(value=1.0))
    with pytest.raises(GuardError, match="1 turns and no sampled ids: an engine of text played it"):
        checked_samples([Group(id=0, task=TASK, episodes=(scored,))], 1.0, 0)


def test_training_on_text_is_refused_with_the_reason() -> None:
    """Before any work; evaluation of the same file is not."""
    base = {"model": {"path": "m"}, "tasks": {"type": "arithmetic"}, "rewards": ({"type": "exact"},)}
    config = RunConfig(**base, engine={"type": "openai", "url": "http://e/v1"})
    with pytest.raises(ConfigError, match=r"cannot train: .*neither the sampled ids nor their log-probabilities"):
        check_config(config)
    check_config(config, trains=False)
    check_config(config.model_copy(update={"evaluation": EvaluationConfig(num_samples=2)}), trains=False)
    config = RunConfig(**base, engine={"type": "openai", "url": "http://e/v1"}, sampling={"top_k": 4})
    with pytest.raises(ConfigError, match=r"sampling\.top_k = 4 has no effect"):
        check_config(config, trains=False)
    assert openai.BUSY.isdisjoint({400, 401, 404})
