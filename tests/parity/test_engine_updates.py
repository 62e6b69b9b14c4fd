"""Weights that change while requests run: versions on tokens, keep and recompute, and caches that must not survive."""

from __future__ import annotations

import asyncio
import copy

import pytest
import torch
from engine_oracle import generate, make_engine, plain_logits, request, sharp_model

from headrace.engines import EngineError
from headrace.engines.kv import PrefixCache
from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion, VersionSpan
from headrace.weights import CopiedWeights, WeightUpdateError

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))


def perturb(model, scale=0.1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


async def until_generated(engine, count):
    while engine.stats().num_generated_tokens < count:
        await asyncio.sleep(0)


async def switch(engine, model, version, scale=0.1):
    await engine.pause("keep")
    perturb(model, scale, seed=version.number)
    await engine.update_weights(WeightUpdate(version=version))
    await engine.resume()


def teacher_forced(model, asked, reply):
    logits = plain_logits(model, asked.prompt_ids + reply.ids, len(asked.prompt_ids))
    return logits.log_softmax(-1).gather(1, torch.tensor(reply.ids).unsqueeze(1)).squeeze(1)


def run_update_in_flight(kv_policy):
    """Five replies of mixed lengths under two versions: (old model, new model, requests, replies, stats)."""
    model = sharp_model()
    old = copy.deepcopy(model)
    engine = make_engine(model, kv_policy=kv_policy, max_prefill_tokens=20)
    asked = [request(f"r{n}", range(1, 4 + 2 * n), seed=n, max_new_tokens=12 + 3 * n) for n in range(5)]

    async def main():
        tasks = [asyncio.create_task(engine.generate(a)) for a in asked]
        await until_generated(engine, 30)
        await switch(engine, model, V1)
        return await asyncio.gather(*tasks)

    return old, model, asked, asyncio.run(main()), engine.stats()


def test_recompute_serves_the_new_policy_exactly():
    """I7, F76: under recompute, each token has the log-probability (1e-4) that its own version gives it after all
    tokens before it; the spans say which version that is."""
    old, new, asked, replies, stats = run_update_in_flight("recompute")
    for a, reply in zip(asked, replies, strict=True):
        assert [span.version for span in reply.version_spans] == [V0, V1]
        cut = reply.version_spans[0].end
        assert reply.version_spans == (VersionSpan(V0, 0, cut), VersionSpan(V1, cut, len(reply.ids)))
        got = torch.tensor(reply.logprobs)
        assert (teacher_forced(old, a, reply)[:cut] - got[:cut]).abs().max() < 1e-4
        assert (teacher_forced(new, a, reply)[cut:] - got[cut:]).abs().max() < 1e-4
        assert (teacher_forced(old, a, reply)[cut:] - got[cut:]).abs().max() > 1e-2
    recomputed = sum(len(a.prompt_ids) + r.version_spans[0].end - 1 for a, r in zip(asked, replies, strict=True))
    assert stats.num_prefill_tokens == sum(len(a.prompt_ids) for a in asked) + recomputed


def test_keep_serves_new_weights_on_old_keys():
    """kv_policy = keep: tokens before the switch are the old policy's exactly; those behind it are neither policy's
    (new weights over old keys and values), which is what the version spans and the trainer's correction are for."""
    old, new, asked, replies, stats = run_update_in_flight("keep")
    gaps = []
    for a, reply in zip(asked, replies, strict=True):
        assert [span.version for span in reply.version_spans] == [V0, V1]
        cut = reply.version_spans[0].end
        got = torch.tensor(reply.logprobs)
        assert (teacher_forced(old, a, reply)[:cut] - got[:cut]).abs().max() < 1e-4
        gaps.append(float((teacher_forced(new, a, reply)[cut:] - got[cut:]).abs().max()))
    assert max(gaps) > 1e-3
    assert stats.num_prefill_tokens == sum(len(a.prompt_ids) for a in asked)


def test_two_updates_in_one_reply():
    """I7: a reply that lives through two updates carries three spans."""
    model = sharp_model()
    engine = make_engine(model, kv_policy="recompute")
    asked = request("r", (1, 2, 3), max_new_tokens=40)

    async def main():
        task = asyncio.create_task(engine.generate(asked))
        for number, version in enumerate((V1, V2), start=1):
            await until_generated(engine, 10 * number)
            await switch(engine, model, version)
        return await task

    reply = asyncio.run(main())
    assert [span.version for span in reply.version_spans] == [V0, V1, V2]
    assert engine.version == V2


def warm_gap_after_update():
    """Warm a prefix, update, ask for it again: the gap to the new weights."""
    model = sharp_model()
    engine = make_engine(model)
    asked = request("r", range(1, 12), max_new_tokens=8)

    async def main():
        await engine.generate(asked)
        await switch(engine, model, V1)
        return await engine.generate(asked)

    reply = asyncio.run(main())
    return float((teacher_forced(model, asked, reply) - torch.tensor(reply.logprobs)).abs().max())


def test_a_prefix_of_older_weights_is_never_served():
    """F76: after an update, a prompt that was warm is computed anew."""
    assert warm_gap_after_update() < 1e-5


def test_the_stale_prefix_test_can_fail(monkeypatch):
    """F76: with the cache drop taken out, the test above does see the old weights' keys."""
    monkeypatch.setattr(PrefixCache, "clear", lambda self: None)
    assert warm_gap_after_update() > 1e-2


def test_waiting_requests_start_under_the_new_version():
    """I7: what was only queued at the switch belongs to the new version from its first token on; the members of one
    group that were admitted before and after it do not share a prompt's keys."""
    model = sharp_model()
    engine = make_engine(model, max_batch_size=1)
    asked = [request(f"r{n}", range(1, 8), seed=n, prefix_key="g", max_new_tokens=6) for n in range(2)]

    async def main():
        tasks = [asyncio.create_task(engine.generate(a)) for a in asked]
        await until_generated(engine, 2)
        await switch(engine, model, V1)
        return await asyncio.gather(*tasks)

    second = asyncio.run(main())[1]
    assert second.version_spans == (VersionSpan(V1, 0, 6),)
    assert (teacher_forced(model, asked[1], second) - torch.tensor(second.logprobs)).abs().max() < 1e-5


def test_updates_need_a_pause():
    """Weights may change between two steps only, so an update of an engine that is not paused is refused."""
    engine = make_engine(sharp_model())

    async def main():
        with pytest.raises(EngineError, match="needs a paused engine"):
            await engine.update_weights(WeightUpdate(version=V1))

    asyncio.run(main())
    assert engine.version == V0


def test_a_refused_update_leaves_the_engine_as_it_was():
    """F82, F88: a bad update is refused whole; the engine stays healthy on its version and goes on."""
    trainer = sharp_model()
    engine = make_engine(trainer, carrier=CopiedWeights(trainer, V0))
    before = generate(engine, [request("r", (1, 2), max_new_tokens=5)])

    async def main():
        await engine.pause("keep")
        with pytest.raises(WeightUpdateError, match="is missing"):
            await engine.update_weights(WeightUpdate(version=V1, tensors={}))
        await engine.resume()
        assert await engine.healthy()

    asyncio.run(main())
    assert engine.version == V0
    assert generate(engine, [request("r", (1, 2), max_new_tokens=5)]) == before


def test_an_update_that_breaks_half_way_kills_the_engine(monkeypatch):
    """F88: an engine whose weights may be mixed serves nothing any more."""
    trainer = sharp_model()
    carrier = CopiedWeights(trainer, V0)
    engine = make_engine(trainer, carrier=carrier)
    monkeypatch.setattr(carrier, "receive", lambda update: {}["lost"])

    async def main():
        await engine.pause("keep")
        with pytest.raises(EngineError, match=r"failed while it took weights 0\.1: KeyError"):
            await engine.update_weights(WeightUpdate(version=V1, tensors={}))
        assert not await engine.healthy()
        with pytest.raises(EngineError, match="failed earlier"):
            await engine.generate(request("r", (1, 2)))

    asyncio.run(main())
