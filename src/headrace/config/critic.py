"""The ``[critic]`` section: a value for each trained token, for algorithms whose advantages need one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from headrace.config.base import LoraConfig, OptimizerSection


class CriticSection(OptimizerSection):
    """What both kinds of critic have: an optimizer of their own, and the numbers of GAE and of the value loss."""

    warmup_batches: int = Field(0, ge=0)
    """The run's first rollout batches, which train the critic only. They are published as versions like any other,
    with the policy's weights as they were; the policy's own schedule starts after them."""
    value_clip: float | None = Field(0.2, gt=0)
    """Largest step of a value away from what it was at behaviour time, in units of the reward."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount for each trained token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE: 1 compares the whole return with the value, 0 looks one token ahead."""


class SharedCriticConfig(CriticSection):
    """A value head on the policy's own hidden states."""

    type: Literal["shared"] = "shared"
    train_backbone: bool = False
    """Let the value loss move the policy's weights too; its optimizer then steps on the sum of both gradients."""
    loss_coefficient: float = Field(0.1, gt=0)
    """Weight of the value loss in the backbone's gradient; the head itself learns from the whole."""


class SeparateCriticConfig(CriticSection):
    """A model of its own with a value head."""

    type: Literal["separate"] = "separate"
    path: str | None = None
    """What it starts from, as ``model.path``; None takes the policy's start. It must speak the policy's ids."""
    lora: LoraConfig | None = None


CriticConfig = Annotated[SharedCriticConfig | SeparateCriticConfig, Field(discriminator="type")]
