"""However a minibatch is cut, ordered and mixed, its loss and gradient are the same.

Legend: T tokens of a sample, N trained tokens of a micro-batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.algorithms import PRESETS, ComposedAlgorithm, build_algorithm
from headrace.algorithms.fields import LossOutput, Minibatch, TokenFields, Totals, sample_columns
from headrace.config.schema import AlgorithmConfig
from headrace.types import AttemptKey, PolicyVersion, Sample

VERSION = PolicyVersion(0, 3)
SELECT_MANY = {"fraction": 0.3}


def build(**options: Any) -> ComposedAlgorithm:
    config = AlgorithmConfig.model_validate(options)
    algorithm = build_algorithm(config, asynchronous=False, max_new_tokens=16)
    assert isinstance(algorithm, ComposedAlgorithm)
    return algorithm


COMPOSITIONS: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS if name not in ("clip_cov", "kl_cov", "m2po")),
    {"preset": "clip_cov", "selection": {**SELECT_MANY, "low": -0.02, "high": 5.0}},
    {"preset": "kl_cov", "selection": SELECT_MANY},
    {"preset": "m2po", "selection": {"threshold": 0.1}},
    {"kl": {"coefficient": 0.2}, "correction": {"type": "masked", "low": 0.8, "high": 1.2}},
    {"kl": {"coefficient": 0.2, "unbiased": True, "aggregation": "token_mean"}, "entropy_coefficient": 0.1},
    {"preset": "gspo", "aggregation": "token_mean", "correction": {"type": "truncated", "high": 1.1}},
    {"correction": {"type": "truncated", "high": 1.1, "level": "sequence", "batch_normalised": True}},
    {"correction": {"type": "masked", "low": 0.7, "high": 1.4, "batch_normalised": True, "veto": 0.4}},
    {"correction": {"type": "decoupled", "level": "geometric", "max_drift": 0.05, "proximal": "interpolated"}},
    {"preset": "grpo", "supervised": {"coefficient": 0.5, "aggregation": "seq_mean_token_mean"}},
    {"preset": "dapo", "distillation": {"estimator": "k3", "unbiased": True, "aggregation": "seq_mean_token_sum"}},
]


@dataclass(frozen=True)
class Case:
    """A minibatch with float64 log-probabilities of the current policy: [T] for each sample."""

    minibatch: Minibatch
    current: list[Tensor]

    def gradient(self, algorithm: ComposedAlgorithm, chunks: list[list[int]]) -> tuple[float, list[Tensor]]:
        """Loss and gradient per sample when each chunk of samples is one micro-batch, in the given order."""
        minibatch = self.minibatch
        if algorithm.needs.prepare:
            minibatch = algorithm.prepare(minibatch, self.current, step=5)
        leaves = [values_T.clone().requires_grad_() for values_T in self.current]
        loss = 0.0
        for chunk in chunks:
            output: LossOutput = algorithm.loss(*fields_of(minibatch, leaves, chunk))
            part = output.per_token_N.sum() / output.denominator
            part.backward()
            loss += part.item()
        return loss, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def fields_of(minibatch: Minibatch, leaves: list[Tensor], chunk: list[int]) -> tuple[Tensor, TokenFields]:
    samples = [minibatch.samples[i] for i in chunk]
    slots = [torch.tensor([t for t, trained in enumerate(s.mask) if trained]) for s in samples]

    def gather(values: Any) -> Tensor:
        return torch.cat([values[i][s] for i, s in zip(chunk, slots, strict=True)])

    logprobs_N = gather(leaves)
    assert minibatch.proximal_logprobs is not None
    fields = TokenFields(
        advantages_N=gather(minibatch.advantages),
        proximal_logprobs_N=gather(minibatch.proximal_logprobs),
        reference_logprobs_N=gather(minibatch.reference_logprobs),
        totals=minibatch.totals,
        entropy_N=logprobs_N.square(),
        selected_N=None if minibatch.selected is None else gather(minibatch.selected),
        mean_correction=minibatch.mean_correction,
        **sample_columns(samples, minibatch.version, torch.device("cpu")),
    )
    return logprobs_N, fields


def make_case(seed: int, lengths: list[int], streams: list[str]) -> Case:
    """One episode for each length; the last of more than one token is two samples (branches)."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    samples: list[Sample] = []
    for i, (length, stream) in enumerate(zip(lengths, streams, strict=True)):
        parts = [length] if i or length < 2 else [1, length - 1]
        reward = rng.choice([0.0, 1.0]) if stream == "rl" else None
        for branch, num_tokens in enumerate(parts):
            samples.append(make_sample(rng, AttemptKey(i % 3, i), branch, num_tokens, stream, reward))

    def noise(scale: float) -> list[Tensor]:
        values = [torch.randn(len(s.ids), generator=generator, dtype=torch.float64) for s in samples]
        return [v * scale - 0.9 for v in values]

    sign = {s.key: rng.choice([-1.0, 0.0, 0.5, 1.5]) if s.stream == "rl" else 0.0 for s in samples}
    minibatch = Minibatch(
        samples=tuple(samples),
        advantages=[torch.tensor(s.mask) * torch.tensor(sign[s.key], dtype=torch.float64) for s in samples],
        proximal_logprobs=noise(0.3),
        reference_logprobs=noise(0.3),
        totals=Totals.count(samples, 16),
        version=VERSION,
    )
    return Case(minibatch, noise(0.3))


def make_sample(
    rng: random.Random, key: AttemptKey, branch: int, num_tokens: int, stream: str, reward: float | None
) -> Sample:
    mask = (0, *([1] * num_tokens))
    teaches = stream == "distillation" or (stream == "rl" and rng.random() < 0.3)
    behaviour = tuple(rng.gauss(-0.9, 0.3) for _ in mask)
    return Sample(
        id=f"{key}/{branch}",
        key=key,
        ids=tuple(range(len(mask))),
        mask=mask,
        stream=stream,  # type: ignore[arg-type]
        weight=rng.choice([1.0, 0.5]),
        weight_T=tuple(rng.random() for _ in mask) if rng.random() < 0.5 else None,
        behaviour_logprobs=behaviour,
        versions=tuple(PolicyVersion(0, rng.randrange(4)) for _ in mask),
        teacher_logprobs=tuple(rng.gauss(-0.9, 0.3) for _ in mask) if teaches else None,
        reward=reward,
    )


def reordered(case: Case, order: list[int]) -> Case:
    def pick(values: Any) -> Any:
        return [values[i] for i in order]

    m = case.minibatch
    return Case(
        Minibatch(
            samples=tuple(pick(m.samples)),
            advantages=pick(m.advantages),
            proximal_logprobs=pick(m.proximal_logprobs),
            reference_logprobs=pick(m.reference_logprobs),
            totals=m.totals,
            version=m.version,
        ),
        pick(case.current),
    )


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=str)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_split_and_order_gives_the_same_gradient(composition: dict[str, Any], data: st.DataObject) -> None:
    """I4, FAILURES 53, 55: one denominator for each stream of the minibatch, one choice of tokens, whatever the
    micro-batches, their order, and the order of the samples in the minibatch."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    streams = data.draw(
        st.lists(
            st.sampled_from(["rl", "rl", "supervised", "distillation"]), min_size=len(lengths), max_size=len(lengths)
        )
    )
    case = make_case(data.draw(st.integers(0, 2**16)), lengths, streams)
    algorithm = build(**composition)
    samples = case.minibatch.samples
    whole_loss, whole = case.gradient(algorithm, [list(range(len(samples)))])
    order = list(data.draw(st.permutations(range(len(samples)))))
    by_episode: dict[AttemptKey, list[int]] = {}
    for place, i in enumerate(order):
        by_episode.setdefault(samples[i].key, []).append(place)
    units = list(by_episode.values())
    cuts = sorted(data.draw(st.sets(st.integers(1, len(units) - 1)))) if len(units) > 1 else []
    chunks = [[i for unit in units[a:b] for i in unit] for a, b in zip([0, *cuts], [*cuts, len(units)], strict=True)]
    split_loss, split = reordered(case, order).gradient(algorithm, chunks)
    assert split_loss == pytest.approx(whole_loss, rel=1e-10, abs=1e-12)
    for place, i in enumerate(order):
        torch.testing.assert_close(split[place], whole[i], rtol=1e-9, atol=1e-13)
    for sample, gradient_T in zip(samples, whole, strict=True):
        assert not gradient_T[torch.tensor(sample.mask) == 0].any(), "a masked token has no gradient"


def test_the_cases_reach_every_choice() -> None:
    """The test above proves something: choices choose some tokens and leave some, and weights are normalised."""
    case = make_case(3, [5, 4, 5, 3], ["rl"] * 4)
    for composition in COMPOSITIONS:
        algorithm = build(**composition)
        if algorithm.needs.prepare:
            prepared = algorithm.prepare(case.minibatch, case.current, step=5)
            if algorithm.resolved.selection != "none":
                assert prepared.selected is not None
                flags = [bool(v) for values_T in prepared.selected for v in values_T]
                assert any(flags) and not all(flags), composition
            else:
                assert prepared.mean_correction not in (None, 1.0), composition


def test_adding_supervised_samples_moves_no_rl_gradient() -> None:
    """Streams have denominators of their own: the gradient of the rl samples is the same with and without others."""
    mixed = make_case(4, [3, 2, 4, 5], ["rl", "supervised", "rl", "distillation"])
    samples = mixed.minibatch.samples
    rl = [i for i, s in enumerate(samples) if s.stream == "rl"]
    alone = reordered(mixed, rl)
    totals = Totals.count(alone.minibatch.samples, 16)
    alone = Case(Minibatch(**{**{f: getattr(alone.minibatch, f) for f in FIELDS}, "totals": totals}), alone.current)
    for preset in ("grpo", "dapo", "dr_grpo"):
        algorithm = build(preset=preset, distillation={"coefficient": 0.0})
        _, together = mixed.gradient(algorithm, [list(range(len(samples)))])
        _, apart = alone.gradient(algorithm, [list(range(len(rl)))])
        for place, i in enumerate(rl):
            torch.testing.assert_close(together[i], apart[place], rtol=1e-12, atol=1e-15)
        assert any(together[i].any() for i in rl)


FIELDS = ("samples", "advantages", "proximal_logprobs", "reference_logprobs", "version")
