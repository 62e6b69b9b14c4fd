"""vLLM itself over tiny models in float32: what it must share with the embedded engine, and what weights that travel
must do. As a server in another process; test_engine_vllm_in_process.py runs this file with vLLM in its own.
Skips where there is no .venv-vllm (tests/allowed_skips.txt)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm_fixture import EXACT, PROMPT, VOCAB, Shared, check_every_parameter, gaps, perturb, request, sync, vllm_python

from headrace.engines.flips import count_flips
from headrace.protocols import Engine, WeightUpdate
from headrace.types import Generation, PolicyVersion
from headrace.weights import WeightUpdateError, named_parameters


@pytest.fixture(scope="module", autouse=True)
def there_is_vllm() -> None:
    """Skips before anything is opened."""
    vllm_python()


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("tied"), tied=True)
    yield shared
    shared.session.close()


def test_replies_are_of_the_declared_distribution(tied: Shared) -> None:
    """I5, F6: temperature, top-k, top-p and greedy, in one batch and over more requests than rows; the padding ids
    beyond the tokenizer's are never drawn."""
    options: list[dict[str, Any]] = [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 7}]
    options += [{"top_k": 20, "top_p": 0.7}, {"temperature": 0.0}, {"temperature": 2.0}]
    asked = [request(f"r{n}", PROMPT[: 4 + 6 * n], n, max_new_tokens=20, **o) for n, o in enumerate(options)]
    replies = tied.generate(*asked)
    for a, reply in zip(asked, replies, strict=True):
        assert float(gaps(tied.model, a, reply).max()) < EXACT
        assert len(reply.ids) == 20 and max(reply.ids) < VOCAB and reply.finish_reason == "length"
        assert (reply.kept_ids is not None) == a.sampling.is_truncated
        if reply.kept_ids is not None:
            assert all(
                i in kept and len(kept) <= a.sampling.top_k for i, kept in zip(reply.ids, reply.kept_ids, strict=True)
            )
    assert isinstance(tied.engine, Engine) and tied.run(tied.engine.healthy())


def test_a_seed_decides_whatever_else_runs(tied: Shared) -> None:
    """I18: the same request alone and among others; float32 on a CPU flips no token here."""
    asked = [request(f"r{n}", PROMPT[: 5 + n], n, max_new_tokens=16) for n in range(4)]
    alone = [tied.generate(a)[0] for a in asked]
    together = tied.generate(*asked)
    flips = count_flips(alone, together)
    assert flips.num_tokens >= 60 and flips.num_flips == 0 and flips.max_logprob_gap < EXACT
    assert alone[0].ids != tied.generate(request("other", PROMPT[:5], 9, max_new_tokens=16))[0].ids


def test_stop_ids_stay_in_the_reply(tied: Shared) -> None:
    """I2: the id that ends a reply is its last id."""
    whole = tied.generate(request("whole", PROMPT[:6], max_new_tokens=20))[0]
    stop = whole.ids[7]
    reply = tied.generate(request("stopped", PROMPT[:6], max_new_tokens=20, stop_ids=(stop,)))[0]
    assert reply.finish_reason == "stop" and reply.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert len(reply.logprobs) == len(reply.ids)


def test_abort_returns_partial_tokens(tied: Shared) -> None:
    """An aborted reply holds what was sampled, with its log-probabilities; the engine goes on."""
    asked = request("long", PROMPT[:6], max_new_tokens=200)

    async def main() -> Generation:
        task = asyncio.create_task(tied.engine.generate(asked))
        while not (tied.engine._by_id and tied.engine._by_handle[tied.engine._by_id["long"]].ids):
            await asyncio.sleep(0.001)
        await tied.engine.abort("long")
        return await task

    reply = tied.run(main())
    assert reply.finish_reason == "abort" and 0 < len(reply.ids) < 200
    assert float(gaps(tied.model, asked, reply).max()) < EXACT
    assert tied.worst(request("next", PROMPT[:6], max_new_tokens=4)) < EXACT


def test_the_prefix_cache_is_used_and_is_the_versions_own(tied: Shared) -> None:
    """F76: a warm prompt is found; after an update it is computed anew; another salt finds nothing."""
    asked = request("warm", PROMPT, max_new_tokens=8)
    tied.generate(asked)
    before = tied.engine.stats().num_cached_prefix_tokens
    assert tied.worst(asked) < EXACT
    assert tied.engine.stats().num_cached_prefix_tokens == before + 32
    perturb(tied.model)
    tied.sync()
    assert tied.worst(asked) < EXACT
    assert tied.engine.stats().num_cached_prefix_tokens == before + 32
    assert tied.worst(request("salted", PROMPT, max_new_tokens=8, cache_salt="fresh")) < EXACT
    assert tied.engine.stats().num_cached_prefix_tokens == before + 32


def test_every_parameter_arrives_tied(tied: Shared) -> None:
    """F78, F81: embedding (with the tied head), attention, MLP and norms in turn, against a forward pass of the new
    weights."""
    check_every_parameter(tied)


def test_refused_updates_change_nothing(tied: Shared) -> None:
    """F82, F87: older versions, missing, unknown and misshapen tensors are named, and the engine serves as before."""
    asked = request("r", PROMPT[:9], max_new_tokens=6)
    before = tied.generate(asked)[0]
    tensors = {name: p.detach() + 1 for name, p in named_parameters(tied.model).items()}
    first = next(iter(tensors))
    for change, message in [
        ({first: None}, f"{first} is missing"),
        ({"extra": torch.zeros(2)}, "extra was never part of it"),
        ({first: torch.zeros(2, 2)}, r"is float32 \(2, 2\), the engine's is float32"),
        ({first: tensors[first].bfloat16()}, "is bfloat16"),
    ]:
        wrong = {name: t for name, t in {**tensors, **change}.items() if t is not None}
        tied.run(tied.engine.pause("keep"))
        with pytest.raises(WeightUpdateError, match=message):
            tied.run(tied.engine.update_weights(WeightUpdate(version=PolicyVersion(0, tied.number + 1), tensors=wrong)))
        tied.run(tied.engine.resume())
    with pytest.raises(WeightUpdateError, match="an engine never goes back"):
        tied.run(tied.engine.update_weights(WeightUpdate(version=PolicyVersion(-1, 0), tensors=tensors)))
    assert tied.generate(asked)[0] == before


def test_an_update_twice_is_once(tied: Shared) -> None:
    """F87: idempotent; the same version with other weights is refused."""
    tied.sync()
    sums = tied.engine.weight_checksums()
    tied.run(sync(tied.engine, tied.model, tied.number))
    assert tied.engine.weight_checksums() == sums
    other = copy.deepcopy(tied.model)
    perturb(other)
    with pytest.raises(WeightUpdateError, match="the engine holds other weights under the same version"):
        tied.run(sync(tied.engine, other, tied.number))
    tied.run(tied.engine.resume())
    assert tied.worst(request("r", PROMPT[:9], max_new_tokens=6)) < EXACT
