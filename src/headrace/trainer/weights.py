"""The trainable weights: their float32 masters, their optimizer, and how both are written and read.

Where the model's own parameters are float32 (or float64, in tests) they are the masters. A bfloat16 model gives each
micro-batch's gradient over to the master right after it was computed, so that gradients are summed in float32 too,
and takes the rounded masters back after each step.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from headrace.config.base import OptimizerSection
from headrace.errors import HeadraceError
from headrace.model.load import LoadedModel

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "trainer.json"
SHARDS = "shards"
"""Folder of a checkpoint of several processes, in the form of torch.distributed.checkpoint."""
SHARD_PREFIX = "weight/"
"""Of a weight's name in there; a moment has its own name before it."""
MOMENTS = ("exp_avg", "exp_avg_sq")


Write = Callable[[Path], None]
"""Writes a part of a checkpoint into its folder."""


class NonFiniteError(HeadraceError):
    """A loss, gradient or weight is NaN or infinite. The weights are as they were before (I13)."""


class CheckpointError(HeadraceError):
    """A trainer checkpoint that does not fit this trainer."""


class HasWeights(Protocol):
    """A model and the float32 masters of those weights that are not float32 themselves, by parameter name."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def masters(self) -> dict[str, Tensor]: ...


class TrainableWeights:
    """Masters, gradients and AdamW. ``masters`` maps parameter names to the tensors that the optimizer steps."""

    def __init__(self, loaded: HasWeights, config: OptimizerSection) -> None:
        self._parameters = trainable(loaded)
        self.masters = masters_of(loaded)
        for name, parameter in self._parameters.items():
            master = self.masters[name]
            if master is parameter:
                continue
            master.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(_give_gradient_to(master))  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(
            self.masters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._max_grad_norm = config.max_grad_norm

    def step(self, rate: float) -> tuple[float, bool]:
        """Clip, step, clear. Returns (global gradient norm before clipping, whether weights moved).

        A gradient that is exactly 0 everywhere moves nothing: AdamW would otherwise walk on old momentum and decay
        weights although no token had a say. That holds whether the zero was computed or its pass was skipped.
        Raises NonFiniteError, with weights and optimizer untouched, where the norm is not finite.
        """
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not _is_finite(norm):
            bad = [name for name, m in self.masters.items() if m.grad is not None and not m.grad.isfinite().all()]
            self.clear()
            raise NonFiniteError(
                f"the gradient norm is {norm}: first tensor with a non-finite gradient: {bad[0] if bad else 'none'} "
                f"({len(bad)} in all). The step was not made and the weights are unchanged. Look at the batch's "
                "advantages and log-probability gap; a lower learning rate or tighter clipping may help"
            )
        if norm == 0.0:
            self.clear()
            return 0.0, False
        if norm > self._max_grad_norm:
            torch._foreach_mul_(gradients, self._max_grad_norm / (norm + 1e-6))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        # torch's fused kernels write without raising version counters, by which others know that a weight has changed
        torch.autograd.graph.increment_version(list(self.masters.values()))
        self.clear()
        round_into_model(self._parameters, self.masters)
        return norm, True

    def clear(self) -> None:
        """Drop the gathered gradient."""
        for tensor in (*self.masters.values(), *self._parameters.values()):
            tensor.grad = None

    def check_finite(self) -> None:
        """Raises NonFiniteError naming the first weight that is not finite."""
        for name, parameter in self._parameters.items():
            # one sum is much cheaper than a mask of flags, and NaN or infinity always reach it
            if not parameter.detach().sum().isfinite() and not parameter.detach().isfinite().all():
                raise NonFiniteError(
                    f"weight {name} is not finite, so this version is not published and no engine will serve it. "
                    "Resume from the last checkpoint with a lower learning rate"
                )

    def writer(self, *, copied: bool) -> Write:
        """Writes masters and optimizer moments as safetensors, under their parameters' names, into a folder.
        ``copied``: as they are now, out of host memory, whenever it is called and on whatever thread."""
        moments = {
            f"{name}/{field}": value
            for name, master in self.masters.items()
            for field, value in self.optimizer.state.get(master, {}).items()
        }
        files: dict[str, dict[str, Tensor]] = {WEIGHTS_FILE: dict(self.masters), OPTIMIZER_FILE: moments}
        for tensors in files.values():
            for key, tensor in tensors.items():
                tensors[key] = tensor.detach().to("cpu", copy=True) if copied else tensor.detach()

        def write(path: Path) -> None:
            for file, tensors in files.items():
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / file)

        return write

    @torch.no_grad()
    def restore(self, path: Path) -> None:
        """From a checkpoint of one process or of several. Raises CheckpointError, with nothing changed, where names or
        shapes are not those of this model."""
        moments = _saved_moments(path, self.masters)
        load_weights(self._parameters, self.masters, path)
        state: dict[Tensor, dict[str, Tensor]] = {}
        for (name, field), value in moments.items():
            # fused AdamW keeps its step counters beside the weights
            state.setdefault(self.masters[name], {})[field] = value.to(self.masters[name].device)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)
        self.clear()


def trainable(loaded: HasWeights) -> dict[str, Tensor]:
    return {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}


def masters_of(loaded: HasWeights) -> dict[str, Tensor]:
    """What the optimizer steps, by parameter name: the master copy where there is one, else the parameter itself."""
    return {name: loaded.masters.get(name, p) for name, p in trainable(loaded).items()}


@torch.no_grad()
def round_into_model(parameters: dict[str, Tensor], masters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if parameter is not masters[name]:
            parameter.copy_(masters[name])


def restore_model(loaded: LoadedModel, path: Path) -> None:
    """Put the weights of the trainer checkpoint ``path`` into a model that was loaded as the run's start.

    Raises CheckpointError where they do not fit. Enough for evaluation and export; a trainer has its own restore.
    """
    load_weights(trainable(loaded), masters_of(loaded), path)


@torch.no_grad()
def load_weights(parameters: dict[str, Tensor], masters: dict[str, Tensor], path: Path) -> None:
    """Copy the weights of a trainer checkpoint into ``masters`` and, rounded, into ``parameters``, in place."""
    saved = _saved_weights(path, masters)
    wrong = sorted(saved.keys() ^ masters.keys())
    wrong += [name for name in saved.keys() & masters.keys() if saved[name].shape != masters[name].shape]
    if wrong:
        raise CheckpointError(
            f"the checkpoint {path} belongs to another model: {len(wrong)} weights differ in name or shape, the first "
            f"is {wrong[0]}. Use the model, and LoRA setting, that the run was started with"
        )
    for name, master in masters.items():
        master.copy_(saved[name])
    round_into_model(parameters, masters)


def _saved_weights(path: Path, masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a checkpoint of one process, or of several (whole tensors, as types and names of ``masters`` say)."""
    if (path / WEIGHTS_FILE).is_file():
        return load_file(path / WEIGHTS_FILE)
    if not (path / SHARDS).is_dir():
        raise CheckpointError(f"{path} is no trainer checkpoint: it holds no {WEIGHTS_FILE}")
    return _read_shards(path, SHARD_PREFIX, masters)


def _saved_moments(path: Path, masters: dict[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """(name of the weight, field of AdamW's state) -> value. Empty before the first step that moved weights."""
    if (path / OPTIMIZER_FILE).is_file():
        saved = {key.rpartition("/"): value for key, value in load_file(path / OPTIMIZER_FILE).items()}
        return {(name, field): value for (name, _, field), value in saved.items()}
    if not (path / SHARDS).is_dir():
        raise CheckpointError(f"{path} is no trainer checkpoint: it holds no {OPTIMIZER_FILE}")
    num_moves = int(read_state(path)["num_moves"])
    if not num_moves:
        return {}
    moments = {(name, "step"): torch.tensor(float(num_moves)) for name in masters}
    for field in MOMENTS:
        moments |= {(name, field): value for name, value in _read_shards(path, f"{field}/", masters).items()}
    return moments


def _read_shards(path: Path, prefix: str, masters: dict[str, Tensor]) -> dict[str, Tensor]:
    """All whole tensors whose keys begin with ``prefix``, by what stands behind it."""
    reader = FileSystemReader(path / SHARDS)
    described: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    whole = {
        key.removeprefix(prefix): torch.empty(tuple(about.size), dtype=torch.float32)
        for key, about in described.items()
        if key.startswith(prefix)
    }
    for name, tensor in whole.items():
        if name in masters:
            whole[name] = tensor.to(masters[name].dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for: one process reads
        load_distributed({prefix + name: t for name, t in whole.items()}, storage_reader=reader, no_dist=True)
    return whole


def write_state(path: Path, state: dict[str, Any]) -> None:
    (path / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")


def read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no trainer checkpoint: it holds no {STATE_FILE}") from error
    return state


def _give_gradient_to(master: Tensor) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.to(master.dtype)
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook


def _is_finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")
