"""What several sections have in common: the base of all, LoRA, and the optimizer's keys."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
    is_default_type: ClassVar[bool] = False
    """The member of its union that a section without ``type`` is."""


class LoraConfig(Section):
    """Train low-rank adapters through peft instead of all weights."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class ScheduleConfig(Section):
    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to the full rate."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Rate at the end of the run over the full rate; linear and cosine only."""


class OptimizerSection(Section):
    """AdamW, its schedule, and the clip of the global gradient norm: for each model that has an optimizer."""

    learning_rate: float = Field(1e-5, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
