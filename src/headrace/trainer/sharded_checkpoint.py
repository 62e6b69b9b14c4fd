"""Checkpoints of several processes, through torch.distributed.checkpoint: each writes its shards, any layout reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from headrace.model.parallel.state import like
from headrace.trainer.shards import ShardedWeights
from headrace.trainer.weights import SHARD_PREFIX as _WEIGHT
from headrace.trainer.weights import SHARDS, CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_shards(weights: ShardedWeights, path: Path) -> int:
    """Write weights and moments below ``path``; returns how often the optimizer has moved weights. Collective."""
    state: dict[str, Any] = {_WEIGHT + n: like(m.detach(), weights.parameters[n]) for n, m in weights.masters.items()}
    num_moves = weights.num_moves
    if num_moves:
        for name, master in weights.masters.items():
            moments = weights.optimizer.state.get(master, {})
            for field in _MOMENTS:
                moment = moments[field] if field in moments else torch.zeros_like(master)
                state[f"{field}/{name}"] = like(moment, weights.parameters[name])
    save_distributed(state, storage_writer=FileSystemWriter(path / SHARDS))
    return num_moves


@torch.no_grad()
def load_shards(weights: ShardedWeights, path: Path, num_moves: int) -> None:
    """Read what :func:`save_shards` wrote, in this process's layout. Collective.

    Raises CheckpointError where names or shapes are not this model's.
    """
    folder = path / SHARDS
    if not folder.is_dir():
        raise CheckpointError(f"{path} is no checkpoint of a run with several processes: it holds no {SHARDS}")
    reader = FileSystemReader(folder)
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    kinds = (_WEIGHT, *(f"{field}/" for field in _MOMENTS)) if num_moves else (_WEIGHT,)
    local = {kind + n: torch.empty_like(m) for kind in kinds for n, m in weights.masters.items()}
    wrong = [
        key for key in local if key not in saved or tuple(saved[key].size) != tuple(_parameter(weights, key).shape)
    ]
    if wrong:
        raise CheckpointError(
            f"the checkpoint {path} belongs to another model: {len(wrong)} tensors differ in name or shape, the first "
            f"is {wrong[0]}. Use the model that the run was started with"
        )
    load_distributed({key: like(t, _parameter(weights, key)) for key, t in local.items()}, storage_reader=reader)
    weights.clear()
    weights.optimizer.state.clear()
    for name, master in weights.masters.items():
        master.copy_(local[_WEIGHT + name])
        if num_moves and master.numel():
            step = torch.tensor(float(num_moves), dtype=torch.float32)
            moments: dict[str, Tensor] = {field: local[f"{field}/{name}"] for field in _MOMENTS}
            weights.optimizer.state[master] = {"step": step, **moments}
    weights.num_moves = num_moves
    weights.copy_into_model()


def _parameter(weights: ShardedWeights, key: str) -> Any:
    return weights.parameters[key.partition("/")[2]]
