"""Policy objectives: ratio and advantage to a loss per token, minimised. Legend: N trained tokens of a micro-batch.

A new objective is one function and one entry of :data:`OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInput:
    """What an objective may read. ``ratio_N`` carries gradient; an objective that must not pass it detaches it."""

    logprobs_N: Tensor
    ratio_N: Tensor
    advantages_N: Tensor
    clip_low: float = 0.0
    """Distance below 1: the lower bound of the ratio is 1 - clip_low."""
    clip_high: float = 0.0
    """Distance above 1: the upper bound of the ratio is 1 + clip_high."""
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """The loss of each token before correction and aggregation, and which tokens a bound acted on (bool [N])."""

    loss_N: Tensor
    clipped_low_N: Tensor | None = None
    clipped_high_N: Tensor | None = None
    dual_clipped_N: Tensor | None = None


def ppo(x: ObjectiveInput) -> ObjectiveOutput:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A): PPO, arXiv 1707.06347, equation 7; with unequal bounds
    DAPO's clip-higher, arXiv 2503.14476, section 3.1. With ``dual_clip`` = c, where A < 0: min(that, -c A)
    (dual-clip PPO, arXiv 1912.09729)."""
    ratio_N, advantages_N = x.ratio_N, x.advantages_N
    low, high = 1.0 - x.clip_low, 1.0 + x.clip_high
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    dual_clipped_N = None
    if x.dual_clip is not None:
        bound_N = -x.dual_clip * advantages_N
        dual_clipped_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(dual_clipped_N, bound_N, loss_N)
    return ObjectiveOutput(
        loss_N=loss_N,
        clipped_low_N=(ratio_N < low) & (advantages_N < 0),
        clipped_high_N=(ratio_N > high) & (advantages_N > 0),
        dual_clipped_N=dual_clipped_N,
    )


def cispo(x: ObjectiveInput) -> ObjectiveOutput:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A l: CISPO, arXiv 2506.13585, section 3.1.

    Every token keeps a gradient; the bound limits its weight only. The paper turns the lower bound off
    (``clip_low = 1``). TRL's option of the same name is the bound itself: its ``epsilon_high = 5`` is
    ``clip_high = 4`` here.
    """
    low, high = 1.0 - x.clip_low, 1.0 + x.clip_high
    ratio_N = x.ratio_N.detach()
    return ObjectiveOutput(
        loss_N=-ratio_N.clamp(low, high) * x.advantages_N * x.logprobs_N,
        clipped_low_N=ratio_N < low,
        clipped_high_N=ratio_N > high,
    )


def reinforce(x: ObjectiveInput) -> ObjectiveOutput:
    """-A l: REINFORCE (Williams 1992). No ratio, so right on policy only, or under an importance correction."""
    return ObjectiveOutput(loss_N=-x.advantages_N * x.logprobs_N)


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective and the options that act on it; any other of the group is refused (I20)."""

    function: Callable[[ObjectiveInput], ObjectiveOutput]
    options: frozenset[str] = frozenset()


OBJECTIVES: dict[str, Objective] = {
    "ppo": Objective(ppo, frozenset({"ratio_level", "clip_low", "clip_high", "dual_clip"})),
    "cispo": Objective(cispo, frozenset({"ratio_level", "clip_low", "clip_high"})),
    "reinforce": Objective(reinforce),
}
