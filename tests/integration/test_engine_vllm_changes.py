"""vLLM engines of their own over tiny models in float32: other weights, weights that change in flight, and a killed
server. Skips where there is no .venv-vllm."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import pytest
from vllm_fixture import (
    EXACT,
    MODE,
    PROMPT,
    Shared,
    check_every_parameter,
    gaps,
    make_vllm,
    perturb,
    request,
    vllm_model,
    vllm_python,
)

from headrace.engines import EngineError
from headrace.protocols import WeightUpdate
from headrace.types import Generation, PolicyVersion, VersionSpan
from headrace.weights import named_parameters


@pytest.fixture(scope="module", autouse=True)
def there_is_vllm() -> None:
    """Skips before anything is opened."""
    vllm_python()


def test_every_parameter_arrives_untied_without_fusing_names(tmp_path: Path) -> None:
    """The same for a Qwen3 with a head of its own, and norms inside attention."""
    shared = Shared(tmp_path, architecture="qwen3", tied=False)
    try:
        check_every_parameter(shared)
    finally:
        shared.session.close()


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
def test_weights_change_in_flight(tmp_path: Path, kv_policy: str) -> None:
    """I7: with recompute, tokens before the switch are the old policy's and those after it the new one's (1e-4); with
    keep, those after it stand on old keys. A probe and a queue of waiting requests in between change nothing."""
    shared = Shared(tmp_path, kv_policy=kv_policy, max_batch_size=2)
    old = copy.deepcopy(shared.model)
    asked = [request(f"r{n}", PROMPT[: 4 + 9 * n], n, max_new_tokens=120) for n in range(2)]
    waiting = request("waiting", PROMPT, 5, max_new_tokens=8)

    async def main() -> tuple[list[Generation], Generation, Generation]:
        engine = shared.engine
        tasks = [asyncio.create_task(engine.generate(a)) for a in [*asked, waiting]]
        while len(engine._by_id) < 3 or min(len(engine._by_handle[engine._by_id[a.id]].ids) for a in asked) < 5:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        perturb(shared.model, scale=0.1)
        await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 1), tensors=named_parameters(shared.model)))
        (proof,) = await engine.probe([request("probe", PROMPT[:7], max_new_tokens=4)])
        await engine.resume()
        *replies, late = await asyncio.gather(*tasks)
        return replies, late, proof

    try:
        replies, late, proof = shared.run(main())
    finally:
        shared.session.close()
    mixed = []
    for a, reply in zip(asked, replies, strict=True):
        assert [span.version.number for span in reply.version_spans] == [0, 1]
        cut = reply.version_spans[0].end
        assert float(gaps(old, a, reply)[:cut].max()) < EXACT
        mixed.append(float(gaps(shared.model, a, reply)[cut:].max()))
    assert max(mixed) < EXACT if kv_policy == "recompute" else max(mixed) > 1e-2
    assert late.version_spans == (VersionSpan(PolicyVersion(0, 1), 0, 8),)
    assert float(gaps(shared.model, waiting, late).max()) < EXACT
    assert float(gaps(shared.model, request("probe", PROMPT[:7]), proof).max()) < EXACT


@pytest.mark.skipif(MODE == "server", reason="of a server on a thread")
def test_one_vllm_a_process(tmp_path: Path) -> None:
    """vLLM's process group is the process's: a second engine is refused while the first lives, and may follow it."""
    for _ in range(2):
        shared = Shared(tmp_path)
        try:
            other = make_vllm(vllm_model(), tmp_path)
            with pytest.raises(EngineError, match="this process holds a vLLM already"):
                shared.run(other.start())
            shared.run(other.close())
            assert shared.worst(request("r", PROMPT[:5], max_new_tokens=4)) < EXACT
        finally:
            shared.session.close()


@pytest.mark.skipif(MODE == "in_process", reason="of a server in another process")
def test_kill_9_of_the_server(tmp_path: Path) -> None:
    """F106: what runs fails with the signal and the log's end, and the engine is dead from then on."""
    shared = Shared(tmp_path)

    async def main() -> None:
        task = asyncio.create_task(shared.engine.generate(request("r", PROMPT[:5], max_new_tokens=200)))
        while not shared.engine.stats().num_running:
            await asyncio.sleep(0.001)
        shared.engine._server.kill()
        with pytest.raises(EngineError, match="signal SIGKILL ended it; its last words"):
            await task
        assert not await shared.engine.healthy()

    shared.run(main())
    shared.session.close()
