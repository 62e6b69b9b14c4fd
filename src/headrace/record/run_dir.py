"""The run's folder: created once, opened by one writer, described by ``run.json``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.record.files import FileLock, RecordError, clear_errors, write_atomically, write_json_atomically
from headrace.record.redact import redact

__all__ = ["SCHEMA_VERSION", "RunDirectory", "collect_run_info", "read_run_info", "write_atomically"]

SCHEMA_VERSION = 1
_PACKAGES = ("headrace", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy", "pyarrow", "pydantic",
             "math-verify", "reasoning-gym")  # fmt: skip


def collect_run_info(
    *,
    name: str,
    config: Mapping[str, Any],
    seeds: Mapping[str, int],
    dataset_fingerprints: Mapping[str, str],
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``run.json`` holds, secrets redacted. ``extra``: what only the caller can know (GPUs, checksums)."""
    packages = {}
    for package in _PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "name": name,
        "config": redact(config),
        "seeds": dict(seeds),
        "dataset_fingerprints": dict(dataset_fingerprints),
        "packages": packages,
        "python": platform.python_version(),
        "hardware": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "num_cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "created_unix_s": time.time(),
        **redact(dict(extra or {})),
    }


def read_run_info(path: Path) -> dict[str, Any]:
    """``run.json`` of the run in ``path``. Raises RecordError where it is missing, broken or of a newer schema."""
    file = path / "run.json"
    try:
        info = json.loads(file.read_text())
    except FileNotFoundError:
        raise RecordError(f"{path} is not a run's folder: it has no run.json; give the folder of a run") from None
    except ValueError as error:
        raise RecordError(f"{file} is not JSON ({error}): it was changed from outside") from None
    if not isinstance(info, dict) or not isinstance(info.get("schema_version"), int):
        raise RecordError(f"{file} has no schema_version: it was not written by headrace")
    if info["schema_version"] > SCHEMA_VERSION:
        raise RecordError(
            f"{file} has schema version {info['schema_version']}, this headrace reads up to {SCHEMA_VERSION}; update it"
        )
    return info


class RunDirectory:
    """A run's folder under its lock. Close it when the run ends; a killed process lets go by itself."""

    def __init__(self, path: Path, info: dict[str, Any], lock: FileLock) -> None:
        self.path = path
        self.info = info
        self._lock = lock

    @classmethod
    def create(cls, path: Path, run_info: Mapping[str, Any]) -> RunDirectory:
        """Make the folder of a new run. Raises RecordError where ``path`` holds anything already."""
        if path.exists() and not path.is_dir():
            raise RecordError(f"the output folder {path} is a file; choose another name or output_dir")
        with clear_errors(path, "making the run's folder"):
            path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / "lock", f"run {path.name}")
        try:
            _refuse_other_content(path)
            run = cls(path, {"schema_version": SCHEMA_VERSION, **run_info}, lock)
            write_json_atomically(path / "run.json", run.info)
            run._make_folders()
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open an existing run for writing (a resume). Raises RecordError where it is none, or is being written."""
        info = read_run_info(path)
        run = cls(path, info, FileLock(path / "lock", f"run {path.name}"))
        run._make_folders()
        return run

    def _make_folders(self) -> None:
        with clear_errors(self.path, "making the folders of"):
            for folder in (self.ledger_path, self.episodes_path, self.spans_path, self.checkpoints_path):
                folder.mkdir(exist_ok=True)

    @property
    def ledger_path(self) -> Path:
        return self.path / "ledger"

    @property
    def episodes_path(self) -> Path:
        return self.path / "episodes"

    @property
    def spans_path(self) -> Path:
        return self.path / "spans"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    def close(self) -> None:
        """Let go of the lock; a second call does nothing."""
        self._lock.release()


def _refuse_other_content(path: Path) -> None:
    if (path / "run.json").exists():
        other = read_run_info(path)
        raise RecordError(
            f"the output folder {path} holds another run ({other.get('name', '?')}): resume that one with "
            f"`headrace resume {path}`, or choose another name or output_dir"
        )
    # "lock" is ours; a temporary run.json is what a process left that was killed before it had begun.
    if any(p.name != "lock" and not p.name.startswith(".run.json.") for p in path.iterdir()):
        raise RecordError(
            f"the output folder {path} is not empty and holds no run; headrace does not mix its files with others: "
            "choose another name or output_dir"
        )
