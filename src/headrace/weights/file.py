"""Weights in a folder, the writing side: whole versions (:class:`FileSender`), or differences with whole versions now
and then (:class:`DeltaSender`). :mod:`headrace.weights.store` reads both and says what lies where.

One sender owns a folder: it takes a lock, and what an earlier one left there is removed at the first publish, so that
no engine can mistake another run's weights for this one's. Versions are removed when ``keep`` newer whole ones stand;
that happens before a publish, so the folder needs room for ``keep`` + 1 whole versions.

    step of a publish                    what a crash or a full disk there leaves
    old versions are removed             the newest ``keep`` whole ones and what builds on them
    data files, aside, then renamed      the last version; files that no manifest names, removed by the next publish
    the manifest, aside, then renamed    before the rename the last version, after it the new one
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from headrace.protocols import WeightUpdate
from headrace.record.files import FileLock, RecordError, fsync_folder, write_atomically
from headrace.types import PolicyVersion
from headrace.weights.carrier import Manifest, WeightUpdateError, checksums_of, dtype_name, tensors_of, update_by
from headrace.weights.checksums import checksum, checksums
from headrace.weights.delta import Difference, check_zstd, difference
from headrace.weights.store import OWN_FILE, manifest_name

SHARD_BYTES = 1 << 30
"""Of one file of a whole version; a larger tensor has a file of its own."""
Named = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Published:
    """One version that stands in the folder."""

    manifest: Manifest

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(*self.manifest["version"])

    @property
    def is_whole(self) -> bool:
        return bool(self.manifest["kind"] == "full")


class FileSender:
    """Publishes every version whole. ``num_bytes``: of the last publish, its manifest included."""

    def __init__(self, folder: Path, *, keep: int = 2, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._lock: FileLock | None = None
        self._published: list[_Published] = []
        self.num_bytes = 0

    @property
    def receiver(self) -> Mapping[str, Any]:
        return {"type": "file", "path": str(self._folder.resolve())}

    @property
    def inherit(self) -> tuple[int, ...]:
        return ()

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Publish; returns once the version would survive a power cut. What a receiver holds does not matter: it reads
        what it lacks. Raises WeightUpdateError, after which the last version stands."""
        newest = self._published[-1] if self._published else None
        if newest is not None and update.version <= newest.version:
            return self._again(update, newest)
        try:
            self._open()
            self._prune()
            manifest = self._write(update)
            text = json.dumps(manifest).encode()
            write_atomically(self._folder / manifest_name(update.version), text)
        except (OSError, RecordError) as error:
            raise self._failed(update.version, error) from error
        self._published.append(_Published(manifest))
        self.num_bytes = len(text) + sum(num_bytes for _, num_bytes in manifest["files"])
        self._stands()
        return manifest

    def transfer(self) -> None:
        """Nothing: the files are there."""

    def latest(self) -> WeightUpdate | None:
        return update_by(self._published[-1].manifest) if self._published else None

    def close(self) -> None:
        """Let go of the folder; what was published stays, and a later send takes the folder again."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _write(self, update: WeightUpdate) -> Manifest:
        """Everything but the manifest."""
        return self._write_whole(update.version, tensors_of(update))

    def _stands(self) -> None:
        """What was written last is published."""

    def _failed(self, version: PolicyVersion, error: Exception) -> WeightUpdateError:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        stands = f"weights {self._published[-1].version} still stand" if self._published else "nothing is published yet"
        try:
            self._sweep()
        except OSError as another:
            stands += f" (what was written of it is still there: {another})"
        return WeightUpdateError(
            f"weights {version} could not be published in {self._folder}: {cause}. {stands}, and no engine saw any of "
            "this; free some space there, or set engine.carrier.path to a folder that has it"
        )

    def _write_whole(self, version: PolicyVersion, tensors: Iterable[Named]) -> Manifest:
        """One shard in memory at a time."""
        entries: list[list[Any]] = []
        files: list[tuple[str, int]] = []
        for number, shard in enumerate(_shards(tensors, self._shard_bytes)):
            data = safetensors.torch.save(shard, metadata={"version": str(version)})
            files.append((f"weights-{version}-{number:05}.safetensors", len(data)))
            write_atomically(self._folder / files[-1][0], data)
            entries += [[n, dtype_name(t.dtype), list(t.shape), number, checksum(t)] for n, t in shard.items()]
        return {"version": list(version), "base": None, "kind": "full", "files": files, "tensors": entries}

    def _again(self, update: WeightUpdate, newest: _Published) -> Manifest:
        if update.version < newest.version:
            raise WeightUpdateError(
                f"weights {update.version} are older than {newest.version}, which stand in {self._folder}; versions "
                "never go back"
            )
        if checksums(tensors_of(update)) != checksums_of(newest.manifest):
            raise WeightUpdateError(
                f"weights {update.version} were published in {self._folder} with other bits under the same version"
            )
        return newest.manifest

    def _open(self) -> None:
        """Take the folder, at the first publish; what stands in it then is not of this run."""
        if self._lock is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self._folder / "sender.lock", f"the folder of weights {self._folder}")
        self._sweep()

    def _sweep(self) -> None:
        """Remove what is of none of the published versions: of an earlier sender, or of a publish that failed."""
        named = {name for published in self._published for name in _files(published)}
        found = self._folder.iterdir() if self._lock is not None else ()
        left = [path for path in found if OWN_FILE.fullmatch(path.name) and path.name not in named]
        # Manifests first: while one stands, all that it names does.
        for path in sorted(left, key=lambda path: path.suffix != ".json"):
            path.unlink()

    def _prune(self) -> None:
        whole = [n for n, published in enumerate(self._published) if published.is_whole]
        if len(whole) <= self._keep:
            return
        first = whole[-self._keep]
        for published in self._published[:first]:
            for name in _files(published):
                (self._folder / name).unlink(missing_ok=True)
        fsync_folder(self._folder)
        self._published = self._published[first:]


class DeltaSender(FileSender):
    """Publishes differences from the version before; whole where that is smaller, at the start, and after every
    ``anchor_every`` differences, so that a late joiner has a bounded number to read. Keeps a copy of the last version
    in host memory to compare with."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        anchor_every: int = 20,
        zstd_level: int = 3,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        super().__init__(folder, keep=keep, shard_bytes=shard_bytes)
        check_zstd()
        self._anchor_every = anchor_every
        self._level = zstd_level
        self._copy: dict[str, Tensor] = {}
        """Of the last published version; empty where there is none to build on."""
        self._written: dict[str, Tensor] = {}
        """Of the version that is being published."""

    @property
    def receiver(self) -> Mapping[str, Any]:
        return {**super().receiver, "type": "delta"}

    def close(self) -> None:
        super().close()
        self._copy = {}

    def _write(self, update: WeightUpdate) -> Manifest:
        old, self._copy, self._written = self._copy, {}, {}  # whatever fails from here on, the next publish is whole
        changes: dict[str, Difference] = {}
        new: dict[str, Tensor] = {}
        for name, tensor in tensors_of(update):
            if name in old and old[name].shape == tensor.shape and old[name].dtype == tensor.dtype:
                changes[name] = difference(tensor.detach().cpu(), old[name], self._level)
                new[name] = old.pop(name)
                if changes[name].kind != "same":
                    new[name].copy_(tensor.detach())
            else:
                new[name] = tensor.detach().cpu().contiguous().clone()
        if self._must_be_whole(changes, new) or old:
            manifest = self._write_whole(update.version, new.items())
        else:
            manifest = self._write_delta(update.version, changes, new)
        self._written = new
        return manifest

    def _stands(self) -> None:
        self._copy, self._written = self._written, {}

    def _must_be_whole(self, changes: Mapping[str, Difference], new: Mapping[str, Tensor]) -> bool:
        num_since = next((n for n, p in enumerate(reversed(self._published)) if p.is_whole), None)
        if num_since is None or num_since >= self._anchor_every or len(changes) < len(new):
            return True
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in new.values())
        return sum(change.num_bytes for change in changes.values()) >= num_bytes

    def _write_delta(
        self, version: PolicyVersion, changes: Mapping[str, Difference], new: Mapping[str, Tensor]
    ) -> Manifest:
        entries: list[list[Any]] = []
        payload = bytearray()
        for name, tensor in new.items():
            change, place = changes[name], []
            for part in change.parts:
                place.append((len(payload), len(part)))
                payload += part
            where = (change.kind, change.num_changed, place) if change.parts else None
            entries.append([name, dtype_name(tensor.dtype), list(tensor.shape), where, checksum(tensor)])
        file = f"weights-{version}.delta"
        write_atomically(self._folder / file, bytes(payload))
        base = list(self._published[-1].version)
        return {
            "version": list(version),
            "base": base,
            "kind": "delta",
            "files": [(file, len(payload))],
            "tensors": entries,
        }


def _files(published: _Published) -> list[str]:
    """The manifest first: it goes before what it names."""
    return [manifest_name(published.version), *(name for name, _ in published.manifest["files"])]


def _shards(tensors: Iterable[Named], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if shard and size + num_bytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        own = tensor.detach().cpu().contiguous()
        # safetensors wants each tensor in memory of its own; tied ones, and views into larger ones, are not.
        is_alone = own.untyped_storage().nbytes() == num_bytes
        if not is_alone or any(own.data_ptr() == other.data_ptr() for other in shard.values()):
            own = own.clone()
        shard[name] = own
        size += num_bytes
    if shard:
        yield shard
