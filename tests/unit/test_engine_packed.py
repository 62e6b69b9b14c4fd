"""The engine's view with laid-out weights: same function, same parameters, never an old weight (I6, F78)."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import nn

from headrace.config.engines import TransformersEngineConfig
from headrace.engines import TransformersEngine
from headrace.engines.errors import EngineError
from headrace.engines.packed import PackedLinear, can_pack, drop_packed, packed_view
from headrace.protocols import WeightUpdate
from headrace.testing import tiny_model
from headrace.types import GenerationRequest, PolicyVersion, Sampling
from headrace.weights import SharedWeights

pytestmark = pytest.mark.skipif(not can_pack(torch.ones(2, 2)), reason="this torch has no oneDNN")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24), (33, 1, 24), (1, 200, 24)])
def test_packed_product_is_the_linear_layers(shape, bias):
    """To rounding of float32, for one row and many, whatever the number of axes."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("write", ["copy_", "load_state_dict", "fused step"])
def test_a_written_weight_is_laid_out_again(write):
    """Every way in which the trainer writes raises the version counter, and the next product uses the new weight."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 8, bias=False)
    packed, x = PackedLinear(linear), torch.randn(3, 8)
    with torch.no_grad():
        before = packed(x)
    if write == "fused step":
        optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1, fused=True)
        linear(x).sum().backward()
        optimizer.step()
        torch.autograd.graph.increment_version([linear.weight])
    else:
        new = torch.randn(8, 8)
        with torch.no_grad():
            linear.weight.copy_(new) if write == "copy_" else linear.load_state_dict({"weight": new})
    with torch.no_grad():
        after = packed(x)
        torch.testing.assert_close(after, linear(x), rtol=1e-5, atol=1e-6)
    assert (after - before).abs().max() > 1e-2


def test_dropping_finds_what_no_counter_shows():
    """A write through .data raises no counter; an update, which drops the layouts, brings it in all the same."""
    linear = nn.Linear(8, 8, bias=False)
    packed, x = PackedLinear(linear), torch.randn(3, 8)
    with torch.no_grad():
        before = packed(x)
        linear.weight.data.mul_(2)
        torch.testing.assert_close(packed(x), before)
        drop_packed(nn.Sequential(packed))
        torch.testing.assert_close(packed(x), 2 * before, rtol=1e-5, atol=1e-6)


def test_the_view_shares_parameters_and_leaves_the_model_alone():
    """One storage for trainer and engine: nothing but the linear layers' layouts is copied, tied weights stay tied."""
    model = tiny_model(tied=True)
    view = packed_view(model)
    assert dict(view.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert all(a is b for a, b in zip(view.parameters(), model.parameters(), strict=True))
    assert view.lm_head.weight is view.get_input_embeddings().weight is model.lm_head.weight
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    num_linear = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert sum(isinstance(module, PackedLinear) for module in view.modules()) == num_linear > 0
    assert not any(isinstance(module, nn.Linear) for module in view.modules())


def engine_of(model, **options):
    config = TransformersEngineConfig(**options)
    return TransformersEngine(SharedWeights(model, PolicyVersion(0, 0)), config, vocab_size=32)


def reply(engine):
    request = GenerationRequest(id="r", prompt_ids=(1, 2, 3), sampling=Sampling(max_new_tokens=4), seed=0)
    return asyncio.run(engine.generate(request))


def test_an_update_brings_hidden_writes_in():
    """I6: what an update publishes is served, also where the write raised no counter."""
    torch.manual_seed(0)
    model = tiny_model(vocab_size=32)
    engine = engine_of(model)
    before = reply(engine)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)

    async def update():
        await engine.pause("keep")
        await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 1)))
        await engine.resume()

    asyncio.run(update())
    after, fresh = reply(engine), reply(engine_of(model))
    assert after.logprobs == fresh.logprobs
    assert after.logprobs != before.logprobs


def test_packed_weights_are_a_choice():
    """None takes them where they help; true is refused where they cannot be had; false is the plain model."""
    model = tiny_model(vocab_size=32)
    plain, packed = reply(engine_of(model, packed_weights=False)), reply(engine_of(model))
    assert packed.ids == plain.ids
    assert max(abs(a - b) for a, b in zip(packed.logprobs, plain.logprobs, strict=True)) < 1e-5
    with pytest.raises(EngineError, match="packed_weights = true needs a float32 model"):
        engine_of(tiny_model(vocab_size=32).double(), packed_weights=True)
    assert reply(engine_of(tiny_model(vocab_size=32).double())).ids
