"""One device, two users, for real: an embedded engine that frees its weights and keys, and a trainer that moves out
(failures 84, 85). On the CPU, where the same code runs and the bytes are counted."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from engine_oracle import generate, make_engine, reply_logprobs, request, sharp_model

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import TrainerConfig
from headrace.control.lease import EngineTenant, Lease, TrainerTenant
from headrace.control.watchdog import Watchdog
from headrace.daemon_thread import DaemonThread
from headrace.engines import EngineError
from headrace.engines.embedded import TransformersEngine
from headrace.model.load import prepare_model
from headrace.protocols import LendableEngine, LendableTrainer, WeightUpdate
from headrace.testing import Reinforce, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import Generation, PolicyVersion
from headrace.weights import CopiedWeights
from headrace.weights.checksums import checksums, named_parameters

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def copied(model: Any, **options: Any) -> TransformersEngine:
    return make_engine(model, carrier=CopiedWeights(model, V0), **options)


def weights(model: Any, version: PolicyVersion = V0) -> WeightUpdate:
    tensors = {name: tensor.detach().clone() for name, tensor in named_parameters(model).items()}
    return WeightUpdate(version=version, tensors=tensors)


@pytest.mark.parametrize("prefix_cache_tokens", [0, 4096])
def test_a_reply_goes_on_after_its_engine_had_lent_its_memory(prefix_cache_tokens: int) -> None:
    """Weights, keys and values are gone in the middle of five replies; they come back by a sync and are computed anew:
    the replies are those of an engine that kept them (I18), and are the model's own."""
    model = sharp_model()
    asked = [request(f"r{n}", range(1, 4 + n), seed=n, max_new_tokens=16) for n in range(5)]
    expected = generate(copied(model), asked)

    async def main() -> list[Generation]:
        engine = copied(model, prefix_cache_tokens=prefix_cache_tokens)
        assert isinstance(engine, LendableEngine)
        calls = [asyncio.create_task(engine.generate(a)) for a in asked]
        while engine.stats().num_generated_tokens < 25:
            await asyncio.sleep(0)
        num_parameter_bytes = sum(p.nbytes for p in model.parameters())
        assert engine.held_bytes() > num_parameter_bytes
        await engine.pause("keep")
        await engine.release()
        assert engine.held_bytes() == 0
        await engine.acquire()
        assert engine.held_bytes() == num_parameter_bytes
        await engine.update_weights(weights(model))
        await engine.resume()
        return await asyncio.gather(*calls)

    for a, reply, whole in zip(asked, asyncio.run(main()), expected, strict=True):
        assert reply.ids == whole.ids
        assert (reply_logprobs(model, a, reply) - torch.tensor(reply.logprobs)).abs().max() < 1e-4


def test_an_engine_without_weights_serves_nothing() -> None:
    """Failure 84: between release and the next update, every way to a token is closed, and so is a wrong order."""
    model = sharp_model()

    async def main() -> None:
        engine = copied(model)
        with pytest.raises(EngineError, match="release needs a paused engine"):
            await engine.release()
        await engine.pause("keep")
        await engine.release()
        with pytest.raises(EngineError, match=r"await acquire\(\) first"):
            await engine.update_weights(weights(model))
        for call in (engine.resume, lambda: engine.probe([request("p", [1], max_new_tokens=1)])):
            with pytest.raises(EngineError, match="weights were released"):
                await call()
        await engine.acquire()
        assert all(p.isnan().all() for p in engine._carrier.model.parameters())  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="weights were released"):
            await engine.resume()
        await engine.update_weights(weights(model))
        await engine.resume()
        assert engine.weight_checksums() == checksums(named_parameters(model).items())

    asyncio.run(main())


def test_weights_that_are_shared_cannot_be_released() -> None:
    """They are the trainer's."""

    async def main() -> None:
        engine = make_engine(sharp_model())
        await engine.pause("keep")
        with pytest.raises(EngineError, match="shares the trainer's weights"):
            await engine.release()

    asyncio.run(main())


def make_trainer(dtype: str = "float32", rate: float = 1e-2, **options: Any) -> tuple[Any, PolicyTrainer]:
    loaded = prepare_model(tiny_model(initializer_range=0.25), tiny_tokenizer(), dtype)
    return loaded.model, PolicyTrainer(loaded, TrainerConfig(learning_rate=rate), num_steps=3, **options)


def minibatch(step: int = 0) -> Minibatch:
    samples = [make_sample([1, 6, 20], [30 + step, 31, 4], member=m) for m in range(2)]
    return Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * (1.0 - 2.0 * i) for i, s in enumerate(samples)],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=6, num_episodes=2, max_length=3),
    )


ALGORITHM = Reinforce({})


def trained(num_offloads: int, dtype: str = "float32") -> dict[str, str]:
    """Checksums after three steps, with hand-overs between them."""
    model, trainer = make_trainer(dtype, with_reference=True)
    assert isinstance(trainer, LendableTrainer)
    for step in range(3):
        trainer.forward_backward(minibatch(step), ALGORITHM)
        for _ in range(num_offloads):
            before = trainer.held_bytes()
            trainer.offload()
            trainer.offload()
            assert trainer.held_bytes() == 0
            trainer.onload()
            assert trainer.held_bytes() == before
        trainer.optim_step()
    return checksums(named_parameters(model).items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_comes_back_bit_for_bit(dtype: str) -> None:
    """Weights, masters, gradients, moments: training goes on as if it had never left."""
    assert trained(1, dtype) == trained(0, dtype)


def test_engine_and_trainer_take_turns_under_a_lease() -> None:
    """Rollouts, hand-over, a step, hand-over with the new weights: one is resident at a time, bytes are booked, and the
    engine then serves what the trainer made."""
    model, trainer = make_trainer(rate=1e-1)
    asked = request("a", range(1, 9), max_new_tokens=8)

    async def main() -> tuple[Lease, Generation, Generation, Any]:
        thread = DaemonThread("trainer")
        engine = copied(copy.deepcopy(model))
        published = weights(model)
        watchdog = Watchdog(asyncio.get_running_loop().time, 60.0)
        tenants = {
            "engine": EngineTenant(engine, lambda: published),
            "trainer": TrainerTenant(trainer, thread.call),
        }
        await thread.call(trainer.offload)
        lease = Lease(tenants, holder="engine", watchdog=watchdog, deadline_s=30.0)
        first = await engine.generate(asked)
        await lease.give("trainer")
        lease.check("trainer")
        await thread.call(trainer.forward_backward, minibatch(), ALGORITHM)
        await thread.call(trainer.optim_step)
        published = weights(model, V1)
        new = copy.deepcopy(model)
        await lease.give("engine")
        await engine.resume()
        second = await engine.generate(request("b", range(1, 9), max_new_tokens=8))
        thread.stop()
        return lease, first, second, new

    lease, first, second, new = asyncio.run(main())
    to_trainer, to_engine = lease.hand_overs
    assert (to_trainer.giver, to_trainer.taker) == ("engine", "trainer")
    assert to_trainer.before_bytes["trainer"] == to_trainer.between_bytes["engine"] == 0
    assert to_trainer.between_bytes["trainer"] == to_engine.between_bytes["engine"] == 0
    assert to_trainer.before_bytes["engine"] > 0 < to_trainer.after_bytes["trainer"]
    assert [s.version for s in first.version_spans] == [V0]
    assert [s.version for s in second.version_spans] == [V1]
    assert (reply_logprobs(new, request("b", range(1, 9)), second) - torch.tensor(second.logprobs)).abs().max() < 1e-4
