"""Supervised samples beside the rollouts of a run: ``[supervised_data]``.

The cursor is the index of the rollout batch, which every checkpoint holds: with n conversations a batch, batch i takes
the places i n to i n + n - 1 in an endless row of shuffled passes over the file. So a resume goes on where its
checkpoint stood, and nothing else has to be remembered. A conversation is imitated in one of its batch's optimizer
steps. It is nobody's attempt: the books do not know it, and metrics count it apart, as ``supervised/...``.

Legend: T tokens of a sample.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import RunConfig
from headrace.environments.preferences import Conversation, Rows
from headrace.model.renderer import ChatRenderer
from headrace.model.replies import check_length, conversation_samples
from headrace.types import AttemptKey, Sample


@dataclass(frozen=True, kw_only=True)
class SupervisedStream:
    """Which conversations a rollout batch imitates, and their samples."""

    conversations: Sequence[Sequence[Sample]]
    """The samples of each."""
    num_per_batch: int
    seed: int

    @staticmethod
    def build(
        rows: Rows[Conversation] | None, config: RunConfig, renderer: ChatRenderer, max_context: int
    ) -> SupervisedStream | None:
        """Every conversation as samples. Raises ConfigError naming the row that does not fit the context."""
        if rows is None or config.supervised_data is None:
            return None
        return SupervisedStream(
            conversations=[_samples(row, place, renderer, max_context) for place, row in enumerate(rows.train)],
            num_per_batch=config.supervised_data.conversations_per_batch,
            seed=config.seed,
        )

    def of_batch(self, index: int) -> list[list[Sample]]:
        """The samples of each conversation of rollout batch ``index`` (0 is the run's first), keys and ids their own:
        no attempt has a negative group."""
        size = len(self.conversations)
        places = range(index * self.num_per_batch, (index + 1) * self.num_per_batch)
        orders = {number: self._order(number) for number in {place // size for place in places}}
        return [
            [
                replace(sample, id=f"supervised-{place}/{number}", key=AttemptKey(-1 - place, number))
                for number, sample in enumerate(self.conversations[orders[place // size][place % size]])
            ]
            for place in places
        ]

    def _order(self, number: int) -> list[int]:
        """Of pass ``number`` over the conversations."""
        order = list(range(len(self.conversations)))
        random.Random(f"supervised/{self.seed}/{number}").shuffle(order)
        return order

    def mix(self, plan: Sequence[Minibatch], index: int) -> list[Minibatch]:
        """``plan`` of rollout batch ``index`` with its conversations dealt out over the minibatches. The rl stream's
        samples, advantages and counts stay as they are; the supervised stream has its own counts."""
        drawn = self.of_batch(index)
        shares = [[s for samples in drawn[k :: len(plan)] for s in samples] for k in range(len(plan))]
        return [_with(minibatch, share) for minibatch, share in zip(plan, shares, strict=True)]


def _samples(row: Conversation, place: int, renderer: ChatRenderer, max_context: int) -> list[Sample]:
    weighted = conversation_samples(renderer, row.messages, row.weights, place)
    samples = [replace(w.sample, prefix_key="", weight_T=tuple(w.weight_T.tolist())) for w in weighted]
    check_length(samples, max_context, row.where)
    return samples


def _with(minibatch: Minibatch, samples: Sequence[Sample]) -> Minibatch:
    zeros = [torch.zeros(len(sample.ids)) for sample in samples]

    def padded(values: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if values is None else [*values, *zeros]

    every = (*minibatch.samples, *samples)
    return replace(
        minibatch,
        samples=every,
        advantages=[*minibatch.advantages, *zeros],
        proximal_logprobs=padded(minibatch.proximal_logprobs),
        reference_logprobs=padded(minibatch.reference_logprobs),
        values=padded(minibatch.values),
        value_targets=padded(minibatch.value_targets),
        totals=Totals.count(every, minibatch.totals.max_length),
    )


def counted_apart(metrics: Mapping[str, float], minibatch: Minibatch) -> dict[str, float]:
    """A step's metrics with the rl stream's counts of samples and tokens, and the supervised stream's beside them."""
    own = [sample for sample in minibatch.samples if sample.stream == "supervised"]
    num_tokens = sum(sample.num_trained for sample in own)
    return {
        **metrics,
        "num_samples": metrics["num_samples"] - len(own),
        "num_trained_tokens": metrics["num_trained_tokens"] - num_tokens,
        "supervised/num_samples": float(len(own)),
        "supervised/num_tokens": float(num_tokens),
    }
