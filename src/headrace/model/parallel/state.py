"""Weights of a split model: this rank's shards as plain tensors, and whole tensors in bounded buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from headrace.model.parallel.mesh import ParallelMesh


def local_shard(parameter: Any) -> Tensor:
    """This rank's part, as a plain tensor over the same storage."""
    detached = parameter.detach()
    local: Tensor = detached.to_local() if isinstance(detached, DTensor) else detached
    return local


def like(local: Tensor, parameter: DTensor) -> DTensor:
    """``local`` as a distributed tensor that lies as ``parameter`` does."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def global_norm(gradients: Mapping[str, DTensor], mesh: ParallelMesh) -> float:
    """The 2-norm over the whole model (F68): parts are summed over the axes that split them, and counted once where
    ranks hold the same. Collective; the same number on every rank."""
    by_split: dict[tuple[str, ...], Tensor] = {}
    meshes: dict[tuple[str, ...], Any] = {}
    for gradient in gradients.values():
        names = gradient.device_mesh.mesh_dim_names or ()
        split = tuple(
            name for name, p in zip(names, gradient.placements, strict=True) if isinstance(p, Shard) or _strided(p)
        )
        square = torch.linalg.vector_norm(local_shard(gradient)).double().square()
        by_split[split] = by_split.get(split, torch.zeros_like(square)) + square
        meshes[split] = gradient.device_mesh
    total = torch.zeros((), dtype=torch.float64, device=mesh.dense.device_type)
    # ranks of one stage hold the same kinds of tensors, in one order, so their collectives meet
    for split in sorted(by_split):
        for name in split:
            dist.all_reduce(by_split[split], group=meshes[split].get_group(name))
        total += by_split[split]
    dist.all_reduce(total, group=mesh.group("pp"))
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    return float(total.sqrt())


def _strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"


def whole_tensors(
    parameters: Mapping[str, DTensor], mesh: ParallelMesh, bucket_bytes: int, dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The whole model, bucket by bucket, on every rank: names in one process and full tensors of type ``dtype``.

    A bucket holds at most ``bucket_bytes``, or one tensor that is larger. Drop each bucket before taking the next: no
    rank ever holds the whole model. Collective: every rank takes every bucket.
    """
    described = [(name, tuple(p.shape), p.numel() * dtype.itemsize) for name, p in parameters.items()]
    stages: list[list[tuple[str, tuple[int, ...], int]]] = [[] for _ in range(mesh.config.pp)]
    dist.all_gather_object(stages, described, group=mesh.group("pp"))
    sent: set[str] = set()
    for stage, listed in enumerate(stages):
        new = [entry for entry in listed if entry[0] not in sent]
        sent.update(name for name, _, _ in new)
        for bucket in _buckets(new, bucket_bytes):
            yield {name: _whole(parameters.get(name), shape, stage, mesh, dtype) for name, shape in bucket}


def _buckets(
    entries: list[tuple[str, tuple[int, ...], int]], bucket_bytes: int
) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    bucket: list[tuple[str, tuple[int, ...]]] = []
    size = 0
    for name, shape, num_bytes in entries:
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, shape))
        size += num_bytes
    if bucket:
        yield bucket


@torch.no_grad()
def _whole(
    parameter: DTensor | None, shape: tuple[int, ...], stage: int, mesh: ParallelMesh, dtype: torch.dtype
) -> Tensor:
    group = mesh.group("pp")
    if mesh.rank("pp") == stage:
        assert parameter is not None
        detached: Any = parameter.detach()
        full: Tensor = detached.full_tensor().to(dtype).contiguous()
    else:
        full = torch.empty(shape, dtype=dtype, device=mesh.dense.device_type)
    if mesh.config.pp > 1:
        dist.broadcast(full, src=dist.get_global_rank(group, stage), group=group)
    return full
