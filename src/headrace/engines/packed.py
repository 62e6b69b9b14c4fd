"""The engine's own view of the model: the same parameters, linear layers laid out for products of few rows.

A decode step multiplies 1 to 64 rows by every weight. The BLAS product brings the weight into its kernel's layout at
each call, which takes as long as the product of so few rows itself; oneDNN takes a weight that was laid out once. On
two cores that is 1.3 to 2.5 times the rate at 8 to 128 rows (benchmarks/engine.py shows the sum of it), for a second
copy of the linear layers' weights and one pass over them after each update.

A laid-out weight must not outlive the weight that it was made from. The engine drops all of them when it takes an
update, and each use compares the parameter's version counter, which a write in place raises (torch's fused optimizers
are an exception, so the trainer raises it after their steps). A write that hides from both is what the canary is for
(I6).
"""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import Tensor, nn

from headrace.model.linear import PLAIN, onednn_serves, product

_ROWS = 32
"""The number of rows that a layout is chosen for; it serves any number."""


def packed_view(model: nn.Module) -> nn.Module:
    """A module tree of its own over the very parameters and buffers of ``model``, in evaluation mode, with
    :class:`PackedLinear` in place of each linear layer that can be laid out; ``model`` itself is left as it is."""
    shared = chain(model.parameters(), model.buffers(), [getattr(model, "config", None)])
    view = copy.deepcopy(model, {id(thing): thing for thing in shared if thing is not None})
    for parent in list(view.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and type(child) in PLAIN and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child))
    return view.eval()


def drop_packed(view: nn.Module) -> None:
    """Forget every laid-out weight."""
    for module in view.modules():
        if isinstance(module, PackedLinear):
            module.drop()


def num_packed_bytes(view: nn.Module) -> int:
    """Of the weights that are laid out now."""
    return sum(module.num_bytes() for module in view.modules() if isinstance(module, PackedLinear))


def can_pack(weight: Tensor) -> bool:
    """oneDNN multiplies by it, and can lay it out."""
    return onednn_serves(weight) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


class PackedLinear(nn.Module):
    """``linear`` with its weight laid out at first use and again whenever it was written. Without gradient."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed: Tensor | None = None
        self._packed_version = -1

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self._packed is None or self.weight._version != self._packed_version:
            self._packed_version = self.weight._version
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), _ROWS)
        output = product(input.reshape(-1, self.in_features), self._packed, self.bias)
        return output.view(*input.shape[:-1], self.out_features)

    def drop(self) -> None:
        self._packed = None

    def num_bytes(self) -> int:
        """A packed layout has no strides to count by; it holds as many elements as the weight, padded at most."""
        return 0 if self._packed is None else self.in_features * self.out_features * self.weight.element_size()
