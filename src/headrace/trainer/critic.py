"""The critic: a value for each trained token, from a head on the policy's hidden states or from a model of its own.

The value of a trained token is that of the state in which it was sampled, so it is read where the token's
log-probability is: at its predictor. A critic has its own optimizer, schedule and step count.

Legend: T tokens of a sample, U distinct predictors, N trained tokens of a micro-batch, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.algorithms.fields import STREAMS, Minibatch, sample_columns
from headrace.algorithms.values import value_loss
from headrace.config.critic import CriticConfig, SharedCriticConfig
from headrace.errors import ConfigError
from headrace.model.load import LoadedModel
from headrace.model.logprobs import hidden_states
from headrace.model.packing import PackedRow
from headrace.trainer.metrics import MinibatchMetrics
from headrace.trainer.schedule import learning_rate
from headrace.trainer.weights import NonFiniteError, TrainableWeights, Write, read_state, write_state
from headrace.types import Sample

FOLDER = "critic"
"""Within a trainer's checkpoint."""

MakeRows = Callable[[Sequence[Sample]], Iterator[PackedRow]]
"""The trainer's own packing, so that critic and policy see the same micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ValueModel:
    """What the critic's optimizer steps: the value head, and the backbone where the critic has one of its own."""

    model: torch.nn.Module
    masters: dict[str, Tensor]


class Critic:
    """Values, their loss, and the steps of the critic's optimizer.

    Example::

        critic = Critic(config.critic, policy.loaded, own=None, num_steps=100)
        trainer = PolicyTrainer(policy.loaded, config.trainer, num_steps=90, critic=critic)
        values = trainer.forward(batch.samples, "critic")
    """

    def __init__(
        self, config: CriticConfig, policy: LoadedModel, *, num_steps: int, own: LoadedModel | None = None
    ) -> None:
        """``own``: the model of a separate critic; its output head is not used. ``num_steps``: the critic's optimizer
        steps in the whole run, warm-up included. Raises ConfigError where ``own`` speaks other ids than the policy."""
        self.config = config
        self._num_steps = num_steps
        self._step = 0
        source = policy if own is None else own
        weight = next(source.model.parameters())
        dtype = torch.promote_types(weight.dtype, torch.float32)
        width = int(source.model.config.get_text_config().hidden_size)
        # Zeros: the first values are 0, whatever the seed, and the first step moves the head alone.
        self.head = torch.nn.Linear(width, 1, dtype=dtype, device=weight.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.backbone: PreTrainedModel | None = None
        parts = torch.nn.ModuleDict({"value_head": self.head})
        masters: dict[str, Tensor] = {}
        if own is not None:
            _check_same_ids(policy, own)
            self.backbone = parts["backbone"] = cast(PreTrainedModel, own.model.base_model)
            prefix = own.model.base_model_prefix
            masters = {f"backbone{name.removeprefix(prefix)}": m for name, m in own.masters.items()}
        self._weights = TrainableWeights(_ValueModel(model=parts, masters=masters), config)

    @property
    def is_shared(self) -> bool:
        """True where the values are read from the policy's hidden states."""
        return self.backbone is None

    @property
    def step(self) -> int:
        """The critic's optimizer steps done."""
        return self._step

    # ---------------------------------------------------------------------------------------- values

    def forward(self, samples: Sequence[Sample], rows: MakeRows, policy: PreTrainedModel) -> list[Tensor]:
        """Values of ``samples``, each float32 [T] on the CPU, 0 where the mask is 0. No gradient."""
        out = [torch.zeros(len(sample.ids)) for sample in samples]
        with torch.no_grad():
            for row in rows(samples):
                hidden_UD = hidden_states(policy if self.backbone is None else self.backbone, row)
                values_N = self._values(hidden_UD, row)
                for index, values_T in zip(row.indices, row.scatter(values_N), strict=True):
                    out[index] = values_T
        return out

    def _values(self, hidden_UD: Tensor, row: PackedRow) -> Tensor:
        values_U: Tensor = self.head(hidden_UD.to(self.head.weight.dtype))[:, 0]
        return values_U.index_select(0, row.row_N)

    # ---------------------------------------------------------------------------------------- losses

    def loss(self, hidden_UD: Tensor, minibatch: Minibatch, row: PackedRow, metrics: MinibatchMetrics) -> Tensor:
        """The value loss of one row, a weighted token mean over the minibatch's rl stream like its denominators (I17);
        tokens of other streams have no return to foretell.

        ``hidden_UD``: of this critic's backbone. On a shared backbone the loss reaches the policy's weights only with
        ``train_backbone``, and then scaled by ``loss_coefficient``; the head's gradient is the whole one.
        """
        if minibatch.values is None or minibatch.value_targets is None:
            raise ValueError("a critic is trained on minibatches that carry values and value targets")
        if isinstance(self.config, SharedCriticConfig):
            coefficient = self.config.loss_coefficient if self.config.train_backbone else 0.0
            hidden_UD = _ScaleGradient.apply(hidden_UD, coefficient) if coefficient else hidden_UD.detach()  # type: ignore[no-untyped-call]
        values_N = self._values(hidden_UD, row)
        old_N = row.gather(minibatch.values).to(values_N.dtype)
        target_N = row.gather(minibatch.value_targets).to(values_N.dtype)
        columns = sample_columns(row.samples, None, values_N.device)
        weights_N, stream_N = columns["weights_N"], columns["stream_N"]
        if stream_N is not None:
            places = (stream_N == STREAMS.index("rl")).nonzero()[:, 0]
            values_N, old_N, target_N, weights_N = (v[places] for v in (values_N, old_N, target_N, weights_N))
        loss_N, clipped_N = value_loss(values_N, old_N, target_N, self.config.value_clip)
        # A minibatch without rl tokens has none to sum over either.
        loss = (loss_N * weights_N).sum() / max(1, minibatch.totals.num_tokens)
        total = float(loss.detach())
        if not math.isfinite(total):
            raise NonFiniteError(
                f"the value loss of the critic's step {self._step} is {total} in the micro-batch of samples "
                f"{', '.join(s.id for s in row.samples[:4])}{' ...' if len(row.samples) > 4 else ''}. No weights were "
                "changed; look at these samples' rewards, or lower critic.learning_rate"
            )
        num_tokens = float(len(loss_N))
        metrics.add(
            {
                "critic/loss": (float(loss_N.detach().sum()), num_tokens),
                "critic/clip_share": (float(clipped_N.sum()), num_tokens),
            },
            0.0,
        )
        return loss

    def forward_backward(self, minibatch: Minibatch, rows: MakeRows, metrics: MinibatchMetrics) -> None:
        """Add the value loss's gradient of one minibatch; for a critic with its own backbone."""
        assert self.backbone is not None
        for row in rows(minibatch.samples):
            loss = self.loss(hidden_states(self.backbone, row), minibatch, row, metrics)
            loss.backward()  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------------------- steps

    def optim_step(self) -> dict[str, float]:
        """Clip, step, clear, as the policy's: see ``PolicyTrainer.optim_step``."""
        rate = learning_rate(self.config.learning_rate, self.config.schedule, self._step, self._num_steps)
        norm, _ = self._weights.step(rate)
        self._step += 1
        return {"critic/grad_norm": norm, "critic/learning_rate": rate}

    def clear(self) -> None:
        """Drop the gathered gradient."""
        self._weights.clear()

    def writer(self, *, copied: bool) -> Write:
        """Writes weights, optimizer and step count, in a folder of their own within a checkpoint's; ``copied``: as
        ``TrainableWeights.writer``."""
        write_weights, state = self._weights.writer(copied=copied), {"step": self._step}

        def write(path: Path) -> None:
            folder = path / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            write_weights(folder)
            write_state(folder, state)

        return write

    def restore(self, path: Path) -> None:
        """Bit for bit. Raises CheckpointError where ``path`` holds no critic, or another one."""
        state = read_state(path / FOLDER)
        self._weights.restore(path / FOLDER)
        self._step = int(state["step"])


class _ScaleGradient(torch.autograd.Function):
    """The same values, a scaled gradient."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None  # type: ignore[attr-defined]


def _check_same_ids(policy: LoadedModel, own: LoadedModel) -> None:
    if policy.tokenizer.get_vocab() == own.tokenizer.get_vocab():
        return
    raise ConfigError(
        f"critic.path: the tokenizer of {own.path or type(own.model).__name__} ({own.vocab_size} ids) is not the "
        f"policy's ({policy.vocab_size} ids), so it would judge other text than the policy wrote; choose a model with "
        "the policy's tokenizer, or leave critic.path out"
    )
