"""Configuration of training without rollouts: ``headrace sft``, ``headrace reward-model`` and ``headrace dpo``.

Sections that a run of the loop has as well (model, schedule) are the same classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from headrace.config.base import OptimizerSection, Section
from headrace.config.checks import model_problems
from headrace.config.load import config_error
from headrace.config.schema import ModelConfig

DEFAULT_HELD_OUT = 0.1


class DataConfig(Section):
    """A JSONL or Parquet file, and what is held out of it."""

    path: Path
    held_out_path: Path | None = None
    held_out_fraction: float | None = Field(None, gt=0, lt=1)
    """Split off by a hash of the prompt, where there is no file of its own; None: a tenth."""


class OfflineTrainerConfig(OptimizerSection):
    num_epochs: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)
    """Conversations, or pairs, of one optimizer step."""
    max_microbatch_tokens: int = Field(8192, ge=16)
    """Packed tokens of one forward and backward pass; a longer example gets one of its own."""
    max_logit_tokens: int = Field(1024, ge=1)
    """Trained tokens whose [., V] logits are held at once."""
    num_threads: int | None = Field(None, ge=1)
    """None: all cores."""


class OfflineEvaluationConfig(Section):
    every: int = Field(0, ge=0)
    """Optimizer steps between validations; 0: before the first step and after the last only."""
    max_examples: int = Field(1000, ge=2)
    """The first so many held-out examples."""


class OfflineCheckpointConfig(Section):
    every: int = Field(0, ge=0)
    """Optimizer steps between checkpoints; 0: at the end and on Ctrl-C."""
    keep: int = Field(1, ge=1)


class OfflineConfig(Section):
    """What the three have in common."""

    name: str = Field("offline", pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0)
    output_dir: Path = Path("runs")
    model: ModelConfig
    data: DataConfig
    trainer: OfflineTrainerConfig = OfflineTrainerConfig()
    evaluation: OfflineEvaluationConfig = OfflineEvaluationConfig()
    checkpoint: OfflineCheckpointConfig = OfflineCheckpointConfig()

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name


class SftConfig(OfflineConfig):
    """``headrace sft``: rows of ``messages``; the loss is on the assistant's tokens, its end of turn included."""


class BradleyTerryConfig(Section):
    centre_coefficient: float = Field(0.01, ge=0)
    """Times (score of chosen + score of rejected) squared: keeps scores around 0, which pairs alone leave open."""
    content_free_share: float = Field(0.05, ge=0, le=1)
    """Extra pairs, over the number of real ones, in which the chosen reply beats an empty or content-free one: a
    reward model that never saw such replies may pay for them. Training only, never validation."""


class RewardModelConfig(OfflineConfig):
    """``headrace reward-model``: rows of ``messages`` (or ``prompt``), ``chosen``, ``rejected``, ``margin``."""

    bradley_terry: BradleyTerryConfig = BradleyTerryConfig()


class DpoLossConfig(Section):
    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs whose label is taken to be wrong (conservative DPO)."""


class DpoConfig(OfflineConfig):
    """``headrace dpo``: the same rows as for a reward model, ``margin`` aside."""

    dpo: DpoLossConfig = DpoLossConfig()


def check_offline(config: OfflineConfig) -> None:
    """I20: refuse options without effect. Raises ConfigError."""
    problems = [*model_problems(config.model), *_without_effect(config)]
    if problems:
        raise config_error(problems)


def _without_effect(config: OfflineConfig) -> Iterator[str]:
    data, schedule = config.data, config.trainer.schedule
    if data.held_out_path is not None and data.held_out_fraction is not None:
        yield (
            "data.held_out_path and data.held_out_fraction are both set: the held-out rows come from one of them; "
            "remove the other"
        )
    if schedule.type == "constant" and "final_fraction" in schedule.model_fields_set:
        yield 'trainer.schedule.final_fraction has no effect: trainer.schedule.type is "constant"'
    if config.name in (".", ".."):
        yield f'name = "{config.name}" would put the run outside its own folder; choose a name'
