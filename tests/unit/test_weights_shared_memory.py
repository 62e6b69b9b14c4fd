"""The carrier through shared memory, both ends in one process: all or nothing, once or twice, and never back."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights import WeightUpdateError, checksums
from headrace.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender

V0, V1, V2 = (PolicyVersion(0, n) for n in range(3))


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(7, 9, generator=generator),
        "strided": torch.randn(4, 6, generator=generator).t(),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 3),
    }


class Ends:
    def __init__(self) -> None:
        self.sender = SharedMemorySender()
        self.receiver = SharedMemoryReceiver(os.dup(self.sender.fd))

    def close(self) -> None:
        self.sender.close()
        os.close(self.receiver._fd)

    def send(self, version: PolicyVersion, sent: dict[str, torch.Tensor], base: PolicyVersion | None = None) -> Any:
        return self.sender.send(WeightUpdate(version=version, tensors=sent), base)

    def pass_on(self, version: PolicyVersion, sent: dict[str, torch.Tensor]) -> None:
        read = self.receiver.read(self.send(version, sent))
        assert read is not None
        self.receiver.commit(read)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_tensors_arrive_bit_for_bit(ends: Ends) -> None:
    """F78: values, shapes, dtypes and checksums, also of strided, scalar and empty tensors; a smaller update after a
    larger one, too."""
    for number, sent in enumerate([tensors(), {"matrix": torch.randn(500, 300)}, tensors(1)]):
        ends.receiver = SharedMemoryReceiver(ends.receiver._fd)
        read = ends.receiver.read(ends.send(PolicyVersion(0, number), sent))
        assert read is not None and read.version.number == number
        assert read.checksums == checksums(sent.items())
        for name, tensor in sent.items():
            assert read.tensors[name].dtype == tensor.dtype and torch.equal(read.tensors[name], tensor)


def test_buckets_arrive_as_one_update(ends: Ends) -> None:
    """A trainer of several processes hands out whole tensors a few at a time."""
    sent = tensors()
    buckets = [{name: tensor} for name, tensor in sent.items()]
    manifest = ends.sender.send(WeightUpdate(version=V1, buckets=lambda: iter(buckets)), None)
    read = ends.receiver.read(manifest)
    assert read is not None and read.checksums == checksums(sent.items())


def test_nothing_that_is_done_to_a_received_tensor_reaches_the_sender(ends: Ends) -> None:
    """The map is private."""
    sent = tensors()
    manifest = ends.send(V0, sent)
    read = ends.receiver.read(manifest)
    assert read is not None
    read.tensors["matrix"].zero_()
    again = ends.receiver.read(manifest)
    assert again is not None and torch.equal(again.tensors["matrix"], sent["matrix"])


def test_a_flipped_bit_is_named(ends: Ends) -> None:
    """I6: bits that changed on the way."""
    manifest = ends.send(V0, tensors())
    offset = next(entry[3] for entry in manifest["tensors"] if entry[0] == "half")
    (byte,) = os.pread(ends.sender.fd, 1, offset)
    os.pwrite(ends.sender.fd, bytes([byte ^ 1]), offset)
    with pytest.raises(WeightUpdateError, match=r"weights 0\.0 do not fit .*: half arrived with other bits"):
        ends.receiver.read(manifest)
    assert ends.receiver.version is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("half"), "half is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra was never part of it"),
        (lambda t: t.update(half=torch.zeros(33)), r"half is float32 \(33,\), the engine's is bfloat16 \(33,\)"),
        (lambda t: t.update(matrix=torch.zeros(9, 7)), r"matrix is float32 \(9, 7\), the engine's is float32 \(7, 9\)"),
    ],
    ids=["missing", "unknown", "dtype", "shape"],
)
def test_what_does_not_fit_is_refused_whole(ends: Ends, change: Any, message: str) -> None:
    """F82: after the first update, the names, shapes and dtypes stay."""
    ends.pass_on(V0, tensors())
    wrong = tensors(1)
    change(wrong)
    with pytest.raises(WeightUpdateError, match=message):
        ends.receiver.read(ends.send(V1, wrong))
    assert ends.receiver.version == V0
    ends.pass_on(V1, tensors(1))
    assert ends.receiver.version == V1


def test_versions_go_forward_and_repeats_are_nothing(ends: Ends) -> None:
    """F87: older ones are refused, the same one again is None, other weights under its name are refused, and an update
    that builds on another version than the engine's is refused."""
    ends.pass_on(V1, tensors())
    assert ends.receiver.read(ends.send(V1, tensors())) is None
    for version, seed, base, message in [
        (V0, 0, None, r"they are older than the engine's 0\.1"),
        (V1, 1, None, r"holds other weights under the same version 0\.1"),
        (V2, 1, V0, r"they build on 0\.0, but the engine holds 0\.1"),
    ]:
        with pytest.raises(WeightUpdateError, match=message):
            ends.receiver.read(ends.send(version, tensors(seed), base))
    read = ends.receiver.read(ends.send(PolicyVersion(1, 0), tensors(1), V1))
    assert read is not None and ends.receiver.version == V1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(num_bytes=1 << 40), "the manifest says 1099511627776 bytes, and"),
        (lambda m: m.update(num_bytes=64), "does not lie in the 64 bytes"),
        (lambda m: m["tensors"].__setitem__(0, ("matrix", "float32", [7, 9], -64, "")), r"at -64\) does not lie in"),
        (lambda m: m["tensors"].__setitem__(0, ("matrix", "nn", [7, 9], 0, "")), r"matrix \(nn \[7, 9\] at 0\)"),
    ],
    ids=["longer", "shorter", "before", "dtype"],
)
def test_a_manifest_that_lies_reads_nothing_outside(ends: Ends, change: Any, message: str) -> None:
    """What comes from outside is checked before it is used as an address."""
    manifest = ends.send(V0, tensors())
    change(manifest)
    with pytest.raises(WeightUpdateError, match=message):
        ends.receiver.read(manifest)


def test_a_full_disk_is_one_clear_error(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 4: no room for a publish: nothing is announced, and a later publish with room works."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WeightUpdateError, match=r"weights 0\.0 need \d+ bytes or more in .*, which is full; free"):
            ends.send(V0, tensors())
    ends.pass_on(V0, tensors())


def test_an_update_without_tensors_is_refused(ends: Ends) -> None:
    """I20: an engine in another process cannot share storage."""
    with pytest.raises(
        WeightUpdateError, match="came without tensors, but this engine does not share the trainer's storage"
    ):
        ends.sender.send(WeightUpdate(version=V1), None)


def test_the_memory_has_no_name_and_ends_with_its_owner() -> None:
    """Whatever is killed, nothing stays in /dev/shm."""
    sender = SharedMemorySender()
    assert os.fstat(sender.fd).st_nlink == 0
    fd = sender.fd
    sender.close()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_released_memory_is_given_back_and_can_be_used_again(ends: Ends) -> None:
    """Weights that travel once (those under an adapter) do not stay in memory twice."""
    ends.pass_on(V0, tensors())
    assert os.fstat(ends.sender.fd).st_size > 0
    ends.sender.release()
    assert os.fstat(ends.sender.fd).st_size == 0 and ends.sender.latest() is None
    ends.pass_on(V1, tensors(1))
    assert ends.receiver.version == V1
