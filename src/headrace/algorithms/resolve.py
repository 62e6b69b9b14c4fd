"""From the configuration to a composition with every knob concrete, and the check of options without effect (I20)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.algorithms.advantages import ADVANTAGES
from headrace.algorithms.objectives import OBJECTIVES
from headrace.algorithms.presets import PRESETS, Preset
from headrace.algorithms.selections import SELECTIONS
from headrace.algorithms.validity import contradictions
from headrace.config.critic import CriticConfig
from headrace.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig, SelectionConfig
from headrace.errors import ConfigError

TRUNCATED_HIGH = 2.0
"""Default cap of truncated correction, and of decoupled PPO in an asynchronous run."""
MASKED_LOW, MASKED_HIGH = 0.5, 5.0
"""Default band of masked and rejected correction (IcePop)."""

OBJECTIVE_OPTIONS = (
    "ratio_level",
    "ratio_anchor",
    "clip_low",
    "clip_high",
    "dual_clip",
    "temperature_positive",
    "temperature_negative",
    "trust_low",
    "trust_high",
    "ratio_cap",
    "penalty",
)
"""Keys of [algorithm] that belong to some objectives and not to others; the numbers have the names of
ObjectiveInput's fields."""
SELECTION_OPTIONS = ("fraction", "low", "high", "penalty", "threshold")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedCorrection:
    """Importance correction; None: the knob has no part in it."""

    type: str
    level: str | None
    low: float | None
    high: float | None
    batch_normalised: bool
    veto: float | None
    max_drift: float | None
    proximal: str

    @property
    def weighs(self) -> bool:
        """True where rho decides how much of the loss a token keeps."""
        return self.type != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedTerm:
    """A stream's own term of the loss."""

    coefficient: float
    aggregation: str
    estimator: str = ""
    unbiased: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedAlgorithm:
    """Every knob of a composition; the run records it. None: the knob has no part in this composition."""

    preset: str
    advantage: str
    discount: float | None
    """Of later rewards; for GAE ``critic.gamma``."""
    gae_lambda: float | None
    """``critic.gae_lambda``. For GAE both are None where the composition was made without a critic: it then knows what
    it needs, and estimates nothing."""
    objective: str
    ratio_level: str | None
    ratio_anchor: str | None
    clip_low: float | None
    clip_high: float | None
    dual_clip: float | None
    """None also where the objective knows it and it is off."""
    temperature_positive: float | None
    temperature_negative: float | None
    trust_low: float | None
    trust_high: float | None
    ratio_cap: float | None
    penalty: float | None
    aggregation: str
    kl_coefficient: float
    kl_estimator: str | None
    kl_placement: str | None
    kl_unbiased: bool
    kl_aggregation: str | None
    correction: ResolvedCorrection
    selection: str
    selection_options: Mapping[str, float]
    supervised: ResolvedTerm
    distillation: ResolvedTerm
    entropy_coefficient: float
    dynamic_sampling: bool
    overlong_buffer: int | None
    """Tokens; None is off."""
    mask_truncated: bool
    max_new_tokens: int
    """Where the overlong penalty ends, in tokens."""

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

    @property
    def anchors_to_behaviour(self) -> bool:
        """True where the ratio is taken to the policy that sampled, so that nothing reads the proximal one."""
        return self.ratio_anchor == "behaviour"

    @property
    def ratio_is_one_on_one_step(self) -> bool:
        """True where, on the only optimizer step of a batch, the policy is compared with itself."""
        return not self.anchors_to_behaviour and self.correction.proximal == "recomputed"

    @property
    def refuses_negative_rewards(self) -> bool:
        return ADVANTAGES[self.advantage].refuses_negative

    @property
    def trains_zero_advantages(self) -> str | None:
        """The term that is no product with the advantage and trains all the same, if there is one."""
        if self.kl_in_loss:
            return "kl with placement 'loss'"
        if self.entropy_coefficient > 0:
            return "entropy_coefficient"
        if not OBJECTIVES[self.objective].zero_advantage_zero_gradient:
            return f"objective '{self.objective}'"
        selection = SELECTIONS[self.selection]
        if selection is not None and selection.penalises:
            return f"selection '{self.selection}'"
        return f"advantage '{self.advantage}' (the critic's loss)" if self.needs_values else None


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
    advantage = config.advantage or preset.advantage
    objective = config.objective or preset.objective
    options = _objective_options(config, preset, objective, problems)
    aggregation = config.aggregation or preset.aggregation
    selection, selection_options = _selection(config.selection, preset, problems)
    resolved = ResolvedAlgorithm(
        preset=config.preset,
        advantage=advantage,
        **_discounts(config, advantage, critic, problems),
        objective=objective,
        **options,
        aggregation=aggregation,
        **_kl(config.kl, preset, aggregation, problems),
        correction=_correction(config.correction, asynchronous and options["ratio_anchor"] != "behaviour", problems),
        selection=selection,
        selection_options=selection_options,
        supervised=ResolvedTerm(coefficient=config.supervised.coefficient, aggregation=config.supervised.aggregation),
        distillation=ResolvedTerm(**config.distillation.model_dump()),
        entropy_coefficient=_first(config.entropy_coefficient, 0.0),
        dynamic_sampling=preset.dynamic_sampling if config.dynamic_sampling is None else config.dynamic_sampling,
        overlong_buffer=_overlong_buffer(config.overlong_buffer, preset, max_new_tokens),
        mask_truncated=bool(config.mask_truncated),
        max_new_tokens=max_new_tokens,
    )
    problems += contradictions(resolved, config)
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


def _discounts(
    config: AlgorithmConfig, advantage: str, critic: CriticConfig | None, problems: list[str]
) -> dict[str, Any]:
    """Discount and GAE's lambda: one discount acts, the critic's with GAE and the user's with plain returns."""
    estimator = ADVANTAGES[advantage]
    if config.discount is not None and not estimator.discounts:
        why = "discounts by critic.gamma" if estimator.needs_values else "takes an episode's reward as a whole"
        problems.append(f"algorithm.discount has no effect with advantage '{advantage}', which {why}: remove it")
    if estimator.needs_values:
        return {
            "discount": None if critic is None else critic.gamma,
            "gae_lambda": None if critic is None else critic.gae_lambda,
        }
    return {"discount": _first(config.discount, 1.0) if estimator.discounts else None, "gae_lambda": None}


def _objective_options(config: AlgorithmConfig, preset: Preset, objective: str, problems: list[str]) -> dict[str, Any]:
    """Each option: the user's, else the preset's, else the objective's default; None where it has no part."""
    defaults = OBJECTIVES[objective].options
    options: dict[str, Any] = {}
    for name in OBJECTIVE_OPTIONS:
        given = getattr(config, name)
        if name not in defaults and given is not None:
            problems.append(f"algorithm.{name} has no effect with objective '{objective}': remove it")
        value = preset.options.get(name, defaults.get(name)) if given is None else given
        options[name] = value if name in defaults else None
    return options


def _selection(config: SelectionConfig | None, preset: Preset, problems: list[str]) -> tuple[str, Mapping[str, float]]:
    """Type and options, all concrete."""
    name = (config.type if config is not None else None) or preset.selection
    selection = SELECTIONS[name]
    defaults = selection.options if selection is not None else {}
    options = dict(defaults)
    for key in SELECTION_OPTIONS if config is not None else ():
        given = getattr(config, key)
        if given is not None and key not in defaults:
            problems.append(f"algorithm.selection.{key} has no effect with selection type '{name}': remove it")
        elif given is not None:
            options[key] = given
    return name, options


def _kl(config: KlConfig | None, preset: Preset, aggregation: str, problems: list[str]) -> dict[str, Any]:
    """Coefficient, estimator, placement and the rest: each the user's where set, else the preset's."""
    given = config.model_fields_set if config is not None else frozenset()
    if config is None or config.coefficient == 0:
        problems += [
            f"algorithm.kl.{name} has no effect while algorithm.kl.coefficient is 0: set the coefficient or remove it"
            for name in ("estimator", "placement", "unbiased", "aggregation")
            if name in given
        ]
        return {
            "kl_coefficient": 0.0,
            "kl_estimator": None,
            "kl_placement": None,
            "kl_unbiased": False,
            "kl_aggregation": None,
        }
    placement = config.placement if "placement" in given else preset.kl_placement
    # In the reward k1 alone is unbiased, in the loss it has no gradient in expectation: so the preset's estimator
    # goes with its placement, and another placement takes that placement's own default.
    default = preset.kl_estimator if placement == preset.kl_placement else {"reward": "k1", "loss": "k3"}[placement]
    estimator = config.estimator if "estimator" in given else default
    in_loss = placement == "loss"
    problems += [
        f"algorithm.kl.{name} has no effect with algorithm.kl.placement 'reward': remove it, or set placement to 'loss'"
        for name in ("unbiased", "aggregation")
        if name in given and not in_loss
    ]
    return {
        "kl_coefficient": config.coefficient,
        "kl_estimator": estimator,
        "kl_placement": placement,
        "kl_unbiased": config.unbiased and in_loss,
        "kl_aggregation": (config.aggregation or aggregation) if in_loss else None,
    }


def _correction(config: CorrectionConfig | None, asynchronous: bool, problems: list[str]) -> ResolvedCorrection:
    """The user's where there is one; else decoupled in an asynchronous run, and none in a synchronous one."""
    if config is None:
        config = CorrectionConfig(type="decoupled", high=TRUNCATED_HIGH) if asynchronous else CorrectionConfig()
    weighs = config.type != "none"
    if not weighs:
        problems += [
            f"algorithm.correction.{name} has no effect with correction type 'none': set algorithm.correction.type"
            for name in ("low", "high", "level", "batch_normalised")
            if getattr(config, name) is not None
        ]
    elif config.low is not None and config.type not in ("masked", "rejected"):
        problems.append(f"algorithm.correction.low has no effect with correction type '{config.type}': remove it")
    low, high = None, config.high if weighs else None
    if config.type in ("masked", "rejected"):
        low, high = _first(config.low, MASKED_LOW), _first(config.high, MASKED_HIGH)
    if config.type == "truncated":
        high = _first(config.high, TRUNCATED_HIGH)
    return ResolvedCorrection(
        type=config.type,
        level=(config.level or "token") if weighs else None,
        low=low,
        high=high,
        batch_normalised=bool(config.batch_normalised) and weighs,
        veto=config.veto,
        max_drift=config.max_drift,
        proximal=config.proximal or "recomputed",
    )


def _overlong_buffer(given: int | None, preset: Preset, max_new_tokens: int) -> int | None:
    buffer = round(preset.overlong_fraction * max_new_tokens) if given is None else given
    return buffer or None
