"""Checkpoints of several processes, through torch.distributed.checkpoint: each writes its shards, any layout reads.

One process writes safetensors (``weights.py``); several can read those too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from headrace.model.parallel.state import like
from headrace.trainer.shards import ShardedWeights
from headrace.trainer.weights import MOMENTS, OPTIMIZER_FILE, SHARD_PREFIX, SHARDS, WEIGHTS_FILE, CheckpointError


def save_shards(weights: ShardedWeights, path: Path) -> int:
    """Write weights and moments below ``path``; returns how often the optimizer has moved weights. Collective."""
    state: dict[str, Any] = {
        SHARD_PREFIX + name: like(master.detach(), weights.parameters[name]) for name, master in weights.masters.items()
    }
    num_moves = weights.num_moves
    if num_moves:
        for name, master in weights.masters.items():
            moments = weights.optimizer.state.get(master, {})
            for field in MOMENTS:
                moment = moments[field] if field in moments else torch.zeros_like(master)
                state[f"{field}/{name}"] = like(moment, weights.parameters[name])
    save_distributed(state, storage_writer=FileSystemWriter(path / SHARDS))
    return num_moves


@torch.no_grad()
def load_shards(weights: ShardedWeights, path: Path, num_moves: int | None) -> None:
    """Read what :func:`save_shards` returned ``num_moves`` for, or a checkpoint of one process (None), in this
    process's layout. Collective. Raises CheckpointError where names or shapes are not this model's.
    """
    # kind of tensor ("" is the weight itself) -> its key
    if num_moves is None:
        num_moves = _num_moves(path)
        reader: FileSystemReader = HuggingFaceStorageReader(str(path))
        keys = {"": "{name}"} | {field: f"{{name}}/{field}" for field in MOMENTS if num_moves}
    elif (path / SHARDS).is_dir():
        reader = FileSystemReader(path / SHARDS)
        keys = {"": SHARD_PREFIX + "{name}"} | {field: f"{field}/{{name}}" for field in MOMENTS if num_moves}
    else:
        raise CheckpointError(f"{path} is no trainer checkpoint: it holds neither {WEIGHTS_FILE} nor {SHARDS}")
    saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    local = {(kind, name): torch.empty_like(m) for kind in keys for name, m in weights.masters.items()}
    wanted = {
        keys[kind].format(name=name): like(tensor, weights.parameters[name]) for (kind, name), tensor in local.items()
    }
    wrong = [key for key, tensor in wanted.items() if key not in saved or saved[key].size != tensor.shape]
    if wrong:
        raise CheckpointError(
            f"the checkpoint {path} belongs to another model: {len(wrong)} tensors differ in name or shape, the first "
            f"is {wrong[0]}. Use the model that the run was started with"
        )
    load_distributed(wanted, storage_reader=reader)
    weights.clear()
    weights.optimizer.state.clear()
    for name, master in weights.masters.items():
        master.copy_(local["", name])
        if num_moves and master.numel():
            step = torch.tensor(float(num_moves), dtype=torch.float32)
            moments: dict[str, Tensor] = {field: local[field, name] for field in MOMENTS}
            weights.optimizer.state[master] = {"step": step, **moments}
    weights.num_moves = num_moves
    weights.copy_into_model()


def _num_moves(path: Path) -> int:
    """Steps that moved weights, by the step counters of one process's AdamW."""
    try:
        with safe_open(path / OPTIMIZER_FILE, framework="pt") as file:
            return max((int(file.get_tensor(key)) for key in file.keys() if key.endswith("/step")), default=0)  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no trainer checkpoint: it holds no {OPTIMIZER_FILE}") from error
