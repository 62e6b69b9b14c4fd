"""An engine behind an actor is an engine (DESIGN.md, section 5), and its values survive the wire bit for bit (I1)."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.cluster.actors import ActorDied, ActorHost, InProcessHandle, MessageHandle, RemoteError
from headrace.cluster.remote_engine import EngineActor, RemoteEngine
from headrace.cluster.wire import WireError, decode, encode
from headrace.engines.errors import EngineError
from headrace.protocols import Engine, EngineCapabilities, WeightUpdate
from headrace.scripted import Reply, ScriptedEngine, run_in_virtual_time
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Generation,
    GenerationRequest,
    Group,
    Outcome,
    PolicyVersion,
    RoutingIds,
    Sampling,
    Score,
    ScoreError,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
    VersionSpan,
)


def request(name: str = "rollout-g0m0t0") -> GenerationRequest:
    return GenerationRequest(id=name, prompt_ids=(1, 2), sampling=Sampling(stop_ids=(0,)), seed=7)


async def connected(engine: ScriptedEngine, **options: Any) -> RemoteEngine:
    """Over messages that are bytes in between."""
    host = ActorHost("s", EngineActor(engine=engine), lambda m: later(handle.receive, m))
    handle = MessageHandle("engine", "s", lambda m: later(host.receive, m))
    return await RemoteEngine.connect(handle, **options)


def later(deliver: Callable[[Any], None], message: Any) -> None:
    asyncio.get_running_loop().call_later(0.01, deliver, decode(encode(message)))


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def body() -> Any:
        return await main()

    return run_in_virtual_time(body)


def test_it_generates_and_updates_as_the_engine_behind_it() -> None:
    """Section 5: every call of the protocol reaches the engine, and what it says of itself is known here."""

    async def main() -> None:
        engine = ScriptedEngine(Reply(text="42", duration_s=1.0))
        remote = await connected(engine)
        assert isinstance(remote, Engine)
        assert remote.capabilities == engine.capabilities and remote.version == PolicyVersion(0, 0)
        generation = await remote.generate(request())
        assert generation.ids == (52, 50, 0) and generation.version_spans == (VersionSpan(PolicyVersion(0, 0), 0, 3),)
        assert remote.stats() == engine.stats() and remote.stats().num_generated_tokens == 3
        await remote.pause("keep")
        await remote.update_weights(WeightUpdate(version=PolicyVersion(0, 1)))
        assert remote.version == PolicyVersion(0, 1)
        assert len(await remote.probe([request("a"), request("b")])) == 2
        await remote.resume()
        assert await remote.healthy()
        await remote.close()
        assert engine.log == ["pause", "update_weights", "probe", "resume", "healthy", "close"]
        assert not await remote.healthy()

    run(main)


def test_checksums_are_those_of_the_last_update() -> None:
    """I6: the canary compares tensors that the engine holds now."""

    async def main() -> None:
        engine = ScriptedEngine()
        engine.weight_checksums = lambda: {"w": str(engine.version)}  # type: ignore[method-assign]
        remote = await connected(engine)
        assert remote.weight_checksums() == {"w": "0.0"}
        await remote.pause("keep")
        await remote.update_weights(WeightUpdate(version=PolicyVersion(2, 5)))
        await remote.resume()
        assert remote.weight_checksums() == {"w": "2.5"}

    run(main)


def test_an_aborted_generation_returns_what_it_has() -> None:
    async def main() -> None:
        remote = await connected(ScriptedEngine(Reply(text="123456789", duration_s=10.0)))
        running = asyncio.ensure_future(remote.generate(request()))
        await asyncio.sleep(4.5)
        await remote.abort(request().id)
        generation = await running
        assert generation.finish_reason == "abort" and 0 < len(generation.ids) < 10

    run(main)


def test_a_cancelled_generation_frees_the_engine() -> None:
    """I19: nobody waits for it, so the engine must not go on with it."""
    ended: list[str] = []

    class Watched(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> Generation:
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                ended.append(request.id)
                raise

    async def main() -> None:
        remote = await connected(Watched(Reply(duration_s=math.inf)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(remote.generate(request()), 5.0)
        await asyncio.sleep(1.0)

    run(main)
    assert ended == [request().id]


def test_a_late_reply_does_not_turn_the_version_back() -> None:
    """Failure 101: replies overtake each other, versions seen by the caller do not."""

    async def main() -> None:
        engine = ScriptedEngine()
        actor = EngineActor(engine=engine)
        remote = await RemoteEngine.connect(InProcessHandle("engine", actor))
        old = await actor.abort("nobody")
        engine.version = PolicyVersion(0, 3)
        await remote.abort("nobody")
        assert remote.version == PolicyVersion(0, 3)

        async def answer_late(_: str) -> Any:
            return old

        actor.abort = answer_late  # type: ignore[method-assign]
        await remote.abort("nobody")
        assert remote.version == PolicyVersion(0, 3)

    run(main)


def test_errors_of_the_engine_and_of_the_actor_are_told_apart() -> None:
    """Failure 106: a request that failed is no dead engine."""

    async def main() -> None:
        remote = await connected(ScriptedEngine(Reply(error=EngineError("no room"))))
        with pytest.raises(RemoteError, match="EngineError: no room"):
            await remote.generate(request())
        assert await remote.healthy()
        await remote._handle.close()
        with pytest.raises(ActorDied):
            await remote.generate(request())
        await remote.close()

    run(main)


def test_weights_travel_by_their_carrier() -> None:
    """``send_weights`` and ``receive_weights`` bracket the call; without them tensors are refused by name."""

    async def main() -> None:
        engine, seen = ScriptedEngine(), []
        tensors = {"w": torch.ones(2)}

        async def send(update: WeightUpdate) -> dict[str, Any]:
            seen.append(update)
            return {"version": list(update.version)}

        actor = EngineActor(engine=engine, receive_weights=lambda m: WeightUpdate(version=PolicyVersion(*m["version"])))
        host = ActorHost("s", actor, lambda m: later(handle.receive, m))
        handle = MessageHandle("engine", "s", lambda m: later(host.receive, m))
        remote = await RemoteEngine.connect(handle, send_weights=send)
        await remote.pause("keep")
        await remote.update_weights(WeightUpdate(version=PolicyVersion(0, 1), tensors=tensors))
        assert seen[0].tensors is tensors and engine.version == PolicyVersion(0, 1)
        plain = await connected(ScriptedEngine())
        with pytest.raises(WireError, match=r"torch.Tensor cannot travel"):
            await plain.update_weights(WeightUpdate(version=PolicyVersion(0, 1), tensors=tensors))

    run(main)


def test_an_actor_of_another_kind_is_refused() -> None:
    class Other:
        def describe(self) -> str:
            return "hello"

    async def main() -> None:
        with pytest.raises(EngineError, match="holds no EngineActor"):
            await RemoteEngine.connect(InProcessHandle("other", Other()))

    run(main)


# ------------------------------------------------------------------------------------------------------ wire


def episode() -> Episode:
    """Everything that an episode can carry."""
    version = PolicyVersion(1, 4)
    task = Task(
        id="t", messages=({"role": "user", "content": "é?"},), answer=[1, ("a", None)], metadata={"$k": {3: b"x"}}
    )
    policy = Segment(
        source=Source.POLICY,
        ids=(7, 0),
        parent=0,
        logprobs=(-0.1, -1e-45),
        version_spans=(VersionSpan(version, 0, 2),),
        kept_ids=((7, 8), (0,)),
        routing=RoutingIds((np.arange(12, dtype=np.uint8).reshape(3, 2, 2),)),
    )
    return Episode(
        key=AttemptKey(3, 1, 2),
        task=task,
        turns=(Turn(reply="7", observation=({"role": "user", "content": "ok"},)),),
        trace=Trace(segments=(Segment(source=Source.TEMPLATE, ids=(1,)), policy)),
        outcome=Outcome.DONE,
        score=Score(value=0.5, components={"exact": 1.0}, value_T=(0.25, 0.25)),
        issued_version=version,
        policy_seed=2**63 - 1,
    )


def test_values_come_out_of_the_wire_as_they_went_in() -> None:
    """I1: ids, log-probabilities and versions, their types and every bit."""
    value = episode()
    group = Group(id=3, task=value.task, episodes=(value,))
    error = ScoreError(error_class=ErrorClass.CRASH, message="m")
    items = (value, group, error, request(), Outcome.TIMEOUT, math.inf, -0.0, [1, (2,)], None, EngineCapabilities())
    back = decode(encode(items))
    assert back == items and isinstance(back[3].prompt_ids, tuple) and math.copysign(1.0, back[6]) == -1.0
    assert type(back[4]) is Outcome and type(back[0].key) is AttemptKey
    routing = back[0].trace.segments[1].routing.parts[0]
    assert routing.dtype == np.uint8 and (routing == np.arange(12).reshape(3, 2, 2)).all()
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("value", [object(), torch.ones(1), print, {"f": {1, 2}}])
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="cannot travel between processes"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"$is":["Popen","x"]}', b'{"$odd":1}', b'{"$is":["Task","x"]}', b'{"$enum":["Outcome","no"]}'],
)
def test_bytes_that_are_none_of_ours_are_refused(data: bytes) -> None:
    """Nothing but the classes of the table can be made by what comes in."""
    with pytest.raises(WireError, match="no value of headrace"):
        decode(data)


def test_frames_are_json() -> None:
    assert json.loads(encode({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}
