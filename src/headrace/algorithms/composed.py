"""The algorithm that a resolved composition describes. It is the only place where the parts meet.

Legend: N trained tokens of a micro-batch, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.algorithms import shaping
from headrace.algorithms.advantages import ADVANTAGES, EpisodeRewards, lambda_returns
from headrace.algorithms.aggregations import AGGREGATIONS
from headrace.algorithms.corrections import CORRECTIONS, CorrectionWeights
from headrace.algorithms.fields import LossOutput, TokenFields, Totals
from headrace.algorithms.kl import KL_ESTIMATORS
from headrace.algorithms.objectives import OBJECTIVES, ObjectiveInput, ObjectiveOutput
from headrace.algorithms.ratios import RATIO_LEVELS, bounded_exp, episode_lengths
from headrace.algorithms.resolve import ResolvedAlgorithm
from headrace.protocols import AlgorithmNeeds
from headrace.types import Group, RolloutBatch


class ComposedAlgorithm:
    """advantage x ratio level x objective x correction x aggregation x KL (``headrace.protocols.Algorithm``).

    loss = sum over tokens of w * (c * policy + kl_coefficient * KL - entropy_coefficient * H) / denominator, where c
    is the importance correction and w the aggregation's weight times the sample's own.
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
            values=r.needs_values,
        )

    @property
    def zero_advantage_means_zero_gradient(self) -> bool:
        """Each policy term is a product with the advantage; KL in the loss, the entropy bonus and a critic's loss are
        not."""
        r = self.resolved
        return not r.kl_in_loss and r.entropy_coefficient == 0 and not r.needs_values

    def keep_group(self, group: Group) -> bool:
        """With dynamic sampling: whether the group's scored rewards differ. Without: always True."""
        return not self.resolved.dynamic_sampling or shaping.has_signal(group)

    def shape_rewards(self, batch: RolloutBatch) -> list[float]:
        """Rewards with the overlong penalty, in sample order. :meth:`advantage` applies this itself."""
        return shaping.shape_rewards(batch.samples, self.resolved.max_new_tokens, self.resolved.overlong_buffer)

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
        tokens still count in the denominators (counts before rejection). Raises ValueError for a group of one
        under a group-relative estimator, a sample without reward, or missing log-probabilities or values.
        """
        r, samples = self.resolved, batch.samples
        estimator = ADVANTAGES[r.advantage]
        episodes, rewards = self._rewards(batch, proximal_logprobs, reference_logprobs, values)
        options = self._gae_options() if estimator.needs_values else {}
        advantages = shaping.scatter(samples, episodes, estimator.function(rewards, **options))
        if r.mask_truncated:
            return [torch.zeros_like(a) if s.truncated else a for s, a in zip(samples, advantages, strict=True)]
        return advantages

    def value_targets(
        self,
        batch: RolloutBatch,
        *,
        values: Sequence[Tensor],
        proximal_logprobs: Sequence[Tensor] | None = None,
        reference_logprobs: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The lambda-returns that a critic is trained towards: float32 [T] for each sample, 0 where the mask is 0."""
        episodes, rewards = self._rewards(batch, proximal_logprobs, reference_logprobs, values)
        return shaping.scatter(batch.samples, episodes, lambda_returns(rewards, **self._gae_options()))

    def _gae_options(self) -> dict[str, float]:
        r = self.resolved
        if r.gamma is None or r.gae_lambda is None:
            raise ValueError(f"advantage '{r.advantage}' needs a critic: build_algorithm(..., critic=config.critic)")
        return {"gamma": r.gamma, "gae_lambda": r.gae_lambda}

    def _rewards(
        self,
        batch: RolloutBatch,
        proximal_logprobs: Sequence[Tensor] | None,
        reference_logprobs: Sequence[Tensor] | None,
        values: Sequence[Tensor] | None,
    ) -> tuple[shaping.EpisodeSamples, list[EpisodeRewards]]:
        """Which samples make up each episode, and its shaped rewards (and values) token by token."""
        r, samples = self.resolved, batch.samples
        penalties = None
        if r.kl_in_reward:
            if proximal_logprobs is None or reference_logprobs is None:
                raise ValueError("KL in the reward needs the proximal and the reference log-probabilities of the batch")
            assert r.kl_estimator is not None
            penalties = shaping.kl_penalties(
                samples, r.kl_estimator, r.kl_coefficient, proximal_logprobs, reference_logprobs
            )
        return shaping.episode_rewards(samples, self.shape_rewards(batch), penalties, values)

    def loss(self, logprobs_N: Tensor, fields: TokenFields) -> LossOutput:
        """See :class:`~headrace.algorithms.fields.LossOutput`. Sums over micro-batches give the minibatch's loss."""
        r = self.resolved
        proximal_N = logprobs_N if fields.proximal_logprobs_N is None else fields.proximal_logprobs_N
        proximal_N = proximal_N.detach()
        log_ratio = RATIO_LEVELS[r.ratio_level or "token"]
        ratio_N = bounded_exp(log_ratio(logprobs_N, proximal_N, fields.episode_index_N, fields.num_episodes))
        output = OBJECTIVES[r.objective].function(
            ObjectiveInput(
                logprobs_N=logprobs_N,
                ratio_N=ratio_N,
                advantages_N=fields.advantages_N,
                clip_low=r.clip_low or 0.0,
                clip_high=r.clip_high or 0.0,
                dual_clip=r.dual_clip,
            )
        )
        total_N = output.loss_N
        weights = self._correction(proximal_N, fields.behaviour_logprobs_N)
        if weights is not None:
            total_N = weights.apply(total_N)
        kl_N = self._kl(logprobs_N, fields.reference_logprobs_N)
        if kl_N is not None and r.kl_in_loss:
            total_N = total_N + r.kl_coefficient * kl_N
        if r.entropy_coefficient > 0:
            if fields.entropy_N is None:
                raise ValueError("the entropy bonus needs fields.entropy_N")
            total_N = total_N - r.entropy_coefficient * fields.entropy_N
        aggregation = AGGREGATIONS[r.aggregation]
        if aggregation.token_weight is not None:
            lengths_N = episode_lengths(fields.episode_index_N, fields.num_episodes)[fields.episode_index_N]
            total_N = total_N * aggregation.token_weight(lengths_N.to(total_N.dtype))
        return LossOutput(
            per_token_N=total_N * fields.weights_N,
            denominator=_positive(aggregation.denominator(fields.totals), fields.totals),
            metrics=_metrics(ratio_N, output, weights, kl_N, fields.entropy_N),
        )

    def _correction(self, proximal_N: Tensor, behaviour_N: Tensor) -> CorrectionWeights | None:
        function = CORRECTIONS[self.resolved.correction_type]
        if function is None:
            return None
        log_rho_N = proximal_N - behaviour_N.detach()
        return function(log_rho_N, self.resolved.correction_low, self.resolved.correction_high)

    def _kl(self, logprobs_N: Tensor, reference_N: Tensor | None) -> Tensor | None:
        """KL as configured, for the loss and for the metric alike (FAILURES.md 61); None where it is off."""
        if self.resolved.kl_estimator is None:
            return None
        if reference_N is None:
            raise ValueError("KL needs fields.reference_logprobs_N")
        return KL_ESTIMATORS[self.resolved.kl_estimator](logprobs_N, reference_N.detach())


def _positive(denominator: float, totals: Totals) -> float:
    if denominator <= 0:
        raise ValueError(f"a minibatch without trained tokens has no loss: {totals}")
    return float(denominator)


def _metrics(
    ratio_N: Tensor,
    output: ObjectiveOutput,
    weights: CorrectionWeights | None,
    kl_N: Tensor | None,
    entropy_N: Tensor | None,
) -> dict[str, tuple[float, float]]:
    """name -> (sum, count) over the micro-batch's trained tokens; one copy to the host for all of them."""
    named: dict[str, Tensor | None] = {
        "policy/ratio": ratio_N,
        "policy/clipped_low": output.clipped_low_N,
        "policy/clipped_high": output.clipped_high_N,
        "policy/dual_clipped": output.dual_clipped_N,
        "policy/kl": kl_N,
        "policy/entropy": entropy_N,
    }
    if weights is not None:
        named["correction/weight"] = weights.apply(torch.ones_like(weights.weight_N))
        named["correction/truncated"] = weights.truncated_N
        named["correction/masked"] = weights.rejected_N
    present = {name: values_N for name, values_N in named.items() if values_N is not None}
    if not present:
        return {}
    sums = torch.stack([v.detach().double().sum() for v in present.values()]).tolist()
    return {name: (total, float(len(v))) for (name, v), total in zip(present.items(), sums, strict=True)}
