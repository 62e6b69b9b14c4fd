"""Checkpoints: complete or not there (I12). Written aside, flushed, renamed, marked; the old goes after that."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.record.files import (
    RecordError,
    clear_errors,
    disk_error,
    fsync_file,
    fsync_folder,
    write_json_atomically,
)

_NAME = re.compile(r"step-(\d+)$")
_MARKER = "COMPLETE"
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path

    def state(self) -> dict[str, Any]:
        """The extra state (cursor, ledger position, admission, seeds) that was written with it."""
        try:
            state = json.loads((self.path / _STATE).read_text())
        except (OSError, ValueError) as error:
            raise RecordError(
                f"checkpoint {self.path} has no readable {_STATE} ({error}); resume from another one"
            ) from error
        if not isinstance(state, dict):
            raise RecordError(f"checkpoint {self.path}: {_STATE} is not a JSON object; resume from another one")
        return state


class CheckpointStore:
    """The folder ``checkpoints/``. One process writes it at a time (the run's lock).

    Example::

        with store.writing(step) as folder:
            trainer.save(folder)
            store.write_state(folder, {"cursor": cursor.state(), ...})
        # complete here, or not there at all
    """

    def __init__(self, path: Path, keep: int) -> None:
        """Opening for writing removes what a killed process left unfinished. ``keep``: complete ones kept, >= 1."""
        if keep < 1:
            raise ValueError(f"checkpoint.keep = {keep}: at least one complete checkpoint must be kept")
        self._path = path
        self._keep = keep
        with clear_errors(path, "opening"):
            path.mkdir(parents=True, exist_ok=True)
            self._clean_up()

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A folder to write the checkpoint of ``step`` into. On leaving, everything in it is flushed, it is renamed and
        the marker is written last; then surplus old ones are removed. If the block raises, nothing remains. Raises
        RecordError (disk full and the like); where that came of an old one's removal, the new one is complete."""
        final = self._path / f"step-{step}"
        aside = self._path / f"step-{step}.tmp"
        if aside.exists():
            raise RecordError(f"checkpoint {step} is being written already ({aside})")
        try:
            aside.mkdir()
            yield aside
            _fsync_tree(aside)
            if final.exists():  # an incomplete one, or one of a rolled-back lineage
                final.rename(self._path / f"step-{step}.old")
            aside.rename(final)
            fsync_folder(self._path)
            _write_marker(final)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise disk_error(final, "writing checkpoint", error) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(self._path / f"step-{step}.old", ignore_errors=True)
        self._remove_surplus()

    @staticmethod
    def write_state(folder: Path, state: dict[str, Any]) -> None:
        """Write the extra state into the folder that :meth:`writing` gave."""
        write_json_atomically(folder / _STATE, state)

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; None without one."""
        complete = find_checkpoints(self._path)
        return complete[-1] if complete else None

    def oldest(self) -> Checkpoint | None:
        """The oldest complete checkpoint that is kept."""
        complete = find_checkpoints(self._path)
        return complete[0] if complete else None

    def remove_after(self, step: int) -> None:
        """Remove checkpoints newer than ``step``: a resume from an older one made them a dead branch."""
        for checkpoint in find_checkpoints(self._path):
            if checkpoint.step > step:
                _remove(checkpoint.path)

    def _clean_up(self) -> None:
        for folder in sorted(self._path.iterdir()):
            if not folder.is_dir() or folder.suffix not in (".tmp", ".old"):
                continue
            replaced_by = folder.with_suffix("")
            if folder.suffix == ".old" and (folder / _MARKER).is_file() and not (replaced_by / _MARKER).is_file():
                # Killed while a complete checkpoint was being replaced by one of the same step: the old one stands.
                shutil.rmtree(replaced_by, ignore_errors=True)
                folder.rename(replaced_by)
            else:
                shutil.rmtree(folder)
        for folder in self._path.iterdir():
            if _NAME.match(folder.name) and not (folder / _MARKER).is_file():
                shutil.rmtree(folder)  # killed before its marker was written, or after it was taken away

    def _remove_surplus(self) -> None:
        for checkpoint in find_checkpoints(self._path)[: -self._keep]:
            _remove(checkpoint.path)


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Complete checkpoints in folder ``path``, oldest first; unfinished ones are not there."""
    found = []
    if path.is_dir():
        for folder in path.iterdir():
            match = _NAME.match(folder.name)
            if match and (folder / _MARKER).is_file():
                found.append(Checkpoint(int(match[1]), folder))
    return sorted(found, key=lambda c: c.step)


def _remove(folder: Path) -> None:
    """Unmark first, so that a kill in the middle leaves an incomplete one, not a complete one with holes."""
    with clear_errors(folder, "removing the old checkpoint"):
        (folder / _MARKER).unlink()
        fsync_folder(folder)
        shutil.rmtree(folder)


def _write_marker(folder: Path) -> None:
    fd = os.open(folder / _MARKER, os.O_WRONLY | os.O_CREAT, 0o644)
    os.fsync(fd)
    os.close(fd)
    fsync_folder(folder)


def _fsync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            fsync_file(Path(root) / name)
        fsync_folder(Path(root))
