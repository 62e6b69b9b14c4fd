"""Passes over packed rows on one process's part of the model: row by row, or through a pipeline of stages.

The pipeline is torch's (``torch.distributed.pipelining``). It cuts tensors into micro-batches; what it cuts here are
the rows' numbers, and each stage looks its own row up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from headrace.model.packing import PackedRow
from headrace.model.parallel.apply import let_go
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
        with kept_gradients(stage):
            _schedule(stage, mesh, len(rows), keep).eval(
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
    """The gradient of every row's loss. ``loss_of`` is called where the last stage is. Gradients that were there must
    be kept around it: :func:`kept_gradients`."""
    stage.load(rows, needs_entropy=needs_entropy, routing_of=routing_of)
    if mesh.config.pp == 1:
        for i in range(len(rows)):
            loss_of(i, stage(index=torch.tensor([i]))).backward()  # type: ignore[no-untyped-call]
        return
    numbers = torch.arange(len(rows))
    _schedule(stage, mesh, len(rows), lambda scores_2N, index: loss_of(int(index), scores_2N)).step(
        *((numbers,) if mesh.is_first_stage else ()),
        target=numbers if mesh.is_last_stage else None,
        return_outputs=False,
        index=numbers,
    )


@contextmanager
def kept_gradients(stage: PolicyStage) -> Iterator[None]:
    """Inside there are no gradients yet; afterwards those from before are added to what came. A schedule of torch's
    drops all gradients when it is set up, and it is set up for each pass."""
    let_go(stage)  # or its parameters would be gathered ones, and gradients belong to the shards
    kept = [(parameter, parameter.grad) for parameter in stage.parameters() if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


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
