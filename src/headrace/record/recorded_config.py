"""The configuration of a recorded run, for ``headrace resume`` and ``headrace eval``. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.config.load import restore_config
from headrace.config.overrides import apply_overrides
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.record.redact import REDACTED
from headrace.record.run_dir import read_run_info

_MAY_CHANGE: tuple[str, ...] = ("trainer.num_batches", "evaluation.", "checkpoint.", "guards.", "waits.", "monitor.")
_MAY_CHANGE += ("parallel.", "cluster.", "engine.urls", "engine.weights_path")
"""What a resumed run may do otherwise: how long, how watched, and where its parts run. Anything else would make it
another run under the old one's name."""


def recorded_config(run_dir: Path, overrides: Sequence[tuple[str, str]] = ()) -> RunConfig:
    """What ``run.json`` in ``run_dir`` says, with ``overrides``, and with the folder where it lies now.

    Raises:
        RecordError: ``run_dir`` is no run's folder.
        ConfigError: an override that would make it another run, or a secret that the record does not hold.
    """
    info = read_run_info(run_dir)
    if kind := info.get("kind"):
        raise ConfigError(
            f"{run_dir} is a run of headrace {kind}, without rollouts: go on with it by headrace {kind} FILE.TOML "
            f"--resume; what came out of it lies in {run_dir / 'export'}"
        )
    data: dict[str, Any] = info["config"]
    for key, _ in overrides:
        if not key.startswith(_MAY_CHANGE):
            allowed = ", ".join(f"{name}*" if name.endswith(".") else name for name in _MAY_CHANGE)
            raise ConfigError(f"command line: --{key} cannot change when a run goes on; what can: {allowed}")
    apply_overrides(data, overrides)
    for key in _redacted(data, ""):
        raise ConfigError(f"{run_dir / 'run.json'} does not hold the secret {key}; give it again with --{key} VALUE")
    config = restore_config(data, f"{run_dir / 'run.json'}")
    return config.model_copy(update={"output_dir": run_dir.parent, "name": run_dir.name})


def _redacted(node: Any, key: str) -> Iterator[str]:
    if isinstance(node, str) and REDACTED in node:
        yield key
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from _redacted(child, f"{key}.{name}" if key else str(name))
