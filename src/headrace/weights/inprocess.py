"""The two carriers of one process: the engine runs the trainer's own model, or a copy of it.

Contract of a carrier (tests/parity/test_engine_carriers.py runs it on both):

* ``receive`` switches to ``update.version`` and its weights: all of them, or none and a :class:`WeightUpdateError`.
* An older version is refused. The current version may be received again, with the same effect.
* After it, the model's log-probabilities are those of the sender's weights, for every parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace.errors import HeadraceError
from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksums, named_parameters


class WeightUpdateError(HeadraceError):
    """A weight update does not fit. Nothing was changed."""


class SharedWeights:
    """The engine runs the trainer's model object: nothing is copied, an update carries a version only.

    The loop must keep the engine paused while an optimizer step writes. A model with adapters (peft) shares too.
    """

    owns_weights = False

    def __init__(self, model: nn.Module, version: PolicyVersion) -> None:
        self.model = model
        self.version = version

    def receive(self, update: WeightUpdate) -> None:
        _check_version(update.version, self.version)
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


class CopiedWeights:
    """The engine runs its own copy, made here from ``model``; an update carries every parameter by name.

    Names are those of ``named_parameters``. A tied weight may come under any or several of its names; under several,
    the tensors must be equal.
    """

    def __init__(self, model: nn.Module, version: PolicyVersion) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.version = version
        self._parameters = named_parameters(self.model)
        by_identity = {id(parameter): name for name, parameter in self._parameters.items()}
        self._main_name = {
            name: by_identity[id(parameter)] for name, parameter in self.model.named_parameters(remove_duplicate=False)
        }

    @torch.no_grad()
    def receive(self, update: WeightUpdate) -> None:
        _check_version(update.version, self.version)
        if update.tensors is None:
            raise WeightUpdateError(
                f"weights {update.version} came without tensors, but this engine holds its own copy; "
                'publish with tensors, or set engine.weights = "shared"'
            )
        new = self._checked(update.tensors, update.version)
        for name, tensor in new.items():
            self._parameters[name].copy_(tensor)
        self.version = update.version

    def checksums(self) -> dict[str, str]:
        return checksums(self._parameters.items())

    def shares_storage_with(self, model: nn.Module) -> bool:
        return _same_storage(self.model, model)

    def _checked(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> dict[str, Tensor]:
        """The tensors under their main names; raises before anything was written."""
        new: dict[str, Tensor] = {}
        problems = []
        for name, tensor in tensors.items():
            main = self._main_name.get(name)
            if main is None:
                problems.append(f"{name} is not a parameter of the engine's model")
                continue
            parameter = self._parameters[main]
            if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
                problems.append(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the engine's is "
                    f"{parameter.dtype} {tuple(parameter.shape)}"
                )
            elif main in new and not torch.equal(new[main], tensor):
                problems.append(f"{name} is tied to {main}, but the two came with different values")
            new[main] = tensor
        problems += [f"{name} is missing" for name in self._parameters if name not in new]
        if problems:
            more = f" and {len(problems) - 5} more problems" if len(problems) > 5 else ""
            raise WeightUpdateError(
                f"weights {version} do not fit this engine, nothing was changed: " + "; ".join(problems[:5]) + more
            )
        return new


def _check_version(new: PolicyVersion, current: PolicyVersion) -> None:
    if new < current:
        raise WeightUpdateError(f"weights {new} are older than the engine's {current}; an engine never goes back")


def _same_storage(a: nn.Module, b: nn.Module) -> bool:
    """True where both have the same parameters by name and each pair is the same memory."""
    mine, theirs = named_parameters(a), named_parameters(b)
    return mine.keys() == theirs.keys() and all(
        mine[name].data_ptr() == theirs[name].data_ptr() and mine[name].shape == theirs[name].shape for name in mine
    )
