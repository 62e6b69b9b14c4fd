"""Split a loaded model over the mesh: pipeline stage, experts, tensor parallel, then FSDP2 over all the rest.

FSDP2 is always there, also over one rank: it holds float32 (or float64) shards, computes in the model's type, and sums
gradients over every axis that splits tokens. Sums, not means: the loss has global denominators already (F54).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from headrace.model.head import has_tied_head
from headrace.model.load import DTYPES, LoadedModel
from headrace.model.parallel.check import ModelShape, ParallelError, check_layout
from headrace.model.parallel.experts import apply_expert_parallel, expert_modules
from headrace.model.parallel.mesh import ParallelMesh
from headrace.model.parallel.stage import Absent, PolicyStage, keep_stage
from headrace.model.parallel.tensor import apply_tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelModel:
    """This process's part of a model."""

    stage: PolicyStage
    parameters: dict[str, DTensor]
    """By the names that the whole model has in one process. A tied head is there once, as the embedding."""
    tied_ends: bool
    """The first and the last pipeline stage hold the same weight, so their gradients are summed."""


def parallelize(loaded: LoadedModel, mesh: ParallelMesh, *, max_logit_tokens: int) -> ParallelModel:
    """Split ``loaded`` in place: every process calls it with the same whole model. Raises ParallelError."""
    if mesh.config.offload_parameters and mesh.dense.device_type == "cpu":
        raise ParallelError(
            "parallel.offload_parameters has no effect: this machine computes on the CPU, whose memory is host memory; "
            "remove it"
        )
    if loaded.base is not None:
        raise ParallelError("model.lora: adapters train in one process only so far; set all axes of [parallel] to 1")
    weights: dict[str, Tensor] = {**dict(loaded.model.named_parameters()), **loaded.masters}
    return _split(loaded.model, weights, loaded.vocab_size, loaded.dtype, mesh, max_logit_tokens)


def parallelize_frozen(loaded: LoadedModel, mesh: ParallelMesh, *, max_logit_tokens: int) -> PolicyStage:
    """The same for a frozen copy (a reference). Call it before :func:`parallelize`."""
    model = copy.deepcopy(loaded.model)
    model.requires_grad_(False)
    weights: dict[str, Tensor] = dict(model.named_parameters())
    return _split(model, weights, loaded.vocab_size, loaded.dtype, mesh, max_logit_tokens).stage


def let_go(stage: nn.Module) -> None:
    """Drop what passes gathered, so that the next one gathers the shards as they are then. A pass without gradient
    leaves the outermost unit's weights gathered, and with pipeline stages every unit's."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _split(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    vocab_size: int,
    dtype: str,
    mesh: ParallelMesh,
    max_logit_tokens: int,
) -> ParallelModel:
    check_layout(mesh.config, ModelShape.of(model.config.to_dict()))
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].detach()
    pp_ends = mesh.config.pp > 1 and (mesh.is_first_stage or mesh.is_last_stage)
    tied = has_tied_head(model)
    if mesh.config.pp > 1:
        keep_stage(model, mesh)
    experts = expert_modules(model)
    if experts and mesh.config.ep * mesh.config.tp > 1:
        apply_expert_parallel(model, mesh)
    if mesh.config.tp > 1:
        apply_tensor_parallel(model, mesh.dense["tp"], set(experts))
    stage = PolicyStage(model, vocab_size, max_logit_tokens, mesh, DTYPES[dtype])
    _shard(stage, list(experts.values()), mesh, dtype)
    parameters: dict[str, DTensor] = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        parameters[name] = parameter
    return ParallelModel(stage=stage, parameters=parameters, tied_ends=tied and pp_ends)


def _shard(stage: PolicyStage, experts: list[nn.Module], mesh: ParallelMesh, dtype: str) -> None:
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if mesh.config.offload_parameters else OffloadPolicy()
    # a stage computes several rows forward before the first goes backward; gathering weights anew each time costs more
    reshard = mesh.config.pp == 1
    dense, expert = mesh.sharding("dense"), mesh.sharding("expert")
    dispatched = mesh.config.ep * mesh.config.tp > 1
    units = [(module, expert) for module in experts] if dispatched else []
    units += [(layer, dense) for layer in _layers(stage.model)]
    for module, device_mesh in units:
        fully_shard(module, mesh=device_mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
    fully_shard(stage, mesh=dense, mp_policy=policy, offload_policy=offload)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    layers: nn.ModuleList = model.base_model.layers  # type: ignore[assignment]
    return (layer for layer in layers if not isinstance(layer, Absent))
