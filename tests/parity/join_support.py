"""The implementation on the oracle's inputs, in the oracle's form: nested lists ``[sequence][token]``, 0 where masked.

Everything runs in float64. Legend: N trained tokens of the batch, T slots of a sample (one before the first token).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from oracle_core import AGGREGATIONS, Batch, Mask, Nested, shares
from oracle_presets import Rollout
from torch import Tensor

from headrace.algorithms import ComposedAlgorithm, build_algorithm
from headrace.algorithms.fields import LossOutput, Minibatch, TokenFields, Totals
from headrace.config.critic import CriticConfig
from headrace.config.schema import AlgorithmConfig
from headrace.types import (
    AttemptKey,
    Episode,
    Group,
    Outcome,
    PolicyVersion,
    RolloutBatch,
    Sample,
    Score,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)

TOLERANCE = 1e-9
VERSION = PolicyVersion(0, 4)
"""The trainer's when the batch was closed: v_prox of the oracle's A-3PO vectors."""


def assert_close(found: Any, expected: Any, where: str = "") -> None:
    """Equal structure, equal keys, floats to 1e-9 (relative above 1)."""
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_close(a, b, f"{where}[{k}]")
    else:
        assert abs(found - expected) <= TOLERANCE * max(1.0, abs(expected)), (where, found, expected)


# ------------------------------------------------------------------------------------------------------ shapes


def flat(rows: Sequence[Sequence[float]], mask: Mask) -> Tensor:
    """float64 [N]: the entries at trained tokens."""
    return torch.tensor(
        [v for row, marks in zip(rows, mask, strict=True) for v, m in zip(row, marks, strict=True) if m],
        dtype=torch.float64,
    )


def nest(values_N: Tensor, mask: Mask) -> Nested:
    """The reverse of :func:`flat`, 0 where masked."""
    values = iter(values_N.tolist())
    out = [[float(next(values)) if m else 0.0 for m in row] for row in mask]
    assert next(values, None) is None
    return out


def index_of(mask: Mask) -> Tensor:
    """int64 [N]: the sequence of each trained token."""
    return torch.tensor([i for i, row in enumerate(mask) for m in row if m])


def per_sequence(values_N: Tensor, mask: Mask) -> list[float]:
    """The value that all trained tokens of a sequence share."""
    pairs = zip(nest(values_N, mask), mask, strict=True)
    rows = [[v for v, m in zip(*pair, strict=True) if m] for pair in pairs]
    assert all(max(row) - min(row) <= TOLERANCE * max(1.0, abs(row[0])) for row in rows)
    return [row[0] for row in rows]


def leaves(rows: Nested, mask: Mask) -> list[Tensor]:
    """float64 [T] for each sequence's sample: a slot before the first token; NaN there and where masked."""
    return [
        torch.tensor([torch.nan, *(v if m else torch.nan for v, m in zip(*pair, strict=True))], dtype=torch.float64)
        for pair in zip(rows, mask, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------- running


def build(max_new_tokens: int = 6, *, critic: CriticConfig | None = None, **config: Any) -> ComposedAlgorithm:
    algorithm = build_algorithm(
        AlgorithmConfig.model_validate(config), asynchronous=False, max_new_tokens=max_new_tokens, critic=critic
    )
    assert isinstance(algorithm, ComposedAlgorithm)
    return algorithm


def fields_of(batch: Batch, **changes: Any) -> TokenFields:
    """The batch as one micro-batch. The reward of an episode is its advantage: the oracle's TOPR tests the latter."""
    index_N = index_of(batch.mask)
    fields: dict[str, Any] = {
        "advantages_N": flat(batch.advantage, batch.mask),
        "behaviour_logprobs_N": flat(batch.roll, batch.mask),
        "proximal_logprobs_N": flat(batch.old, batch.mask),
        "reference_logprobs_N": flat(batch.ref, batch.mask),
        "weights_N": torch.ones(len(index_N), dtype=torch.float64),
        "episode_index_N": index_N,
        "num_episodes": len(batch.mask),
        "totals": Totals(num_tokens=len(index_N), num_episodes=len(batch.mask), max_length=batch.max_length),
        "rewards_N": flat(batch.advantage, batch.mask),
    }
    return TokenFields(**{**fields, **changes})


def run(algorithm: ComposedAlgorithm, batch: Batch, fields: TokenFields) -> tuple[float, Nested, LossOutput]:
    """Loss, its gradient by each token's log-probability, and the output."""
    logprobs_N = flat(batch.new, batch.mask).requires_grad_()
    output = algorithm.loss(logprobs_N, fields)
    loss = output.per_token_N.sum() / output.denominator
    loss.backward()
    assert logprobs_N.grad is not None
    return loss.item(), nest(logprobs_N.grad, batch.mask), output


def describe(config: dict[str, Any], batch: Batch, **changes: Any) -> dict[str, Any]:
    """The loss under each aggregation and the slope of each token's own loss, as the oracle's vectors have them.

    The slope is the gradient of the sum. Under each other aggregation the gradient must be slope times share.
    """
    out: dict[str, Any] = {}
    gradients = {}
    for how in AGGREGATIONS:
        algorithm = build(batch.max_length, **{**config, "aggregation": how})
        out[how], gradients[how], _ = run(algorithm, batch, fields_of(batch, **changes))
    out["slope"] = gradients["token_sum"]
    for how, gradient in gradients.items():
        assert_close(gradient, shared(out["slope"], batch, how), how)
    return out


def shared(slope: Nested, batch: Batch, how: str) -> Nested:
    """Slope times share: the gradient under an aggregation."""
    share = shares(batch.mask, how, batch.max_length)
    return [[s * w for s, w in zip(*pair, strict=True)] for pair in zip(slope, share, strict=True)]


# ---------------------------------------------------------------------------------------------- whole minibatches


def samples_of(batch: Batch, rewards: list[float] | None = None, group_sizes: list[int] | None = None) -> list[Sample]:
    """One sample for each sequence; groups are neighbours, all in one group where no sizes are given."""
    groups = [g for g, size in enumerate(group_sizes or [len(batch.mask)]) for _ in range(size)]
    out = []
    for i, (row, group) in enumerate(zip(batch.mask, groups, strict=True)):
        key = AttemptKey(group, i)
        behaviour = [v if m else 0.0 for v, m in zip(batch.roll[i], row, strict=True)]
        out.append(
            Sample(
                id=f"{key}/0",
                key=key,
                ids=(7, *range(len(row))),
                mask=(0, *row),
                behaviour_logprobs=(0.0, *behaviour),
                versions=(None, *(VERSION if m else None for m in row)),
                reward=None if rewards is None else rewards[i],
            )
        )
    return out


def minibatch_of(batch: Batch) -> Minibatch:
    samples = samples_of(batch)
    return Minibatch(
        samples=tuple(samples),
        advantages=leaves(batch.advantage, batch.mask),
        proximal_logprobs=leaves(batch.old, batch.mask),
        reference_logprobs=leaves(batch.ref, batch.mask),
        totals=Totals.count(samples, batch.max_length),
        version=VERSION,
    )


def selected(config: dict[str, Any], batch: Batch) -> Tensor:
    """bool [N]: the tokens that ``prepare`` chooses in the whole batch."""
    prepared = build(batch.max_length, **config).prepare(minibatch_of(batch), leaves(batch.new, batch.mask), step=0)
    assert prepared.selected is not None
    mask = [[bool(m) for m in sample.mask] for sample in prepared.samples]
    return torch.cat([chosen_T[torch.tensor(m)] for chosen_T, m in zip(prepared.selected, mask, strict=True)])


def rollout_batch(rollout: Rollout) -> RolloutBatch:
    """With a greedy reply for each group."""
    samples = samples_of(rollout.batch, rollout.rewards, rollout.group_sizes)
    greedy = {s.key.group: reward for s, reward in zip(samples, rollout.greedy, strict=True)}
    groups = tuple(_with_greedy(group, reward) for group, reward in greedy.items())
    return RolloutBatch(index=0, groups=groups, samples=tuple(samples), version=VERSION)


def _with_greedy(group: int, reward: float) -> Group:
    task = Task(id="t", messages=({"role": "user", "content": "?"},))
    span = VersionSpan(VERSION, 0, 1)
    reply = Segment(source=Source.POLICY, ids=(1,), parent=0, logprobs=(0.0,), version_spans=(span,))
    baseline = Episode(
        key=AttemptKey(group, 99),
        task=task,
        turns=(),
        trace=Trace(segments=(Segment(source=Source.TEMPLATE, ids=(0,)), reply)),
        outcome=Outcome.DONE,
        score=Score(value=reward),
    )
    return Group(id=group, task=task, episodes=(), baseline=baseline)


@contextmanager
def advantages_in_float64() -> Iterator[None]:
    """Advantages are computed in float64 and handed over in float32; here they are handed over as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def advantages(algorithm: ComposedAlgorithm, rollout: Rollout, values: Nested | None = None) -> Nested:
    """Of the whole rollout batch, through ``ComposedAlgorithm.advantage``; ``values``: a critic's."""
    batch, mask = rollout.batch, rollout.batch.mask
    logprobs: dict[str, Any] = {} if values is None else {"values": leaves(values, mask)}
    if algorithm.resolved.kl_in_reward:
        logprobs |= {"proximal_logprobs": leaves(batch.old, mask), "reference_logprobs": leaves(batch.ref, mask)}
    with advantages_in_float64():
        found = algorithm.advantage(rollout_batch(rollout), **logprobs)
    rounded = algorithm.advantage(rollout_batch(rollout), **logprobs)
    assert all(torch.equal(a.float(), b) for a, b in zip(found, rounded, strict=True)), "the same but for its type"
    for values_T, row in zip(found, mask, strict=True):
        assert not values_T[~torch.tensor([False, *map(bool, row)])].any()
    return [values_T[1:].tolist() for values_T in found]
