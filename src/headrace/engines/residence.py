"""Weights that leave the device's memory and come back empty: an engine's part of a lease (control/lease.py).

The engine holds a copy of weights that the trainer has, so nothing is kept of them: they come with the next update.
"""

from __future__ import annotations

import torch
from torch import nn


class Residence:
    """Of the parameters of one model that the engine owns. Called on the engine's thread."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._shapes: list[torch.Size] = []

    @property
    def is_released(self) -> bool:
        return bool(self._shapes)

    @torch.no_grad()
    def release(self) -> None:
        """Free their storage. The parameters stay the objects that they are, without an element."""
        if not self.is_released:
            self._shapes = [parameter.shape for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.data = parameter.data.new_empty(0)

    @torch.no_grad()
    def acquire(self) -> None:
        """Room for them again, filled with NaN: who computes with it before an update is found out (I13)."""
        for parameter, shape in zip(self._parameters, self._shapes, strict=False):
            parameter.data = parameter.data.new_full(shape, float("nan"))
        self._shapes = []

    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._parameters)
