"""The canary over the real engine (I6): a stale tensor and a stale prefix cache are found, and named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from headrace.config.engines import TransformersEngineConfig
from headrace.engines.embedded import TransformersEngine
from headrace.protocols import WeightUpdate
from headrace.testing import tiny_model
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import GenerationRequest, PolicyVersion, Sample, Sampling
from headrace.weights.canary import Canary, CanaryResult, SyncError
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.inprocess import CopiedWeights, SharedWeights

PROMPT = (1, 6, 20, 30, 31)
VICTIM = "model.layers.1.mlp.up_proj.weight"


class Sync:
    """A trainer's model, an engine over it, and the canary between them."""

    def __init__(self, carrier: type = SharedWeights, **engine: Any) -> None:
        from headrace.config.schema import TrainerConfig
        from headrace.model.load import prepare_model
        from headrace.testing import tiny_tokenizer

        loaded = prepare_model(tiny_model(initializer_range=0.2), tiny_tokenizer(), "float32")
        self.model = loaded.model
        self.trainer = PolicyTrainer(loaded, TrainerConfig(), num_steps=10)
        self.engine = TransformersEngine(
            carrier(self.model, PolicyVersion(0, 0)),
            TransformersEngineConfig(num_threads=1, **engine),
            vocab_size=loaded.vocab_size,
        )
        self.copies = carrier is not SharedWeights
        self.canary = Canary(
            self.engine,
            self.score,
            PROMPT,
            bound=1e-3,
            trainer_checksums=self.checksums,
            shares_weights=not self.copies,
        )

    async def checksums(self) -> Mapping[str, str]:
        return checksums(named_parameters(self.model).items())

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        return [t.tolist() for t in self.trainer.forward(samples)]

    async def next_version(self, scale: float = 0.05) -> CanaryResult:
        """All weights move; the engine takes them; the canary proves it."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape) * scale)
        update = self.trainer.publish()
        if self.copies:
            update = WeightUpdate(version=update.version, tensors=named_parameters(self.model))
        await self.engine.pause("keep")
        await self.engine.update_weights(update)
        result = await self.canary.prove(update.version)
        await self.engine.resume()
        return result


def run(steps: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return asyncio.run(steps())


@pytest.mark.parametrize("carrier", [SharedWeights, CopiedWeights])
@pytest.mark.parametrize("prefix_cache_tokens", [0, 4096])
def test_an_honest_engine_passes_at_every_sync(carrier: type, prefix_cache_tokens: int) -> None:
    """I6: gaps far below the bound, while the weights move by far more than it."""

    async def steps() -> None:
        sync = Sync(carrier, prefix_cache_tokens=prefix_cache_tokens)
        for number in (1, 2, 3):
            result = await sync.next_version()
            assert result.version.number == number
            assert result.max_gap < 1e-5 and result.num_tokens >= 4
        await sync.engine.close()

    run(steps)


class Forgetful(CopiedWeights):
    """Takes every tensor of an update but one."""

    def receive(self, update: WeightUpdate) -> None:
        kept = self.model.get_parameter(VICTIM).clone()
        super().receive(update)
        with torch.no_grad():
            self.model.get_parameter(VICTIM).copy_(kept)


@pytest.mark.parametrize("scale", [0.05, 1e-7])
def test_a_tensor_that_was_not_updated_is_named(scale: float) -> None:
    """I6, F78: also where the update is so small that no log-probability moves by the bound."""

    async def steps() -> None:
        sync = Sync(Forgetful)
        with pytest.raises(SyncError) as caught:
            await sync.next_version(scale)
        message = str(caught.value)
        assert "version 0.1" in message and f"these tensors differ between trainer and engine: {VICTIM}." in message
        await sync.engine.close()

    run(steps)


@pytest.mark.parametrize("carrier", [SharedWeights, CopiedWeights])
def test_a_prefix_cache_that_outlives_an_update_is_named(carrier: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6, F76: keys and values of older weights answer for the new ones. The warm probe asks again for the prompt that
    it left in the cache at the sync before."""

    async def steps() -> None:
        sync = Sync(carrier)
        await sync.next_version()
        monkeypatch.setattr(sync.engine._compute, "drop_prefixes", lambda: None)
        with pytest.raises(SyncError, match="the engine's prefix cache outlived an update"):
            await sync.next_version()
        await sync.engine.close()

    run(steps)


def test_an_engine_that_computes_another_function_of_equal_tensors_is_told_apart() -> None:
    """I6: checksums agree, a cold prompt does not: neither a tensor nor the cache is blamed."""

    async def steps() -> None:
        sync = Sync(SharedWeights)
        forward = sync.engine._compute._forward

        def other(*arguments: Any) -> Any:
            logits, routing = forward(*arguments)
            return logits * 1.1, routing  # a soft cap that only one side has, say

        sync.engine._compute._forward = other
        with pytest.raises(SyncError, match="the two compute different functions"):
            await sync.next_version()
        await sync.engine.close()

    run(steps)


def test_nothing_else_advances_while_the_canary_probes() -> None:
    """I6: a request in flight waits until the new weights are proved."""

    async def steps() -> None:
        sync = Sync(SharedWeights)
        asked = GenerationRequest(id="r", prompt_ids=PROMPT, sampling=Sampling(max_new_tokens=30), seed=1)
        running = asyncio.create_task(sync.engine.generate(asked))
        while sync.engine.stats().num_generated_tokens < 3:
            await asyncio.sleep(0)
        await sync.engine.pause("keep")
        before = sync.engine.stats().num_generated_tokens
        result_of_probe = await sync.canary.prove(PolicyVersion(0, 0))
        probed = sync.engine.stats().num_generated_tokens - before
        assert probed == result_of_probe.num_tokens
        await sync.engine.resume()
        assert len((await running).ids) == 30
        await sync.engine.close()

    run(steps)
