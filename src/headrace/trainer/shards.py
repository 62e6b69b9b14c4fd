"""The optimizer of one process: AdamW on its own shards, with everything that must be global made global.

AdamW works element by element, so shards need nothing from each other except the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from headrace.config.schema import TrainerConfig
from headrace.model.parallel.apply import ParallelModel, let_go
from headrace.model.parallel.mesh import ParallelMesh
from headrace.model.parallel.state import global_norm, local_shard
from headrace.trainer.weights import NonFiniteError


class ShardedWeights:
    """Shards, gradients and AdamW. ``masters`` maps names to the plain tensors that the optimizer steps."""

    def __init__(self, model: ParallelModel, config: TrainerConfig, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._tied_ends = model.tied_ends
        self._stage = model.stage
        self.parameters: Mapping[str, DTensor] = model.parameters
        self._shards = {name: local_shard(p) for name, p in model.parameters.items()}
        on_host = mesh.config.offload_optimizer
        self.masters = {
            name: (shard.to("cpu", copy=True) if on_host else shard).requires_grad_(True)
            for name, shard in self._shards.items()
        }
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            [master for master in self.masters.values() if master.numel()],
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._max_grad_norm = config.max_grad_norm
        self.num_moves = 0
        """Steps that moved weights: AdamW's own count, alike for all parameters."""

    def finish_gradients(self) -> None:
        """After the last backward pass of a minibatch, its gradients alone: sum what the two ends of a pipeline have
        for a tied weight."""
        if not self._tied_ends:
            return
        group, pp = self._mesh.group("pp"), self._mesh.config.pp
        other = dist.get_global_rank(group, pp - 1 if self._mesh.is_first_stage else 0)
        gradient = local_shard(self.parameters[_TIED].grad)
        received = torch.empty_like(gradient)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient.clone(), other, group=group),
                dist.P2POp(dist.irecv, received, other, group=group),
            ]
        )
        for work in works:
            work.wait()
        gradient.add_(received)

    def norm(self) -> float:
        """The global gradient norm, the same number on every process. Collective."""
        counted = {
            name: p.grad
            for name, p in self.parameters.items()
            if p.grad is not None and not (name == _TIED and self._tied_ends and not self._mesh.is_first_stage)
        }
        return global_norm(counted, self._mesh)  # type: ignore[arg-type]

    def step(self, rate: float) -> tuple[float, bool]:
        """Clip by the global norm, step, clear: see ``TrainableWeights.step``. Collective."""
        norm = self.norm()
        if norm != norm or norm == float("inf"):
            bad = [name for name, p in self.parameters.items() if p.grad is not None and not _finite(p.grad)]
            self.clear()
            raise NonFiniteError(
                f"the gradient norm is {norm}: first tensor with a non-finite gradient on this process: "
                f"{bad[0] if bad else 'none'} ({len(bad)} in all). The step was not made on any process and the "
                "weights are unchanged. Look at the batch's advantages and log-probability gap; a lower learning rate "
                "or tighter clipping may help"
            )
        if norm == 0.0:
            self.clear()
            return 0.0, False
        scale = self._max_grad_norm / (norm + 1e-6) if norm > self._max_grad_norm else 1.0
        for name, master in self.masters.items():
            gradient = self.parameters[name].grad
            if gradient is not None:
                master.grad = local_shard(gradient).to(master.device).mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.num_moves += 1
        self.clear()
        self.copy_into_model()
        return norm, True

    @torch.no_grad()
    def copy_into_model(self) -> None:
        """After masters were written: into shards, where they are not the same storage. What a pass before gathered of
        the old ones must not serve the next."""
        let_go(self._stage)
        for name, master in self.masters.items():
            if master.data_ptr() != self._shards[name].data_ptr():
                self._shards[name].copy_(master)

    def clear(self) -> None:
        """Drop the gathered gradient."""
        for name, master in self.masters.items():
            master.grad = None
            self.parameters[name].grad = None

    def check_finite(self) -> None:
        """Raises NonFiniteError on every process where a weight on any of them is not finite. Collective (I13)."""
        bad = [name for name, shard in self._shards.items() if not _finite(shard)]
        count = torch.tensor(len(bad), device=self._mesh.dense.device_type)
        dist.all_reduce(count)
        if count:
            raise NonFiniteError(
                f"{int(count)} shards of weights are not finite (here: {', '.join(bad[:3]) or 'none'}), so this "
                "version is not published and no engine will serve it. Resume from the last checkpoint with a lower "
                "learning rate"
            )


_TIED = "model.embed_tokens.weight"


def _finite(tensor: Tensor) -> bool:
    return bool(local_shard(tensor).isfinite().all())
