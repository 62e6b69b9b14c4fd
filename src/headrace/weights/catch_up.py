"""``protocols.CatchUp`` from the trainer: how an engine that joins between two publishes gets what the others serve.

The trainer's tensors are the published weights from a publish until the next batch's first optimizer step. Both the
copy and the scores of the proof are made on the trainer's own thread, between two of its calls, so that no step can
fall into them. After that first step there is nothing to copy, and the engine waits for the publish that follows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from headrace.protocols import Probed, WeightUpdate
from headrace.types import PolicyVersion, Sample
from headrace.weights.canary import Canary
from headrace.weights.checksums import checksums

T = TypeVar("T")


class PublishedTrainer(Protocol):
    """As much of a trainer as this needs. Called on the trainer's thread."""

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def holds_published_weights(self) -> bool:
        """No optimizer step was made since the last publish."""
        ...

    def forward(self, samples: Sequence[Sample]) -> Sequence[Tensor]: ...


class _MovedOn(Exception):
    """The trainer made an optimizer step, so that its scores say nothing about the published version any more."""


class TrainerCatchUp:
    """``on_trainer`` runs a function on the trainer's thread; ``tensors``: the weights that travel; ``frozen``: those
    that never change (the base of an adapter), which an engine has from its start."""

    def __init__(
        self,
        canary: Canary,
        trainer: PublishedTrainer,
        tensors: Callable[[], Mapping[str, Tensor]],
        on_trainer: Callable[[Callable[[], T]], Awaitable[T]],
        frozen: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._canary = canary
        self._trainer = trainer
        self._tensors = tensors
        self._frozen = frozen
        self._on_trainer: Callable[[Callable[[], object]], Awaitable[object]] = on_trainer  # type: ignore[assignment]

    async def update(self) -> WeightUpdate | None:
        """A copy of the published weights; None where the trainer has begun to change them."""
        found = await self._on_trainer(self._copy)
        assert found is None or isinstance(found, WeightUpdate)
        return found

    async def prove(self, name: str, engine: Probed, update: WeightUpdate) -> bool:
        """Against the trainer where it has not moved on; the checksums against ``update`` itself. Raises SyncError."""
        tensors = update.tensors
        assert tensors is not None, "this carrier's updates are tensors"

        def score(samples: Sequence[Sample]) -> list[list[float]]:
            if not self._trainer.holds_published_weights or self._trainer.version != update.version:
                raise _MovedOn
            return [t.tolist() for t in self._trainer.forward(samples)]

        async def score_samples(samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
            scores = await self._on_trainer(lambda: score(samples))
            assert isinstance(scores, list)
            return scores

        async def sums() -> Mapping[str, str]:
            found = await self._on_trainer(lambda: checksums((*self._frozen().items(), *tensors.items())))
            assert isinstance(found, dict)
            return found

        try:
            await self._canary.prove_engine(
                engine,
                update.version,
                name=name,
                score=score_samples,
                trainer_checksums=sums,
            )
        except _MovedOn:
            return False
        return True

    def _copy(self) -> WeightUpdate | None:
        if not self._trainer.holds_published_weights:
            return None
        tensors = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        return WeightUpdate(version=self._trainer.version, tensors=tensors)
