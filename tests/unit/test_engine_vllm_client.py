"""The vLLM engine's client against a scripted server in a process of its own: replies, and every way to fail."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_scripted_server import VOCAB, distribution

from headrace.config.engines import VllmEngineConfig
from headrace.engines import EngineError, RequestError
from headrace.engines.semantics import SemanticsError
from headrace.engines.vllm import client
from headrace.engines.vllm.client import VllmEngine
from headrace.engines.vllm.launch import backend_options, in_a_process
from headrace.errors import HeadraceError
from headrace.protocols import Engine, WeightUpdate
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling, VersionSpan

SERVER = Path(__file__).parents[1] / "vllm_scripted_server.py"
V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))


class Sender:
    """Carries a version, and no tensors."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self.inherit = (self.file.fileno(),)
        self.receiver = {"type": "scripted"}
        self.refuse = False
        self.num_transfers = 0

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> dict[str, Any]:
        return {"version": update.version, "base": base, "refuse": self.refuse}

    def transfer(self) -> None:
        self.num_transfers += 1

    def latest(self) -> WeightUpdate | None:
        return None

    def close(self) -> None:
        self.file.close()


class UpdateRefused(HeadraceError):
    pass


def make(fault: str = "well", python: str = sys.executable, **config: Any) -> VllmEngine:
    engine, sender = VllmEngineConfig(**{"start_deadline_s": 20.0, **config}), Sender()
    options = backend_options(engine, model=Path(fault), dtype="float32", vocab_size=VOCAB, max_context=64)
    return VllmEngine(
        engine,
        sender,
        WeightUpdate(version=V0),
        in_a_process(
            options,
            python=Path(python),
            weights=sender.receiver,
            inherit=sender.inherit,
            log_path=None,
            program=SERVER,
        ),
        vocab_size=VOCAB,
        decode=lambda ids: "".join(chr(97 + i) for i in ids),
        max_context=64,
        make_update_error=UpdateRefused,
    )


def asked(name: str = "r", seed: int = 0, **sampling: Any) -> GenerationRequest:
    declared = Sampling(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest(id=name, prompt_ids=(1, 2, 3), sampling=declared, seed=seed)


def checksums_of(version: PolicyVersion) -> dict[str, str]:
    return {"w": f"checksum of {version}", "frozen": "never changes"}


def run(steps: Callable[[VllmEngine], Awaitable[Any]], fault: str = "well", **config: Any) -> Any:
    """``steps`` on an engine that is closed afterwards; its server must be gone then."""

    async def main() -> Any:
        engine = make(fault, **config)
        try:
            return await steps(engine)
        finally:
            await engine.close()
            if engine._server is not None:
                assert not engine._server.is_alive

    return asyncio.run(main())


def assert_declared(request: GenerationRequest, reply: Generation, version: PolicyVersion) -> None:
    sampling = request.sampling
    options = distribution(sampling, version)
    assert [options[i] for i in reply.ids] == list(reply.logprobs)
    kept = tuple(tuple(sorted(options)) for _ in reply.ids) if sampling.is_truncated else None
    assert reply.kept_ids == kept


def test_replies_have_ids_logprobs_kept_ids_and_versions() -> None:
    """I2, I18: what the server sampled arrives bit for bit, each request by its own seed, more requests than fit."""

    async def steps(engine: VllmEngine) -> None:
        assert isinstance(engine, Engine)
        requests = [asked(f"r{n}", n, top_k=n % 3 * 2, max_new_tokens=3 + n) for n in range(6)]
        replies = await asyncio.gather(*(engine.generate(r) for r in requests))
        for request, reply in zip(requests, replies, strict=True):
            assert_declared(request, reply, V0)
            assert reply.request_id == request.id and reply.finish_reason == "length"
            assert reply.version_spans == (VersionSpan(V0, 0, request.sampling.max_new_tokens),)
        again = await engine.generate(requests[3])
        assert again == replies[3]
        stats = engine.stats()
        assert stats.num_generated_tokens >= sum(len(r.ids) for r in replies) and not stats.num_running
        assert await engine.healthy()
        assert engine.weight_checksums() == checksums_of(V0)

    run(steps, max_batch_size=2)


def test_stop_ids_and_stop_strings() -> None:
    """A stop id ends a reply in the server, a stop string here, at the token that completes it; both stay."""

    async def steps(engine: VllmEngine) -> None:
        whole = await engine.generate(asked(max_new_tokens=40))
        stop_id = whole.ids[5]
        reply = await engine.generate(asked(max_new_tokens=40, stop_ids=(stop_id,)))
        assert reply.finish_reason == "stop" and reply.ids == whole.ids[: whole.ids.index(stop_id) + 1]
        text = "".join(chr(97 + i) for i in whole.ids)
        reply = await engine.generate(asked(max_new_tokens=40, stop_strings=(text[3:6],)))
        assert reply.finish_reason == "stop" and reply.ids == whole.ids[: text.index(text[3:6]) + 3]

    run(steps)


def test_abort_returns_what_has_come() -> None:
    """An aborted request returns its tokens so far, unknown ids are ignored, and others go on."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        long = asyncio.create_task(engine.generate(asked("long", max_new_tokens=60)))
        other = asyncio.create_task(engine.generate(asked("other", max_new_tokens=30)))
        while engine.stats().num_running < 2 or not engine._by_handle[engine._by_id["long"]].ids:
            await asyncio.sleep(0.001)
        await engine.abort("nobody")
        await engine.abort("long")
        reply = await long
        assert reply.finish_reason == "abort" and 0 < len(reply.ids) < 60
        assert len((await other).ids) == 30

    run(steps, "slow")


def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    """I19: the caller's deadline passes; the server drops the request, and its id can be used again."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(asked(max_new_tokens=60)), 0.05)
        await engine.generate(asked(max_new_tokens=2))
        assert engine.stats().num_running == 0 and not engine._by_handle and not engine._by_id

    run(steps, "slow")


def test_versions_change_between_two_tokens() -> None:
    """I7: pause keeps what runs, a probe alone advances meanwhile, and each token carries its version."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        request = asked("long", max_new_tokens=60)
        long = asyncio.create_task(engine.generate(request))
        while not engine._by_id or len(engine._by_handle[engine._by_id["long"]].ids) < 5:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineError, match="needs a paused engine"):
            await engine.update_weights(WeightUpdate(version=V1))
        await engine.pause("keep")
        await engine.update_weights(WeightUpdate(version=V1))
        assert engine.version == V1 and engine.weight_checksums() == checksums_of(V1)
        num_before = len(engine._by_handle[engine._by_id["long"]].ids)
        late = asyncio.create_task(engine.generate(asked("late", 1)))
        (proof,) = await engine.probe([asked("probe")])
        assert_declared(asked("probe"), proof, V1)
        assert len(engine._by_handle[engine._by_id["long"]].ids) == num_before and not late.done()
        await engine.resume()
        reply = await long
        assert reply.version_spans == (VersionSpan(V0, 0, num_before), VersionSpan(V1, num_before, 60))
        assert (await late).version_spans == (VersionSpan(V1, 0, 8),)

    run(steps, "slow")


def test_pause_abort_ends_everything() -> None:
    """``pause("abort")`` ends what runs and what waits, with what each has; later requests wait for resume."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        tasks = [asyncio.create_task(engine.generate(asked(f"r{n}", n, max_new_tokens=60))) for n in range(3)]
        while not engine.stats().num_running:
            await asyncio.sleep(0.001)
        await engine.pause("abort")
        replies = await asyncio.gather(*tasks)
        assert {r.finish_reason for r in replies} == {"abort"} and not replies[2].ids
        late = asyncio.create_task(engine.generate(asked("late")))
        await asyncio.sleep(0.05)
        assert not late.done()
        await engine.resume()
        assert len((await late).ids) == 8

    run(steps, "slow", max_batch_size=2)


def test_older_and_refused_updates_change_nothing() -> None:
    """F82, F87: the engine keeps its version and goes on; the same update twice is once."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        await engine.pause("keep")
        for _ in range(2):
            await engine.update_weights(WeightUpdate(version=V2))
            assert engine.version == V2 and engine.weight_checksums() == checksums_of(V2)
        with pytest.raises(UpdateRefused, match=r"weights 0\.1 are older than the engine's 0\.2"):
            await engine.update_weights(WeightUpdate(version=V1))
        engine._sender.refuse = True
        with pytest.raises(UpdateRefused, match="refused 'update': these tensors do not fit"):
            await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 3)))
        await engine.resume()
        assert await engine.healthy() and engine.version == V2
        assert_declared(asked(), await engine.generate(asked()), V2)

    run(steps)


def test_weights_of_no_version_serve_nothing() -> None:
    """F88: where a load breaks half way, probes are refused, with what happened."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        await engine.pause("keep")
        with pytest.raises(EngineError, match=r"failed half way.*RuntimeError: half way"):
            await engine.update_weights(WeightUpdate(version=V1))
        assert engine.version == V0
        with pytest.raises(EngineError, match="serves nothing until a complete update"):
            await engine.probe([asked("probe")])

    run(steps, "load-raises")


def test_a_module_that_serves_old_weights_shows_in_the_checksums() -> None:
    """I6: what the server found stale stands where the canary compares checksums."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        assert engine.weight_checksums() == checksums_of(V0) | {"stale": "not served"}

    run(steps, "stale")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("exits-at-start", r"is gone: it ended with exit code 1; its last words:\n.*no such model anywhere"),
        ("refuses-to-start", "the vLLM server failed: VersionError: vLLM 9.9 is installed"),
        ("garbage", "sent what cannot be read: WireError: a frame is no JSON"),
        ("small-context", "its context is 8 tokens, 64 are needed"),
        ("silent-at-start", r"took more than 0\.5 s to load the model; it still runs \(process \d+\); it printed noth"),
    ],
)
def test_a_server_that_does_not_start(fault: str, message: str) -> None:
    """I19: the first call says how it ended and what it said last; later calls say the same at once."""

    async def steps(engine: VllmEngine) -> None:
        for _ in range(2):
            with pytest.raises(EngineError, match=f"(?s){message}"):
                await engine.generate(asked())
        assert not await engine.healthy()

    run(steps, fault, start_deadline_s=0.5 if fault == "silent-at-start" else 20.0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raw-logprobs", "with {'top_k': 1} one id can be drawn, but its log-probability is -"),
        ("no-temperature", "doubling the temperature should halve the log of the odds of two ids"),
        ("top-p-first", "with {'top_k': 2, 'top_p': 0.4} one id can be drawn"),
        ("no-seeds", "7 seeds gave one reply"),
    ],
)
def test_an_engine_that_means_something_else_is_refused(fault: str, message: str) -> None:
    """F6: log-probabilities of the raw logits, or seeds without effect, are found at start."""

    async def steps(engine: VllmEngine) -> None:
        with pytest.raises(SemanticsError, match=message):
            await engine.start()

    run(steps, fault)


def test_a_killed_server_fails_everything_with_its_signal_and_last_words() -> None:
    """F106: kill -9 while requests run. Nobody waits for ever, and the engine says so from then on."""

    async def steps(engine: VllmEngine) -> None:
        tasks = [asyncio.create_task(engine.generate(asked(f"r{n}", n, max_new_tokens=60))) for n in range(3)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "signal SIGKILL ended it" in str(result) and "about to be killed" in str(result)
        assert not await engine.healthy()
        with pytest.raises(EngineError, match="SIGKILL"):
            await engine.pause("keep")

    run(steps, "killed")


def test_a_server_killed_from_outside_while_idle() -> None:
    """F106: also where nothing runs."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        os.kill(engine._server.pid, signal.SIGKILL)
        while await engine.healthy():
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="SIGKILL"):
            await engine.generate(asked())

    run(steps)


def test_a_step_that_raises_is_told() -> None:
    """The server's own error arrives before it is gone."""

    async def steps(engine: VllmEngine) -> None:
        with pytest.raises(EngineError, match=r"(?s)the vLLM server failed: .*RuntimeError: the step broke"):
            await engine.generate(asked())

    run(steps, "step-raises")


def test_a_hanging_step_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: health is answered beside the step, abort returns at once, a pause has its own deadline, close is short."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        task = asyncio.create_task(engine.generate(asked()))
        await asyncio.sleep(0.1)
        assert await engine.healthy()
        await engine.abort("r")
        assert (await task).finish_reason == "abort"
        with pytest.raises(EngineError, match=r"took more than 0\.2 s to answer 'resume'; it still runs"):
            await engine._call("resume", deadline_s=0.2)

    started_s = time.monotonic()
    run(steps, "step-hangs")
    assert time.monotonic() - started_s < 15


def test_refused_requests_never_reach_the_server() -> None:
    """One clear error for what cannot be served; the engine goes on."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        for request, message in [
            (asked(max_new_tokens=100), "more than the context of 64"),
            (asked(top_p=0.5), "top_p = 0.5 without top_k: vLLM tells the kept ids of a bounded number only"),
            (asked(temperature=-1.0), "temperature is -1.0"),
            (asked(temperature=3.0), r"temperature is 3\.0; vLLM takes 2\.0 at most"),
        ]:
            with pytest.raises(RequestError, match=message):
                await engine.generate(request)
        assert len((await engine.generate(asked())).ids) == 8

    run(steps)


def test_a_closed_engine_says_so() -> None:
    """Closing ends what runs with an error, twice is once, and a server that was never started is no trouble."""

    async def main() -> None:
        engine = make("slow")
        await engine.start()
        task = asyncio.create_task(engine.generate(asked(max_new_tokens=60)))
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            await task
        with pytest.raises(EngineError, match="the engine is closed"):
            await engine.generate(asked())
        unused = make()
        await unused.close()
        assert not await unused.healthy()

    asyncio.run(main())


def test_no_server_outlives_its_client() -> None:
    """A run that is killed hangs up, and the server ends by itself."""

    async def main() -> None:
        engine = make("slow")
        await engine.start()
        server = engine._server
        engine._reader_task.cancel()
        engine._writer.transport.abort()  # what the kernel does for a process that was killed
        assert await server.ended(5.0)
        await engine.close()

    asyncio.run(main())


def test_a_python_that_is_not_there() -> None:
    async def main() -> None:
        engine = make(python="/nowhere/python")
        with pytest.raises(EngineError, match="could not be started: /nowhere/python: No such file"):
            await engine.start()
        await engine.close()

    asyncio.run(main())


def test_calls_are_bounded() -> None:
    """I19: no wait on the server without a deadline."""
    assert client.CALL_DEADLINE_S <= 3600 and client.HEALTH_DEADLINE_S <= 30
