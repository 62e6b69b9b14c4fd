"""Real engines behind one: a reply that is cut short and goes on elsewhere is the reply that one engine would have
given (I18: the seed's stream goes on), and room is measured."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_oracle import VOCAB, generate, make_engine, reply_logprobs, request, sharp_model

from headrace.config.fleet import FleetConfig
from headrace.control.watchdog import Watchdog
from headrace.engines import EngineError
from headrace.engines.embedded import TransformersEngine
from headrace.engines.fleet.fleet import FleetEngine
from headrace.engines.fleet.flight import joined, rest_of
from headrace.model.load import prepare_model
from headrace.testing import tiny_tokenizer
from headrace.types import Generation, GenerationRequest, PolicyVersion
from headrace.weights import CopiedWeights

V0 = PolicyVersion(0, 0)


def kill(engine: TransformersEngine) -> None:
    """As a step that raises: every request ends with an error that carries its tokens."""
    engine._fail(RuntimeError("killed by the test"))


async def cut_short(engine: TransformersEngine, asked: GenerationRequest, num_tokens: int) -> Generation:
    """What the engine had sampled when it was killed."""
    call = asyncio.create_task(engine.generate(asked))
    while engine.stats().num_generated_tokens < num_tokens:
        await asyncio.sleep(0)
    kill(engine)
    with pytest.raises(EngineError, match="killed") as caught:
        await call
    assert caught.value.partial is not None
    return caught.value.partial


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"temperature": 0.0}, {"stop_ids": (3,)}])
def test_a_continued_reply_is_the_uninterrupted_one(options: dict[str, Any]) -> None:
    """The same ids, log-probabilities to 1e-5, the same kept ids; and they are the model's own (I2)."""
    model = sharp_model()
    asked = request("a", range(1, 9), seed=11, max_new_tokens=24, **options)
    (whole,) = generate(make_engine(model), [asked])

    async def main() -> tuple[Generation, Generation]:
        first = await cut_short(make_engine(model), asked, 5)
        second = await make_engine(model).generate(rest_of(asked, [first]))
        return first, second

    first, second = asyncio.run(main())
    assert first.finish_reason == "abort"
    assert 0 < len(first.ids) < len(whole.ids)
    reply = joined(asked, [first, second], second.finish_reason)
    assert reply.ids == whole.ids
    assert reply.kept_ids == whole.kept_ids
    assert reply.finish_reason == whole.finish_reason
    assert torch.tensor(reply.logprobs).sub(torch.tensor(whole.logprobs)).abs().max() < 1e-5
    assert (reply_logprobs(model, asked, reply) - torch.tensor(reply.logprobs)).abs().max() < 1e-4


def test_without_the_offset_the_draws_would_repeat() -> None:
    """What ``first_draw`` is for: from the start of the stream, the tokens behind a cut would be drawn with the numbers
    that the first ones were drawn with."""
    engine = make_engine(sharp_model())
    asked = request("a", range(1, 9), seed=11, max_new_tokens=12)
    (whole,) = generate(engine, [asked])
    later = replace(asked, prompt_ids=asked.prompt_ids + whole.ids[:6])
    (repeated,) = generate(make_engine(sharp_model()), [later])
    (continued,) = generate(make_engine(sharp_model()), [replace(later, first_draw=6)])
    assert continued.ids[:6] == whole.ids[6:12]
    assert repeated.ids[:6] != whole.ids[6:12]


def test_the_choice_of_routers_is_that_of_the_engine_that_sampled() -> None:
    """Router replay (R3): each token's experts come from the engine that sampled with them, once."""
    tokenizer = tiny_tokenizer("".join(chr(65 + i) for i in range(VOCAB - 9)))
    made = sharp_model(architecture="qwen3_moe", norm_topk_prob=True, vocab_size=VOCAB, tied=False)
    model = prepare_model(made, tokenizer).model
    asked = request("a", range(1, 9), seed=3, max_new_tokens=12)

    def engine() -> TransformersEngine:
        return TransformersEngine(
            CopiedWeights(model, V0), make_engine(model)._config, vocab_size=VOCAB, record_routing=True
        )

    (whole,) = generate(engine(), [asked])

    async def main() -> Generation:
        first = await cut_short(engine(), asked, 4)
        second = await engine().generate(rest_of(asked, [first]))
        return joined(asked, [first, second], second.finish_reason)

    reply = asyncio.run(main())
    assert reply.ids == whole.ids
    assert reply.routing is not None and whole.routing is not None
    assert reply.routing.num_tokens == whole.routing.num_tokens == 8 + len(whole.ids) - 1
    assert torch.equal(torch.cat(list(reply.routing.parts)), torch.cat(list(whole.routing.parts)))


def test_a_fleet_of_real_engines_outlives_one_of_them() -> None:
    """Twelve replies, one of two engines dies in the middle: all come whole, as a single engine gives them."""
    model = sharp_model()
    asked = [request(f"r{n}", range(1, 5 + n), seed=n, max_new_tokens=20) for n in range(12)]
    expected = generate(make_engine(model), asked)
    engines: list[TransformersEngine] = []

    async def start(index: int, incarnation: int) -> TransformersEngine:
        own = copy.deepcopy(model)
        engines.append(make_engine(own, carrier=CopiedWeights(own, V0), max_batch_size=4))
        return engines[-1]

    async def main() -> list[Generation]:
        clock = asyncio.get_running_loop().time
        fleet = FleetEngine(
            start, FleetConfig(num_engines=2, max_restarts=0), version=V0, watchdog=Watchdog(clock, 60.0)
        )
        for name in await fleet.unproved():
            fleet.proved(name, V0)
        calls = [asyncio.create_task(fleet.generate(a)) for a in asked]
        while fleet.stats().num_generated_tokens < 60:
            await asyncio.sleep(0)
        assert engines[0].stats().max_running == 4
        assert 0 < engines[0].stats().kv_used_tokens < engines[0].stats().kv_total_tokens
        kill(engines[0])
        replies = await asyncio.gather(*calls)
        assert fleet.batch_metrics()["fleet/num_continued"] >= 1.0
        await fleet.close()
        return replies

    replies = asyncio.run(main())
    assert [r.request_id for r in replies] == [a.id for a in asked]
    for reply, whole in zip(replies, expected, strict=True):
        assert reply.ids == whole.ids
        assert torch.tensor(reply.logprobs).sub(torch.tensor(whole.logprobs)).abs().max() < 1e-4
