"""Passes over packed rows on one process's part of the model: row by row, or through a pipeline of stages.

The pipeline is torch's (``torch.distributed.pipelining``). It cuts tensors into micro-batches; what it cuts here are
the rows' numbers, and each stage looks its own row up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from headrace.model.packing import PackedRow
from headrace.model.parallel.mesh import ParallelMesh
from headrace.model.parallel.stage import PolicyStage, RoutingOf

RowLoss = Callable[[int, Tensor], Tensor]
"""(number of the row, its scores [2, N]) -> the loss of that row, attached to the scores."""


def score_rows(
    stage: PolicyStage, mesh: ParallelMesh, rows: Sequence[PackedRow], routing_of: RoutingOf | None = None
) -> dict[int, Tensor]:
    """Scores [2, N] of each row by its number, without gradient; empty where another stage computes them."""
    stage.load(rows, needs_entropy=False, routing_of=routing_of)
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        if mesh.config.pp == 1:
            for i in range(len(rows)):
                found[i] = stage(index=torch.tensor([i]))
            return found

        def keep(scores_2N: Tensor, index: Tensor) -> Tensor:
            found[int(index)] = scores_2N
            return scores_2N.new_zeros(())

        numbers = torch.arange(len(rows))
        schedule = _schedule(stage, mesh, len(rows), keep)
        schedule.eval(
            *((numbers,) if mesh.is_first_stage else ()),
            target=numbers if mesh.is_last_stage else None,
            return_outputs=False,
            index=numbers,
        )
    return found


def train_rows(
    stage: PolicyStage,
    mesh: ParallelMesh,
    rows: Sequence[PackedRow],
    loss_of: RowLoss,
    *,
    needs_entropy: bool,
    routing_of: RoutingOf | None = None,
) -> None:
    """Add the gradient of every row's loss. ``loss_of`` is called where the last stage is."""
    stage.load(rows, needs_entropy=needs_entropy, routing_of=routing_of)
    if mesh.config.pp == 1:
        for i in range(len(rows)):
            loss_of(i, stage(index=torch.tensor([i]))).backward()  # type: ignore[no-untyped-call]
        return
    numbers = torch.arange(len(rows))
    schedule = _schedule(stage, mesh, len(rows), lambda scores_2N, index: loss_of(int(index), scores_2N))
    schedule.step(
        *((numbers,) if mesh.is_first_stage else ()),
        target=numbers if mesh.is_last_stage else None,
        return_outputs=False,
        index=numbers,
    )


def _schedule(
    stage: PolicyStage, mesh: ParallelMesh, num_rows: int, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> ScheduleGPipe | Schedule1F1B:
    """Made anew for each pass: it is bound to the shape of what travels. Sums of gradients, not means."""
    weight = next(stage.model.parameters())
    dtype = stage.compute_dtype
    # its gradient travels back: the pipeline looks whether it requires one
    hidden = torch.empty(stage.hidden_shape, dtype=dtype, device="meta", requires_grad=torch.is_grad_enabled())
    first = torch.empty(1, dtype=torch.long, device="meta")
    pipeline_stage = PipelineStage(
        stage,
        mesh.rank("pp"),
        mesh.config.pp,
        weight.device,
        input_args=first if mesh.is_first_stage else hidden,
        output_args=torch.empty(2, 1, dtype=dtype, device="meta") if mesh.is_last_stage else hidden,
        group=mesh.group("pp"),
    )
    kind = ScheduleGPipe if mesh.config.pp_schedule == "gpipe" else Schedule1F1B
    return kind(pipeline_stage, num_rows, loss_fn=loss_of, scale_grads=False)
