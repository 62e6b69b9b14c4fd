"""The engine against transformers: greedy ids, log-probabilities, seeds, batch shape, prefix cache."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from engine_oracle import VOCAB, assert_scored, generate, make_engine, plain_logits, request, sharp_model

from headrace.engines.flips import count_flips, measure_flips
from headrace.engines.sampling import uniform
from headrace.model.attention import ATTENTION_NAME

MODELS = {
    "llama": {},
    "llama_untied_mha": {"tied": False, "num_kv_heads": 4},
    "qwen3": {"architecture": "qwen3"},
}


@pytest.fixture(scope="module")
def model():
    return sharp_model()


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_greedy_equals_transformers_generate(options):
    """I1, F14: greedy replies to prompts of mixed lengths, batched, are transformers' greedy replies one by one."""
    model = sharp_model(**options)
    asked = [request(f"r{n}", range(1, 2 + n), temperature=0, max_new_tokens=5 + 3 * n) for n in range(6)]
    replies = generate(make_engine(model, max_batch_size=4), asked)
    model.set_attn_implementation("sdpa")
    for a, reply in zip(asked, replies, strict=True):
        expected = model.generate(
            torch.tensor([a.prompt_ids]),
            attention_mask=torch.ones(1, len(a.prompt_ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=a.sampling.max_new_tokens,
            suppress_tokens=list(range(VOCAB, VOCAB + 16)),
            eos_token_id=None,
            pad_token_id=0,
        )
        assert reply.ids == tuple(expected[0, len(a.prompt_ids) :].tolist())
    model.set_attn_implementation(ATTENTION_NAME)
    for a, reply in zip(asked, replies, strict=True):
        assert_scored(model, a, reply)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.7, "top_k": 9, "top_p": 0.9}],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_sampled_from(model, sampling):
    """F6, F7, I5: sampled replies score the same in a plain forward pass, kept ids included; kept ids are a top-k and
    top-p of that pass. The logits agree to 1e-5; a temperature below 1 magnifies what is left between them."""
    bound = 1e-5 / min(1.0, sampling.get("temperature", 1.0))
    asked = [request(f"r{n}", range(1, 3 + n), seed=n, max_new_tokens=20, **sampling) for n in range(5)]
    for a, reply in zip(asked, generate(make_engine(model), asked), strict=True):
        assert len(reply.ids) == len(reply.logprobs) == 20
        assert_scored(model, a, reply, bound)
        assert (reply.kept_ids is not None) == a.sampling.is_truncated
        if reply.kept_ids is None:
            continue
        logits = plain_logits(model, a.prompt_ids + reply.ids, len(a.prompt_ids))
        for t, kept in enumerate(reply.kept_ids):
            assert reply.ids[t] in kept
            assert len(kept) <= (a.sampling.top_k or VOCAB)
            assert set(logits[t].topk(len(kept)).indices.tolist()) == set(kept)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.7, "top_k": 9}], ids=str)
def test_logprobs_are_exact_but_for_their_own_rounding(sampling):
    """The same in float64, where float32 rounds logits and log-probabilities only once, at the end: 2e-6."""
    model = sharp_model().double()
    asked = [request(f"r{n}", range(1, 3 + n), seed=n, max_new_tokens=20, **sampling) for n in range(5)]
    for a, reply in zip(asked, generate(make_engine(model), asked), strict=True):
        assert_scored(model, a, reply, 2e-6)


def test_each_token_is_drawn_with_the_number_of_its_position(model):
    """I18: token t is the one at which the cumulative distribution passes uniform(seed, t), in and out of a batch."""
    asked = [request(f"r{n}", range(1, 3 + n), seed=40 + n, max_new_tokens=12) for n in range(3)]
    for a, reply in zip(asked, generate(make_engine(model), asked), strict=True):
        probs = plain_logits(model, a.prompt_ids + reply.ids, len(a.prompt_ids)).double().softmax(-1)
        for t, chosen in enumerate(reply.ids):
            after = float(probs[t, : chosen + 1].sum())
            assert after - float(probs[t, chosen]) - 1e-5 <= uniform(a.seed, t) <= after + 1e-5


def test_kept_ids_are_left_out_where_not_wanted(model):
    """carry_kept_ids = false: the reply says nothing about kept ids, and so do the capabilities."""
    engine = make_engine(model, carry_kept_ids=False)
    assert not engine.capabilities.kept_ids
    assert generate(engine, [request("r", (1, 2), top_k=3, max_new_tokens=4)])[0].kept_ids is None


def test_bfloat16_model(model):
    """F9: a bf16 model decodes over bf16 rows of mixed lengths; the gap to its plain forward is bf16's rounding."""
    rounded = sharp_model(dtype=torch.bfloat16, initializer_range=0.1)
    asked = [request(f"r{n}", range(1, 3 + n), seed=n, max_new_tokens=9) for n in range(4)]
    for a, reply in zip(asked, generate(make_engine(rounded), asked), strict=True):
        assert_scored(rounded, a, reply, bound=0.1)


def test_reply_does_not_depend_on_neighbours(model):
    """I18: the same seeds give the same replies alone, in a full batch, in a small one, and in another order."""
    asked = [request(f"r{n}", range(1, 2 + n % 5), seed=100 + n, max_new_tokens=6 + n) for n in range(9)]
    alone = [generate(make_engine(model), [a])[0] for a in asked]
    full = generate(make_engine(model), asked)
    narrow = generate(make_engine(model, max_batch_size=2), asked)
    turned = generate(make_engine(model), asked[::-1])[::-1]
    for others in (full, narrow, turned):
        assert count_flips(alone, others).num_flips == 0
    other_seeds = generate(make_engine(model), [replace(a, seed=a.seed + 50) for a in asked])
    assert count_flips(alone, other_seeds).num_flips == len(asked)


def test_equal_submissions_give_equal_bits(model):
    """I18: two runs of one set of requests agree in every bit of every log-probability."""
    asked = [request(f"r{n}", range(1, 2 + n % 5), seed=n, max_new_tokens=4 + 2 * n) for n in range(12)]
    first, second = (generate(make_engine(model, max_batch_size=5), asked) for _ in range(2))
    assert first == second


def test_flip_rate_is_measured_and_small(model):
    """I18: batch shape changes logits by rounding only; the measured rate of flipped tokens stays below 1 %."""
    asked = [request(f"r{n}", range(1, 3 + n % 4), seed=n, max_new_tokens=40) for n in range(24)]
    flips = asyncio.run(measure_flips(make_engine(model), asked))
    assert flips.num_tokens >= 900
    assert flips.rate < 0.01
    assert flips.max_logprob_gap < 1e-4


def test_count_flips_counts_the_first_difference_only(model):
    """I18: after a flip the replies have different prefixes, so nothing behind it is compared."""
    a, b = generate(make_engine(model), [request(f"r{s}", (1, 2), seed=s, max_new_tokens=30) for s in range(2)])
    first = next(t for t in range(30) if a.ids[t] != b.ids[t])
    flips = count_flips([a], [b])
    assert (flips.num_flips, flips.num_tokens) == (1, first + 1)
    assert flips.rate == 1 / (first + 1)


def test_group_prompt_is_prefilled_once(model):
    """A group's shared prompt costs one prefill, with and without prefix cache, also where the group does not fit
    into the batch at once; a prompt of another group is its own."""
    prompt = tuple(range(1, 12))
    asked = [request(f"a{n}", prompt, seed=n, prefix_key="a", max_new_tokens=5) for n in range(6)]
    asked += [request("b", (*prompt[:-1], 30), prefix_key="b", max_new_tokens=5)]
    for cache in (0, 1000):
        engine = make_engine(model, max_batch_size=4, prefix_cache_tokens=cache)
        replies = generate(engine, asked)
        assert engine.stats().num_prefill_tokens == 22
        assert engine.stats().num_cached_prefix_tokens == 55
        for a, reply in zip(asked, replies, strict=True):
            assert_scored(model, a, reply)


def test_without_cache_only_groups_share(model):
    """prefix_cache_tokens = 0: equal prompts of no group are prefilled each, and nothing is kept for later."""
    engine = make_engine(model, prefix_cache_tokens=0)
    generate(engine, [request(f"r{n}", (1, 2, 3), max_new_tokens=2) for n in range(2)])
    generate(engine, [request(f"s{n}", (1, 2, 3), prefix_key="g", max_new_tokens=2) for n in range(2)])
    generate(engine, [request("t", (1, 2, 3), prefix_key="g", max_new_tokens=2)])
    assert engine.stats().num_prefill_tokens == 3 * 4


def test_warm_prefix_equals_cold(model):
    """F76: a cached prompt gives the reply of a fresh one, and a salt forces a fresh one."""
    engine = make_engine(model)
    cold, warm, salted = (
        generate(engine, [request(name, range(1, 9), seed=3, cache_salt=salt, max_new_tokens=12)])[0]
        for name, salt in (("cold", None), ("warm", None), ("salted", "fresh"))
    )
    assert engine.stats().num_prefill_tokens == 16
    assert cold.ids == warm.ids == salted.ids
    assert cold.logprobs == warm.logprobs == salted.logprobs


def test_prefill_packs_prompts_within_its_budget(model):
    """F40: prompts packed into one row, or split by max_prefill_tokens, do not see each other; one that is longer
    than the budget is prefilled alone."""
    asked = [request(f"r{n}", range(n, n + length), max_new_tokens=4) for n, length in enumerate((3, 9, 2, 1, 7, 4))]
    for budget in (1, 5, 10, 4096):
        for a, reply in zip(asked, generate(make_engine(model, max_prefill_tokens=budget), asked), strict=True):
            assert_scored(model, a, reply)


def test_rows_and_capacity_grow_while_running(model):
    """Replies far beyond the first capacity, joined late by others, keep their content as the buffers are replaced."""

    async def main():
        engine = make_engine(model)
        long = request("long", (1, 2, 3), seed=5, max_new_tokens=300)
        task = asyncio.create_task(engine.generate(long))
        while engine.stats().num_generated_tokens < 20:
            await asyncio.sleep(0)
        asked = [request(f"r{n}", (7, 5, 3) * (20 + n), seed=n, max_new_tokens=30 + n) for n in range(7)]
        replies = await asyncio.gather(*(engine.generate(a) for a in asked))
        return [long, *asked], [await task, *replies]

    for a, reply in zip(*asyncio.run(main()), strict=True):
        assert_scored(model, a, reply, bound=2e-5)
