"""What a trainer does about the routers of a mixture-of-experts model: load-balance loss, load metrics, replay.

Legend: L routers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from headrace.config.schema import TrainerConfig
from headrace.errors import ConfigError
from headrace.model.packing import PackedRow
from headrace.model.routing import RouterLoad, RouterPass, RouterShape, router_shape
from headrace.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of the model that is trained, and what the configuration wants of them."""

    shape: RouterShape
    coefficient: float
    replays: bool

    @classmethod
    def of(cls, model: PreTrainedModel, config: TrainerConfig) -> Routers | None:
        """None for a model without routers that headrace knows; ConfigError where the configuration needs them."""
        shape = router_shape(model)
        if shape is not None:
            return cls(shape=shape, coefficient=config.router_aux_coefficient, replays=config.router_replay)
        if config.router_aux_coefficient or config.router_replay:
            name = "router_replay = true" if config.router_replay else "router_aux_coefficient"
            raise ConfigError(
                f"trainer.{name}: {type(model).__name__} has no routers that headrace knows (it knows Qwen3-MoE's); "
                "remove it, or train a mixture-of-experts model"
            )
        return None

    def new_pass(self, row: PackedRow, slope_LE: Tensor | None = None) -> RouterPass:
        """For one pass over ``row``; with ``slope_LE`` its backward pass adds the load-balance loss's gradient."""
        recorded = row.recorded_TLK if self.replays else None
        return RouterPass(self.shape, row.uses_T, replayed_TLK=recorded, slope_LE=slope_LE)

    def new_load(self) -> RouterLoad:
        return RouterLoad(self.shape)

    def metrics(self, load: RouterLoad) -> dict[str, float]:
        return load.metrics(with_replay=self.replays)

    def check_recorded(self, samples: Iterable[Sample]) -> None:
        """Raises ValueError where a sample that must be replayed has no record: never silently no replay (F11). Of all
        processes' samples, so that all of them raise."""
        missing = [s.id for s in samples if s.stream == "rl" and s.num_trained and s.routing is None]
        if self.replays and missing:
            raise ValueError(
                f"trainer.router_replay: {len(missing)} samples carry no routing ids, {missing[0]} among them: the "
                "engine that sampled them does not record its routers' choices, or they were lost on the way"
            )
