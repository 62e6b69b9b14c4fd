"""Rows whose tokens agree are computed once; they must draw what they would have drawn alone (I1, I18)."""

from __future__ import annotations

import asyncio

import pytest
import torch
from engine_oracle import assert_scored, generate, make_engine, request, sharp_model

from headrace.engines.flips import count_flips
from headrace.engines.lines import Lines
from headrace.protocols import WeightUpdate
from headrace.types import Generation, PolicyVersion, VersionSpan


class Watched:
    """How many rows each forward pass over one new token a row computes."""

    def __init__(self, model):
        self.num_rows: list[int] = []
        model.get_input_embeddings().register_forward_hook(self._seen)

    def _seen(self, _module, args, _output):
        if args[0].shape[1] == 1:
            self.num_rows.append(args[0].shape[0])


async def update_after(engine, model, num_tokens):
    """Move the shared weights, as version 1, once so many tokens were drawn."""
    while engine.stats().num_generated_tokens < num_tokens:
        await asyncio.sleep(0)
    await engine.pause("keep")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 1)))
    await engine.resume()


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.4}, {"temperature": 0}, {"temperature": 0.7, "top_k": 4}, {"temperature": 0.6, "top_p": 0.8}],
    ids=str,
)
def test_members_of_a_group_draw_what_they_would_draw_alone(sampling):
    """Some agree for a while, some to the end; each token and log-probability is that of the member's own stream. A
    temperature below 1 magnifies the rounding of logits, as in test_engine_logprobs.py."""
    bound = 1e-5 / min(1.0, sampling["temperature"] or 1.0)
    model = sharp_model()
    asked = [
        request(f"{group}{n}", (1, 2, 3 + k), seed=50 + n, max_new_tokens=6 + n % 3, prefix_key=group, **sampling)
        for k, group in enumerate("ab")
        for n in range(8)
    ]
    alone = [generate(make_engine(model, packed_weights=False), [a])[0] for a in asked]
    watched = Watched(model)
    together = generate(make_engine(model, packed_weights=False), asked)
    flips = count_flips(alone, together)
    assert flips.num_flips == 0
    assert flips.max_logprob_gap < bound
    assert [a.kept_ids for a in alone] == [b.kept_ids for b in together]
    for a, reply in zip(asked, together, strict=True):
        assert_scored(model, a, reply, bound)
    expected = [
        len({(a.prompt_ids, r.ids[:t]) for a, r in zip(asked, together, strict=True) if len(r.ids) > t})
        for t in range(1, 8)
    ]
    assert watched.num_rows == expected
    assert expected[0] < len(asked)


def test_what_differs_in_anything_is_no_line():
    """Other sampling, another cache namespace, or another moment of admission, between which weights may change."""
    model = sharp_model()
    watched = Watched(model)
    asked = [
        request("a", (1, 2), temperature=0, max_new_tokens=3),
        request("b", (1, 2), temperature=0, max_new_tokens=3, cache_salt="other"),
        request("c", (1, 2), temperature=1e-3, max_new_tokens=3),
        request("d", (1, 2), temperature=0, max_new_tokens=3),  # the same as a
    ]
    replies = generate(make_engine(model, packed_weights=False), asked)
    assert len({r.ids for r in replies}) == 1
    assert watched.num_rows == [3, 3]


def test_a_late_twin_keeps_its_own_weights():
    """F60: a request that comes after an update, with the same prompt and tokens, is computed by the new weights from
    its prompt on, though the old one's row lies beside it."""
    model = sharp_model()
    engine = make_engine(model, packed_weights=False)

    async def main():
        first = asyncio.create_task(engine.generate(request("a", (1, 2, 3), temperature=0, max_new_tokens=40)))
        await update_after(engine, model, 3)
        late = request("b", (1, 2, 3), temperature=0, max_new_tokens=5)
        reply = await engine.generate(late)
        assert {span.version for span in reply.version_spans} == {PolicyVersion(0, 1)}
        assert_scored(model, late, reply)
        await engine.abort("a")
        await first

    asyncio.run(main())


def test_lines_go_on_after_one_of_them_is_aborted():
    """The first row of a line may leave at any moment, also before its first token."""
    model = sharp_model()

    async def main(num_tokens):
        engine = make_engine(model, packed_weights=False)
        asked = [request(f"r{n}", (1, 2, 3), seed=n, temperature=0, max_new_tokens=8) for n in range(4)]
        tasks = [asyncio.create_task(engine.generate(a)) for a in asked]
        await asyncio.sleep(0)
        while engine.stats().num_generated_tokens < num_tokens:
            await asyncio.sleep(0)
        await engine.abort("r0")
        replies = [await task for task in tasks]
        assert replies[0].finish_reason == "abort"
        for a, reply in zip(asked[1:], replies[1:], strict=True):
            assert len(reply.ids) == 8
            assert_scored(model, a, reply)

    for num_tokens in (0, 4, 12):
        asyncio.run(main(num_tokens))


def test_stale_rows_of_a_line_are_recomputed_alike():
    """kv_policy = recompute: each row of a line is written anew, and parting rows go on from it."""
    model = sharp_model()
    engine = make_engine(model, packed_weights=False, kv_policy="recompute")
    asked = [request(f"r{n}", (1, 2, 3), seed=n, temperature=0.5, max_new_tokens=12) for n in range(6)]

    async def main():
        tasks = [asyncio.create_task(engine.generate(a)) for a in asked]
        await update_after(engine, model, 18)
        return [await task for task in tasks]

    for a, reply in zip(asked, asyncio.run(main()), strict=True):
        start = reply.version_spans[-1].start
        whole = request(a.id, a.prompt_ids + reply.ids[:start], temperature=0.5)
        rest = Generation(
            request_id=a.id,
            ids=reply.ids[start:],
            logprobs=reply.logprobs[start:],
            version_spans=(VersionSpan(PolicyVersion(0, 1), 0, 12 - start),),
            finish_reason=reply.finish_reason,
        )
        assert 0 < start < 12
        assert_scored(model, whole, rest, 2e-5)


def test_lines_by_key():
    lines = Lines(["x", "y", "x", "z", "y"])
    assert (lines.first_S, lines.line_B, lines.are_single) == ([0, 1, 3], [0, 1, 0, 2, 1], False)
    assert Lines([1, 2]).are_single
