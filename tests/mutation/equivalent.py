"""Mutants that no test can or should kill, each with the reason. See rooms.py."""

from __future__ import annotations

_NARROWING = "KL has been computed wherever it is in the loss; the test tells the type checker"
_NO_GRADIENT = "a comparison passes no gradient; detached, it keeps no graph"

EQUIVALENT: dict[str, str] = {
    "algorithms.values.value_loss: clipped_N.detach() -> clipped_N": _NO_GRADIENT,
    "algorithms.values.value_loss: plain_N.detach() -> plain_N": _NO_GRADIENT,
    "algorithms.composed._rl: kl_M is not None and r.kl_in_loss and shares_aggregation -> "
    "r.kl_in_loss and shares_aggregation": _NARROWING,
    "algorithms.composed._rl: kl_M is not None and r.kl_in_loss and (not shares_aggregation) -> "
    "r.kl_in_loss and (not shares_aggregation)": _NARROWING,
    "algorithms.composed._rl: kl_M is not None and r.kl_in_loss and shares_aggregation -> "
    "kl_M is not None and shares_aggregation": "in the reward KL has no aggregation, so that it shares none",
    "algorithms.composed._metrics: v.detach() -> v": "only its value is read; detached, it keeps no graph",
    "algorithms.policy_term.policy_term: if getattr(r, name) is not None -> no filter": (
        "an option without a part in the objective is None, and the objective does not read it"
    ),
    "algorithms.policy_term.policy_term: log_ratio_N.detach() -> log_ratio_N": _NO_GRADIENT,
    "algorithms.policy_term.with_choices: fields.mean_correction is None or term.weights is None -> "
    "fields.mean_correction is None": "a batch-normalised correction weighs; the test tells the type checker",
    "algorithms.objectives._tv_trusted: x.logprobs_N.detach() -> x.logprobs_N": _NO_GRADIENT,
    "algorithms.objectives.dppo_kl: x.logprobs_N.detach() -> x.logprobs_N": _NO_GRADIENT,
    "control.checks._check_numbers: version is None or "
    "(current_version is not None and version.number > current_version)"
    " -> current_version is not None and version.number > current_version": "versions were compared with the trace's, "
    "whose spans tile; the test tells the type checker",
    "control.router.prefixes: start:start + BLOCK_TOKENS -> :start + BLOCK_TOKENS": "the chain holds what is before "
    "the block already; a name is that of the whole prefix either way",
    "control.samples._sample: first is not None and first.source is Source.POLICY -> first.source is Source.POLICY": (
        "a branch is only asked for where it has sampled ids; the test tells the type checker"
    ),
}
"""``room.module.function: before -> after`` -> why it survives."""
