"""The carrier from several processes to one: whole weights come in buckets, and the engine's copy is written as they
arrive.

Holding all tensors until the last one is checked would need the whole model twice. So an update that fails half way
leaves weights of no version. They are served to nobody: ``broken`` says why, the engine refuses every request while it
does, and the next complete update mends it.
"""

from __future__ import annotations

import torch
from torch import nn

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import WeightUpdateError, refused
from headrace.weights.inprocess import check_version
from headrace.weights.parameters import Parameters


class StreamedWeights:
    """The engine runs ``model``, which it owns from now on; an update brings every parameter once, by name."""

    def __init__(self, model: nn.Module, version: PolicyVersion) -> None:
        self.model = model.requires_grad_(False).eval()
        self.version = version
        self.broken = ""
        """Why the weights are of no version; empty while they are of one."""
        self._parameters = Parameters(self.model)

    def receive(self, update: WeightUpdate) -> None:
        check_version(update.version, self.version)
        if update.buckets is None:
            raise WeightUpdateError(f"weights {update.version} came without buckets, but this engine is fed by them")
        brought: set[str] = set()
        try:
            problems = self._take(update, brought)
        except BaseException as error:
            self._break(update.version, brought, f"{type(error).__name__}: {error}")
            raise
        if problems:
            self._break(update.version, brought, "; ".join(problems[:5]))
            raise WeightUpdateError(self.broken) if self.broken else refused(update.version, problems)
        self.version, self.broken = update.version, ""

    @torch.no_grad()
    def _take(self, update: WeightUpdate, brought: set[str]) -> list[str]:
        """Write what fits, up to the first that does not; returns what did not."""
        assert update.buckets is not None
        problems: list[str] = []
        seen: set[str] = set()
        for bucket in update.buckets():  # to its end, whatever is wrong: other processes take part in it
            for name, tensor in bucket.items():
                seen.add(name)
                problem = self._parameters.problem(name, tensor)
                if problem is not None:
                    problems.append(problem)
                elif not problems:
                    brought.add(name)
                    self._parameters.write(self._parameters.main({name: tensor}))
        return problems + self._parameters.missing(seen)

    def _break(self, version: PolicyVersion, brought: set[str], why: str) -> None:
        if brought:
            self.broken = (
                f"weights {version} arrived in part, {len(brought)} of their tensors were written, so the engine holds "
                f"weights of no version and serves nothing until a complete update: {why}"
            )

    def checksums(self) -> dict[str, str]:
        return self._parameters.checksums()

    def shares_storage_with(self, model: nn.Module) -> bool:
        """Never: it is a copy."""
        return False

    def close(self) -> None:
        """Nothing is held but the model."""
