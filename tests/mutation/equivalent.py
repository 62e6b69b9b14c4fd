"""Mutants of the algorithms room that no test can or should kill, each with the reason. See algorithms.py."""

from __future__ import annotations

_NARROWING = "KL has been computed wherever it is in the loss; the test tells the type checker"
_NO_GRADIENT = "a comparison passes no gradient; detached, it keeps no graph"

EQUIVALENT: dict[str, str] = {
    "composed._rl: kl_M is not None and r.kl_in_loss and shares_aggregation -> "
    "r.kl_in_loss and shares_aggregation": _NARROWING,
    "composed._rl: kl_M is not None and r.kl_in_loss and (not shares_aggregation) -> "
    "r.kl_in_loss and (not shares_aggregation)": _NARROWING,
    "composed._rl: kl_M is not None and r.kl_in_loss and shares_aggregation -> "
    "kl_M is not None and shares_aggregation": "in the reward KL has no aggregation, so that it shares none",
    "composed._metrics: v.detach() -> v": "only its value is read; detached, it keeps no graph",
    "objectives._tv_trusted: x.logprobs_N.detach() -> x.logprobs_N": _NO_GRADIENT,
    "objectives.dppo_kl: x.logprobs_N.detach() -> x.logprobs_N": _NO_GRADIENT,
}
"""``module.function: before -> after`` -> why it survives."""
