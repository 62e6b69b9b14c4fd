"""Weights as folders of safetensors: complete or not there, twice is once, under names that a server knows."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import WeightUpdateError
from headrace.weights.checksums import checksum
from headrace.weights.model_folder import ModelFolders

V0, V1, V2, V3 = (PolicyVersion(0, n) for n in range(4))


def tensors(value: float) -> dict[str, torch.Tensor]:
    whole = torch.full((4, 6), value)
    return {"a": whole[:, :3], "b": torch.full((5,), value, dtype=torch.bfloat16), "c": whole}


def update(version: PolicyVersion, value: float) -> WeightUpdate:
    return WeightUpdate(version=version, tensors=tensors(value))


def read(folder: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in Path(folder).glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


@pytest.mark.parametrize("file_bytes", [1, 1 << 20])
def test_a_version_is_a_folder_that_anybody_can_read(tmp_path: Path, file_bytes: int) -> None:
    """Bit for bit, views and buckets too, in one file or several, with the model's configuration beside them."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    folders = ModelFolders(tmp_path / "weights", model, file_bytes=file_bytes)
    manifest = folders.send(update(V1, 2.0), None)
    found = read(manifest["path"])
    assert found.keys() == tensors(2.0).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(2.0).items())
    assert {row[0]: row[-1] for row in manifest["tensors"]} == {n: checksum(t) for n, t in tensors(2.0).items()}
    assert (Path(manifest["path"]) / "config.json").read_text() == "{}"
    for file in Path(manifest["path"]).iterdir():
        assert file.stat().st_mode & stat.S_IRGRP, "a server under another name must be able to read it"
    buckets = WeightUpdate(version=V2, buckets=lambda: iter([{"a": torch.ones(2)}, {"b": torch.zeros(2)}]))
    assert read(folders.send(buckets, None)["path"]).keys() == {"a", "b"}
    json.dumps(manifest)


def test_the_same_version_is_written_once_and_looked_at_again(tmp_path: Path) -> None:
    """Other bits under one version get a folder of their own, so that nobody who reads the first loses it; an engine
    that holds the version refuses them."""
    folders = ModelFolders(tmp_path)
    first = folders.send(update(V1, 2.0), None)
    inode = (Path(first["path"]) / "model-00000.safetensors").stat().st_ino
    assert [r[-1] for r in folders.send(update(V1, 2.0), None)["tensors"]] == [r[-1] for r in first["tensors"]]
    other = folders.send(update(V1, 3.0), None)
    assert other["path"].endswith("version-0.1-2") and torch.equal(read(other["path"])["c"], torch.full((4, 6), 3.0))
    buckets = WeightUpdate(version=V1, buckets=lambda: iter([tensors(4.0)]))
    assert folders.send(buckets, None)["path"] == other["path"]
    assert (Path(first["path"]) / "model-00000.safetensors").stat().st_ino == inode


def test_the_newest_two_stay(tmp_path: Path) -> None:
    folders = ModelFolders(tmp_path)
    for number, version in enumerate((V0, V1, V2, V3)):
        folders.send(update(version, number), None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-0.2", "version-0.3"]
    again = ModelFolders(tmp_path)  # another lineage of the run
    again.send(update(V3, 9.0), None)
    assert torch.equal(read(str(tmp_path / "version-0.3"))["c"], torch.full((4, 6), 9.0))


def test_a_full_disk_leaves_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear error; the last version stands, no half-written folder does, and the next try works."""
    folders = ModelFolders(tmp_path)
    folders.send(update(V0, 1.0), None)
    whole = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        whole(path, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    taken: list[str] = []

    def buckets() -> Iterator[dict[str, torch.Tensor]]:
        for name in ("a", "b", "c"):
            taken.append(name)
            yield {name: torch.ones(3)}

    with pytest.raises(WeightUpdateError, match="No space left"):
        ModelFolders(tmp_path, file_bytes=1).send(WeightUpdate(version=V1, buckets=buckets), None)
    assert taken == ["a", "b", "c"], "other processes wait for each bucket"
    with pytest.raises(
        WeightUpdateError, match=r"weights 0\.1 could not be written .*No space left on device.*Nothing has"
    ):
        folders.send(update(V1, 2.0), None)
    assert [path.name for path in tmp_path.iterdir()] == ["version-0.0"]
    monkeypatch.undo()
    folders.send(update(V1, 2.0), None)
    assert len(list(tmp_path.iterdir())) == 2


def test_names_that_the_checkpoint_does_not_have_are_refused(tmp_path: Path) -> None:
    """F82: a server would skip them, or fail half way. A checkpoint may have more, such as a tied head."""
    model = tmp_path / "model"
    model.mkdir()
    safetensors.torch.save_file(
        {"a": torch.ones(1), "b": torch.ones(1), "head": torch.ones(1)}, model / "m.safetensors"
    )
    folders = ModelFolders(tmp_path / "weights", model)
    folders.send(WeightUpdate(version=V0, tensors={"a": torch.ones(1), "b": torch.ones(1)}), None)
    with pytest.raises(WeightUpdateError, match=r"names that .* does not have \(such as experts.fused; 1 in all\)"):
        folders.send(WeightUpdate(version=V1, tensors={"a": torch.ones(1), "experts.fused": torch.ones(1)}), None)
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-0.0"]
    with pytest.raises(WeightUpdateError, match="came without tensors"):
        folders.send(WeightUpdate(version=V1), None)
