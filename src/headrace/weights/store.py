"""Weights in a folder, the reading side: whole versions and differences, found and put together by version.

A folder holds, for each published version::

    weights-0.12.json                    the manifest; it is there when everything that it names is
    weights-0.12-00000.safetensors, ...  a whole version: tensors by the trainer's names
    weights-0.12.delta                   or its difference from an earlier one (headrace.weights.delta)

Files are written aside, flushed and renamed, the manifest last, and none is ever changed afterwards. So whoever lists
the folder sees complete versions only, and any folder will do: of this machine, of a network, or a mounted bucket of an
object store. Whole versions are ordinary safetensors files, which anything can load.

A manifest has, beside what all have (headrace.weights.carrier): ``kind`` (full or delta), ``files`` ([[name, bytes],
...]), and as ``place`` of a tensor the index of its file (full), or null, or [kind, number of changed elements,
[[offset, bytes], ...]] (delta). Who holds version 4 and is told of 7 reads 5, 6 and 7; who holds nothing begins at the
last whole version before 7.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.types import PolicyVersion
from headrace.weights.carrier import (
    Held,
    Manifest,
    ReceivedWeights,
    TensorSpec,
    WeightUpdateError,
    checksums_of,
    dtype_name,
    refused,
    specs_of,
)
from headrace.weights.delta import DeltaError, Difference, apply

_MANIFEST = re.compile(r"weights-(\d+)\.(\d+)\.json")
OWN_FILE = re.compile(r"\.?weights-\d+\.\d+(\.json|\.delta|-\d+\.safetensors)(\.\d+\.tmp)?")
"""Every file that a sender makes, those written aside too."""


def manifest_name(version: PolicyVersion) -> str:
    return f"weights-{version}.json"


def versions_in(folder: Path) -> list[PolicyVersion]:
    """The complete ones, oldest first; none where the folder is not there yet."""
    if not folder.is_dir():
        return []
    found = (_MANIFEST.fullmatch(path.name) for path in folder.iterdir())
    return sorted(PolicyVersion(int(match[1]), int(match[2])) for match in found if match)


def read_manifest(folder: Path, version: PolicyVersion) -> Manifest:
    """Raises WeightUpdateError where it is not there, or is none."""
    path = folder / manifest_name(version)
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise WeightUpdateError(
            f"weights {version} are not in {folder}: they were never published there, or were removed because newer "
            "whole versions came; take the newest"
        ) from None
    except (OSError, ValueError) as error:
        raise WeightUpdateError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("version") != list(version):
        raise WeightUpdateError(f"{path} is no manifest of weights {version}; it was changed from outside")
    return manifest


class StoreReceiver:
    """The engine's side: reads any version of the folder, whatever it held before."""

    def __init__(self, folder: Path, *, keeps_base: bool) -> None:
        """``keeps_base``: keep the committed tensors in host memory, so that the next difference is all that is read.
        Without, each difference is put onto the last whole version again."""
        self._folder = folder
        self._keeps_base = keeps_base
        self._held = Held()
        self._base: Mapping[str, Tensor] = {}

    @property
    def version(self) -> PolicyVersion | None:
        return self._held.version

    def newest(self) -> Manifest | None:
        """Of the newest complete version; None where there is none."""
        versions = versions_in(self._folder)
        return read_manifest(self._folder, versions[-1]) if versions else None

    def catch_up(self) -> ReceivedWeights | None:
        """The newest version, for an engine that joins late or fell behind; None where it holds that already, or there
        is none. Raises WeightUpdateError. To be committed as after :meth:`read`."""
        newest = self.newest()
        return None if newest is None else self.read(newest)

    def read(self, manifest: Mapping[str, Any]) -> ReceivedWeights | None:
        """All tensors of the version; None where it is the committed one. Raises WeightUpdateError."""
        version = PolicyVersion(*manifest["version"])
        sums, specs = checksums_of(manifest), specs_of(manifest)

        def fetch() -> tuple[dict[str, Tensor], list[str]]:
            tensors = self._assembled(manifest, specs)
            missing = [f"{name} is missing in its file" for name in sums if name not in tensors]
            return {name: tensor for name, tensor in tensors.items() if name in sums}, missing

        # No base: what this version builds on is in the folder too.
        return self._held.checked(version, None, sums, specs, fetch)

    def commit(self, read: ReceivedWeights) -> None:
        self._held.commit(read)
        if self._keeps_base:
            self._base = dict(read.tensors)

    def close(self) -> None:
        self._base = {}

    def _assembled(self, manifest: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
        """The last whole version, or what is held, and every difference since."""
        chain = [manifest]
        while chain[-1]["kind"] == "delta":
            version, base = PolicyVersion(*chain[-1]["version"]), PolicyVersion(*chain[-1]["base"])
            if base >= version:
                raise refused(version, [f"they claim to build on {base}"])
            if self._base and base == self.version:
                break
            chain.append(read_manifest(self._folder, base))
        tensors = dict(self._base) if chain[-1]["kind"] == "delta" else self._whole(chain.pop())
        for step in reversed(chain):
            tensors = self._advanced(step, tensors, specs)
        return tensors

    def _whole(self, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
        version = PolicyVersion(*manifest["version"])
        tensors: dict[str, Tensor] = {}
        for name, _ in manifest["files"]:
            path = self._own_file(name)
            try:
                with safe_open(path, framework="pt") as file:
                    tensors |= {tensor: file.get_tensor(tensor) for tensor in file.keys()}  # noqa: SIM118 (no mapping)
            except (OSError, SafetensorError) as error:
                raise WeightUpdateError(f"weights {version}: {path} cannot be read: {error}") from error
        expected = specs_of(manifest)
        problems = [
            f"{name} is {spec} in its file"
            for name, tensor in tensors.items()
            if (spec := TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))) != expected.get(name)
        ]
        if problems:
            raise refused(version, problems)
        # A mapped file goes when nobody maps it any more; a base is kept for long, so it gets memory of its own.
        return {name: tensor.clone() for name, tensor in tensors.items()} if self._keeps_base else tensors

    def _advanced(
        self, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]
    ) -> dict[str, Tensor]:
        """``tensors`` of the version that ``manifest`` builds on, with its differences. Those that did not change are
        the same objects."""
        version = PolicyVersion(*manifest["version"])
        ((name, num_bytes),) = manifest["files"]
        path = self._own_file(name)
        try:
            payload = path.read_bytes()
        except OSError as error:
            raise WeightUpdateError(f"weights {version}: {path} cannot be read: {error}") from error
        if len(payload) != num_bytes:
            raise WeightUpdateError(f"weights {version}: {path} has {len(payload)} bytes, {num_bytes} were written")
        new, problems = {}, []
        for tensor, _, _, place, _ in manifest["tensors"]:
            if tensor not in tensors or tensor not in specs:
                problems.append(f"{tensor} has nothing to build on")
                continue
            try:
                new[tensor] = apply(_difference(place, payload), tensors[tensor])
            except DeltaError as error:
                problems.append(f"{tensor} cannot be put together: {error}")
        if problems:
            raise refused(version, problems)
        return new

    def _own_file(self, name: str) -> Path:
        """What a manifest names is a file of this folder, or nothing is opened."""
        if not OWN_FILE.fullmatch(name):
            raise WeightUpdateError(f"a manifest in {self._folder} names the file {name!r}, which is none of ours")
        return self._folder / name


def _difference(place: Any, payload: bytes) -> Difference:
    if place is None:
        return Difference("same", 0)
    kind, num_changed, parts = place
    return Difference(kind, num_changed, tuple(_parts(parts, payload)))


def _parts(places: Any, payload: bytes) -> Iterator[bytes]:
    for offset, num_bytes in places:
        if not 0 <= offset <= offset + num_bytes <= len(payload):
            raise DeltaError(f"{num_bytes} bytes at {offset} of {len(payload)}")
        yield payload[offset : offset + num_bytes]
