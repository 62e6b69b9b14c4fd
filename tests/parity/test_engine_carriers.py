"""The contract of weight carriers (headrace.weights.inprocess), run on both carriers of one process."""

from __future__ import annotations

import asyncio
import copy
import re

import pytest
import torch
from engine_oracle import assert_scored, generate, make_engine, request, sharp_model

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights import CopiedWeights, SharedWeights, WeightUpdateError, checksum, checksums, named_parameters

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in named_parameters(model).items()}


def send(engine, carrier, trainer, version):
    """Pause, publish the trainer's weights the way that ``carrier`` wants them, resume."""
    tensors = None if isinstance(carrier, SharedWeights) else snapshot(trainer)

    async def main():
        await engine.pause("keep")
        await engine.update_weights(WeightUpdate(version=version, tensors=tensors))
        await engine.resume()

    asyncio.run(main())


@pytest.mark.parametrize("kind", [SharedWeights, CopiedWeights])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_parameter_arrives(kind, tied):
    """F78, F81, F82: after each parameter in turn is perturbed and published, the engine's replies score as the
    trainer's new weights; before the publish, a copy still serves the old ones. Checksums name the one tensor."""
    trainer = sharp_model(tied=tied)
    carrier = kind(trainer, V0)
    engine = make_engine(trainer, carrier=carrier)
    asked = request("r", (1, 2, 3), max_new_tokens=6)
    for number, (name, parameter) in enumerate(named_parameters(trainer).items(), start=1):
        old_sums = engine.weight_checksums()
        old_model = copy.deepcopy(trainer)
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        if kind is CopiedWeights:
            assert_scored(old_model, asked, generate(engine, [asked])[0])
        send(engine, carrier, trainer, PolicyVersion(0, number))
        reply = generate(engine, [asked])[0]
        assert_scored(trainer, asked, reply)
        assert reply.version_spans[0].version == PolicyVersion(0, number)
        with pytest.raises(AssertionError, match="log-probabilities differ"):
            assert_scored(old_model, asked, reply)
        new_sums = engine.weight_checksums()
        assert new_sums == checksums(named_parameters(trainer).items())
        assert [n for n in new_sums if new_sums[n] != old_sums[n]] == [name]


@pytest.mark.parametrize("kind", [SharedWeights, CopiedWeights])
def test_older_versions_are_refused_and_repeats_change_nothing(kind):
    """F87: an engine never goes back; receiving one update twice is receiving it once."""
    trainer = sharp_model()
    carrier = kind(trainer, V1)
    tensors = None if kind is SharedWeights else snapshot(trainer)
    with pytest.raises(WeightUpdateError, match=r"weights 0\.0 are older than the engine's 0\.1"):
        carrier.receive(WeightUpdate(version=V0, tensors=tensors))
    assert carrier.version == V1
    for _ in range(2):
        carrier.receive(WeightUpdate(version=V2, tensors=tensors))
        assert carrier.version == V2
        assert carrier.checksums() == checksums(named_parameters(trainer).items())
    carrier.receive(WeightUpdate(version=PolicyVersion(1, 0), tensors=tensors))
    assert carrier.version == PolicyVersion(1, 0)


def test_storage_is_shared_or_not():
    """I6: with shared weights, identity of storage proves equality at no cost; a copy shares nothing."""
    trainer = sharp_model()
    assert make_engine(trainer).shares_storage_with(trainer)
    assert not make_engine(trainer, carrier=CopiedWeights(trainer, V0)).shares_storage_with(trainer)
    assert not make_engine(trainer).shares_storage_with(sharp_model(tied=False))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not a parameter of the engine's model"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight is torch.float32 \(3,\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64).bfloat16()}), "model.norm.weight is torch.bfloat16"),
        (lambda t: t.update({"model.embed_tokens.weight": torch.zeros(1, 1)}), r"the engine's is torch.float32 \(64"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "first"],
)
def test_a_copy_takes_all_tensors_or_none(change, message, tied):
    """F82: a name, shape or dtype that does not fit is refused by name, and no weight is touched."""
    trainer = sharp_model(tied=tied)
    carrier = CopiedWeights(trainer, V0)
    before = carrier.checksums()
    tensors = {name: tensor + 1 for name, tensor in snapshot(trainer).items()}
    change(tensors)
    with pytest.raises(WeightUpdateError, match=message):
        carrier.receive(WeightUpdate(version=V1, tensors=tensors))
    assert carrier.checksums() == before
    assert carrier.version == V0


def test_tied_weights_may_come_under_both_names_if_equal():
    """F81: a state dict names a tied head twice; equal values are one tensor, different ones are a contradiction."""
    trainer = sharp_model(tied=True)
    carrier = CopiedWeights(trainer, V0)
    tensors = snapshot(trainer)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    carrier.receive(WeightUpdate(version=V1, tensors=tensors))
    only_head = {("lm_head.weight" if n == "model.embed_tokens.weight" else n): t for n, t in snapshot(trainer).items()}
    carrier.receive(WeightUpdate(version=V1, tensors=only_head))
    tensors["lm_head.weight"] += 1
    message = re.escape("lm_head.weight is tied to model.embed_tokens.weight, but the two came with different values")
    with pytest.raises(WeightUpdateError, match=message):
        carrier.receive(WeightUpdate(version=V2, tensors=tensors))
    assert carrier.model.lm_head.weight is carrier.model.model.embed_tokens.weight


def test_carriers_refuse_each_others_updates():
    """I20: tensors that would be ignored, and a copy that would stay old, are errors."""
    trainer = sharp_model()
    with pytest.raises(WeightUpdateError, match="shares the trainer's storage and would ignore them"):
        SharedWeights(trainer, V0).receive(WeightUpdate(version=V1, tensors=snapshot(trainer)))
    with pytest.raises(WeightUpdateError, match="came without tensors, but this engine holds its own copy"):
        CopiedWeights(trainer, V0).receive(WeightUpdate(version=V1))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21
def test_adapters_are_shared_too():
    """A peft model with shared weights serves its adapter, also after the adapter moved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)  # the adapter is random

    trainer = get_peft_model(sharp_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    carrier = SharedWeights(trainer, V0)
    engine = make_engine(trainer, carrier=carrier)
    asked = request("r", (1, 2, 3), max_new_tokens=6)
    assert_scored(trainer.get_base_model(), asked, generate(engine, [asked])[0])
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            if "lora_" in name:
                parameter.mul_(-2)
    send(engine, carrier, trainer, V1)
    assert_scored(trainer.get_base_model(), asked, generate(engine, [asked])[0])


def test_checksum_sees_single_bits_swaps_shapes_and_dtypes():
    """F78: one flipped bit anywhere, two swapped elements, a shift, another shape or dtype change the checksum; a
    copy, a slice of a larger buffer and a transposed view of equal content do not."""
    torch.manual_seed(0)
    for size in (5, 8192, 8192 * 3 + 11):
        tensor = torch.randn(size)
        reference = checksum(tensor)
        assert checksum(tensor.clone()) == reference
        assert checksum(torch.cat([torch.zeros(1), tensor])[1:]) == reference
        for where in (0, size // 2, size - 1):
            flipped = tensor.clone()
            flipped.view(torch.int32)[where] ^= 1
            assert checksum(flipped) != reference
        swapped = tensor.clone()
        swapped[0], swapped[size - 1] = tensor[size - 1], tensor[0]
        assert checksum(swapped) != reference
        assert checksum(tensor.roll(1)) != reference
        assert checksum(tensor.view(1, size)) != reference
        assert checksum(tensor.view(torch.int32)) != reference
    matrix = torch.randn(7, 9)
    assert checksum(matrix.t().contiguous().t()) == checksum(matrix)
    assert checksum(torch.zeros(0)) != checksum(torch.zeros(1))
    assert checksum(torch.zeros(3)) != checksum(-torch.zeros(3))
    assert checksum(torch.ones(6).bfloat16()) == checksum(torch.ones(6, dtype=torch.bfloat16))
