"""Boards of weights for engines in other processes: written once for each version, read bit for bit (I6)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from headrace.cluster.boards import RayBoard, SharedMemoryBoard, SharedMemoryInbox, receive_from_ray
from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.inprocess import WeightUpdateError


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
    }


def update(number: int, seed: int | None = None) -> WeightUpdate:
    return WeightUpdate(version=PolicyVersion(0, number), tensors=tensors(number if seed is None else seed))


def assert_same(received: WeightUpdate, number: int) -> None:
    assert received.version == PolicyVersion(0, number) and received.tensors is not None
    expected = tensors(number)
    assert received.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        got = received.tensors[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor), name


class FakeRay:
    """As much of Ray as a board uses; what is put becomes read-only, as there."""

    def __init__(self) -> None:
        self.puts: list[Any] = []

    def put(self, value: Any) -> Any:
        for _, _, raw in value["tensors"].values():
            raw.flags.writeable = False
        self.puts.append(value)
        return value


def test_shared_memory_reaches_every_engine_and_a_late_one() -> None:
    board = SharedMemoryBoard()
    early, late = SharedMemoryInbox(board.fd), SharedMemoryInbox(board.fd)
    for number in (1, 2):
        assert_same(early.receive(asyncio.run(board.send(update(number)))), number)
    manifest = asyncio.run(board.send(update(2)))
    assert_same(late.receive(manifest), 2)
    assert_same(early.receive(manifest), 2)  # the same again: its engine may have died half way through
    board.close()


def test_a_version_is_written_once_however_many_ask() -> None:
    ray = FakeRay()
    board = RayBoard(ray)

    async def main() -> list[Any]:
        return await asyncio.gather(*(board.send(update(1)) for _ in range(4)))

    references = asyncio.run(main())
    assert len(ray.puts) == 1 and all(reference is references[0] for reference in references)
    assert_same(receive_from_ray(references[0]), 1)


def test_buckets_of_a_trainer_of_several_processes_are_put_together() -> None:
    ray = FakeRay()

    def buckets() -> Any:
        for name, tensor in tensors(3).items():
            yield {name: tensor}

    made = WeightUpdate(version=PolicyVersion(0, 3), buckets=buckets)
    assert_same(receive_from_ray(asyncio.run(RayBoard(ray).send(made))), 3)


def test_an_update_without_tensors_is_refused_and_a_later_one_is_not_hindered() -> None:
    board = RayBoard(FakeRay())

    async def main() -> Any:
        with pytest.raises(WeightUpdateError, match="came without tensors"):
            await board.send(WeightUpdate(version=PolicyVersion(0, 1)))
        return await board.send(update(1))

    assert_same(receive_from_ray(asyncio.run(main())), 1)
