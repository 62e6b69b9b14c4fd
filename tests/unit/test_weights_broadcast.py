"""The carrier by collective over gloo: a group of its own, several engines, and whoever does not come."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights import WeightUpdateError, checksums
from headrace.weights.broadcast import BroadcastReceiver, BroadcastSender
from headrace.weights.carrier import carry
from headrace.weights.receivers import make_receiver

NAMES = ("e0", "e1", "e2")


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(7, 9, generator=generator),
        "strided": torch.randn(4, 6, generator=generator).t(),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 3),
    }


@pytest.fixture
def sender() -> Iterator[BroadcastSender]:
    made = BroadcastSender(NAMES[:2], bucket_bytes=100, deadline_s=20.0)
    yield made
    made.close()


def receivers(sender: BroadcastSender, *names: str) -> list[Any]:
    return [make_receiver(json.loads(json.dumps(sender.receiver_of(name)))) for name in names]


def publish(sender: BroadcastSender, ends: list[Any], number: int, base: PolicyVersion | None = None) -> list[Any]:
    """What each receiver read; they take part at the same time, each in a thread."""
    update = WeightUpdate(version=PolicyVersion(0, number), tensors=tensors(number))
    manifest = json.loads(json.dumps(sender.send(update, base)))
    with ThreadPoolExecutor(len(ends) + 1) as pool:
        transfer = pool.submit(sender.transfer)
        reads = [pool.submit(end.read, manifest) for end in ends]
        transfer.result()
        found = [read.result() for read in reads]
    for end, read in zip(ends, found, strict=True):
        if read is not None:
            end.commit(read)
    return found


def test_all_engines_get_all_bits_at_once(sender: BroadcastSender) -> None:
    """F78: two engines, several buckets, odd shapes; torch's default group is never made."""
    ends = receivers(sender, *NAMES[:2])
    for number in (1, 2):
        for read in publish(sender, ends, number):
            assert read.version.number == number
            assert checksums(read.tensors.items()) == checksums(tensors(number).items()) == read.checksums
    assert publish(sender, ends, 2) == [None, None]  # F83: the same again
    assert not dist.is_initialized() and sender.latest() is None


def test_engines_join_and_leave(sender: BroadcastSender) -> None:
    """F88: a late joiner is named and sent to; one that left is not waited for; one that is not named is told so."""
    first, second, third = receivers(sender, *NAMES)
    publish(sender, [first, second], 1)
    sender.set_receivers(NAMES)
    publish(sender, [first, second, third], 2)
    sender.set_receivers(["e2"])
    publish(sender, [third], 3)
    assert [end.version.number for end in (first, second, third)] == [2, 2, 3]
    manifest = sender.send(WeightUpdate(version=PolicyVersion(0, 4), tensors=tensors(4)), None)
    with pytest.raises(WeightUpdateError, match="they are for e2, and this engine is 'e0'"):
        first.read(manifest)


def test_whoever_does_not_come_is_not_waited_for_for_ever(capfd: pytest.CaptureFixture[str]) -> None:
    """I19: an engine that never joins, and one that dies between two updates, end the transfer after its deadline with
    one clear error; the engines that are left get the next version in a new group."""
    sender = BroadcastSender(("e0",), deadline_s=0.5)
    (end,) = receivers(sender, "e0")
    update = WeightUpdate(version=PolicyVersion(0, 1), tensors=tensors(1))
    for come_first in (False, True):
        if come_first:
            publish(sender, [end], 0)
        started_s = time.monotonic()
        sender.send(update, None)
        with pytest.raises(WeightUpdateError, match=r"weights 0\.1 could not be broadcast to e0 within 0\.5 s"):
            sender.transfer()
        assert time.monotonic() - started_s < 10.0
    publish(sender, [end], 1)
    assert end.version == PolicyVersion(0, 1)
    with pytest.raises(WeightUpdateError, match="nothing was announced"):
        sender.transfer()
    sender.close()
    capfd.readouterr()  # torch's own words about the time-outs


def test_an_engine_gives_up_on_a_sender_that_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    """I19, from the other side: nothing was changed, and the error says what broke off."""
    sender = BroadcastSender(("e0",), deadline_s=0.5)
    (end,) = receivers(sender, "e0")
    publish(sender, [end], 1)
    manifest = sender.send(WeightUpdate(version=PolicyVersion(0, 2), tensors=tensors(2)), None)
    with pytest.raises(WeightUpdateError, match=r"weights 0\.2: the broadcast to e0 broke off, or brought nothing for"):
        end.read(manifest)
    assert end.version == PolicyVersion(0, 1)
    sender.close()
    capfd.readouterr()


def test_a_flipped_bit_is_named(sender: BroadcastSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: bits that changed between the sender's checksum and the receiver's."""
    sender.set_receivers(["e0"])
    (end,) = receivers(sender, "e0")
    from headrace.weights import broadcast

    def flipping(tensor: Tensor) -> Tensor:
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).clone()
        if tensor.dtype == torch.bfloat16:
            raw[3] ^= 1
        return raw

    monkeypatch.setattr(broadcast, "raw_bytes", flipping)
    with pytest.raises(WeightUpdateError, match="half arrived with other bits than were sent"):
        carry(sender, end, WeightUpdate(version=PolicyVersion(0, 1), tensors=tensors(1)))
    assert end.version is None


@pytest.mark.parametrize(
    ("number", "base", "message"),
    [
        (1, None, r"older than the engine's 0\.2"),
        (3, PolicyVersion(0, 1), r"they build on 0\.1, but the engine holds 0\.2"),
    ],
)
def test_versions_are_checked_after_taking_part(
    sender: BroadcastSender, number: int, base: PolicyVersion | None, message: str
) -> None:
    """F87: an engine that refuses takes part all the same, since the others would wait for it."""
    sender.set_receivers(["e0"])
    (end,) = receivers(sender, "e0")
    publish(sender, [end], 2)
    with pytest.raises(WeightUpdateError, match=message):
        publish(sender, [end], number, base)
    publish(sender, [end], 4)
    assert end.version == PolicyVersion(0, 4)


def test_a_sender_without_weights_or_half_way_says_so(sender: BroadcastSender) -> None:
    """The receivers are told, in place of waiting for their deadline."""
    with pytest.raises(WeightUpdateError, match="came without tensors"):
        sender.send(WeightUpdate(version=PolicyVersion(0, 1)), None)
    sender.set_receivers(["e0"])
    (end,) = receivers(sender, "e0")

    def buckets() -> Iterator[dict[str, Tensor]]:
        yield tensors(1)
        raise KeyError("the gather failed")

    manifest = sender.send(WeightUpdate(version=PolicyVersion(0, 1), buckets=buckets), None)
    errors: list[BaseException] = []

    def transfer() -> None:
        try:
            sender.transfer()
        except KeyError as error:
            errors.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    with pytest.raises(WeightUpdateError, match="the sender could not go on half way"):
        end.read(manifest)
    thread.join(20)
    assert [type(error) for error in errors] == [KeyError]
    publish(sender, [end], 2)


def test_without_a_gpu_nccl_and_cuda_ipc_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 4: said plainly, before anything hangs."""
    from headrace.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WeightUpdateError, match='backend "nccl" needs a GPU'):
        BroadcastSender(backend="nccl")
    with pytest.raises(WeightUpdateError, match='backend "nccl" needs a GPU'):
        BroadcastReceiver("e0", "127.0.0.1", 1, "nccl", 1.0)
    for end in (CudaIpcSender, CudaIpcReceiver):
        with pytest.raises(WeightUpdateError, match='"cuda_ipc" hands over GPU memory, and this process has no GPU'):
            end()
