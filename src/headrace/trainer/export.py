"""Export: the policy as a plain Hugging Face folder that ``from_pretrained`` loads."""

from __future__ import annotations

from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from headrace.config.load import restore_config
from headrace.model.load import ADAPTER_NAME, LoadedModel, load_model
from headrace.record.checkpoints import find_checkpoints
from headrace.record.run_dir import read_run_info
from headrace.trainer.weights import STATE_FILE, CheckpointError, restore_model


def export_model(loaded: LoadedModel, path: Path) -> None:
    """Write weights (safetensors, in the compute type), configuration, generation config and tokenizer to ``path``.

    A LoRA adapter is merged: the model that is written has the base's architecture and needs no peft.
    """
    path.mkdir(parents=True, exist_ok=True)
    if loaded.base is None:
        loaded.model.save_pretrained(path)
    else:
        loaded.base.save_pretrained(path, state_dict=_merged(loaded))
    loaded.tokenizer.save_pretrained(path)


@torch.no_grad()
def _merged(loaded: LoadedModel) -> dict[str, Tensor]:
    assert loaded.base is not None
    state: dict[str, Tensor] = dict(loaded.base.state_dict())
    for name, module in loaded.model.named_modules():
        if isinstance(module, LoraLayer):
            weight = state[f"{name}.weight"]
            delta: Tensor = module.get_delta_weight(ADAPTER_NAME)  # type: ignore[attr-defined]
            state[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
    return state


def export_checkpoint(source: Path, dest: Path) -> Path:
    """Export a checkpoint of a run of the loop as a plain Hugging Face folder at ``dest``, and return ``dest``.

    ``source`` is a run's folder (its newest complete checkpoint is taken) or one of its checkpoint folders. Raises
    CheckpointError where there is none, or ``dest`` is not empty.
    """
    checkpoint = find_checkpoint(source)
    new_folder(dest)
    run_file = checkpoint.parent.parent / "run.json"
    config = restore_config(read_run_info(checkpoint.parent.parent)["config"], str(run_file))
    loaded = load_model(config.model.path, config.model.dtype, lora=config.model.lora, seed=config.seed)
    restore_model(loaded, checkpoint)
    export_model(loaded, dest)
    return dest


def new_folder(dest: Path) -> None:
    """Raises CheckpointError where ``dest`` holds anything."""
    if dest.exists() and any(dest.iterdir()):
        raise CheckpointError(f"{dest} is not empty; name a new folder to export into")


def find_checkpoint(source: Path) -> Path:
    """The checkpoint folder ``source``, or the newest complete one of the run ``source``. Raises CheckpointError."""
    if (source / STATE_FILE).is_file():
        return source
    checkpoints = find_checkpoints(source / "checkpoints")
    if not checkpoints:
        raise CheckpointError(f"{source} is neither a checkpoint nor a run with a complete checkpoint")
    return checkpoints[-1].path
