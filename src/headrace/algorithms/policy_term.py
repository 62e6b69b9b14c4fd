"""The policy term of a composition: ratio, objective, token choice and importance correction of the rl tokens.

One function computes it for the loss of a micro-batch and for what must be known of a whole minibatch beforehand.
Legend: N trained tokens of the rl stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.corrections import (
    CORRECTIONS,
    RHO_LEVELS,
    CorrectionWeights,
    off_policy_sequences,
    vetoed,
)
from headrace.algorithms.fields import TokenFields
from headrace.algorithms.objectives import OBJECTIVES, ObjectiveInput, ObjectiveOutput
from headrace.algorithms.ratios import RATIO_LEVELS, bounded_exp, interpolated_proximal
from headrace.algorithms.resolve import OBJECTIVE_OPTIONS, ResolvedAlgorithm
from headrace.algorithms.selections import SELECTIONS

_NUMBERS = tuple(name for name in OBJECTIVE_OPTIONS if name not in ("ratio_level", "ratio_anchor"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """``loss_N`` is what the objective and the token choice give, before the correction's weights."""

    log_ratio_N: Tensor
    """Of the token, to the ratio's anchor; with gradient."""
    ratio_N: Tensor
    """At the ratio level."""
    output: ObjectiveOutput
    weights: CorrectionWeights | None
    """None: no correction of any kind."""

    @property
    def clipped_N(self) -> Tensor:
        """bool: a bound of the objective acts on the token."""
        found = [self.output.clipped_low_N, self.output.clipped_high_N, self.output.dual_clipped_N]
        clipped_N = torch.zeros_like(self.log_ratio_N, dtype=torch.bool)
        for flags_N in found:
            clipped_N = clipped_N if flags_N is None else clipped_N | flags_N
        return clipped_N

    def corrected(self, loss_N: Tensor) -> Tensor:
        return loss_N if self.weights is None else self.weights.apply(loss_N)


def policy_term(r: ResolvedAlgorithm, logprobs_N: Tensor, fields: TokenFields) -> PolicyTerm:
    """Of these tokens. All tokens of an episode must be there."""
    behaviour_N = fields.behaviour_logprobs_N.detach()
    proximal_N = _proximal(r, logprobs_N, fields)
    anchor_N = behaviour_N if r.anchors_to_behaviour else proximal_N
    index_N, num_episodes = fields.episode_index_N, fields.num_episodes
    level = RATIO_LEVELS[r.ratio_level or "token"]
    ratio_N = bounded_exp(level(logprobs_N, anchor_N, index_N, num_episodes))
    numbers: dict[str, Any] = {name: getattr(r, name) for name in _NUMBERS if getattr(r, name) is not None}
    output = OBJECTIVES[r.objective].function(
        ObjectiveInput(
            logprobs_N=logprobs_N,
            anchor_N=anchor_N,
            ratio_N=ratio_N,
            advantages_N=fields.advantages_N,
            episode_index_N=index_N,
            num_episodes=num_episodes,
            rewards_N=fields.rewards_N,
            **numbers,
        )
    )
    log_ratio_N = logprobs_N - anchor_N
    return PolicyTerm(
        log_ratio_N=log_ratio_N,
        ratio_N=ratio_N,
        output=output,
        weights=_weights(r, proximal_N - behaviour_N, log_ratio_N.detach(), fields),
    )


def _proximal(r: ResolvedAlgorithm, logprobs_N: Tensor, fields: TokenFields) -> Tensor:
    """The given ones; where a batch makes one step the current ones; interpolated where so configured."""
    if r.correction.proximal == "interpolated":
        if fields.ages_N is None:
            raise ValueError("an interpolated proximal policy needs fields.ages_N")
        # Counted from the version at the batch's start, 0: a token of age a was sampled by -a, and 1 is being made.
        return interpolated_proximal(logprobs_N, fields.behaviour_logprobs_N.detach(), -fields.ages_N, 0, 1)
    return (logprobs_N if fields.proximal_logprobs_N is None else fields.proximal_logprobs_N).detach()


def _weights(
    r: ResolvedAlgorithm, log_rho_N: Tensor, log_ratio_N: Tensor, fields: TokenFields
) -> CorrectionWeights | None:
    """Weights and rejections, not yet divided by the minibatch's mean."""
    c, index_N, num_episodes = r.correction, fields.episode_index_N, fields.num_episodes
    if not c.weighs and c.veto is None and c.max_drift is None:
        return None
    at_level_N = RHO_LEVELS[c.level or "token"](log_rho_N, index_N, num_episodes)
    weights = CORRECTIONS[c.type](at_level_N, c.low, c.high)
    if c.veto is not None:
        weights = weights.reject(vetoed(log_rho_N, c.veto, index_N, num_episodes))
    if c.max_drift is not None:
        weights = weights.reject(
            off_policy_sequences(log_ratio_N, fields.advantages_N, c.max_drift, index_N, num_episodes)
        )
    return weights


def with_choices(r: ResolvedAlgorithm, term: PolicyTerm, fields: TokenFields) -> PolicyTerm:
    """The token choice and the normaliser of the whole minibatch applied. Raises ValueError where they are missing."""
    if r.correction.batch_normalised:
        if fields.mean_correction is None or term.weights is None:
            raise ValueError("batch-normalised correction needs fields.mean_correction: call prepare first")
        weights = replace(term.weights, weight_N=term.weights.weight_N / fields.mean_correction)
        term = replace(term, weights=weights)
    selection = SELECTIONS[r.selection]
    if selection is None:
        return term
    if fields.selected_N is None:
        raise ValueError(f"selection '{r.selection}' needs fields.selected_N: call prepare first")
    loss_N = term.output.loss_N
    if selection.penalises:
        penalty_N = r.selection_options["penalty"] * term.log_ratio_N.abs()
        loss_N = loss_N + torch.where(fields.selected_N, penalty_N, 0.0)
    else:
        loss_N = torch.where(fields.selected_N, 0.0, loss_N)
    return replace(term, output=replace(term.output, loss_N=loss_N))
