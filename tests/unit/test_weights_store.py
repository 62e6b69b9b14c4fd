"""Weights in a folder: whole versions and differences, what they cost, and what a full disk or a foreign hand does."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.protocols import WeightUpdate
from headrace.record import files
from headrace.types import PolicyVersion
from headrace.weights import WeightUpdateError, checksums
from headrace.weights.carrier import Subscription
from headrace.weights.delta import DeltaError, Difference, apply, difference
from headrace.weights.file import DeltaSender, FileSender
from headrace.weights.receivers import make_receiver
from headrace.weights.shared_sender import SharedSender
from headrace.weights.store import StoreReceiver, versions_in

V0, V1, V2, V3 = (PolicyVersion(0, n) for n in range(4))


def model(num_values: int = 1 << 20, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = num_values // 4
    return {f"w{n}": (torch.randn(size, generator=generator) * 0.02).to(dtype) for n in range(4)}


def stepped(tensors: Mapping[str, Tensor], share: float, seed: int) -> dict[str, Tensor]:
    """``share`` of the values moved by one unit in the last place, as an optimizer step leaves a bfloat16 model."""
    generator = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in tensors.items():
        words = tensor.clone().view(torch.int16)
        picked = torch.randperm(len(words), generator=generator)[: round(share * len(words))]
        words[picked] += (torch.randint(0, 2, (len(picked),), generator=generator) * 2 - 1).to(torch.int16)
        new[name] = words.view(tensor.dtype)
    return new


def update(number: int, tensors: Mapping[str, Tensor]) -> WeightUpdate:
    return WeightUpdate(version=PolicyVersion(0, number), tensors=tensors)


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def assert_same_bits(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert checksums(a.items()) == checksums(b.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def delta(folder: Path) -> Iterator[DeltaSender]:
    sender = DeltaSender(folder, anchor_every=4)
    yield sender
    sender.close()


# ------------------------------------------------------------------------------------------------- deltas


def test_one_percent_changed_costs_at_most_five_percent_and_arrives_bit_for_bit(
    folder: Path, delta: DeltaSender
) -> None:
    """Issue 4, end criterion 2, on a bfloat16 wire: the manifest counts too."""
    old = model()
    receiver = make_receiver(delta.receiver)
    assert delta.num_bytes == 0
    receiver.commit(receiver.read(delta.send(update(0, old), None)))  # type: ignore[arg-type]
    assert delta.num_bytes > num_bytes(old)
    for number in (1, 2, 3):
        new = stepped(old, 0.01, number)
        changed = sum(int((new[n].view(torch.int16) != old[n].view(torch.int16)).sum()) for n in new)
        assert 0.0099 < changed / sum(t.numel() for t in new.values()) <= 0.01
        manifest = delta.send(update(number, new), None)
        assert manifest["kind"] == "delta" and delta.num_bytes <= 0.05 * num_bytes(new)
        assert sum(f.stat().st_size for f in folder.glob(f"weights-0.{number}*")) == delta.num_bytes
        read = receiver.read(manifest)
        assert read is not None
        assert_same_bits(read.tensors, new)
        receiver.commit(read)
        old = new


def test_a_full_version_comes_by_itself_where_it_is_smaller_and_now_and_then(delta: DeltaSender) -> None:
    """Issue 4: every value changed, so a difference would be no smaller; and after ``anchor_every`` differences."""
    tensors = model(1 << 12)
    kinds = []
    for number in range(12):
        tensors = stepped(tensors, 1.0 if number in (2, 3) else 0.01, number)
        kinds.append(delta.send(update(number, tensors), None)["kind"])
    d, f = "delta", "full"
    assert kinds == [f, d, f, f, d, d, d, d, f, d, d, d]


def test_one_dense_tensor_goes_whole_beside_sparse_ones(delta: DeltaSender) -> None:
    """The smaller form is chosen tensor by tensor."""
    old = model(1 << 14)
    delta.send(update(0, old), None)
    new = {**old, "w1": stepped(old, 1.0, 1)["w1"], "w2": stepped(old, 0.01, 2)["w2"]}
    manifest = delta.send(update(1, new), None)
    assert [place and place[0] for _, _, _, place, _ in manifest["tensors"]] == [None, "whole", "sparse", None]
    read = make_receiver(delta.receiver).read(manifest)
    assert read is not None
    assert_same_bits(read.tensors, new)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.bool]
)
def test_differences_are_exact(dtype: torch.dtype) -> None:
    """F83: NaNs with a payload, infinities and signed zeros count by their bits; applying one twice is applying it
    once; the old tensor is left alone."""
    generator = torch.Generator().manual_seed(1)
    old = torch.randint(0, 2, (50, 41), generator=generator).to(dtype)
    new = old.clone()
    raw = new.view(torch.uint8)
    if dtype is torch.bool:
        new[3, 5:9] = ~new[3, 5:9]
    else:
        raw.flatten()[[7, 90, 700, -1]] = 255  # a NaN, among others
        new[0, 0], new[1, 1] = -0.0 if dtype.is_floating_point else 3, 1
    before = old.clone()
    change = difference(new.t(), old.t(), 3)
    assert change.kind == "sparse" and 0 < change.num_changed < 10
    made = apply(change, old.t())
    assert torch.equal(made.contiguous().view(torch.uint8), new.t().contiguous().view(torch.uint8))
    assert torch.equal(apply(change, made).view(torch.uint8), made.view(torch.uint8))
    assert torch.equal(old.view(torch.uint8), before.view(torch.uint8))
    assert difference(old, before, 3) == Difference("same", 0) and apply(Difference("same", 0), old) is old


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: Difference("sparse", 99, c.parts), "99 changed elements of 64"),
        (lambda c: Difference("sparse", c.num_changed - 1, c.parts), "zstd cannot read it|unpacks to"),
        (lambda c: Difference("sparse", c.num_changed, (b"rubbish", c.parts[1])), "zstd cannot read it"),
        (lambda c: Difference("whole", 64, (b"short",)), "5 bytes for a tensor of 256"),
        (lambda c: Difference("other", 1, c.parts), "an unknown kind of difference: 'other'"),
    ],
)
def test_a_difference_that_is_none_of_this_tensor_is_refused(change: Any, message: str) -> None:
    """What comes from a file is checked before it is an address."""
    old = torch.zeros(64)
    new = old.clone()
    new[::9] = 1.0
    with pytest.raises(DeltaError, match=message):
        apply(change(difference(new, old, 3)), old)
    far = torch.zeros(65)
    far[64] = 1.0
    with pytest.raises(DeltaError, match="element 64 of 64"):
        apply(difference(far, torch.zeros(65), 3), old)


# ------------------------------------------------------------------------------------------------ receivers


@pytest.mark.parametrize("keeps_base", [True, False])
def test_whoever_fell_behind_reads_what_lies_between(delta: DeltaSender, folder: Path, keeps_base: bool) -> None:
    """F88: from any held version to any newer one, over differences and over whole versions, also without the sender;
    the base is checked by version and every tensor by its bits."""
    receivers = [StoreReceiver(folder, keeps_base=keeps_base) for _ in range(8)]
    assert receivers[0].newest() is None and receivers[0].catch_up() is None
    tensors = model(1 << 12)
    for number in range(8):
        tensors = stepped(tensors, 0.02, number)
        delta.send(update(number, tensors), None)
        read = receivers[number].catch_up()
        assert read is not None
        receivers[number].commit(read)
    for number, receiver in enumerate(receivers):
        assert receiver.version == PolicyVersion(0, number)
        read = receiver.catch_up()
        assert (read is None) == (number == 7)
        if read is not None:
            assert_same_bits(read.tensors, tensors)


def test_a_receiver_that_keeps_its_base_reads_the_difference_alone(delta: DeltaSender, folder: Path) -> None:
    """What a difference saves, it saves on the way back too."""
    tensors = model(1 << 12)
    follows, joins = (make_receiver(delta.receiver) for _ in range(2))
    follows.commit(follows.read(delta.send(update(0, tensors), None)))  # type: ignore[arg-type]
    tensors = stepped(tensors, 0.01, 1)
    manifest = delta.send(update(1, tensors), None)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    read = follows.read(manifest)
    assert read is not None
    assert_same_bits(read.tensors, tensors)
    with pytest.raises(WeightUpdateError, match=r"weights 0\.0: .*safetensors cannot be read"):
        joins.read(manifest)


def test_whole_versions_are_ordinary_safetensors_files(folder: Path) -> None:
    """Anything can load them; tied and strided tensors are in them, too; several files where one would be too large."""
    base = torch.randn(8, 4)
    sent = {"a": base, "tied": base, "strided": base.t(), "slice": base[1], "empty": torch.zeros(0, 3)}
    sender = FileSender(folder, shard_bytes=200)
    manifest = sender.send(update(0, sent), None)
    sender.close()
    names = [name for name, _ in manifest["files"]]
    assert len(names) > 1
    loaded = {name: tensor for file in names for name, tensor in load_file(folder / file).items()}
    assert loaded.keys() == sent.keys()
    assert all(torch.equal(loaded[name], sent[name]) for name in sent)


# ----------------------------------------------------------------------------------------- the folder itself


def test_old_versions_go_when_enough_whole_ones_stand(folder: Path) -> None:
    """Disk: at most ``keep`` + 1 whole versions at a time, and never one that the newest builds on."""
    sender = DeltaSender(folder, keep=1, anchor_every=2)
    tensors = model(1 << 12)
    for number in range(8):
        tensors = stepped(tensors, 0.02, number)
        sender.send(update(number, tensors), None)
        if number == 6:  # whole, as 0 and 3: until it stood, 3 had to
            assert [v.number for v in versions_in(folder)] == [3, 4, 5, 6]
    assert [v.number for v in versions_in(folder)] == [6, 7]
    assert len(list(folder.glob("*.safetensors"))) == 1
    sender.close()
    with pytest.raises(
        WeightUpdateError, match=r"weights 0\.1 are not in .*: they were never published there, or were"
    ):
        StoreReceiver(folder, keeps_base=False).read(
            {"version": [0, 2], "base": [0, 1], "kind": "delta", "tensors": []}
        )


def test_one_sender_owns_a_folder_and_removes_what_an_earlier_one_left(folder: Path) -> None:
    """No engine mistakes another run's weights for this one's; other files in the folder are not touched."""
    folder.mkdir()
    (folder / "mine.safetensors").write_text("not ours")
    first = FileSender(folder)
    first.send(update(57, model(1 << 8)), None)
    (folder / ".weights-0.58-00000.safetensors.123.tmp").write_text("left by a kill")
    second = DeltaSender(folder)
    with pytest.raises(WeightUpdateError, match="is open in this process already"):
        second.send(update(0, model(1 << 8)), None)
    first.close()
    second.send(update(0, model(1 << 8)), None)
    assert versions_in(folder) == [V0]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["mine.safetensors", "sender.lock", "weights-0.0-00000.safetensors", "weights-0.0.json"]
    second.close()


@pytest.mark.parametrize(("kind", "num_writes"), [(FileSender, 5), (DeltaSender, 2)])
def test_a_full_disk_is_one_clear_error_and_nothing_is_half_applied(
    kind: Any, num_writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 4, end criterion 8: no room at any write of a publish. The last version stands, what was begun is removed,
    and with room again the same version is published, whole."""
    old = model(1 << 12)
    new, real, num_left = stepped(old, 0.01, 1), os.write, 0

    def full(fd: int, data: Any) -> int:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    for num_before in range(num_writes):
        folder = tmp_path / str(num_before)
        sender = kind(folder, shard_bytes=1 << 11)
        sender.send(update(1, old), None)
        before = sorted(path.name for path in folder.iterdir())
        receiver = make_receiver(sender.receiver)
        receiver.commit(receiver.read(sender.latest().manifest))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "write", full)
            num_left = num_before
            with pytest.raises(WeightUpdateError) as caught:
                sender.send(update(2, new), None)
        message = str(caught.value)
        assert message.startswith(f"weights 0.2 could not be published in {folder}: [Errno 28] No space left on device")
        assert ". weights 0.1 still stand, and no engine saw any of this; free some space there" in message
        assert sorted(path.name for path in folder.iterdir()) == before
        assert receiver.read(sender.latest().manifest) is None and versions_in(folder) == [V1]
        manifest = sender.send(update(2, new), None)
        assert manifest["kind"] == "full"
        read = receiver.read(manifest)
        assert read is not None and read.version == V2
        assert_same_bits(read.tensors, new)
        sender.close()
    last = kind(tmp_path / "room", shard_bytes=1 << 11)
    last.send(update(1, old), None)
    monkeypatch.setattr(files.os, "write", full)
    num_left = num_writes
    last.send(update(2, new), None)
    assert num_left == 0  # the loop above had every write there is
    last.close()


# --------------------------------------------------------------------------------- what a foreign hand does


def flip(path: Path, where: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: flip(folder / "weights-0.0-00000.safetensors"), r"weights 0\.1 do not fit .*: w3 arrived with"),
        (lambda folder: flip(folder / "weights-0.1.delta"), r"w3 cannot be put together|w3 arrived with other bits"),
        (lambda folder: os.truncate(folder / "weights-0.1.delta", 20), r"weights-0\.1\.delta has 20 bytes, \d+ were"),
        (lambda folder: os.truncate(folder / "weights-0.0-00000.safetensors", 4000), "cannot be read: "),
        (lambda folder: (folder / "weights-0.0.json").unlink(), r"weights 0\.0 are not in .*take the newest"),
        (lambda folder: (folder / "weights-0.0.json").write_text("{"), r"weights-0\.0\.json cannot be read"),
        (lambda folder: (folder / "weights-0.0.json").write_text("[]"), r"is no manifest of weights 0\.0"),
    ],
    ids=["whole", "delta", "short-delta", "short-whole", "no-base", "no-json", "no-manifest"],
)
def test_what_was_damaged_is_named(folder: Path, delta: DeltaSender, damage: Any, message: str) -> None:
    """I6, F86: bits that changed on disk, and files that are not there, are one clear error."""
    tensors = model(1 << 12)
    delta.send(update(0, tensors), None)
    manifest = delta.send(update(1, stepped(tensors, 0.01, 1)), None)
    damage(folder)
    receiver = make_receiver(delta.receiver)
    with pytest.raises(WeightUpdateError, match=message):
        receiver.read(manifest)
    assert receiver.version is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(files=[["../secret.json", 1]]), "names the file '../secret.json', which is none of ours"),
        (lambda m: m.update(base=m["version"]), r"they claim to build on 0\.1"),
        (lambda m: m["tensors"].append(["new", "bfloat16", [1], None, ""]), "new has nothing to build on"),
        (lambda m: m["tensors"][0].__setitem__(3, ["sparse", 1, [[-9, 5], [0, 1]]]), "5 bytes at -9 of"),
    ],
    ids=["file", "base", "tensor", "place"],
)
def test_a_manifest_that_lies_opens_nothing_outside(delta: DeltaSender, change: Any, message: str) -> None:
    """What comes from outside is checked before it is used as a name or an address."""
    tensors = model(1 << 12)
    delta.send(update(0, tensors), None)
    manifest = json.loads(json.dumps(delta.send(update(1, stepped(tensors, 0.01, 1)), None)))
    change(manifest)
    with pytest.raises(WeightUpdateError, match=message):
        make_receiver(delta.receiver).read(manifest)


def test_without_zstd_a_delta_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's environment may have no pyarrow."""
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DeltaError, match="through pyarrow, which this Python does not have: `make setup-vllm`"):
        DeltaSender(folder)


def test_an_engine_of_several_is_fed_by_manifests(delta: DeltaSender) -> None:
    """One publish for many engines; one that is given tensors says so."""
    subscription = Subscription.to(delta)
    assert subscription.receiver == delta.receiver and subscription.latest() is None
    with pytest.raises(WeightUpdateError, match=r"weights 0\.1 came without a manifest"):
        subscription.send(update(1, {}), None)
    subscription.close()
    delta.send(update(1, model(1 << 8)), None)


def test_engines_share_one_sender(folder: Path) -> None:
    """F85: two engines send the same update: it is published once. The last handle that closes lets the folder go; an
    engine that is started anew takes it again, finds what was published, and nothing of it is removed."""
    shared = SharedSender(DeltaSender(folder))
    first, second = shared.handle(), shared.handle()
    tensors = model(1 << 10)
    assert first.latest() is None and first.receiver == shared.sender.receiver and first.inherit == ()
    manifest = first.send(update(1, tensors), None)
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert second.send(update(1, tensors), V0) == manifest
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    with pytest.raises(WeightUpdateError, match="with other bits under the same version"):
        second.send(update(1, stepped(tensors, 0.1, 1)), None)
    first.close()
    assert (folder / "sender.lock").exists()
    second.close()
    second.close()
    assert not (folder / "sender.lock").exists()
    third = shared.handle()
    assert third.latest() == WeightUpdate(version=V1, manifest=manifest)
    third.send(update(2, stepped(tensors, 0.01, 2)), None)
    assert versions_in(folder) == [V1, V2] and (folder / "sender.lock").exists()
    third.transfer()
    third.close()


def test_unknown_carriers_are_refused() -> None:
    with pytest.raises(WeightUpdateError, match="weights cannot come by 'pigeon'"):
        make_receiver({"type": "pigeon"})
