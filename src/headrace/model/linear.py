"""Linear layers whose products run in oneDNN, where that is the faster library: float32 on a CPU.

torch multiplies float32 matrices with its BLAS library, except where a weight was laid out beforehand. Measured on two
cores of an AMD processor (SmolLM2-135M's shapes, 470 and 850 rows), products of oneDNN were 2 to 10 % faster than MKL's
with the weight as it lies (forward), and 11 to 14 % in the gradient of the input; the gradient of the weight was faster
in MKL, and stays there. The two libraries add in another order: results differ in their last bits.

oneDNN compiles code for each number of rows that it meets, and keeps it: 0.3 to 0.7 MB for each, with each pair of
sizes. Batches of every length would fill gigabytes in a long run, so products are made of few numbers of rows only
(:func:`round_up`).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn


def onednn_serves(tensor: Tensor) -> bool:
    """oneDNN is there, and ``tensor`` is a plain float32 one in the CPU's memory."""
    return type(tensor) in (Tensor, nn.Parameter) and onednn_computes(tensor.dtype, tensor.device)


def onednn_computes(dtype: torch.dtype, device: torch.device) -> bool:
    """oneDNN is there, and multiplies such matrices."""
    return (
        device.type == "cpu"
        and dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def round_up(num_rows: int) -> int:
    """The next number of rows that products are made of: 48 of them up to 1024, at most a quarter more than asked for
    above 24 and an eighth above 128."""
    step = 4 if num_rows <= 32 else 8 if num_rows <= 64 else 16 if num_rows <= 256 else 32 if num_rows <= 1024 else 128
    return -(-num_rows // step) * step


def product(input_RK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """[R, N]: input @ weight.T + bias in oneDNN, without gradient. Both must be what :func:`onednn_serves`; the weight
    may be a transposed view, or laid out. Where R is none of :func:`round_up`, the input is copied."""
    num_rows = len(input_RK)
    missing = round_up(num_rows) - num_rows
    if missing:
        input_RK = nn.functional.pad(input_RK, (0, 0, 0, missing))
    output = torch.ops.mkldnn._linear_pointwise(input_RK, weight_NK.detach(), bias_N, "none", [], "")
    return cast(Tensor, output[:num_rows] if missing else output)


class OneDnnLinear(nn.Linear):
    """A linear layer, the same in everything but the library that multiplies."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]. In oneDNN where the number of rows is one of :func:`round_up`;
        packed rows are made so (``packing.fitted``)."""
        num_rows = input.numel() // self.in_features
        if not (onednn_serves(self.weight) and onednn_serves(input) and num_rows and num_rows == round_up(num_rows)):
            return super().forward(input)  # float64, bfloat16, a GPU, a tensor that is spread over processes, odd rows
        return cast(Tensor, _Linear.apply(input, self.weight, self.bias))  # type: ignore[no-untyped-call]


PLAIN = (nn.Linear, OneDnnLinear)
"""Layers that are nothing but input @ weight.T + bias."""


def use_onednn(model: nn.Module) -> None:
    """Make every plain linear layer of ``model`` a :class:`OneDnnLinear`, in place: same weights, same names."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_NK)
        output = product(_rows(input), weight_NK, None if bias_N is None else bias_N.detach())
        return output.view(*input.shape[:-1], len(weight_NK))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight_NK = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_RN = _rows(gradients[0])
        grad_input = product(grad_RN, weight_NK.t()).view_as(input) if needs_input else None
        grad_weight = grad_RN.t() @ _rows(input) if needs_weight else None
        return grad_input, grad_weight, grad_RN.sum(0) if needs_bias else None


def _rows(tensor: Tensor) -> Tensor:
    """[R, last dim], contiguous."""
    return tensor.reshape(-1, tensor.shape[-1]).contiguous()
