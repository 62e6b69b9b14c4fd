"""The carrier for servers that load weights from disk: each version is a folder of safetensors in a shared directory.

A version's folder appears under its name at once and complete (written aside, fsync, rename), or not at all; the newest
two stay, so that a server that is still reading one never finds it gone. The names of the tensors are those of the
model's own checkpoint, which is what such servers know: an update with other names is refused. With the model's
config.json beside them, a folder is one that ``from_pretrained`` loads too.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import safe_open
from torch import Tensor

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.carrier import WeightUpdateError, dtype_name, tensors_of
from headrace.weights.checksums import checksum

FILE_BYTES = 1 << 30
"""Of one file; what is held in memory beside the trainer's weights."""
NUM_KEPT = 2
_ASIDE = ".writing-"


class ModelFolders:
    """The trainer's side. One for all engines that read from the same directory: a version is written once."""

    def __init__(self, root: Path, model: Path | None = None, *, file_bytes: int = FILE_BYTES) -> None:
        """``model``: the folder of the model that the run trains; its config.json goes with each version, and its
        checkpoint says which names a server knows."""
        self._root = root
        self._model = model
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._written: list[dict[str, Any]] = []

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> dict[str, Any]:
        """Write ``update`` whole, whatever ``base`` is. The same again is looked at, and not written.

        Returns ``path``, ``version`` and ``tensors``: rows of name, dtype, shape, file and checksum. Raises
        WeightUpdateError (no room, names that the model's checkpoint does not have), after which nothing has changed.
        """
        with self._lock:
            known = [m for m in self._written if m["version"] == list(update.version)]
            if known:
                rows = [_row(name, tensor, "") for name, tensor in tensors_of(update)]
                same = next((m for m in known if _sums(m["tensors"]) == _sums(rows)), None)
                if same is not None:
                    return same
                if update.buckets is not None:  # they come once, and an engine refuses other bits under one version
                    return known[-1] | {"tensors": rows}
            number = f"-{len(known) + 1}" if known else ""
            aside, source = self._root / f"{_ASIDE}{os.getpid()}-{update.version}{number}", tensors_of(update)
            try:
                path = self._root / f"version-{update.version}{number}"
                manifest = {"version": list(update.version), **self._write(source, update.version, aside, path)}
            except OSError as error:
                for _ in source:  # to its end: other processes take part in it
                    pass
                raise WeightUpdateError(
                    f"weights {update.version} could not be written to {self._root}: {error.strerror or error}. "
                    "Nothing has changed; free some space there, or set engine.weights_path to a folder that has it"
                ) from error
            finally:
                shutil.rmtree(aside, ignore_errors=True)
            self._written.append(manifest)
            while len(self._written) > NUM_KEPT:
                shutil.rmtree(self._written.pop(0)["path"], ignore_errors=True)
            return manifest

    def close(self) -> None:
        """The newest versions stay: a server may be asked for them."""

    def _write(
        self, source: Iterator[tuple[str, Tensor]], version: PolicyVersion, aside: Path, path: Path
    ) -> dict[str, Any]:
        self._root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        rows = []
        for number, tensors in enumerate(_in_files(source, self._file_bytes)):
            file = f"model-{number:05d}.safetensors"
            rows += [_row(name, tensor, file) for name, tensor in tensors.items()]
            # Not safetensors' own writer: its files are their owner's alone, and a full disk has no errno there.
            (aside / file).write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
            _fsync(aside / file)
        self._check_names({row[0] for row in rows}, version)
        index = {"metadata": {}, "weight_map": {row[0]: row[3] for row in rows}}
        (aside / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        _fsync(aside / "model.safetensors.index.json")
        if self._model is not None and (self._model / "config.json").is_file():
            shutil.copyfile(self._model / "config.json", aside / "config.json")
        _fsync(aside)
        shutil.rmtree(path, ignore_errors=True)  # of an earlier run, or of a lineage that was taken back
        aside.rename(path)
        _fsync(self._root)
        return {"path": str(path.resolve()), "tensors": rows}

    def _check_names(self, names: set[str], version: PolicyVersion) -> None:
        known = _checkpoint_names(self._model)
        unknown = sorted(names - known)
        if known and unknown:
            raise WeightUpdateError(
                f"weights {version} have names that the checkpoint in {self._model} does not have (such as "
                f"{', '.join(unknown[:3])}; {len(unknown)} in all), so that a server would not know them: this "
                "architecture stores its weights under other names than it computes with, and cannot be served from "
                "disk yet"
            )


def _in_files(tensors: Iterable[tuple[str, Tensor]], file_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In the host's memory, each with storage of its own, as safetensors wants them."""
    together: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        own = tensor.detach().to("cpu", copy=True).contiguous()
        if together and num_bytes + own.nbytes > file_bytes:
            yield together
            together, num_bytes = {}, 0
        together[name] = own
        num_bytes += own.nbytes
    yield together


def _row(name: str, tensor: Tensor, file: str) -> list[Any]:
    return [name, dtype_name(tensor.dtype), list(tensor.shape), file, checksum(tensor)]


def _sums(rows: list[list[Any]]) -> dict[str, str]:
    """Name -> checksum."""
    return {row[0]: row[-1] for row in rows}


def _checkpoint_names(model: Path | None) -> set[str]:
    """Names of the tensors in the safetensors files of a folder; empty where there are none."""
    names: set[str] = set()
    for file in sorted(model.glob("*.safetensors")) if model is not None else ():
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    return names


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
