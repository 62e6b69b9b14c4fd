"""A trainer that leaves the device's memory and comes back as it was: its part of a lease (control/lease.py).

Weights, masters, gradients, the optimizer's moments and the frozen reference move into host memory and back, bit for
bit. The tensors stay the objects that they are (an optimizer and its hooks hold on to them); their storage goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


class TrainerResidence:
    """``tensors``: makes the tensors that hold the trainer's memory, all of this moment. Called on its thread."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._stored: list[tuple[Tensor, Tensor]] = []
        """A tensor without storage, and its values in host memory."""

    @torch.no_grad()
    def offload(self) -> None:
        """Into host memory. A second time changes nothing."""
        if self._stored:
            return
        for tensor in {id(t): t for t in self._tensors()}.values():
            self._stored.append((tensor, tensor.detach().to("cpu", copy=True)))
            tensor.data = tensor.data.new_empty(0)

    @torch.no_grad()
    def onload(self) -> None:
        """Back where they were."""
        for tensor, values in self._stored:
            tensor.data = values.to(tensor.device)
        self._stored = []

    def held_bytes(self) -> int:
        return sum(t.nbytes for t in {id(t): t for t in self._tensors()}.values())


def tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Its moments; counters, which some kernels want on the host, stay."""
    states: Iterable[Mapping[str, object]] = optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim]
