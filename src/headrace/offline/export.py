"""``headrace model export`` of a run without rollouts: a plain model of sft and dpo, a whole reward model of the other.

A run exports by itself when it ends; this is for one that was stopped, for an earlier checkpoint, and for another
place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.load import restore_as
from headrace.config.offline import DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from headrace.environments.preferences import read_pairs
from headrace.errors import ConfigError
from headrace.model.load import LoadedModel, load_model
from headrace.model.paths import resolve_model_path
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.offline.reward_model import Preferences
from headrace.record.run_dir import read_run_info
from headrace.trainer.export import export_model, find_checkpoint, new_folder
from headrace.trainer.weights import restore_model


def export_offline(source: Path, dest: Path) -> Path:
    """Export a checkpoint of ``headrace sft``, ``reward-model`` or ``dpo`` to ``dest``, and return ``dest``.

    ``source`` is the run's folder (its newest complete checkpoint is taken) or one of its checkpoint folders. A reward
    model's scale and probes are measured anew on the pairs that it was trained on, so these must still be there.
    Raises CheckpointError where there is nothing to export or ``dest`` is not empty, ConfigError where the pairs are
    other ones.
    """
    checkpoint = find_checkpoint(source)
    run_dir = checkpoint.parent.parent
    info = read_run_info(run_dir)
    new_folder(dest)
    where = str(run_dir / "run.json")
    if info["kind"] == "reward-model":
        return _reward_model(restore_as(RewardModelConfig, info["config"], where), info, checkpoint, dest)
    schema: type[OfflineConfig] = SftConfig if info["kind"] == "sft" else DpoConfig
    loaded = _load(restore_as(schema, info["config"], where))
    restore_model(loaded, checkpoint)
    export_model(loaded, dest)
    return dest


def _load(config: OfflineConfig) -> LoadedModel:
    return load_model(config.model.path, config.model.dtype, lora=config.model.lora, seed=config.seed)


def _reward_model(config: RewardModelConfig, info: dict[str, Any], checkpoint: Path, dest: Path) -> Path:
    rows = read_pairs(config.data)
    if info["dataset_fingerprints"] != {"rows": rows.fingerprint}:
        raise ConfigError(
            f"{config.data.path} does not hold the pairs that {checkpoint.parent.parent} was trained on (fingerprints "
            "differ), and a reward model's scale and probes come from them: bring the old ones back"
        )
    loaded = _load(config)
    path = resolve_model_path(config.model.path)
    renderer = ChatRenderer(loaded.tokenizer, config.model.chat_template, generation_eos_ids(path))
    recipe = Preferences(config, loaded, renderer, rows.train, rows.held_out[: config.evaluation.max_examples])
    restore_model(loaded, checkpoint)
    dest.mkdir(parents=True, exist_ok=True)
    recipe.export(dest)
    return dest
