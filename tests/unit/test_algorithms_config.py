"""Presets, resolution, entry points, and options without effect (I20)."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from headrace.algorithms import PRESETS, ComposedAlgorithm, build_algorithm, registry, resolve
from headrace.algorithms.resolve import ResolvedAlgorithm
from headrace.config.schema import AlgorithmConfig
from headrace.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"


def resolved(asynchronous: bool = False, max_new_tokens: int = 100, **options: Any) -> ResolvedAlgorithm:
    config = AlgorithmConfig.model_validate(options)
    return resolve(config, asynchronous=asynchronous, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds(preset: str, asynchronous: bool) -> None:
    """I20: a preset alone never has an option without effect; what the run records names it."""
    algorithm = build_algorithm(AlgorithmConfig(preset=preset), asynchronous=asynchronous, max_new_tokens=100)
    assert isinstance(algorithm, ComposedAlgorithm)
    assert algorithm.resolved.preset == preset
    corrects = asynchronous and not algorithm.resolved.anchors_to_behaviour
    assert algorithm.resolved.correction.type == ("decoupled" if corrects else "none")
    assert algorithm.resolved.correction.high == (2.0 if corrects else None)
    assert algorithm.zero_advantage_means_zero_gradient is (preset not in ("dro", "kimi", "kl_cov", "ppo_critic"))


# preset -> advantage, objective, ratio level, clip low, clip high, aggregation, dynamic sampling, overlong buffer
COMPOSITIONS = {
    "grpo": ("group_normalised", "ppo", "token", 0.2, 0.2, "seq_mean_token_mean", False, None),
    "bnpo": ("group_normalised", "ppo", "token", 0.2, 0.2, "token_mean", False, None),
    "dr_grpo": ("group_centred", "ppo", "token", 0.2, 0.2, "seq_mean_token_sum_norm", False, None),
    "rloo": ("leave_one_out", "reinforce", None, None, None, "seq_mean_token_sum", False, None),
    "reinforce": ("none", "reinforce", None, None, None, "seq_mean_token_sum", False, None),
    "reinforce++": ("batch_whitened", "ppo", "token", 0.2, 0.2, "token_mean", False, None),
    "reinforce++_baseline": ("group_centred_whitened", "ppo", "token", 0.2, 0.2, "token_mean", False, None),
    "dapo": ("group_normalised", "ppo", "token", 0.2, 0.28, "token_mean", True, 20),
    "gspo": ("group_normalised", "ppo", "sequence", 3e-4, 4e-4, "seq_mean_token_mean", False, None),
    "cispo": ("group_normalised", "cispo", "token", 1.0, 0.28, "token_mean", False, None),
    "ppo": ("batch_whitened", "ppo", "token", 0.2, 0.2, "token_mean", False, None),
    "ppo_critic": ("gae_whitened", "ppo", "token", 0.2, 0.2, "token_mean", False, None),
    "remax": ("greedy_centred", "reinforce", None, None, None, "seq_mean_token_sum", False, None),
    "opo": ("length_weighted", "reinforce", None, None, None, "seq_mean_token_sum", False, None),
    "maxrl": ("mean_normalised", "reinforce", None, None, None, "seq_mean_token_sum", False, None),
    "gmpo": ("group_normalised", "gmpo", None, 0.4, 0.4, "seq_mean_token_mean", False, None),
    "sapo": ("group_normalised", "sapo", "token", None, None, "seq_mean_token_mean", False, None),
    "tis_pg": ("group_normalised", "cispo", "token", 1.0, 0.0, "token_mean", False, None),
    "topr": ("none", "topr", "trajectory", None, None, "seq_mean_token_sum", False, None),
    "aipo": ("group_centred", "cispo", "token", 1.0, 3.0, "token_mean", False, None),
    "dppo_tv": ("group_centred", "dppo_tv", "token", None, None, "token_mean", False, None),
    "dppo_kl": ("group_centred", "dppo_kl", "token", None, None, "token_mean", False, None),
    "dro": ("group_centred", "quadratic", None, None, None, "seq_mean_token_sum", False, None),
    "kimi": ("group_centred", "quadratic", None, None, None, "seq_mean_token_sum", False, None),
    "clip_cov": ("group_normalised", "ppo", "token", 0.2, 0.2, "token_mean", False, None),
    "kl_cov": ("group_normalised", "ratio", "token", None, None, "token_mean", False, None),
    "m2po": ("group_normalised", "ratio", "token", None, None, "token_mean", False, None),
}

# What else a preset fixes: name -> attribute of the resolved composition -> value.
FURTHER: dict[str, dict[str, Any]] = {
    "sapo": {"temperature_positive": 1.0, "temperature_negative": 1.05, "ratio_anchor": "proximal"},
    "topr": {"ratio_anchor": "behaviour"},
    "aipo": {"ratio_anchor": "behaviour"},
    "dppo_tv": {"ratio_anchor": "behaviour", "trust_low": 0.1, "trust_high": 0.1, "ratio_cap": 20.0},
    "dppo_kl": {"ratio_anchor": "behaviour", "trust_low": 0.05, "trust_high": 0.05, "ratio_cap": 20.0},
    "dro": {"penalty": 0.1, "ratio_anchor": "proximal"},
    "kimi": {"penalty": 0.1, "ratio_anchor": "proximal"},
    "gmpo": {"ratio_anchor": "proximal"},
    "clip_cov": {"selection": "clip_cov", "selection_options": {"fraction": 2e-4, "low": 1.0, "high": 5.0}},
    "kl_cov": {"selection": "kl_cov", "selection_options": {"fraction": 2e-4, "penalty": 1.0}},
    "m2po": {"selection": "m2po", "selection_options": {"threshold": 0.04}, "ratio_anchor": "behaviour"},
    "remax": {"discount": 1.0},
    "reinforce++": {"discount": 1.0},
    "grpo": {"discount": None, "selection": "none", "ratio_anchor": "proximal", "dual_clip": None},
}


@pytest.mark.parametrize("preset", FURTHER)
def test_presets_fix_what_is_their_own(preset: str) -> None:
    """I17: anchors, temperatures, bounds and choices of the papers, as docs/algorithms.md states them."""
    r = resolved(preset=preset)
    assert {name: getattr(r, name) for name in FURTHER[preset]} == FURTHER[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_published_compositions(preset: str) -> None:
    """I17: the table of docs/algorithms.md."""
    r = resolved(preset=preset)
    assert COMPOSITIONS[preset] == (
        r.advantage,
        r.objective,
        r.ratio_level,
        r.clip_low,
        r.clip_high,
        r.aggregation,
        r.dynamic_sampling,
        r.overlong_buffer,
    )


def test_the_documentation_names_every_preset_and_its_composition() -> None:
    """STYLE 12: the table in docs/algorithms.md cannot drift from the code."""
    table = DOCS.read_text().split("## The parts")[0]
    rows = {m[1]: m[0] for m in re.finditer(r"^\| `([^`]+)` \|.*$", table, re.MULTILINE)}
    for name, preset in PRESETS.items():
        for word in (preset.paper, preset.advantage, preset.objective, preset.aggregation):
            assert word in rows[name], f"{name}: {word}"
        for option, value in preset.options.items():
            text = str(value).removeprefix("0").removesuffix(".0") if isinstance(value, float) else value
            assert text in rows[name] or f"{value:g}" in rows[name], f"{name}: {option} {value}"
        assert preset.selection == "none" or f"selection `{preset.selection}`" in rows[name]
    assert set(rows) == set(PRESETS)


def test_user_options_win_over_the_preset() -> None:
    """Each knob of the configuration reaches the composition."""
    r = resolved(
        preset="dapo",
        advantage="leave_one_out",
        objective="cispo",
        ratio_level="sequence",
        clip_low=0.1,
        clip_high=0.9,
        aggregation="token_sum",
        entropy_coefficient=0.01,
        dynamic_sampling=False,
        overlong_buffer=7,
    )
    assert (r.advantage, r.objective, r.ratio_level, r.clip_low, r.clip_high) == (
        "leave_one_out",
        "cispo",
        "sequence",
        0.1,
        0.9,
    )
    assert (r.aggregation, r.entropy_coefficient, r.dynamic_sampling, r.overlong_buffer) == (
        "token_sum",
        0.01,
        False,
        7,
    )
    assert resolved(mask_truncated=True).mask_truncated and not resolved().mask_truncated
    assert resolved(dual_clip=3.0).dual_clip == 3.0
    assert resolved(clip_low=0.0).clip_low == 0.0, "0 is a value, not 'unset'"


def test_kl_fills_in_what_goes_with_its_placement() -> None:
    """FAILURES 60: in the reward k1, in the loss the preset's estimator or k3."""

    def kl(preset: str, **options: Any) -> tuple[float, str | None, str | None]:
        r = resolved(preset=preset, kl={"coefficient": 0.1, **options})
        return r.kl_coefficient, r.kl_estimator, r.kl_placement

    assert kl("grpo") == (0.1, "k3", "loss")
    assert kl("grpo", placement="reward") == (0.1, "k1", "reward")
    assert kl("reinforce++") == (0.1, "k1", "reward")
    assert kl("reinforce++", placement="loss") == (0.1, "k3", "loss")
    assert kl("reinforce++_baseline") == (0.1, "k2", "loss")
    assert kl("rloo", estimator="k3") == (0.1, "k3", "reward")
    assert resolved().kl_estimator is None and resolved(kl={"coefficient": 0}).kl_placement is None


def test_correction_defaults() -> None:
    """Decoupled PPO truncated at 2 when asynchronous, unless the user says otherwise."""

    def correction(asynchronous: bool = True, **options: Any) -> tuple[str, float | None, float | None]:
        r = resolved(asynchronous, correction=options)
        return r.correction.type, r.correction.low, r.correction.high

    assert correction(type="none") == ("none", None, None)
    assert correction(type="truncated") == ("truncated", None, 2.0)
    assert correction(type="decoupled") == ("decoupled", None, None)
    assert correction(type="decoupled", high=3) == ("decoupled", None, 3.0)
    assert correction(type="masked") == ("masked", 0.5, 5.0)
    assert correction(False, type="masked", low=0.9) == ("masked", 0.9, 5.0)
    assert correction(False, type="rejected", high=1.2) == ("rejected", 0.5, 1.2)


def test_the_derived_overlong_buffer_is_off_where_it_would_be_empty() -> None:
    """DAPO with very short replies: a fifth of 2 tokens rounds to none."""
    assert resolved(preset="dapo", max_new_tokens=2).overlong_buffer is None
    assert resolved(preset="dapo", max_new_tokens=20480).overlong_buffer == 4096
    assert resolved(preset="dapo", overlong_buffer=0).overlong_buffer is None, "0 turns the preset's off"


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"objective": "reinforce", "clip_high": 0.3}, "algorithm.clip_high"),
        ({"preset": "rloo", "clip_low": 0.3}, "algorithm.clip_low"),
        ({"preset": "reinforce", "ratio_level": "sequence"}, "algorithm.ratio_level"),
        ({"preset": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip"),
        ({"preset": "rloo", "dual_clip": 3.0}, "algorithm.dual_clip"),
        ({"kl": {"estimator": "k2"}}, "algorithm.kl.estimator"),
        ({"kl": {"placement": "reward"}}, "algorithm.kl.placement"),
        ({"kl": {"coefficient": 0, "placement": "loss"}}, "algorithm.kl.placement"),
        ({"kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k3+"}}, "algorithm.kl.estimator"),
        ({"correction": {"high": 2}}, "algorithm.correction.high"),
        ({"correction": {"type": "none", "low": 0.5}}, "algorithm.correction.low"),
        ({"correction": {"type": "truncated", "low": 0.5}}, "algorithm.correction.low"),
        ({"correction": {"type": "decoupled", "low": 0.5}}, "algorithm.correction.low"),
        ({"correction": {"type": "masked", "low": 2, "high": 1}}, "algorithm.correction.low"),
        ({"correction": {"type": "masked", "low": 6}}, "algorithm.correction.low"),
        ({"correction": {"type": "rejected", "low": 2, "high": 2}}, "algorithm.correction.low"),
        ({"correction": {"type": "rejected", "batch_normalised": True}}, "algorithm.correction.batch_normalised"),
        ({"objective": "dppo_tv_penalised", "ratio_cap": 20.0}, "algorithm.ratio_cap"),
        ({"objective": "dppo_tv_penalised", "mask_truncated": True}, "algorithm.mask_truncated"),
        ({"clip_low": 1.5}, "algorithm.clip_low"),
        ({"overlong_buffer": 100}, "algorithm.overlong_buffer"),
        ({"mask_truncated": True, "kl": {"coefficient": 0.1}}, "algorithm.mask_truncated"),
        ({"mask_truncated": True, "entropy_coefficient": 0.1}, "algorithm.mask_truncated"),
        ({"mask_truncated": True, "preset": "dro"}, "algorithm.mask_truncated"),
        ({"mask_truncated": True, "preset": "kl_cov"}, "algorithm.mask_truncated"),
        ({"mask_truncated": True, "preset": "ppo_critic"}, "algorithm.mask_truncated"),
        ({"discount": 0.9}, "algorithm.discount"),
        ({"preset": "reinforce++_baseline", "discount": 1.0}, "algorithm.discount"),
        ({"preset": "ppo_critic", "discount": 0.9}, "algorithm.discount"),
        ({"temperature_positive": 2.0}, "algorithm.temperature_positive"),
        ({"preset": "cispo", "temperature_negative": 2.0}, "algorithm.temperature_negative"),
        ({"trust_low": 0.1}, "algorithm.trust_low"),
        ({"preset": "aipo", "trust_high": 0.1}, "algorithm.trust_high"),
        ({"preset": "aipo", "ratio_cap": 4.0}, "algorithm.ratio_cap"),
        ({"preset": "rloo", "ratio_anchor": "behaviour"}, "algorithm.ratio_anchor"),
        ({"preset": "gmpo", "ratio_level": "token"}, "algorithm.ratio_level"),
        ({"preset": "dro", "ratio_level": "sequence"}, "algorithm.ratio_level"),
        ({"preset": "kl_cov", "clip_high": 0.2}, "algorithm.clip_high"),
        ({"preset": "dppo_tv", "clip_low": 0.2}, "algorithm.clip_low"),
        ({"preset": "topr", "clip_high": 0.2}, "algorithm.clip_high"),
        ({"preset": "sapo", "clip_high": 0.2}, "algorithm.clip_high"),
        ({"preset": "kimi", "objective": "ppo", "penalty": 0.2}, "algorithm.penalty"),
        ({"correction": {"level": "sequence"}}, "algorithm.correction.level"),
        ({"correction": {"batch_normalised": True}}, "algorithm.correction.batch_normalised"),
        ({"preset": "aipo", "correction": {"type": "truncated"}}, "algorithm.correction.type"),
        ({"ratio_anchor": "behaviour", "correction": {"veto": 1e-4}}, "algorithm.correction.veto"),
        ({"preset": "topr", "correction": {"proximal": "interpolated"}}, "algorithm.correction.proximal"),
        ({"preset": "rloo", "correction": {"proximal": "interpolated"}}, "algorithm.correction.proximal"),
        ({"selection": {"fraction": 0.1}}, "algorithm.selection.fraction"),
        ({"selection": {"type": "m2po", "fraction": 0.1}}, "algorithm.selection.fraction"),
        ({"selection": {"type": "kl_cov", "threshold": 0.1}}, "algorithm.selection.threshold"),
        ({"preset": "clip_cov", "selection": {"penalty": 0.1}}, "algorithm.selection.penalty"),
        ({"preset": "clip_cov", "selection": {"type": "none", "low": 0.1}}, "algorithm.selection.low"),
        ({"preset": "clip_cov", "selection": {"low": 5.0}}, "algorithm.selection.low"),
        ({"kl": {"unbiased": True}}, "algorithm.kl.unbiased"),
        ({"kl": {"aggregation": "token_mean"}}, "algorithm.kl.aggregation"),
        ({"preset": "rloo", "kl": {"coefficient": 0.1, "unbiased": True}}, "algorithm.kl.unbiased"),
        ({"preset": "rloo", "kl": {"coefficient": 0.1, "aggregation": "token_mean"}}, "algorithm.kl.aggregation"),
        ({"kl": {"coefficient": 0.1, "unbiased": True, "estimator": "k2"}}, "algorithm.kl.unbiased"),
        ({"distillation": {"unbiased": True}}, "algorithm.distillation.unbiased"),
        ({"preset": "maxrl", "kl": {"coefficient": 0.1, "placement": "reward"}}, "algorithm.kl.placement"),
        ({"preset": "maxrl", "overlong_buffer": 10}, "algorithm.overlong_buffer"),
        ({"preset": "gmpo", "overlong_buffer": 100}, "algorithm.overlong_buffer"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_one_error_that_names_its_key(options: dict[str, Any], key: str) -> None:
    """I20."""
    with pytest.raises(ConfigError) as caught:
        resolved(**options)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(key + " ")


def test_all_problems_are_told_at_once() -> None:
    """I20: one complete sentence for each."""
    with pytest.raises(ConfigError) as caught:
        resolved(preset="rloo", clip_low=0.1, clip_high=0.1, correction={"high": 1})
    assert [p.split(" ")[0] for p in caught.value.problems] == [
        "algorithm.clip_low",
        "algorithm.clip_high",
        "algorithm.correction.high",
    ]


@pytest.mark.parametrize("change", [{"clip_low": -0.1}, {"clip_high": -0.1}, {"dual_clip": 1.0}])
def test_the_types_refuse_values_out_of_bounds(change: dict[str, float]) -> None:
    """I20: on the configuration, and on one that was made without validation."""
    name = next(iter(change))
    with pytest.raises(ValueError, match=name):
        AlgorithmConfig.model_validate(change)
    unchecked = AlgorithmConfig.model_construct(**{**dict(AlgorithmConfig()), **change})
    with pytest.raises(ConfigError, match=rf"algorithm\.{name}"):
        resolve(unchecked, asynchronous=False, max_new_tokens=100)


def test_options_reach_the_composition() -> None:
    """Each further knob, set by the user."""
    r = resolved(
        preset="clip_cov",
        selection={"fraction": 0.5, "low": 0.25},
        correction={
            "type": "masked",
            "level": "geometric",
            "batch_normalised": True,
            "veto": 1e-3,
            "max_drift": 0.2,
            "proximal": "interpolated",
        },
        kl={"coefficient": 0.1, "unbiased": True, "aggregation": "token_sum"},
        supervised={"coefficient": 0.5, "aggregation": "seq_mean_token_sum"},
        distillation={"coefficient": 2.0, "estimator": "k1", "unbiased": True},
    )
    assert r.selection_options == {"fraction": 0.5, "low": 0.25, "high": 5.0}
    c = r.correction
    assert (c.type, c.level, c.batch_normalised, c.veto, c.max_drift, c.proximal) == (
        "masked",
        "geometric",
        True,
        1e-3,
        0.2,
        "interpolated",
    )
    assert (r.kl_unbiased, r.kl_aggregation, r.kl_estimator) == (True, "token_sum", "k3")
    assert (r.supervised.coefficient, r.supervised.aggregation) == (0.5, "seq_mean_token_sum")
    d = r.distillation
    assert (d.coefficient, d.estimator, d.unbiased, d.aggregation) == (2.0, "k1", True, "token_mean")
    assert resolved(kl={"coefficient": 0.1}).kl_aggregation == "seq_mean_token_mean", "the policy term's"
    assert resolved(preset="clip_cov", selection={"type": "m2po"}).selection_options == {"threshold": 0.04}
    assert resolved(preset="reinforce", discount=0.9).discount == 0.9
    assert resolved(preset="gmpo", clip_low=1.5).clip_low == 1.5, "log-ratios have no lower end at -1"
    assert resolved(preset="dppo_kl", trust_low=0.1).trust_high == 0.05
    penalised = resolved(preset="dppo_tv", objective="dppo_tv_penalised")
    assert (penalised.trust_low, penalised.penalty, penalised.ratio_anchor) == (0.1, 1e-3, "behaviour")
    assert resolved(ratio_level="trajectory", ratio_anchor="behaviour").anchors_to_behaviour
    assert not resolved(ratio_anchor="behaviour", correction={"max_drift": 0.1}).correction.weighs
    assert resolved(preset="rloo", correction={"type": "truncated", "proximal": "interpolated"}).correction.weighs
    assert resolved(preset="rloo", correction={"veto": 1e-4, "proximal": "interpolated"}).correction.veto == 1e-4


def test_needs_of_the_parts() -> None:
    """What the trainer and the loop must bring for each part."""

    def needs(**options: Any) -> Any:
        return build_algorithm(AlgorithmConfig.model_validate(options), asynchronous=False, max_new_tokens=100).needs

    assert needs(preset="remax").greedy_baseline and not needs().greedy_baseline
    assert [p for p in PRESETS if needs(preset=p).prepare] == ["clip_cov", "kl_cov", "m2po"]
    assert needs(correction={"type": "truncated", "batch_normalised": True}).prepare
    assert [p for p in PRESETS if needs(preset=p).skips_proximal] == ["topr", "aipo", "dppo_tv", "dppo_kl", "m2po"]
    assert needs(correction={"proximal": "interpolated"}).skips_proximal


def test_traits_of_the_composition() -> None:
    """What the checks of the whole configuration ask (I20)."""
    assert [p for p in PRESETS if not resolved(preset=p).ratio_is_one_on_one_step] == [
        "topr",
        "aipo",
        "dppo_tv",
        "dppo_kl",
        "m2po",
    ]
    assert not resolved(correction={"proximal": "interpolated"}).ratio_is_one_on_one_step
    assert [p for p in PRESETS if resolved(preset=p).refuses_negative_rewards] == ["maxrl"]


@pytest.mark.parametrize(
    ("name", "nearest"), [("grop", "grpo"), ("Dr-GRPO", "dr_grpo"), ("reinforce+", "reinforce++"), ("dapoo", "dapo")]
)
def test_a_misspelt_preset_names_the_nearest(name: str, nearest: str) -> None:
    """I20."""
    for call in (resolve, build_algorithm):
        with pytest.raises(ConfigError, match=re.escape(f"did you mean '{nearest}'?")):
            call(AlgorithmConfig(preset=name), asynchronous=False, max_new_tokens=100)


def test_a_preset_like_no_other_lists_what_there_is() -> None:
    """I20: no guess where nothing is near."""
    with pytest.raises(ConfigError, match=r"'xyzzy' *Known: aipo, bnpo") as caught:
        resolved(preset="xyzzy")
    assert "did you mean" not in str(caught.value)


def test_groups_of_one_are_refused_at_start_for_group_relative_advantages() -> None:
    """DESIGN section 2."""
    for preset in PRESETS:
        config = AlgorithmConfig(preset=preset)
        if resolved(preset=preset).is_group_relative:
            with pytest.raises(ConfigError, match=r"rollout\.min_group_size is 1"):
                build_algorithm(config, asynchronous=False, max_new_tokens=100, min_group_size=1)
        assert build_algorithm(config, asynchronous=False, max_new_tokens=100, min_group_size=2)


def make_other(config: AlgorithmConfig, *, asynchronous: bool, max_new_tokens: int) -> ComposedAlgorithm:
    """A third party's algorithm: GRPO's composition with one part exchanged."""
    base = resolve(AlgorithmConfig(), asynchronous=asynchronous, max_new_tokens=max_new_tokens)
    return ComposedAlgorithm(dataclasses.replace(base, preset=config.preset, advantage="group_centred"))


def test_an_entry_point_adds_an_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN section 5: one file and one entry point, nothing else changes; its name is known to the error too."""
    entry = EntryPoint(name="other", value=f"{__name__}:make_other", group=registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: make_other)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "headrace.algorithms" else [])
    algorithm = build_algorithm(AlgorithmConfig(preset="other"), asynchronous=True, max_new_tokens=100)
    assert isinstance(algorithm, ComposedAlgorithm)
    assert (algorithm.resolved.preset, algorithm.resolved.advantage) == ("other", "group_centred")
    with pytest.raises(ConfigError, match="did you mean 'other'"):
        build_algorithm(AlgorithmConfig(preset="othe"), asynchronous=False, max_new_tokens=100)
