"""Expert parallel, through transformers: whole experts on each rank, tokens sent to them and back.

The ranks of a tp group hold the same tokens and send disjoint parts of them. So an expert's gradient is summed over
all ranks that hold it (``ParallelMesh.sharding("expert")``), and nothing is counted twice.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel, __version__

from headrace.model.parallel.check import ParallelError
from headrace.model.parallel.mesh import ParallelMesh


def expert_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that hold the experts of one layer each, by name; empty for a dense model."""
    return {name: module for name, module in model.named_modules() if name.endswith(".experts")}


def apply_expert_parallel(model: PreTrainedModel, mesh: ParallelMesh) -> None:
    """Replace each layer's experts by this rank's, in place; tokens travel in every pass.

    Raises ParallelError where transformers is too old, or the experts are no stacked weights that it can send tokens
    to.
    """
    try:  # here, so that a transformers without it (the one that vLLM pins) does all else
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError as error:
        raise ParallelError(
            f"parallel.ep, parallel.tp: transformers {__version__} cannot send tokens to experts; install 5.24 or later"
        ) from error
    plan: dict[str, str] = {}
    for name, module in expert_modules(model).items():
        parameters = dict(module.named_parameters())
        if any("." in own or p.ndim != 3 for own, p in parameters.items()) or not hasattr(module, "num_experts"):
            raise ParallelError(
                f"parallel.ep, parallel.tp: the experts of {type(model).__name__} ({name}) are not stacked into one "
                "tensor each, so tokens cannot be sent to them; use dp_shard or pp"
            )
        plan.update({f"{name}.{own}": "grouped_gemm" for own in parameters})
        plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh.expert["ep"], mesh.dense["tp"], plan, ep_implementation="all_to_all")
