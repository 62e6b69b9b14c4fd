"""What cannot hold together in a composition, one sentence for each problem (I20)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.algorithms.advantages import ADVANTAGES

if TYPE_CHECKING:
    from headrace.algorithms.resolve import ResolvedAlgorithm
    from headrace.config.schema import AlgorithmConfig


def contradictions(r: ResolvedAlgorithm, config: AlgorithmConfig) -> list[str]:
    """Of the resolved composition; ``config`` says what the user set."""
    return [problem for check in (_bounds, _kl, _correction, _selection, _rewards) for problem in check(r, config)]


def _bounds(r: ResolvedAlgorithm, config: AlgorithmConfig) -> Iterator[str]:
    """Bounds that one key's type cannot express, or that a composition made by hand may break."""
    is_log = r.objective == "gmpo"
    if r.clip_low is not None and not 0 <= r.clip_low <= (float("inf") if is_log else 1):
        bound = "lower bound of the log-ratio is -clip_low" if is_log else "lower bound of the ratio is 1 - clip_low"
        yield f"algorithm.clip_low is {r.clip_low}; the {bound}, so {'>= 0' if is_log else '0 to 1'}"
    if r.clip_high is not None and r.clip_high < 0:
        yield f"algorithm.clip_high is {r.clip_high}; the upper bound of the ratio is 1 + clip_high, so >= 0"
    if r.dual_clip is not None and r.dual_clip <= 1:
        yield f"algorithm.dual_clip is {r.dual_clip}; it bounds the ratio from above, so it must be above 1"
    if r.overlong_buffer is not None and r.overlong_buffer >= r.max_new_tokens:
        yield (
            f"algorithm.overlong_buffer is {r.overlong_buffer} tokens, which must be below sampling.max_new_tokens, "
            f"{r.max_new_tokens}"
        )
    if r.mask_truncated and r.trains_zero_advantages:
        yield (
            f"algorithm.mask_truncated cannot hold together with algorithm.{r.trains_zero_advantages}: that term would "
            "still train the truncated replies; "
            + ("set algorithm.kl.placement to 'reward'" if r.kl_in_loss else "remove one")
        )


def _kl(r: ResolvedAlgorithm, config: AlgorithmConfig) -> Iterator[str]:
    if r.kl_in_reward and r.kl_estimator == "k3+":
        yield (
            "algorithm.kl.estimator 'k3+' differs from 'k3' in its gradient alone, and a reward has none: use k1 or k3"
        )
    if r.kl_unbiased and r.kl_estimator not in ("k1", "k3"):
        yield _not_unbiased("kl", r.kl_estimator)
    if r.distillation.unbiased and r.distillation.estimator not in ("k1", "k3"):
        yield _not_unbiased("distillation", r.distillation.estimator)


def _not_unbiased(section: str, estimator: str | None) -> str:
    return (
        f"algorithm.{section}.unbiased cannot hold together with estimator '{estimator}': times the ratio, only k1 and "
        "k3 have the KL as their mean; set the estimator to k1 or k3"
    )


def _correction(r: ResolvedAlgorithm, config: AlgorithmConfig) -> Iterator[str]:
    c = r.correction
    if c.low is not None and c.high is not None and c.low >= c.high:
        yield f"algorithm.correction.low is {c.low}, which must be below correction.high, {c.high}"
    if c.type == "rejected" and c.batch_normalised:
        yield "algorithm.correction.batch_normalised has no effect with type 'rejected', whose weights are 1: remove it"
    interpolates = config.correction is not None and config.correction.proximal is not None
    if r.anchors_to_behaviour:
        why = "the ratio is taken to the behaviour policy (ratio_anchor) and corrects for it already: remove it"
        if c.weighs:
            yield f"algorithm.correction.type '{c.type}' would count twice: {why}"
        if c.veto is not None:
            yield f"algorithm.correction.veto has no effect: {why}"
        if interpolates:
            yield f"algorithm.correction.proximal has no effect: {why}"
    elif interpolates and not (r.ratio_anchor or c.weighs or c.veto is not None or r.kl_unbiased):
        yield (
            f"algorithm.correction.proximal has no effect: objective '{r.objective}' has no ratio and there is no "
            "correction, so that nothing reads the proximal policy; remove it"
        )


def _selection(r: ResolvedAlgorithm, config: AlgorithmConfig) -> Iterator[str]:
    options = r.selection_options
    if r.selection == "clip_cov" and options["low"] >= options["high"]:
        yield f"algorithm.selection.low is {options['low']}, which must be below selection.high, {options['high']}"


def _rewards(r: ResolvedAlgorithm, config: AlgorithmConfig) -> Iterator[str]:
    """Penalties that make rewards negative, where the advantage takes none."""
    if not ADVANTAGES[r.advantage].refuses_negative:
        return
    why = f"makes rewards negative, and advantage '{r.advantage}' divides by their mean"
    if r.kl_in_reward:
        yield f"algorithm.kl.placement 'reward' {why}: set it to 'loss'"
    if r.overlong_buffer is not None:
        yield f"algorithm.overlong_buffer {why}: set it to 0"
