"""An engine that joins between two publishes: a copy of what was published, a proof against it, or neither (I6, failure
88)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from headrace.config.engines import TransformersEngineConfig
from headrace.config.schema import TrainerConfig
from headrace.engines.embedded import TransformersEngine
from headrace.model.load import prepare_model
from headrace.testing import tiny_model, tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, Sample
from headrace.weights.canary import Canary, SyncError
from headrace.weights.catch_up import TrainerCatchUp
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.inprocess import CopiedWeights

NO_VERSION = PolicyVersion(-1, 0)


class Setting:
    """A trainer, an engine with other weights, and the way from the one to the other."""

    def __init__(self) -> None:
        loaded = prepare_model(tiny_model(initializer_range=0.2), tiny_tokenizer(), "float32")
        self.model = loaded.model
        self.trainer = PolicyTrainer(loaded, TrainerConfig(), num_steps=10)
        other = prepare_model(tiny_model(initializer_range=0.2, seed=1), tiny_tokenizer(), "float32").model
        self.engine = TransformersEngine(
            CopiedWeights(other, NO_VERSION), TransformersEngineConfig(num_threads=1), vocab_size=loaded.vocab_size
        )
        self.before_scores: Callable[[], None] = lambda: None
        canary = Canary(
            self.engine, self.score, (1, 6, 20), bound=1e-3, trainer_checksums=self.forbidden, shares_weights=False
        )
        self.catch_up = TrainerCatchUp(canary, self.trainer, lambda: named_parameters(self.model), self.on_trainer)

    async def on_trainer(self, function: Callable[[], Any]) -> Any:
        result = function()
        self.before_scores()
        return result

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        raise AssertionError("the loop's own scores: the trainer may have moved on")

    async def forbidden(self) -> dict[str, str]:
        raise AssertionError("checksums of live weights: the trainer may be writing them")

    def step(self) -> None:
        """As an optimizer step does."""
        self.trainer._num_steps_since_publish = 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1)

    async def join(self) -> bool:
        update = await self.catch_up.update()
        assert update is not None
        await self.engine.pause("keep")
        await self.engine.update_weights(update)
        return await self.catch_up.prove("engine-3", self.engine, update)


def test_a_late_joiner_gets_a_copy_and_is_proved() -> None:
    """The copy is of the published weights and stays as it is when the trainer goes on."""

    async def main() -> None:
        setting = Setting()
        expected = checksums(named_parameters(setting.model).items())
        update = await setting.catch_up.update()
        assert update is not None and update.tensors is not None
        assert await setting.join()
        assert setting.engine.version == PolicyVersion(0, 0)
        setting.step()
        assert checksums(update.tensors.items()) == expected == setting.engine.weight_checksums()

    asyncio.run(main())


def test_between_the_first_step_and_the_publish_there_is_nothing_to_copy() -> None:
    """The trainer's weights are of no version then."""

    async def main() -> None:
        setting = Setting()
        setting.step()
        assert await setting.catch_up.update() is None
        setting.trainer.publish()
        update = await setting.catch_up.update()
        assert update is not None and update.version == PolicyVersion(0, 1)

    asyncio.run(main())


def test_a_trainer_that_moves_on_before_the_proof_proves_nothing() -> None:
    """Neither true nor a false alarm: the engine waits for the next publish."""

    async def main() -> None:
        setting = Setting()
        setting.before_scores = setting.step
        assert not await setting.join()

    asyncio.run(main())


@pytest.mark.parametrize("victim", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_late_joiner_that_lost_a_tensor_is_named_with_it(victim: str) -> None:
    """I6: the engine and the tensor."""

    async def main() -> None:
        setting = Setting()
        update = await setting.catch_up.update()
        assert update is not None
        await setting.engine.pause("keep")
        await setting.engine.update_weights(update)
        with torch.no_grad():
            dict(setting.engine._carrier.model.named_parameters())[victim].mul_(1.5)
        with pytest.raises(SyncError, match=rf"engine-3 and trainer .* these tensors differ .*: {victim}"):
            await setting.catch_up.prove("engine-3", setting.engine, update)

    asyncio.run(main())
