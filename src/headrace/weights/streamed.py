"""The carrier between processes: whole weights come in buckets, and the engine's copy is written as they arrive.

Holding all tensors until the last one is checked would need the whole model twice. So here, unlike with the carriers
of one process, a failed update leaves the engine between two versions; it then refuses to serve any, and the run ends.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.inprocess import WeightUpdateError


class StreamedWeights:
    """The engine runs ``model``, which it owns from now on; an update brings every parameter once, by name."""

    def __init__(self, model: nn.Module, version: PolicyVersion) -> None:
        self.model = model.requires_grad_(False).eval()
        self.version = version
        self._parameters = named_parameters(self.model)

    @torch.no_grad()
    def receive(self, update: WeightUpdate) -> None:
        if update.version < self.version:
            raise WeightUpdateError(
                f"weights {update.version} are older than the engine's {self.version}; an engine never goes back"
            )
        if update.buckets is None:
            raise WeightUpdateError(f"weights {update.version} came without buckets, but this engine is fed by them")
        missing = dict.fromkeys(self._parameters)
        problems: list[str] = []
        for bucket in update.buckets():  # to its end, whatever is wrong: other processes take part in it
            for name, tensor in bucket.items():
                parameter = self._parameters.get(name)
                if parameter is None or tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                    problems.append(f"{name} ({tensor.dtype} {tuple(tensor.shape)}) does not fit the engine's model")
                elif not problems:
                    parameter.copy_(tensor)
                missing.pop(name, None)
        problems += [f"{name} is missing" for name in missing]
        if problems:
            raise WeightUpdateError(
                f"weights {update.version} do not fit this engine, and its weights are between two versions now: "
                + "; ".join(problems[:5])
            )
        self.version = update.version

    def checksums(self) -> dict[str, str]:
        return checksums(self._parameters.items())

    def shares_storage_with(self, model: nn.Module) -> bool:
        """Never: it is a copy."""
        return False
