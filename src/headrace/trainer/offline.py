"""The trainer of written data: gradients of an objective over packed rows, optimizer steps, checkpoints.

It shares packing, log-probabilities, weights and optimizer with the loop's trainer and knows no objective by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from headrace.config.offline import OfflineTrainerConfig
from headrace.model.load import LoadedModel
from headrace.model.packing import PackedRow, packed_rows
from headrace.model.parallel.forecast import Pass
from headrace.trainer.objectives import Objective, Sums
from headrace.trainer.recompute import recompute_activations
from headrace.trainer.schedule import learning_rate
from headrace.trainer.weights import NonFiniteError, TrainableWeights, read_state, write_state
from headrace.types import Sample


class OfflineTrainer:
    """One model, one optimizer.

    Example::

        trainer = OfflineTrainer(loaded, config.trainer, num_steps=100)
        metrics = trainer.train_step(samples, objective)
        validation = trainer.measure(held_out, objective)
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: OfflineTrainerConfig,
        *,
        num_steps: int,
        activation_checkpointing: bool = False,
        activation_budget_bytes: int | None = None,
    ) -> None:
        """``num_steps``: optimizer steps of the whole run, for the schedule."""
        self._loaded = loaded
        self._config = config
        self._num_steps = num_steps
        self._weights = TrainableWeights(loaded, config)
        self.step = 0
        """Optimizer steps done."""
        work = Pass(
            num_tokens=config.max_microbatch_tokens,
            max_logit_tokens=config.max_logit_tokens,
            dtype=loaded.dtype,
            activation_checkpointing=activation_checkpointing,
            activation_budget_bytes=activation_budget_bytes,
        )
        recompute_activations(loaded.model, work)

    def rows(self, samples: Sequence[Sample]) -> Iterator[PackedRow]:
        """Micro-batches; a prompt that samples share is computed once."""
        weight = next(self._loaded.model.parameters())
        return packed_rows(
            samples,
            self._config.max_microbatch_tokens,
            share_prompts=True,
            dtype=weight.dtype,
            device=weight.device,
        )

    def train_step(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """One optimizer step. Raises NonFiniteError, the weights untouched, where loss or gradient is not finite."""
        denominator = objective.denominator(samples)
        sums: Sums = {}
        value = 0.0
        for row in self.rows(samples):
            out = objective.row_loss(row)
            loss = out.total / denominator
            value += float(loss.detach())
            if not math.isfinite(value):
                self._weights.clear()
                raise NonFiniteError(
                    f"the loss of optimizer step {self.step} is {value} in the micro-batch of "
                    f"{', '.join(s.id for s in row.samples[:4])}. The weights are unchanged; lower the learning rate"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            _add(sums, out.sums)
        rate = learning_rate(self._config.learning_rate, self._config.schedule, self.step, self._num_steps)
        norm, _ = self._weights.step(rate)
        self.step += 1
        return {"loss": value, **_means(sums), "grad_norm": norm, "learning_rate": rate}

    @torch.no_grad()
    def measure(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """The objective's metrics over ``samples``, without a gradient."""
        sums: Sums = {}
        value = 0.0
        for row in self.rows(samples):
            out = objective.row_loss(row)
            value += float(out.total)
            _add(sums, out.sums)
        return {"loss": value / objective.denominator(samples), **_means(sums)}

    def save(self, path: Path) -> None:
        """Weights, optimizer and step; nothing in it is ever unpickled."""
        self._weights.writer(copied=False)(path)
        write_state(path, {"step": self.step})

    def restore(self, path: Path) -> None:
        """Become the trainer that saved ``path``. Raises CheckpointError where it does not fit."""
        self._weights.restore(path)
        self.step = int(read_state(path)["step"])

    def check_finite(self) -> None:
        """Raises NonFiniteError: such weights must not be exported (I13)."""
        self._weights.check_finite()


def _add(sums: Sums, new: Sums) -> None:
    for name, (total, count) in new.items():
        old_total, old_count = sums.get(name, (0.0, 0.0))
        sums[name] = (old_total + total, old_count + count)


def _means(sums: Sums) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items() if count}
