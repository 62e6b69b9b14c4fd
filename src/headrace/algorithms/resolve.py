"""From the configuration to a composition with every knob concrete, and the check of options without effect (I20)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.algorithms.advantages import ADVANTAGES
from headrace.algorithms.objectives import OBJECTIVES
from headrace.algorithms.presets import PRESETS, Preset
from headrace.config.schema import AlgorithmConfig, CorrectionConfig, CriticConfig, KlConfig
from headrace.errors import ConfigError

TRUNCATED_HIGH = 2.0
"""Default cap of truncated correction, and of decoupled PPO in an asynchronous run."""
MASKED_LOW, MASKED_HIGH = 0.5, 5.0
"""Default band of masked correction (IcePop)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedAlgorithm:
    """Every knob of a composition; the run records it. None: the knob has no part in this composition."""

    preset: str
    advantage: str
    objective: str
    ratio_level: str | None
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    """None also where the objective knows it and it is off."""
    aggregation: str
    kl_coefficient: float
    kl_estimator: str | None
    kl_placement: str | None
    correction_type: str
    correction_low: float | None
    correction_high: float | None
    entropy_coefficient: float
    dynamic_sampling: bool
    overlong_buffer: int | None
    """Tokens; None is off."""
    mask_truncated: bool
    max_new_tokens: int
    """Where the overlong penalty ends, in tokens."""
    gamma: float | None = None
    gae_lambda: float | None = None

    @property
    def is_group_relative(self) -> bool:
        """True where the advantage compares the members of a group, so that a group of size 1 is an error."""
        return ADVANTAGES[self.advantage].group_relative

    @property
    def needs_values(self) -> bool:
        """True where the advantage reads a critic's values."""
        return ADVANTAGES[self.advantage].needs_values

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_coefficient > 0 and self.kl_placement == "reward"


def resolve(
    config: AlgorithmConfig, *, asynchronous: bool, max_new_tokens: int, critic: CriticConfig | None = None
) -> ResolvedAlgorithm:
    """The preset with the user's deviations. ``critic`` gives GAE its numbers; whether there must be one, or must not,
    is checked with the whole configuration (config/checks.py).

    Raises ConfigError, one problem for each key: an unknown preset (with the nearest name), a value out of bounds,
    or an option that the user set and that has no effect in this composition.
    """
    preset = PRESETS.get(config.preset)
    if preset is None:
        raise ConfigError(unknown_preset(config.preset, PRESETS))
    problems: list[str] = []
    objective = config.objective or preset.objective
    options = OBJECTIVES[objective].options
    for name in ("ratio_level", "clip_low", "clip_high", "dual_clip"):
        if getattr(config, name) is not None and name not in options:
            problems.append(f"algorithm.{name} has no effect with objective '{objective}': remove it")
    kl_coefficient, kl_estimator, kl_placement = _kl(config.kl, preset, problems)
    correction_type, correction_low, correction_high = _correction(config.correction, asynchronous, problems)
    advantage = config.advantage or preset.advantage
    gae_critic = critic if ADVANTAGES[advantage].needs_values else None
    resolved = ResolvedAlgorithm(
        preset=config.preset,
        advantage=advantage,
        objective=objective,
        ratio_level=(config.ratio_level or preset.ratio_level) if "ratio_level" in options else None,
        clip_low=_first(config.clip_low, preset.clip_low) if "clip_low" in options else None,
        clip_high=_first(config.clip_high, preset.clip_high) if "clip_high" in options else None,
        dual_clip=config.dual_clip if "dual_clip" in options else None,
        aggregation=config.aggregation or preset.aggregation,
        kl_coefficient=kl_coefficient,
        kl_estimator=kl_estimator,
        kl_placement=kl_placement,
        correction_type=correction_type,
        correction_low=correction_low,
        correction_high=correction_high,
        entropy_coefficient=_first(config.entropy_coefficient, 0.0),
        dynamic_sampling=preset.dynamic_sampling if config.dynamic_sampling is None else config.dynamic_sampling,
        overlong_buffer=config.overlong_buffer or round(preset.overlong_fraction * max_new_tokens) or None,
        mask_truncated=bool(config.mask_truncated),
        max_new_tokens=max_new_tokens,
        gamma=gae_critic.gamma if gae_critic else None,
        gae_lambda=gae_critic.gae_lambda if gae_critic else None,
    )
    problems += _bounds(resolved)
    if problems:
        raise ConfigError("\n".join(problems), problems=tuple(problems))
    return resolved


def unknown_preset(name: str, known: Iterable[str]) -> str:
    """The sentence for a preset that nobody knows."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name.lower().replace("-", "_"), names, n=1, cutoff=0.5)
    meant = f"; did you mean '{nearest[0]}'?" if nearest else ""
    return f"algorithm.preset: there is no algorithm '{name}'{meant} Known: {', '.join(names)}"


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _kl(config: KlConfig | None, preset: Preset, problems: list[str]) -> tuple[float, str | None, str | None]:
    """Coefficient, estimator, placement: each the user's where set, else the preset's."""
    given = config.model_fields_set if config is not None else frozenset()
    coefficient = config.coefficient if config is not None else 0.0
    if coefficient == 0:
        problems += [
            f"algorithm.kl.{name} has no effect while algorithm.kl.coefficient is 0: set the coefficient or remove it"
            for name in ("estimator", "placement")
            if name in given
        ]
        return 0.0, None, None
    assert config is not None
    placement = config.placement if "placement" in given else preset.kl_placement
    # In the reward k1 alone is unbiased, in the loss it has no gradient in expectation: so the preset's estimator
    # goes with its placement, and another placement takes that placement's own default.
    default = preset.kl_estimator if placement == preset.kl_placement else {"reward": "k1", "loss": "k3"}[placement]
    estimator = config.estimator if "estimator" in given else default
    if placement == "reward" and estimator == "k3+":
        problems.append(
            "algorithm.kl.estimator 'k3+' differs from 'k3' in its gradient alone, and a reward has none: use k1 or k3"
        )
    return coefficient, estimator, placement


def _correction(
    config: CorrectionConfig | None, asynchronous: bool, problems: list[str]
) -> tuple[str, float | None, float | None]:
    """Type, low, high."""
    if config is None:
        return ("decoupled", None, TRUNCATED_HIGH) if asynchronous else ("none", None, None)
    if config.type == "none":
        problems += [
            f"algorithm.correction.{name} has no effect with correction type 'none': set algorithm.correction.type"
            for name in ("low", "high")
            if getattr(config, name) is not None
        ]
        return "none", None, None
    if config.type == "masked":
        low, high = _first(config.low, MASKED_LOW), _first(config.high, MASKED_HIGH)
        if low >= high:
            problems.append(f"algorithm.correction.low is {low}, which must be below correction.high, {high}")
        return "masked", low, high
    if config.low is not None:
        problems.append(f"algorithm.correction.low has no effect with correction type '{config.type}': remove it")
    if config.type == "truncated":
        return "truncated", None, _first(config.high, TRUNCATED_HIGH)
    return "decoupled", None, config.high


def _bounds(r: ResolvedAlgorithm) -> list[str]:
    """Bounds that one key's type cannot express, or that a composition made by hand may break."""
    problems = []
    if r.clip_low is not None and not 0 <= r.clip_low <= 1:
        problems.append(f"algorithm.clip_low is {r.clip_low}; the lower bound of the ratio is 1 - clip_low, so 0 to 1")
    if r.clip_high is not None and r.clip_high < 0:
        problems.append(f"algorithm.clip_high is {r.clip_high}; the upper bound of the ratio is 1 + clip_high, so >= 0")
    if r.dual_clip is not None and r.dual_clip <= 1:
        problems.append(f"algorithm.dual_clip is {r.dual_clip}; it bounds the ratio from above, so it must be above 1")
    if r.overlong_buffer is not None and r.overlong_buffer >= r.max_new_tokens:
        problems.append(
            f"algorithm.overlong_buffer is {r.overlong_buffer} tokens, which must be below sampling.max_new_tokens, "
            f"{r.max_new_tokens}"
        )
    if r.mask_truncated and (r.kl_in_loss or r.entropy_coefficient > 0):
        term = "kl with placement 'loss'" if r.kl_in_loss else "entropy_coefficient"
        problems.append(
            f"algorithm.mask_truncated cannot hold together with algorithm.{term}: that term would still train the "
            "truncated replies; " + ("set algorithm.kl.placement to 'reward'" if r.kl_in_loss else "remove one")
        )
    if r.mask_truncated and r.needs_values:
        problems.append(
            "algorithm.mask_truncated cannot hold together with a critic: the value loss would still train on the "
            "truncated replies; remove it"
        )
    return problems
