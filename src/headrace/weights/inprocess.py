"""The two carriers of one process: the engine runs the trainer's own model, or a copy of it.

Contract of a carrier (tests/parity/test_engine_carriers.py runs it on all):

* ``receive`` switches to ``update.version`` and its weights: all of them, or none and a :class:`WeightUpdateError`.
* An older version is refused. The current version may be received again, with the same effect.
* After it, the model's log-probabilities are those of the sender's weights, for every parameter.
"""

from __future__ import annotations

import copy

from torch import nn

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import WeightUpdateError
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.parameters import Parameters, Travels, all_travel

__all__ = ["CopiedWeights", "SharedWeights", "WeightUpdateError"]


class SharedWeights:
    """The engine runs the trainer's model object: nothing is copied, an update carries a version only.

    The loop must keep the engine paused while an optimizer step writes. A model with adapters (peft) shares too.
    """

    broken = ""
    owns_weights = False

    def __init__(self, model: nn.Module, version: PolicyVersion) -> None:
        self.model = model
        self.version = version

    def receive(self, update: WeightUpdate) -> None:
        check_version(update.version, self.version)
        if update.tensors is not None:
            raise WeightUpdateError(
                f"weights {update.version} came with {len(update.tensors)} tensors, but this engine shares the "
                'trainer\'s storage and would ignore them; publish with tensors=None, or set engine.weights = "copy"'
            )
        self.version = update.version

    def checksums(self) -> dict[str, str]:
        return checksums(named_parameters(self.model).items())

    def shares_storage_with(self, model: nn.Module) -> bool:
        return _same_storage(self.model, model)

    def close(self) -> None:
        """Nothing is held but the model."""


class CopiedWeights:
    """The engine runs its own copy, made here from ``model``; an update carries by name every parameter that
    ``travels``: all, or of a model with an adapter the adapter alone."""

    broken = ""

    def __init__(self, model: nn.Module, version: PolicyVersion, travels: Travels = all_travel) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.version = version
        self._parameters = Parameters(self.model, travels)

    def receive(self, update: WeightUpdate) -> None:
        check_version(update.version, self.version)
        if update.tensors is None:
            raise WeightUpdateError(
                f"weights {update.version} came without tensors, but this engine holds its own copy; "
                'publish with tensors, or set engine.weights = "shared"'
            )
        self._parameters.write(self._parameters.checked(update.tensors, update.version))
        self.version = update.version

    def checksums(self) -> dict[str, str]:
        return self._parameters.checksums()

    def shares_storage_with(self, model: nn.Module) -> bool:
        return _same_storage(self.model, model)

    def close(self) -> None:
        """Nothing is held but the model."""


def check_version(new: PolicyVersion, current: PolicyVersion) -> None:
    """Raises WeightUpdateError for a version from before."""
    if new < current:
        raise WeightUpdateError(f"weights {new} are older than the engine's {current}; an engine never goes back")


def _same_storage(a: nn.Module, b: nn.Module) -> bool:
    """True where both have the same parameters by name and each pair is the same memory."""
    mine, theirs = named_parameters(a), named_parameters(b)
    return mine.keys() == theirs.keys() and all(
        mine[name].data_ptr() == theirs[name].data_ptr() and mine[name].shape == theirs[name].shape for name in mine
    )
