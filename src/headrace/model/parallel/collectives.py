"""Differentiable collectives with the gradients that a loss computed alike on every rank of a group needs.

Where a group computes one loss together, every rank computes it in full. A gradient that comes back from that loss is
then whole on each rank, and must not be summed again; one that comes back from a rank's own part must be.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # what rank s got from r came from r's part s: the way back is the same exchange
        return _exchange(gradients[0], ctx.group), None


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def sum_forward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of ``x`` over the group; the gradient of the sum goes back to each rank's ``x`` as it is."""
    out: Tensor = _SumForward.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def sum_backward(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` itself, alike on all ranks; its gradient is the sum of what the ranks' different uses gave."""
    out: Tensor = _SumBackward.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x`` [group size, ...]: entry s goes to rank s; returns what each rank sent here, in rank order."""
    out: Tensor = _Exchange.apply(x, group)  # type: ignore[no-untyped-call]
    return out
