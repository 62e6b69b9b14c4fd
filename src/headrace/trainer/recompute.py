"""Activation checkpointing: layers that are computed again in the backward pass instead of keeping what it needs."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.config.schema import ParallelConfig
from headrace.model.parallel.check import ModelShape
from headrace.model.parallel.forecast import Pass, recomputed_layers


def recompute_activations(
    model: PreTrainedModel, work: Pass, parallel: ParallelConfig | None = None, stage: int = 0
) -> None:
    """Recompute as many layers of ``model``, which holds those of pipeline stage ``stage``, as ``work`` asks for.

    Raises ParallelError where its budget cannot be kept.
    """
    if work.activation_checkpointing:
        checkpoint_activations(model, None)
    elif work.activation_budget_bytes is not None:
        shape = ModelShape.of(model.config.to_dict())
        checkpoint_activations(model, recomputed_layers(parallel or ParallelConfig(), shape, work)[stage])


def checkpoint_activations(model: PreTrainedModel, num_layers: int | None) -> None:
    """Recompute the first ``num_layers`` layers (None: all) in the backward pass. The first, because the backward pass
    comes to them when it needs nothing of the others any more.

    The three attributes are what transformers' own switch sets (its name changed within version 5), with one
    difference: only the layer itself goes into training mode, which it asks for; its children stay in eval mode, so
    that nothing random wakes up. Passes without gradient (the engine's) are not affected.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layers that can be recomputed (model.activation_checkpointing)"
        )
    for layer in layers[:num_layers]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)  # type: ignore[assignment]
        layer.training = True
