"""This process's part of the model as one module: packed rows in, log-probabilities of trained tokens out.

All computation happens inside ``forward``, because that is where FSDP gathers weights. Between pipeline stages one
hidden tensor travels, whose shape must be the same for all rows of a pass; so rows are handed over beforehand
(``load``), padded to one length, and ``forward`` is told which of them to compute.

Legend: T tokens of a row (of this rank's stretch of it, with context parallel), D model, N trained tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace.model.head import has_tied_head
from headrace.model.logprobs import score_hidden
from headrace.model.packing import PackedRow, pad_row
from headrace.model.parallel.check import layers_of_stage
from headrace.model.parallel.context import Stretch, gather_scores, stretch_of
from headrace.model.parallel.mesh import ParallelMesh
from headrace.model.parallel.tensor import sharded_head
from headrace.model.routing import RouterPass

RoutingOf = Callable[[PackedRow], RouterPass]


class Absent(nn.Module):
    """In the place of a layer that another stage holds: hands its input on. Keeps the other layers' names."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


class PolicyStage(nn.Module):
    """Scores packed rows with this process's part of a model.

    Example::

        stage.load(rows, needs_entropy=False)
        scores_2N = stage(index=torch.tensor([0]))     # log-probabilities and entropies of rows[0]'s trained tokens
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        max_logit_tokens: int,
        mesh: ParallelMesh,
        compute_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self._vocab_size = vocab_size
        self._max_logit_tokens = max_logit_tokens
        self._mesh = mesh
        self._needs_entropy = False
        self._rows: list[PackedRow] = []
        self.routings: list[RouterPass] = []
        """Of each row of the last pass, this process's tokens and layers; empty where nothing is wanted of routers."""
        self._stretches: list[Stretch] = []

    def load(self, rows: Sequence[PackedRow], *, needs_entropy: bool, routing_of: RoutingOf | None = None) -> None:
        """The rows of the next pass. ``needs_entropy``: whether the entropies need a gradient."""
        self._needs_entropy = needs_entropy
        cp = self._mesh.config.cp
        longest = max(row.num_tokens for row in rows)
        lengths = [longest if self._mesh.config.pp > 1 else row.num_tokens for row in rows]
        self._rows = [pad_row(row, -(-length // cp) * cp) for row, length in zip(rows, lengths, strict=True)]
        if cp > 1:
            self._stretches = [stretch_of(row, self._mesh.group("cp")) for row in self._rows]
        own = [stretch.row for stretch in self._stretches] if cp > 1 else self._rows
        self.routings = [] if routing_of is None else [routing_of(row) for row in own]

    @property
    def hidden_shape(self) -> tuple[int, int, int]:
        """Of what travels between stages in this pass: [1, T, D]."""
        return 1, self._rows[0].num_tokens // self._mesh.config.cp, int(self.model.config.get_text_config().hidden_size)

    def forward(self, *inputs: Tensor, index: Tensor) -> Tensor:
        """[1, T, D] for the next stage, or [2, N] out of the last: log-probabilities and entropies."""
        number = int(index)
        row = self._stretches[number].row if self._stretches else self._rows[number]
        given = {"input_ids": row.ids_1T} if self._mesh.is_first_stage else {"inputs_embeds": inputs[0]}
        routing = self.routings[number] if self.routings else None
        hidden_1TD: Tensor = self.model.base_model(
            **given, position_ids=row.positions_1T, layout=row.layout, routing=routing, use_cache=False
        ).last_hidden_state
        if not self._mesh.is_last_stage:
            return hidden_1TD
        head = sharded_head(self.model, self._vocab_size)
        hidden_UD = hidden_1TD[0].index_select(0, row.predictor_U)
        logprobs_N, entropies_N = score_hidden(hidden_UD, head, row, max_logit_tokens=self._max_logit_tokens)
        if not self._needs_entropy:
            entropies_N = entropies_N.detach()
        scores_2N = torch.stack((logprobs_N, entropies_N))
        if self._stretches:
            whole = len(self._rows[number].target_N)
            return gather_scores(scores_2N, self._stretches[number], whole, self._mesh.group("cp"))
        return scores_2N


def keep_stage(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Drop the parts of ``model`` that other pipeline stages hold, in place. A tied embedding stays on both ends."""
    base: Any = model.base_model
    own = layers_of_stage(len(base.layers), mesh.config.pp, mesh.rank("pp"))
    for i in range(len(base.layers)):
        if i not in own:
            base.layers[i] = Absent()
    tied = has_tied_head(model)
    if not mesh.is_last_stage:
        base.norm = Absent()
        model.set_output_embeddings(Absent())  # type: ignore[no-untyped-call]
    if not mesh.is_first_stage and not (tied and mesh.is_last_stage):
        base.embed_tokens = Absent()
