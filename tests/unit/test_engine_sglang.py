"""The SGLang engine against a server that is built from the real wheel's contract: replies, pauses, updates, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_scripted_server import TOLD_EVERY, ScriptedSglang, distribution, serving
from vllm_scripted_server import VOCAB

from headrace.config.engines import SglangEngineConfig
from headrace.engines import EngineError, RequestError
from headrace.engines.http import HttpClient, HttpError
from headrace.engines.semantics import SemanticsError
from headrace.engines.sglang import engine as engine_module
from headrace.engines.sglang.calls import SglangCalls
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.start import Expected
from headrace.engines.sglang.weights import WeightsLost
from headrace.errors import HeadraceError
from headrace.protocols import Engine, WeightUpdate
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling, VersionSpan

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))
PROMPT = (1, 2, 3)


class Folder:
    """Writes a version's name instead of tensors; ``content`` of a version stands for their bits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.content: dict[PolicyVersion, str] = {}
        self.is_full = False

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> dict[str, Any]:
        if self.is_full:
            raise UpdateRefused("the disk is full")
        content = self.content.get(update.version, str(update.version))
        folder = self.root / str(update.version)
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text(content)
        return {"path": str(folder), "tensors": [["w", "float32", [1], 0, f"checksum of {content}"]]}

    def close(self) -> None:
        pass


class UpdateRefused(HeadraceError):
    pass


def update(version: PolicyVersion) -> WeightUpdate:
    return WeightUpdate(version=version)


def asked(name: str = "r", seed: int = 5, **sampling: Any) -> GenerationRequest:
    declared = Sampling(**{"max_new_tokens": 8, **sampling})
    return GenerationRequest(id=name, prompt_ids=PROMPT, sampling=declared, seed=seed)


def probe(name: str = "p", seed: int = 9) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=2)
    return GenerationRequest(id=name, prompt_ids=PROMPT, sampling=sampling, seed=seed, cache_salt="probe")


Steps = Callable[[SglangEngine, ScriptedSglang, Folder], Awaitable[Any]]


def run(tmp_path: Path, steps: Steps, server: ScriptedSglang | None = None, **config: Any) -> ScriptedSglang:
    """``steps`` on an engine that is closed afterwards; its server must run nothing then."""
    server = server or ScriptedSglang()

    async def main() -> None:
        async with serving(server) as url:
            settings = SglangEngineConfig(urls=(url,), start_deadline_s=0.4, **config)
            folder = Folder(tmp_path)
            client = HttpClient(url, name="the SGLang server", use_proxies=False)
            engine = SglangEngine(
                settings,
                SglangCalls(client),
                folder,
                update(V0),
                expected=Expected(dtype="float32", architectures=("LlamaForCausalLM",), max_context=64),
                vocab_size=VOCAB,
                decode=lambda ids: "".join(chr(97 + i) for i in ids),
                make_update_error=UpdateRefused,
            )
            try:
                await asyncio.wait_for(steps(engine, server, folder), 20)
            finally:
                await engine.close()
                await asyncio.sleep(0)
            assert not engine._flights

    asyncio.run(main())
    return server


def drawn(request: GenerationRequest, numbers: list[int]) -> tuple[list[int], list[float], list[tuple[int, ...]]]:
    """What the scripted server draws for ``request`` where token t is of weights ``numbers[t]``."""
    import math
    import random

    ids, logprobs, kept_ids = [], [], []
    sampling = request.sampling
    params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    for t, number in enumerate(numbers):
        whole, kept = distribution(params, number)
        position = len(request.prompt_ids) + t
        (token,) = random.Random(request.seed * 1000 + position).choices(
            list(kept), [math.exp(logprob) for logprob in kept.values()]
        )
        ids.append(token)
        logprobs.append(kept[token] if sampling.is_truncated else whole[token])
        kept_ids.append(tuple(sorted(kept)))
    return ids, logprobs, kept_ids


def assert_drawn(request: GenerationRequest, reply: Generation, numbers: list[int]) -> None:
    ids, logprobs, kept_ids = drawn(request, numbers)
    assert (list(reply.ids), list(reply.logprobs)) == (ids, logprobs)
    assert reply.kept_ids == (tuple(kept_ids) if request.sampling.is_truncated else None)
    versions = [span.version.number for span in reply.version_spans for _ in range(span.start, span.end)]
    assert versions == numbers


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# -------------------------------------------------------------------------------------------------- replies


def test_replies_have_ids_logprobs_kept_ids_and_versions(tmp_path: Path) -> None:
    """I2, I18: bit for bit what the server sampled, by each request's own seed, kept ids where ids are cut off."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        assert isinstance(engine, Engine)
        kinds: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 0.5}]
        requests = [asked(f"r{n}", n, max_new_tokens=3 + n, **kind) for n, kind in enumerate(kinds)]
        for request, reply in zip(requests, await asyncio.gather(*(engine.generate(r) for r in requests)), strict=True):
            assert_drawn(request, reply, [0] * request.sampling.max_new_tokens)
            assert reply.request_id == request.id and reply.finish_reason == "length"
        assert await engine.generate(requests[1]) == Generation(
            **{f: getattr(await engine.generate(requests[1]), f) for f in Generation.__dataclass_fields__}
        )
        assert await engine.healthy()
        assert engine.weight_checksums() == {"w": f"checksum of {V0}"}
        stats = engine.stats()
        assert stats.num_running == stats.num_waiting == 0 and stats.num_generated_tokens > 20
        assert stats.num_cached_prefix_tokens >= 2 * len(PROMPT)

    run(tmp_path, steps)


def test_no_more_requests_are_at_the_server_than_allowed(tmp_path: Path) -> None:
    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await engine.start()
        server.num_most = 0
        await asyncio.gather(*(engine.generate(asked(f"r{n}", n)) for n in range(7)))
        assert server.num_most == 2

    run(tmp_path, steps, max_concurrent=2)


def test_stop_ids_and_stop_strings(tmp_path: Path) -> None:
    """F27, F30: the id or the token that ends a reply stays; without stop ids, the model's own end ids do nothing."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        whole = await engine.generate(asked(max_new_tokens=40))
        stop_id = whole.ids[5]
        reply = await engine.generate(asked(max_new_tokens=40, stop_ids=(stop_id,)))
        assert reply.finish_reason == "stop" and reply.ids == whole.ids[: whole.ids.index(stop_id) + 1]
        text = "".join(chr(97 + i) for i in whole.ids)
        reply = await engine.generate(asked(max_new_tokens=40, stop_strings=(text[3:6],)))
        assert reply.finish_reason == "stop" and reply.ids == whole.ids[: text.index(text[3:6]) + 3]

    server = run(tmp_path, steps)
    bodies = [b["sampling_params"] for path, b in server.bodies if path == "/generate"][-3:]
    assert [b["ignore_eos"] for b in bodies] == [True, False, True]


def test_requests_that_cannot_be_served_are_refused_one_by_one(tmp_path: Path) -> None:
    """I20: top-k with top-p means something else there; the rest goes on."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        with pytest.raises(RequestError, match=r"top_k = 3 with top_p = 0.5: SGLang measures top-p over all ids"):
            await engine.generate(asked(top_k=3, top_p=0.5))
        with pytest.raises(RequestError, match="more than the context of 64"):
            await engine.generate(asked(max_new_tokens=62))
        first = asyncio.create_task(engine.generate(asked(max_new_tokens=60)))
        await until(lambda: "r" in engine._flights)
        with pytest.raises(RequestError, match="already in flight"):
            await engine.generate(asked())
        assert len((await first).ids) == 60

    run(tmp_path, steps)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("adds-a-token", r"3 prompt ids were sent, the server computed 4 \(F18\)"),
        ("padded-id", r"sampled id 19, and the tokenizer has 16 ids \(F14\)"),
        ("own-end-id", r"ended the reply at 15, which is none of the request's stop ids \[99\].*\(F30\)"),
        ("caps-replies", "ended the reply after 3 of 50 tokens: it has less room"),
        ("aborts", "the server aborted it by itself: Aborted"),
        ("hangs-up", "hung up during /generate"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_for_is_an_error(tmp_path: Path, fault: str, message: str) -> None:
    """Never a guess, never a shorter reply: the episode fails with the reason, and the engine stays well."""
    server = ScriptedSglang(fault=fault)

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        with pytest.raises(EngineError, match=message):
            await engine.generate(asked(max_new_tokens=50, stop_ids=(99,), seed=1))
        assert await engine.healthy()

    run(tmp_path, steps, server)


# ------------------------------------------------------------------------------------------ pause and abort


async def begun(engine: SglangEngine, server: ScriptedSglang, *requests: GenerationRequest, num: int) -> list[Any]:
    """Tasks of ``requests``, each with ``num`` tokens at the server."""
    await engine.start()
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await until(lambda: len(server.running) == len(requests))
    server.step(num)
    return tasks


def test_a_pause_takes_requests_off_and_puts_them_back_as_if_nothing_had_been(tmp_path: Path) -> None:
    """I1, I18: prompt and reply so far become the prompt; ids, log-probabilities, kept ids are those of the whole."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        requests = [asked("a", 1, max_new_tokens=20), asked("b", 2, max_new_tokens=20, top_k=4)]
        tasks = await begun(engine, server, *requests, num=6)
        await engine.pause("keep")
        assert not server.running and not server.waiting and not server.is_paused
        late = asyncio.create_task(engine.generate(asked("late", 3)))
        await asyncio.sleep(0.01)
        assert not late.done() and not server.running, "nothing runs while the engine is paused"
        await engine.resume()
        server.by_hand = False
        await until(lambda: len(server.running) > 0)
        server._turn.set()
        for request, reply in zip(requests, await asyncio.gather(*tasks), strict=True):
            assert_drawn(request, reply, [0] * 20)
        assert len((await late).ids) == 8

    server = run(tmp_path, steps, ScriptedSglang(by_hand=True))
    assert [len(b["input_ids"]) for path, b in server.bodies if path == "/generate"][-3:] == [10, 10, 3]


def test_recompute_gives_every_token_its_own_version(tmp_path: Path) -> None:
    """I7: before the switch the old weights, after it the new ones, and the cache of the old ones is not asked."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        request = asked(max_new_tokens=12)
        [task] = await begun(engine, server, request, num=5)
        await engine.pause("keep")
        await engine.update_weights(update(V1))
        assert engine.version == V1
        [probed] = await engine.probe([probe()])
        assert_drawn(probe(), probed, [1, 1])
        await engine.resume()
        await until(lambda: len(server.running) == 1)
        server.step(20)
        reply = await task
        # 5 steps by hand, and the one that an aborted request makes
        assert_drawn(request, reply, [0] * 6 + [1] * 6)
        assert reply.version_spans == (VersionSpan(V0, 0, 6), VersionSpan(V1, 6, 12))

    server = run(tmp_path, steps, ScriptedSglang(by_hand=True))
    salts = [b["cache_salt"] for path, b in server.bodies if path == "/generate" and "cache_salt" in b]
    assert salts[-3:] == ["0.0/", "0.1/probe", "0.1/"]
    updates = [b for path, b in server.bodies if path == "/update_weights_from_disk"]
    assert [(b["weight_version"], b["flush_cache"]) for b in updates] == [("0.0", True), ("0.1", True)]
    assert not any("pause" in route for route in server.seen)


def test_keep_holds_requests_in_place(tmp_path: Path) -> None:
    """kv_policy = keep: they go on over their old keys, the server stamps the switch, and the cache is not flushed."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        request = asked(max_new_tokens=12)
        [task] = await begun(engine, server, request, num=5)
        await engine.pause("keep")
        assert server.is_paused and len(server.running) == 1
        assert await engine.healthy(), "a paused server answers for its health without a forward pass"
        await engine.update_weights(update(V1))
        await engine.resume()
        server.step(20)
        assert_drawn(request, await task, [0] * 5 + [1] * 7)

    server = run(tmp_path, steps, ScriptedSglang(by_hand=True), kv_policy="keep")
    assert server.seen[-4:] == [
        "/update_weights_from_disk 0.1",
        "/model_info",
        "/weights_checker checksum",
        "/continue_generation",
    ]
    updates = [b for path, b in server.bodies if path == "/update_weights_from_disk"]
    assert [b["flush_cache"] for b in updates] == [True, False]


@pytest.mark.parametrize("top_k", [0, 4])
def test_a_probe_runs_alone_whatever_an_in_place_pause_holds(tmp_path: Path, top_k: int) -> None:
    """I6: no other request advances by weights that are not proved. SGLang tells what it had told of a queued request,
    and of truncated sampling nothing; the rest is sampled again."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        request = asked(max_new_tokens=12, top_k=top_k)
        [task] = await begun(engine, server, request, num=TOLD_EVERY + 2)
        await engine.pause("keep")
        await engine.update_weights(update(V1))
        server.num_most = 0
        probes = await engine.probe([probe(f"p{n}", n) for n in range(3)])
        assert [len(p.ids) for p in probes] == [2, 2, 2] and server.num_most <= 3
        assert not server.running and not task.done()
        await engine.resume()
        await until(lambda: len(server.running) == 1)
        server.step(20)
        told = 0 if top_k else TOLD_EVERY
        assert_drawn(request, await task, [0] * told + [1] * (12 - told))

    run(tmp_path, steps, ScriptedSglang(by_hand=True), kv_policy="keep")


def test_a_reply_that_is_lost_half_way_tells_what_had_come(tmp_path: Path) -> None:
    """An episode outlives its engine: another one can go on with these tokens."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        request = asked(max_new_tokens=12)
        [task] = await begun(engine, server, request, num=5)
        await engine.pause("keep")
        server.fault = "hangs-up"
        await engine.resume()
        with pytest.raises(EngineError, match="hung up") as caught:
            await task
        assert caught.value.partial is not None
        assert_drawn(request, caught.value.partial, [0] * 6)

    run(tmp_path, steps, ScriptedSglang(by_hand=True))


def test_abort_returns_what_the_server_hands_back(tmp_path: Path) -> None:
    """One of two, and its neighbour goes on; unknown ids are ignored; SGLang aborts by prefix, so names have one
    length."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        requests = [asked("a", 1, max_new_tokens=20), asked("b", 2, max_new_tokens=20)]
        first, second = await begun(engine, server, *requests, num=4)
        await engine.abort("nobody")
        await engine.abort("a")
        reply = await first
        assert reply.finish_reason == "abort"
        assert_drawn(requests[0], reply, [0] * 5)
        server.step(20)
        assert_drawn(requests[1], await second, [0] * 20)
        rids = [b["rid"] for path, b in server.bodies if path == "/generate" and b["rid"] != "headrace-start"]
        assert len({len(rid) for rid in rids}) == 1 and len(set(rids)) == len(rids)

    run(tmp_path, steps, ScriptedSglang(by_hand=True))


def test_pause_abort_ends_everything(tmp_path: Path) -> None:
    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        tasks = await begun(engine, server, asked("a", 1, max_new_tokens=30), asked("b", 2, max_new_tokens=30), num=3)
        await engine.pause("abort")
        replies = await asyncio.gather(*tasks)
        assert [(r.finish_reason, len(r.ids)) for r in replies] == [("abort", 4), ("abort", 4)]

    run(tmp_path, steps, ScriptedSglang(by_hand=True), kv_policy="keep")


def test_an_abort_that_the_server_missed_gives_the_part_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19: SGLang loses an abort that overtakes its request. The reply ends with what is known, within a deadline."""
    monkeypatch.setattr(engine_module, "SINGLE_ABORT_DEADLINE_S", 0.05)

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        [task] = await begun(engine, server, asked(max_new_tokens=30), num=3)
        server.running[0].body["rid"] = "another name"
        await engine.abort("r")
        reply = await task
        assert reply.finish_reason == "abort" and reply.ids == ()
        await until(lambda: "disconnected" in server.seen)

    run(tmp_path, steps, ScriptedSglang(by_hand=True))


def test_a_caller_that_gives_up_leaves_nothing_at_the_server(tmp_path: Path) -> None:
    """I19: the server is told, and its name can be used again."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        [task] = await begun(engine, server, asked(max_new_tokens=30), num=3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not server.running)
        server.by_hand = False
        assert len((await engine.generate(asked())).ids) == 8

    run(tmp_path, steps, ScriptedSglang(by_hand=True))


def test_a_pause_that_the_server_does_not_answer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I19."""
    monkeypatch.setattr(engine_module, "ABORT_DEADLINE_S", 0.05)
    monkeypatch.setattr(engine_module, "ABORT_AGAIN_S", 0.02)

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        [task] = await begun(engine, server, asked(max_new_tokens=30), num=3)
        monkeypatch.setattr(ScriptedSglang, "_matches", staticmethod(lambda row, body: False))
        with pytest.raises(EngineError, match=r"did not hand back 1 requests within 0\.05 s"):
            await engine.pause("keep")
        task.cancel()

    run(tmp_path, steps, ScriptedSglang(by_hand=True))


# -------------------------------------------------------------------------------------------------- weights


def test_updates_arrive_or_change_nothing(tmp_path: Path) -> None:
    """A full disk, an older version, a running engine, the same version again: refused, or nothing is done twice."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await engine.start()
        with pytest.raises(EngineError, match="needs a paused engine"):
            await engine.update_weights(update(V1))
        await engine.pause("keep")
        folder.is_full = True
        with pytest.raises(UpdateRefused, match="the disk is full"):
            await engine.update_weights(update(V1))
        assert engine.version == V0 and server.weight_version == "0.0"
        folder.is_full = False
        await engine.update_weights(update(V1))
        num_seen = len(server.seen)
        await engine.update_weights(update(V1))
        assert len(server.seen) == num_seen, "the same update twice is once"
        folder.content[V1] = "other bits"
        with pytest.raises(UpdateRefused, match=r"holds other weights under the same version 0\.1"):
            await engine.update_weights(update(V1))
        with pytest.raises(UpdateRefused, match=r"weights 0\.0 are older than the engine's 0\.1"):
            await engine.update_weights(update(V0))
        folder.content[V2] = str(V1)  # the same bits under a new version
        await engine.update_weights(update(V2))
        await engine.resume()
        assert_drawn(asked(), await engine.generate(asked()), [2] * 8)

    run(tmp_path, steps)


def test_a_refused_update_changes_nothing_where_the_server_can_show_it(tmp_path: Path) -> None:
    """Nothing half applied: the checksum of what the server holds is that of before, so the old version is served."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await engine.pause("keep")
        with pytest.raises(UpdateRefused, match=r"Rolling back.*Nothing was changed: it holds weights 0\.0"):
            await engine.update_weights(update(V1))
        await engine.resume()
        assert_drawn(asked(), await engine.generate(asked()), [0] * 8)

    run(tmp_path, steps, ScriptedSglang(fault="refuses-updates"))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("breaks-updates", "is not known to be any version, so nothing is served by it"),
        ("ignores-updates", "accepted weights 0.1, and then nothing that it computes with has changed"),
    ],
)
def test_weights_that_are_not_known_to_be_any_version_are_not_served(tmp_path: Path, fault: str, message: str) -> None:
    """F78, F82, F83: SGLang's way back after a failed update reads the new files, and its success is no proof."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await engine.pause("keep")
        with pytest.raises(WeightsLost, match=message):
            await engine.update_weights(update(V1))
        assert engine.version == V0 and not await engine.healthy()
        with pytest.raises(EngineError, match=message):
            await engine.generate(asked())

    run(tmp_path, steps, ScriptedSglang(fault=fault))


def test_tokens_of_weights_that_this_run_never_published_are_refused(tmp_path: Path) -> None:
    """F87: somebody else updates the server, or it was restarted."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await engine.start()
        server.weight_version = "7.7"
        with pytest.raises(EngineError, match=r"tokens are of weights '7\.7', which this run never published"):
            await engine.generate(asked())

    run(tmp_path, steps)


def test_memory_is_released_and_weights_must_come_back_before_anything_is_served(tmp_path: Path) -> None:
    """F84: what the memory holds after it was taken back is nothing that was proved."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await engine.start()
        with pytest.raises(EngineError, match="release needs a paused engine"):
            await engine.release()
        await engine.pause("keep")
        await engine.release(["kv"])
        await engine.release(["weights"])
        with pytest.raises(EngineError, match="has released memory"):
            await engine.probe([probe()])
        await engine.acquire()
        with pytest.raises(EngineError, match="holds no weights since"):
            await engine.probe([probe()])
        await engine.update_weights(update(V0))
        assert len((await engine.probe([probe()]))[0].ids) == 2

    server = run(tmp_path, steps)
    assert [route for route in server.seen if "memory" in route] == [
        "/release_memory_occupation ['kv_cache']",
        "/release_memory_occupation ['weights']",
        "/resume_memory_occupation ['weights', 'kv_cache']",
    ]


# ---------------------------------------------------------------------------------------------------- start


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (ScriptedSglang(fault="old"), r"it says that it is SGLang 0\.4\.9, and headrace was held to .*0\.5\.23"),
        (ScriptedSglang(architectures=("Qwen3ForCausalLM",)), "serves another model: Qwen3ForCausalLM from somewhere"),
        (ScriptedSglang(fault="ignores-seeds"), "ignores seeds.*--enable-deterministic-inference"),
        (ScriptedSglang(fault="bfloat16"), "computes in bfloat16, the trainer in float32: start it with --dtype"),
        (ScriptedSglang(fault="small"), "may have 26 tokens there, 64 are needed: lower engine.max_context"),
        (ScriptedSglang(fault="no-logprobs"), "returns ids without log-probabilities"),
        (ScriptedSglang(fault="no-kept-ids"), "did not tell the kept ids of each of 1 ids"),
        (ScriptedSglang(fault="names-another-version"), "accepted weights 0.0, and then it says that it serves"),
        (ScriptedSglang(fault="no-checksum"), "tells no checksum of what it holds"),
        (ScriptedSglang(key="k-123"), r"refused a call without a key for /model_info \(401\).*api_key_variable"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value.fault or "model-or-key",
)
def test_a_server_that_does_not_fit_is_one_clear_error(tmp_path: Path, server: ScriptedSglang, message: str) -> None:
    """Wrong model, wrong version, no log-probabilities and their kin, before anything is sampled for the run."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        for _ in range(2):  # and again: the first reason is the one that is told
            with pytest.raises(EngineError, match=message):
                await engine.generate(asked())
        assert not await engine.healthy()

    run(tmp_path, steps, server)


@pytest.mark.parametrize("fault", ["raw-logprobs", "one-seed"])
def test_log_probabilities_of_another_distribution_are_refused(tmp_path: Path, fault: str) -> None:
    """F6: measured, not believed."""

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        with pytest.raises(SemanticsError):
            await engine.start()

    run(tmp_path, steps, ScriptedSglang(fault=fault))


def test_a_dead_address_is_one_clear_error() -> None:
    """Within the start's deadline, naming the address."""

    async def main() -> None:
        client = HttpClient("http://127.0.0.1:1", name="the SGLang server", use_proxies=False)
        calls = SglangCalls(client)
        with pytest.raises(
            HttpError, match=r"nothing answers at http://127\.0\.0\.1:1/model_info .*is the address right"
        ):
            await calls.model_info(patience_s=0.3)
        await calls.close()

    asyncio.run(main())


def test_what_a_killed_run_left_at_the_server_is_ended_first(tmp_path: Path) -> None:
    """A paused server that holds requests of a run that is gone serves the next run."""
    server = ScriptedSglang()

    async def steps(engine: SglangEngine, server: ScriptedSglang, folder: Folder) -> None:
        await server.pause_generation({"mode": "in_place"})
        assert len((await engine.generate(asked())).ids) == 8

    run(tmp_path, steps, server)
    assert server.seen.index("/abort_request") < server.seen.index("/continue_generation")


def test_weights_over_a_process_group_or_as_tensors_are_called_as_the_server_wants(tmp_path: Path) -> None:
    """The routes that no run uses yet: each body passes the contract, updates stand between begin and end."""

    async def main() -> None:
        server = ScriptedSglang(key="k-123")
        async with serving(server) as url:
            calls = SglangCalls(HttpClient(url, name="the server", key="k-123", use_proxies=False))
            await calls.join_group(
                "127.0.0.1", 1234, rank_offset=1, world_size=2, group="g", backend="nccl", deadline_s=5
            )
            await calls.begin_update()
            await calls.update_from_group([("w", "bfloat16", (2, 3))], "0.1", group="g", deadline_s=5)
            await calls.update_from_tensors([b"rank 0"], "0.1", deadline_s=5)
            await calls.end_update()
            await calls.leave_group("g")
            await calls.set_weight_version("0.2")
            assert (await calls.model_info())["weight_version"] == "0.2"
            await calls.close()
        assert server.seen[1:5] == [
            "/begin_weight_update",
            "/update_weights_from_distributed 0.1",
            "/update_weights_from_tensor 0.1",
            "/end_weight_update",
        ]

    asyncio.run(main())
