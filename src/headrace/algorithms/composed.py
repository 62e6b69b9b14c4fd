"""The algorithm that a resolved composition describes. It is the only place where the parts meet.

Legend: N trained tokens of a micro-batch or minibatch, M those of one stream, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headrace.algorithms import shaping
from headrace.algorithms.advantages import ADVANTAGES, EpisodeEstimator, lambda_returns
from headrace.algorithms.corrections import mean_weight
from headrace.algorithms.fields import LossOutput, Minibatch, TokenFields
from headrace.algorithms.flat import flatten, unflatten
from headrace.algorithms.kl import KL_ESTIMATORS
from headrace.algorithms.policy_term import PolicyTerm, policy_term, with_choices
from headrace.algorithms.ratios import bounded_exp
from headrace.algorithms.resolve import ResolvedAlgorithm
from headrace.algorithms.selections import SELECTIONS, SelectionInput
from headrace.algorithms.streams import Term, aggregate, combine, cross_entropy, split, taught_places
from headrace.protocols import AlgorithmNeeds
from headrace.types import Group, RolloutBatch


class ComposedAlgorithm:
    """advantage x ratio level x objective x selection x correction x aggregation x KL (``headrace.protocols.Algorithm``
    and ``WholeMinibatchAlgorithm``).

    loss = sum over streams of sum over their tokens of w * x / denominator. In the rl stream x is c * policy
    - entropy_coefficient * H, c the importance correction, and kl_coefficient * KL beside it; in the supervised stream
    the cross-entropy; on tokens that a teacher has seen the KL to it. w is the aggregation's weight times the sample's.
    """

    def __init__(self, resolved: ResolvedAlgorithm) -> None:
        self.resolved = resolved

    @property
    def needs(self) -> AlgorithmNeeds:
        """KL in the reward needs proximal log-probabilities before the first step, to be subtracted from it."""
        r = self.resolved
        return AlgorithmNeeds(
            reference=r.kl_coefficient > 0,
            proximal=r.kl_in_reward,
            entropy=r.entropy_coefficient > 0,
            skips_proximal=r.anchors_to_behaviour or r.correction.proximal == "interpolated",
            prepare=SELECTIONS[r.selection] is not None or r.correction.batch_normalised,
            greedy_baseline=ADVANTAGES[r.advantage].needs_greedy,
            values=r.needs_values,
        )

    @property
    def zero_advantage_means_zero_gradient(self) -> bool:
        """Each policy term is a product with the advantage; KL in the loss, the entropy bonus, penalties and a critic's
        loss are not."""
        return self.resolved.trains_zero_advantages is None

    def keep_group(self, group: Group) -> bool:
        """With dynamic sampling: whether the group's scored rewards differ. Without: always True."""
        return not self.resolved.dynamic_sampling or shaping.has_signal(group)

    def shape_rewards(self, batch: RolloutBatch) -> list[float]:
        """Rewards with the overlong penalty, in sample order; 0 outside the rl stream. :meth:`advantage` applies this
        itself."""
        r = self.resolved
        places = [i for i, sample in enumerate(batch.samples) if sample.stream == "rl"]
        shaped = shaping.shape_rewards([batch.samples[i] for i in places], r.max_new_tokens, r.overlong_buffer)
        rewards = [0.0] * len(batch.samples)
        for i, reward in zip(places, shaped, strict=True):
            rewards[i] = reward
        return rewards

    def advantage(
        self,
        batch: RolloutBatch,
        *,
        proximal_logprobs: Sequence[Tensor] | None = None,
        reference_logprobs: Sequence[Tensor] | None = None,
        values: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """float32 [T] for each sample, 0 where the mask is 0. One per episode for group-relative estimators.

        With ``mask_truncated`` a truncated reply stays in its group's baseline and its own advantages become 0; its
        tokens still count in the denominators (counts before rejection). Samples of other streams have none, and are
        in no baseline. Raises ValueError for a group of one under a group-relative estimator, a sample without reward,
        a missing greedy reply, or missing log-probabilities or values.
        """
        r = self.resolved
        estimator = ADVANTAGES[r.advantage].function
        advantages = self._estimate(estimator, batch, proximal_logprobs, reference_logprobs, values)
        if r.mask_truncated:
            return [torch.zeros_like(a) if s.truncated else a for s, a in zip(batch.samples, advantages, strict=True)]
        return advantages

    def value_targets(
        self,
        batch: RolloutBatch,
        *,
        values: Sequence[Tensor],
        proximal_logprobs: Sequence[Tensor] | None = None,
        reference_logprobs: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The lambda-returns that a critic is trained towards: float32 [T] for each sample, 0 where the mask is 0 and
        in other streams. Raises ValueError as :meth:`advantage` does."""
        return self._estimate(lambda_returns, batch, proximal_logprobs, reference_logprobs, values)

    def _estimate(
        self,
        estimator: EpisodeEstimator,
        batch: RolloutBatch,
        proximal_logprobs: Sequence[Tensor] | None,
        reference_logprobs: Sequence[Tensor] | None,
        values: Sequence[Tensor] | None,
    ) -> list[Tensor]:
        """What ``estimator`` says of the rl stream's episodes, laid out on their samples: float32 [T] for each sample
        of the batch."""
        r = self.resolved
        if r.needs_values and r.gae_lambda is None:
            raise ValueError(f"advantage '{r.advantage}' needs a critic: build_algorithm(..., critic=config.critic)")
        places = [i for i, sample in enumerate(batch.samples) if sample.stream == "rl"]
        samples = [batch.samples[i] for i in places]

        def of_stream(per_sample: Sequence[Tensor], what: str) -> list[Tensor]:
            if len(per_sample) != len(batch.samples):
                raise ValueError(f"{len(per_sample)} lists of {what} for {len(batch.samples)} samples")
            return [per_sample[i] for i in places]

        penalties = None
        if r.kl_in_reward:
            if proximal_logprobs is None or reference_logprobs is None:
                raise ValueError("KL in the reward needs the proximal and the reference log-probabilities of the batch")
            assert r.kl_estimator is not None
            penalties = shaping.kl_penalties(
                samples,
                r.kl_estimator,
                r.kl_coefficient,
                of_stream(proximal_logprobs, "log-probabilities"),
                of_stream(reference_logprobs, "log-probabilities"),
            )
        shaped = self.shape_rewards(batch)
        episodes, rewards = shaping.episode_rewards(
            samples,
            [shaped[i] for i in places],
            penalties,
            greedy=shaping.greedy_rewards(batch.groups, r.max_new_tokens, r.overlong_buffer),
            values=None if values is None else of_stream(values, "values"),
        )
        estimate = estimator(
            rewards,
            discount=1.0 if r.discount is None else r.discount,
            gae_lambda=1.0 if r.gae_lambda is None else r.gae_lambda,
        )
        per_token = [torch.zeros(len(sample.ids)) for sample in batch.samples]
        for i, values_T in zip(places, shaping.scatter(samples, episodes, estimate), strict=True):
            per_token[i] = values_T
        return per_token

    # ------------------------------------------------------------------------------------------------ loss

    def loss(self, logprobs_N: Tensor, fields: TokenFields) -> LossOutput:
        """See :class:`~headrace.algorithms.fields.LossOutput`. Sums over micro-batches give the minibatch's loss."""
        r = self.resolved
        terms = [
            *self._rl(logprobs_N, fields),
            cross_entropy(logprobs_N, fields, r.supervised.coefficient, r.supervised.aggregation),
            self._distillation(logprobs_N, fields),
        ]
        return combine([term for term in terms if term is not None], logprobs_N, fields.totals)

    @torch.no_grad()
    def prepare(self, minibatch: Minibatch, logprobs: Sequence[Tensor], *, step: int) -> Minibatch:
        """See :class:`~headrace.protocols.WholeMinibatchAlgorithm`. Neither the order of the samples nor their split
        into micro-batches has a part in it: tokens stand in the order of their samples' ids."""
        r = self.resolved
        if all(sample.stream != "rl" or not sample.num_trained for sample in minibatch.samples):
            return minibatch  # nothing to choose from
        logprobs_N, fields, names_N = flatten(minibatch, logprobs)
        term = policy_term(r, logprobs_N, fields)
        if r.correction.batch_normalised:
            assert term.weights is not None and r.correction.level is not None
            mean = mean_weight(term.weights, r.correction.level, fields.episode_index_N, fields.num_episodes)
            minibatch = replace(minibatch, mean_correction=mean)
        selection = SELECTIONS[r.selection]
        if selection is None:
            return minibatch
        chosen_N = selection.function(
            SelectionInput(
                advantages_N=fields.advantages_N,
                logprobs_N=logprobs_N,
                log_ratio_N=logprobs_N - fields.behaviour_logprobs_N,
                clipped_N=term.clipped_N,
                names_N=[f"{step}/{name}" for name in names_N],
                **{name: value for name, value in r.selection_options.items() if name != "penalty"},
            )
        )
        return replace(minibatch, selected=unflatten(minibatch.samples, chosen_N))

    def _rl(self, logprobs_N: Tensor, fields: TokenFields) -> list[Term]:
        """Policy term and entropy bonus, and the KL to the reference with its own aggregation."""
        r = self.resolved
        places_M = fields.places_of("rl")
        if places_M is not None and not len(places_M):
            return []
        logprobs_M, fields_M = split(logprobs_N, fields, places_M)
        term = with_choices(r, policy_term(r, logprobs_M, fields_M), fields_M)
        total_M = term.corrected(term.output.loss_N)
        if r.entropy_coefficient > 0:
            if fields_M.entropy_N is None:
                raise ValueError("the entropy bonus needs fields.entropy_N")
            total_M = total_M - r.entropy_coefficient * fields_M.entropy_N
        kl_M = self._kl(logprobs_M, fields_M, term)
        shares_aggregation = r.kl_aggregation == r.aggregation
        if kl_M is not None and r.kl_in_loss and shares_aggregation:
            total_M = total_M + r.kl_coefficient * kl_M
        per_token_M, denominator = aggregate(total_M, fields_M, r.aggregation, "rl")
        metrics = _metrics(r, term, kl_M, fields_M)
        terms = [Term(per_token_M=per_token_M, denominator=denominator, places_M=places_M, metrics=metrics)]
        if kl_M is not None and r.kl_in_loss and not shares_aggregation:
            assert r.kl_aggregation is not None
            per_token_M, denominator = aggregate(r.kl_coefficient * kl_M, fields_M, r.kl_aggregation, "rl")
            terms.append(Term(per_token_M=per_token_M, denominator=denominator, places_M=places_M))
        return terms

    def _kl(self, logprobs_N: Tensor, fields: TokenFields, term: PolicyTerm) -> Tensor | None:
        """KL as configured, for the loss and for the metric alike (FAILURES.md 61); None where it is off."""
        r = self.resolved
        if r.kl_estimator is None:
            return None
        if fields.reference_logprobs_N is None:
            raise ValueError("KL needs fields.reference_logprobs_N")
        kl_N = KL_ESTIMATORS[r.kl_estimator](logprobs_N, fields.reference_logprobs_N.detach())
        return bounded_exp(term.log_ratio_N) * kl_N if r.kl_unbiased else kl_N

    def _distillation(self, logprobs_N: Tensor, fields: TokenFields) -> Term | None:
        """KL to the teacher, from the log-probabilities of the sampled tokens alone."""
        d = self.resolved.distillation
        places_M = taught_places(fields)
        if places_M is None:
            return None
        logprobs_M, fields_M = split(logprobs_N, fields, places_M)
        assert fields_M.teacher_logprobs_N is not None
        kl_M = KL_ESTIMATORS[d.estimator](logprobs_M, fields_M.teacher_logprobs_N.detach())
        if d.unbiased:
            kl_M = bounded_exp(policy_term(self.resolved, logprobs_M, fields_M).log_ratio_N) * kl_M
        per_token_M, denominator = aggregate(d.coefficient * kl_M, fields_M, d.aggregation, "distillation")
        metrics = {"distillation/kl": (float(kl_M.detach().double().sum()), float(len(kl_M)))}
        return Term(per_token_M=per_token_M, denominator=denominator, places_M=places_M, metrics=metrics)


def _metrics(
    r: ResolvedAlgorithm, term: PolicyTerm, kl_N: Tensor | None, fields: TokenFields
) -> dict[str, tuple[float, float]]:
    """name -> (sum, count) over the rl tokens; one copy to the host for all of them."""
    output, weights = term.output, term.weights
    named: dict[str, Tensor | None] = {
        "policy/ratio": term.ratio_N,
        "policy/clipped_low": output.clipped_low_N,
        "policy/clipped_high": output.clipped_high_N,
        "policy/dual_clipped": output.dual_clipped_N,
        "policy/selected": fields.selected_N if r.selection != "none" else None,
        "policy/kl": kl_N,
        "policy/entropy": fields.entropy_N,
    }
    if weights is not None:
        named["correction/weight"] = weights.apply(torch.ones_like(weights.weight_N))
        named["correction/truncated"] = weights.truncated_N
        named["correction/masked"] = weights.rejected_N
    present = {name: values_N for name, values_N in named.items() if values_N is not None}
    sums = torch.stack([v.detach().double().sum() for v in present.values()]).tolist()
    return {name: (total, float(len(v))) for (name, v), total in zip(present.items(), sums, strict=True)}
