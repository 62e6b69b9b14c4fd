"""The engine's own copy of a model: takes all tensors of an update, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from headrace.types import PolicyVersion
from headrace.weights.carrier import refused
from headrace.weights.checksums import checksums, named_parameters

Travels = Callable[[str], bool]
"""By name of a parameter: whether updates bring it. The others never move, as a base model under an adapter."""


def all_travel(name: str) -> bool:
    return True


def adapter_travels(name: str) -> bool:
    """Of a peft model with LoRA: the adapter alone. The base is frozen, so both sides keep what they started with (and
    the canary compares it too)."""
    return "lora_" in name


class Parameters:
    """Those of ``model`` that travel, by name. A tied weight may come under any or several of its names; under several,
    the tensors must be equal."""

    def __init__(self, model: nn.Module, travels: Travels = all_travel) -> None:
        self._model = model
        self._by_name = {name: p for name, p in named_parameters(model).items() if travels(name)}
        main = {id(parameter): name for name, parameter in self._by_name.items()}
        self._main_name = {
            name: main[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in main
        }

    def checked(self, tensors: Mapping[str, Tensor], version: PolicyVersion) -> dict[str, Tensor]:
        """The tensors under their main names; raises WeightUpdateError before anything was written."""
        new: dict[str, Tensor] = {}
        problems = []
        for name, tensor in tensors.items():
            problem = self.problem(name, tensor)
            if problem is None:
                main = self._main_name[name]
                if main in new and not torch.equal(new[main], tensor):
                    problem = f"{name} is tied to {main}, but the two came with different values"
                new[main] = tensor
            if problem is not None:
                problems.append(problem)
        problems += self.missing(tensors)
        if problems:
            raise refused(version, problems)
        return new

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """Why this tensor does not fit; None where it does."""
        main = self._main_name.get(name)
        if main is None:
            return f"{name} is not a parameter of the engine's model that updates bring"
        parameter = self._by_name[main]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            return (
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, the engine's is "
                f"{parameter.dtype} {tuple(parameter.shape)}"
            )
        return None

    def main(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Under main names; all of them must be known."""
        return {self._main_name[name]: tensor for name, tensor in tensors.items()}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Problems: parameters that none of ``names`` brings."""
        brought = {self._main_name.get(name) for name in names}
        return [f"{name} is missing" for name in self._by_name if name not in brought]

    @torch.no_grad()
    def write(self, new: Mapping[str, Tensor]) -> None:
        """``new``: of :meth:`checked` or :meth:`main`."""
        for name, tensor in new.items():
            self._by_name[name].copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """Of every parameter, those that never travel too."""
        return checksums(named_parameters(self._model).items())
