"""A rollout batch to minibatches: what must be computed before the first optimizer step, and who steps with whom."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import TrainerConfig
from headrace.protocols import Algorithm, CriticAlgorithm, Trainer
from headrace.types import RolloutBatch, Sample


def num_steps_per_batch(config: TrainerConfig) -> int:
    """Optimizer steps that a full rollout batch makes."""
    return config.num_minibatches * config.num_epochs


def may_skip(algorithm: Algorithm, config: TrainerConfig) -> bool:
    """Whether a sample of the rl stream without advantage provably has no gradient, so that no pass is spent on it."""
    return (
        config.skip_zero_gradient and algorithm.zero_advantage_means_zero_gradient and not config.router_aux_coefficient
    )


def plan_update(
    batch: RolloutBatch,
    algorithm: Algorithm,
    trainer: Trainer,
    config: TrainerConfig,
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> list[Minibatch]:
    """The minibatches of a rollout batch in the order of their optimizer steps. Call before the first of them.

    Proximal log-probabilities are computed here, once, where the batch makes more than one optimizer step or the
    algorithm needs them; with a single step the proximal policy is the current one, and no pass is spent on it.
    A critic's values are computed here too, with what it is trained towards.
    Groups stay whole where there are at least as many as minibatches; each epoch shuffles them anew, decided by
    (seed, batch index, epoch). Denominators count all samples of a minibatch, also those that are skipped later.
    """
    samples = batch.samples
    reference = trainer.forward(samples, "reference") if algorithm.needs.reference else None
    early = trainer.forward(samples, "policy") if algorithm.needs.proximal else None
    epochs = [
        _split(samples, config.num_minibatches, random.Random(f"{seed}/{batch.index}/{epoch}"))
        for epoch in range(config.num_epochs)
    ]
    values = targets = None
    if algorithm.needs.values:
        if not isinstance(algorithm, CriticAlgorithm):
            raise TypeError(f"{type(algorithm).__name__}.needs.values is set, but it has no method value_targets")
        values = _values(samples, epochs[0], trainer)
        advantages = algorithm.advantage(batch, proximal_logprobs=early, reference_logprobs=reference, values=values)
        targets = algorithm.value_targets(batch, values=values, proximal_logprobs=early, reference_logprobs=reference)
    else:
        advantages = algorithm.advantage(batch, proximal_logprobs=early, reference_logprobs=reference)
    _check_advantages(samples, advantages)
    proximal = early
    if early is None and not algorithm.needs.skips_proximal and sum(len(epoch) for epoch in epochs) > 1:
        proximal = _proximal(samples, epochs[0], advantages, algorithm, trainer, config)
    return [
        _minibatch(batch, places, advantages, proximal, reference, max_new_tokens, values, targets)
        for epoch in epochs
        for places in epoch
    ]


def _values(samples: Sequence[Sample], minibatches: list[list[int]], trainer: Trainer) -> list[Tensor]:
    """The critic's values at behaviour time, by the first epoch's minibatches: its first pass gives them again."""
    values = [torch.zeros(len(sample.ids)) for sample in samples]
    for places in minibatches:
        for i, values_T in zip(places, trainer.forward([samples[i] for i in places], "critic"), strict=True):
            values[i] = values_T
    return values


def _proximal(
    samples: Sequence[Sample],
    minibatches: list[list[int]],
    advantages: Sequence[Tensor],
    algorithm: Algorithm,
    trainer: Trainer,
    config: TrainerConfig,
) -> list[Tensor]:
    """By the first epoch's minibatches, so that micro-batches are those of the gradient pass (F4). Samples that will
    be skipped get zeros, which nobody reads."""
    skip = may_skip(algorithm, config) and not algorithm.needs.prepare
    proximal = [torch.zeros(len(sample.ids)) for sample in samples]
    for places in minibatches:
        needed = [i for i in places if not skip or bool(advantages[i].any())]
        for i, logprobs_T in zip(needed, trainer.forward([samples[i] for i in needed], "policy"), strict=True):
            proximal[i] = logprobs_T
    return proximal


def _split(samples: Sequence[Sample], num_minibatches: int, rng: random.Random) -> list[list[int]]:
    """Places of the samples of each minibatch: units (groups, or episodes where groups are too few), shuffled, then
    dealt out by trained tokens, so that the steps of a batch weigh about the same. Fewer units make fewer steps."""
    by_group = _units(samples, [sample.key.group for sample in samples])
    units = by_group if len(by_group) >= num_minibatches else _units(samples, [sample.key for sample in samples])
    if num_minibatches == 1:
        return [[i for unit in units for i in unit]]
    rng.shuffle(units)
    units.sort(key=lambda unit: -sum(samples[i].num_trained for i in unit))  # stable: ties stay shuffled
    shares: list[list[int]] = [[] for _ in range(min(num_minibatches, len(units)))]
    weights = [0] * len(shares)
    for unit in units:
        lightest = min(range(len(shares)), key=lambda k: (weights[k], len(shares[k]), k))
        shares[lightest].extend(unit)
        weights[lightest] += sum(samples[i].num_trained for i in unit)
    rng.shuffle(shares)
    return shares


def _units(samples: Sequence[Sample], keys: Sequence[object]) -> list[list[int]]:
    units: dict[object, list[int]] = {}
    for i, key in enumerate(keys):
        units.setdefault(key, []).append(i)
    return list(units.values())


def _minibatch(
    batch: RolloutBatch,
    places: list[int],
    advantages: Sequence[Tensor],
    proximal: Sequence[Tensor] | None,
    reference: Sequence[Tensor] | None,
    max_new_tokens: int,
    values: Sequence[Tensor] | None,
    targets: Sequence[Tensor] | None,
) -> Minibatch:
    chosen = tuple(batch.samples[i] for i in places)
    return Minibatch(
        samples=chosen,
        advantages=[advantages[i] for i in places],
        proximal_logprobs=None if proximal is None else [proximal[i] for i in places],
        reference_logprobs=None if reference is None else [reference[i] for i in places],
        totals=Totals.count(chosen, max_new_tokens),
        values=None if values is None else [values[i] for i in places],
        value_targets=None if targets is None else [targets[i] for i in places],
        version=batch.version,
    )


def _check_advantages(samples: Sequence[Sample], advantages: Sequence[Tensor]) -> None:
    if len(advantages) != len(samples):
        raise ValueError(f"the algorithm gave {len(advantages)} advantages for {len(samples)} samples")
    for sample, advantages_T in zip(samples, advantages, strict=True):
        if advantages_T.shape != (len(sample.ids),):
            raise ValueError(
                f"sample {sample.id} has {len(sample.ids)} ids but advantages of shape {tuple(advantages_T.shape)}"
            )
        if not advantages_T.isfinite().all():
            raise ValueError(f"sample {sample.id} has an advantage that is not finite")
