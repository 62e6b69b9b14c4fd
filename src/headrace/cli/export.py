"""A run's policy as a plain Hugging Face folder: load what the run started from, restore a checkpoint, write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from headrace.cli.recorded import recorded_config
from headrace.errors import HeadraceError
from headrace.model.load import load_model
from headrace.model.paths import resolve_model_path
from headrace.record.checkpoints import find_checkpoints
from headrace.trainer.trainer import PolicyTrainer


class ExportError(HeadraceError):
    """There is nothing to export, or something is in its place already."""


def export_checkpoint(source: Path, dest: Path) -> Path:
    """Write the policy of ``source`` (a run's folder, or one of its checkpoints) to the new folder ``dest``.

    Raises:
        ExportError: no complete checkpoint in ``source``, or ``dest`` exists.
        RecordError, CheckpointError, ModelError: a damaged record, or a model that is not the run's.
    """
    dest = dest.absolute()
    if dest.exists():
        raise ExportError(f"{dest} exists already; give a folder that does not")
    run_dir, checkpoint = find_checkpoint(source.absolute())
    config = recorded_config(run_dir)
    loaded = load_model(
        resolve_model_path(config.model.path), config.model.dtype, lora=config.model.lora, seed=config.seed
    )
    trainer = PolicyTrainer(loaded, config.trainer, num_steps=1)  # no step will be made
    trainer.restore(checkpoint)
    dest.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{dest.name}-", dir=dest.parent) as temporary:
        trainer.export(Path(temporary) / "model")
        os.rename(Path(temporary) / "model", dest)
    return dest


def find_checkpoint(source: Path) -> tuple[Path, Path]:
    """(the run's folder, the checkpoint) that ``source`` means: a run means its newest complete checkpoint."""
    run_dir = source if (source / "run.json").exists() or source.parent.name != "checkpoints" else source.parents[1]
    complete = find_checkpoints(run_dir / "checkpoints")
    if not complete:
        raise ExportError(f"{run_dir} has no complete checkpoint; nothing was trained there yet, or it is no run")
    if run_dir == source:
        return run_dir, complete[-1].path
    if source not in [checkpoint.path for checkpoint in complete]:
        steps = ", ".join(checkpoint.path.name for checkpoint in complete)
        raise ExportError(f"{source} is not a complete checkpoint; complete are: {steps}")
    return run_dir, source
