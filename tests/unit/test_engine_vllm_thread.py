"""vLLM's server on a thread of the run's own process, over a scripted backend: same client, same promises."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_scripted_server import VOCAB, ScriptedBackend, ScriptedReader, distribution

from headrace.config.engines import VllmEngineConfig
from headrace.engines import EngineError
from headrace.engines.vllm import in_process
from headrace.engines.vllm.client import VllmEngine
from headrace.engines.vllm.in_process import ServerThread, vllm_as_a_guest
from headrace.engines.vllm.launch import backend_options
from headrace.protocols import Engine, WeightUpdate
from headrace.types import GenerationRequest, PolicyVersion, Sampling, VersionSpan

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


class Sender:
    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> dict[str, Any]:
        return {"version": update.version, "base": base}

    def transfer(self) -> None:
        pass

    def latest(self) -> None:
        return None

    def close(self) -> None:
        pass


def asked(name: str = "r", seed: int = 0, **sampling: Any) -> GenerationRequest:
    declared = Sampling(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest(id=name, prompt_ids=(1, 2, 3), sampling=declared, seed=seed)


def run(steps: Callable[[VllmEngine], Awaitable[Any]], fault: str = "", load: Any = None) -> list[ScriptedBackend]:
    """``steps`` on an engine that is closed afterwards. Returns the backend that was made."""
    made: list[ScriptedBackend] = []

    def load_scripted(options: Any) -> ScriptedBackend:
        made.append(ScriptedBackend(fault))
        return made[0]

    async def main() -> None:
        config = VllmEngineConfig(mode="in_process", start_deadline_s=20.0)
        options = backend_options(config, model=Path("m"), dtype="float32", vocab_size=VOCAB, max_context=64)
        engine = VllmEngine(
            config,
            Sender(),
            WeightUpdate(version=V0),
            partial(ServerThread, options, ScriptedReader(), load=load or load_scripted),
            vocab_size=VOCAB,
            max_context=64,
        )
        try:
            await steps(engine)
        finally:
            await engine.close()

    asyncio.run(main())
    return made


def num_server_threads() -> int:
    return sum(thread.name == "headrace-vllm" for thread in threading.enumerate())


def test_replies_and_versions_are_those_of_a_server() -> None:
    """I2, I7: what was sampled arrives, an update falls between two tokens, and closing ends the thread and lets go of
    vLLM."""

    async def steps(engine: VllmEngine) -> None:
        assert isinstance(engine, Engine)
        replies = await asyncio.gather(*(engine.generate(asked(f"r{n}", n)) for n in range(5)))
        for reply in replies:
            options = distribution(Sampling(), V0)
            assert [options[i] for i in reply.ids] == list(reply.logprobs)
            assert reply.version_spans == (VersionSpan(V0, 0, 8),)
        long = asyncio.create_task(engine.generate(asked("long", max_new_tokens=60)))
        while not engine._by_id or len(engine._by_handle[engine._by_id["long"]].ids) < 5:
            await asyncio.sleep(0)
        await engine.pause("keep")
        await engine.update_weights(WeightUpdate(version=V1))
        await engine.resume()
        spans = (await long).version_spans
        assert [span.version for span in spans] == [V0, V1] and spans[-1].end == 60
        assert await engine.healthy() and num_server_threads() == 1

    (backend,) = run(steps, "slow")
    assert backend.calls[-1] == "close" and num_server_threads() == 0


def test_only_what_changed_is_loaded() -> None:
    """What travels but did not change need not be loaded again; after a load that broke, everything is."""

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        await engine.pause("keep")
        for number in (1, 2):
            await engine.update_weights(WeightUpdate(version=PolicyVersion(0, number)))

    (backend,) = run(steps)
    assert [call for call in backend.calls if call.startswith("load")] == ["load ['frozen', 'w']"] + ["load ['w']"] * 2


def test_a_load_that_broke_is_mended_by_a_complete_one() -> None:
    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        await engine.pause("keep")
        for _ in range(2):
            with pytest.raises(EngineError, match="failed half way"):
                await engine.update_weights(WeightUpdate(version=V1))

    (backend,) = run(steps, "load-raises")
    assert [call for call in backend.calls if call.startswith("load")][1:] == ["load ['w']", "load ['frozen', 'w']"]


@pytest.mark.parametrize("when", ["at start", "in a step"])
def test_what_goes_wrong_is_told(when: str) -> None:
    """F106: an error on the thread reaches whoever waits, and later calls; nothing waits for ever."""

    def broken(options: Any) -> Any:
        raise RuntimeError("no such model")

    async def steps(engine: VllmEngine) -> None:
        message = "RuntimeError: no such model" if when == "at start" else "(?s)failed: .*RuntimeError: the step broke"
        for _ in range(2):
            with pytest.raises(EngineError, match=message):
                await engine.generate(asked())
        assert not await engine.healthy()

    run(steps, "step-raises", broken if when == "at start" else None)
    assert num_server_threads() == 0


def test_a_hanging_step_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: health is answered beside it, abort returns at once, and closing does not wait for ever."""
    monkeypatch.setattr(in_process, "END_DEADLINE_S", 0.2)
    go_on = threading.Event()
    monkeypatch.setattr(ScriptedBackend, "_go_wrong", lambda self: go_on.wait(20.0))

    async def steps(engine: VllmEngine) -> None:
        await engine.start()
        task = asyncio.create_task(engine.generate(asked()))
        await asyncio.sleep(0.05)
        assert await engine.healthy()
        await engine.abort("r")
        assert (await task).finish_reason == "abort"
        with pytest.raises(EngineError, match=r"took more than 0\.1 s to answer 'resume'; its thread still runs"):
            await engine._call("resume", deadline_s=0.1)

    started_s = time.monotonic()
    run(steps)
    assert time.monotonic() - started_s < 5
    go_on.set()


def test_what_vllm_changes_of_the_process_is_put_back(tmp_path: Path) -> None:
    """I18: vLLM seeds every generator, replaces torch.set_num_threads and logs to the terminal; the trainer is here."""
    before = random.getstate(), torch.get_rng_state(), torch.set_num_threads, torch.get_default_dtype()
    with vllm_as_a_guest(tmp_path / "engine.log"):
        random.seed(0)
        torch.manual_seed(0)
        torch.set_num_threads = lambda num: None
        torch.set_default_dtype(torch.float64)
        logging.getLogger("vllm.engine").warning("loading")
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert torch.set_num_threads is before[2] and torch.get_default_dtype() == before[3]
    assert (tmp_path / "engine.log").read_text() == "loading\n"
