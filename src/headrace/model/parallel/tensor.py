"""Tensor parallel: transformers' own plan and styles, with three changes of ours.

* The output head is split by vocabulary, and its product never gathered: ``model/logprobs.py`` adds up parts.
* Norms over heads (Qwen3's q_norm, k_norm) see this rank's heads only, so their gradient is a part. transformers sums
  ``param.grad`` in a hook, which counts earlier micro-batches again; here each use sums its own gradient.
* Experts are left whole: ``experts.py`` sends tokens to them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from headrace.model.head import OutputHead, VocabShard, has_tied_head, head_of, output_head
from headrace.model.parallel.check import ParallelError
from headrace.model.parallel.collectives import sum_backward

_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"


def apply_tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, expert_modules: set[str]) -> None:
    """Replace weights by this rank's parts, in place. ``mesh`` is the 1-D tp mesh.

    Raises ParallelError where transformers has no plan for the architecture.
    """
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not any(style == "colwise" for style in plan.values()):
        raise ParallelError(
            f"parallel.tp = {mesh.size()}: transformers has no tensor-parallel plan for {type(model).__name__}; "
            "set parallel.tp = 1 and use dp_shard or pp"
        )
    concrete = _expand(model, plan, expert_modules)
    for name in [name for name, style in concrete.items() if style == _PARTIAL_GRADIENT]:
        del concrete[name]
        if isinstance(module := dict(model.named_modules()).get(name), nn.Module):
            _sum_gradient_of(module, mesh)
    tied = has_tied_head(model)
    apply_tensor_parallelism(model, mesh, concrete)
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear):  # another pipeline stage holds it
        return
    if tied:
        head._parameters["weight"] = model.get_input_embeddings()._parameters["weight"]
    else:
        _split_rows(head, "weight", mesh)
    if head.bias is not None:
        _split_rows(head, "bias", mesh)


def sharded_head(model: PreTrainedModel, vocab_size: int) -> OutputHead:
    """The output head as it lies here: whole, or this rank's rows with what the scorer must know of the others."""
    head = head_of(model)
    weight: Any = head.weight
    if not isinstance(weight, DTensor):
        return output_head(model, vocab_size)
    mesh = weight.device_mesh
    start = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    num_rows = max(0, min(vocab_size - start, _local(weight).shape[0]))
    bias = None if head.bias is None else _local(head.bias)[:num_rows]
    return OutputHead.of(model, _local(weight)[:num_rows], bias, VocabShard(mesh.get_group(), start))


def _local(parameter: Any) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter  # type: ignore[no-any-return]
    return parameter.to_local(grad_placements=parameter.placements)


def _split_rows(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    parameter = module._parameters[name]
    assert parameter is not None
    part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
    module._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)


def _sum_gradient_of(module: nn.Module, mesh: DeviceMesh) -> None:
    group, original = mesh.get_group(), module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = dict(module._parameters)
        for name, parameter in parameters.items():
            if parameter is not None and torch.is_grad_enabled():
                module._parameters[name] = sum_backward(parameter, group)  # type: ignore[assignment]
        try:
            return original(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    module.forward = forward


def _expand(model: PreTrainedModel, plan: dict[str, str], expert_modules: set[str]) -> dict[str, str]:
    """Concrete module and parameter names: a style for each parameter that a rule names, and then its module."""
    concrete: dict[str, str] = {}
    for name, module in model.named_modules():
        if name in expert_modules or name.rpartition(".")[0] in expert_modules:
            continue
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is None or module is model.get_output_embeddings():  # type: ignore[no-untyped-call]
            continue
        concrete.update({f"{name}.{own}": style for own, _ in module.named_parameters(recurse=False)})
        concrete[name] = style
    return {name: style for name, style in concrete.items() if not (style == _PARTIAL_GRADIENT and _is_leaf(name))}


def _is_leaf(name: str) -> bool:
    return name.endswith((".weight", ".bias"))
