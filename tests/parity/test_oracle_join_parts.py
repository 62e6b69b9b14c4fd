"""Ratios, choices, entropy, distributions and streams of the blind oracle, by the implementation in float64 (I17)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from join_support import (
    assert_close,
    build,
    fields_of,
    flat,
    index_of,
    nest,
    per_sequence,
    run,
    selected,
)
from oracle_core import Mask, Nested
from oracle_inputs import BATCH, CAPPED, LOGITS, STREAM_WEIGHTS, SUPERVISED_MASK, TEACHER_LOGITS, VERSIONS
from oracle_vectors import EXPECTED
from torch import Tensor

from headrace.algorithms import ratios, selections
from headrace.algorithms.fields import StreamTotals, TokenFields, Totals
from headrace.model.head import OutputHead
from headrace.model.logprobs import score_hidden
from headrace.model.packing import pack
from headrace.types import AttemptKey, Sample

MASK = BATCH.mask
NEW_N, OLD_N, ROLL_N = (flat(rows, MASK) for rows in (BATCH.new, BATCH.old, BATCH.roll))
INDEX_N, NUM_EPISODES = index_of(MASK), len(MASK)


# ------------------------------------------------------------------------------------------------------- ratios


def test_ratios_of_whole_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """I17: the geometric mean (GSPO), the product to the behaviour policy (TOPR), the drift (OPSM), and the cap."""
    level = ratios.RATIO_LEVELS["sequence"]
    sequence_N = ratios.bounded_exp(level(NEW_N, OLD_N, INDEX_N, NUM_EPISODES))
    assert_close(per_sequence(sequence_N, MASK), EXPECTED["sequence_ratio"])
    trajectory_N = ratios.bounded_exp(ratios.RATIO_LEVELS["trajectory"](NEW_N, ROLL_N, INDEX_N, NUM_EPISODES))
    assert_close(per_sequence(trajectory_N, MASK), EXPECTED["trajectory_ratio"])
    drift_E = ratios.episode_means(OLD_N - NEW_N, INDEX_N, NUM_EPISODES)
    assert_close(drift_E.tolist(), EXPECTED["opsm_shift"])
    monkeypatch.setattr(ratios, "MAX_LOG_RATIO", 0.5)
    new_N, old_N = flat(CAPPED.new, CAPPED.mask), flat(CAPPED.old, CAPPED.mask)
    capped_N = ratios.bounded_exp(level(new_N, old_N, index_of(CAPPED.mask), 2))
    assert_close(per_sequence(capped_N, CAPPED.mask), EXPECTED["sequence_ratio_capped"])


def test_interpolated_proximal_policy() -> None:
    """I17: A-3PO's share of the way, and the log-probabilities there, from each token's version."""
    shares = []
    for behaviour, proximal, version in ((2, 4, 5), (4, 4, 5), (5, 4, 5), (5, 5, 5), (3, 5, 5)):
        one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        moved = ratios.interpolated_proximal(one, zero, torch.tensor([behaviour]), proximal, version)
        shares.append(float(moved))
    assert_close(shares, EXPECTED["interpolation"])
    versions_N = flat([[float(v) for v in row] for row in VERSIONS], MASK).long()
    found_N = ratios.interpolated_proximal(NEW_N, ROLL_N, versions_N, 4, 5)
    assert_close(nest(found_N, MASK), EXPECTED["interpolated_proximal"])


# ------------------------------------------------------------------------------------------------------ choices


def test_covariances() -> None:
    """I17: of log-probability and advantage, centred on the batch."""
    found_N = selections.covariances(flat(BATCH.advantage, MASK), NEW_N)
    found = [[i, t, value] for (i, t), value in zip(BATCH.cells(), found_N.tolist(), strict=True)]
    assert_close(found, EXPECTED["covariances"])


@pytest.mark.parametrize(
    ("name", "bounds"), [("clip_cov_candidates", (0.1, 0.605)), ("clip_cov_candidates_wide", (-9.0, 9.0))]
)
def test_clip_cov_candidates(name: str, bounds: tuple[float, float]) -> None:
    """I17: within the bounds and not clipped already; with a fraction of 1 all of them are chosen."""
    config = {
        "preset": "clip_cov",
        "clip_high": 0.28,
        "selection": {"fraction": 1.0, "low": bounds[0], "high": bounds[1]},
    }
    chosen_N = selected(config, BATCH)
    found = [list(cell) for cell, is_chosen in zip(BATCH.cells(), chosen_N.tolist(), strict=True) if is_chosen]
    assert found == EXPECTED[name]


@pytest.mark.parametrize("anchor", ["behaviour", "proximal"])
def test_m2po_keep(anchor: str) -> None:
    """I17: the second moment is that of the ratio to the behaviour policy, whatever the anchor of the loss's ratio."""
    chosen_N = selected({"preset": "m2po", "ratio_anchor": anchor, "selection": {"threshold": 0.1}}, BATCH)
    assert_close(nest((~chosen_N).double(), MASK), EXPECTED["m2po_keep"])


# ------------------------------------------------------------------------------------------- whole distributions


def entropies(logits: list[list[float]]) -> tuple[Tensor, Tensor]:
    """(entropies [N], logits [N, V] as their leaf), by the scorer of the model room under an identity head."""
    leaf_NV = torch.tensor(logits, dtype=torch.float64).requires_grad_()
    samples = [
        Sample(
            id=f"g0m{m}/0",
            key=AttemptKey(0, m),
            ids=(0, 0),
            mask=(0, 1),
            behaviour_logprobs=(0.0, 0.0),
            versions=(None, None),
        )
        for m in range(len(logits))
    ]
    row = pack(list(enumerate(samples)), share_prompts=False, dtype=torch.float64, device=torch.device("cpu"))
    head = OutputHead(torch.eye(leaf_NV.shape[1], dtype=torch.float64), None)
    return score_hidden(leaf_NV, head, row, max_logit_tokens=2)[1], leaf_NV


def test_entropy() -> None:
    """I17: H = logsumexp(z) - sum p z, and its gradient by the logits."""
    entropy_N, leaf_NV = entropies(LOGITS)
    (gradient_NV,) = torch.autograd.grad(entropy_N.sum(), leaf_NV)
    found = [[h, g] for h, g in zip(entropy_N.tolist(), gradient_NV.tolist(), strict=True)]
    assert_close(found, EXPECTED["entropy"])


def test_entropy_bonus() -> None:
    """I17: -0.01 H over the trained tokens of two episodes, the second of one; an untrained one has no gradient."""
    entropy_N, leaf_NV = entropies([LOGITS[0], LOGITS[2], LOGITS[0]])
    algorithm = build(objective="reinforce", aggregation="token_mean", entropy_coefficient=0.01)
    ones_N = torch.ones(3, dtype=torch.float64)
    output = algorithm.loss(-ones_N, distribution_fields(ones_N, entropy_N=entropy_N))
    loss = output.per_token_N.sum() / output.denominator
    (gradient_NV,) = torch.autograd.grad(loss, leaf_NV)
    first, third, other = gradient_NV.tolist()
    assert_close([loss.item(), [[first, [0.0] * 4, third], [other]]], EXPECTED["entropy_bonus"])


def distribution_fields(weights_N: Tensor, **changes: Any) -> TokenFields:
    """Tokens of one episode, with these weights."""
    zeros_N = torch.zeros_like(weights_N)
    counts = StreamTotals(num_tokens=len(zeros_N), num_episodes=1)
    fields: dict[str, Any] = {
        "advantages_N": zeros_N,
        "behaviour_logprobs_N": zeros_N,
        "proximal_logprobs_N": None,
        "reference_logprobs_N": None,
        "weights_N": weights_N,
        "episode_index_N": zeros_N.long(),
        "num_episodes": 1,
        "totals": Totals(num_tokens=len(zeros_N), num_episodes=1, max_length=6, supervised=counts, distillation=counts),
    }
    return TokenFields(**{**fields, **changes})


def expectation(weights_V: Tensor, logits_V: Tensor, stream: int, **config: Any) -> tuple[float, list[float]]:
    """sum_v w_v loss(v) over the whole vocabulary as tokens of a stream, and its gradient by the logits."""
    teacher_V = config.pop("teacher_V", None)
    fields = distribution_fields(
        weights_V, stream_N=torch.full((len(weights_V),), stream), teacher_logprobs_N=teacher_V
    )
    output = build(**config).loss(logits_V.log_softmax(0), fields)
    loss = output.per_token_N.sum() / output.denominator
    (gradient_V,) = torch.autograd.grad(loss, logits_V)
    return loss.item(), gradient_V.tolist()


def test_reverse_kl_is_the_expectation_of_distillation() -> None:
    """I17: headrace distils from sampled tokens. Over all tokens, weighed by the student's probabilities, k1 has the
    value of KL(student || teacher), and k2 and k3+ have its gradient."""
    found = []
    for student, teacher in zip(LOGITS, TEACHER_LOGITS, strict=True):
        logits_V = torch.tensor(student, dtype=torch.float64).requires_grad_()
        weights_V = logits_V.detach().softmax(0)
        teacher_V = torch.tensor(teacher, dtype=torch.float64).log_softmax(0)

        def distilled(
            estimator: str, weights_V: Tensor = weights_V, logits_V: Tensor = logits_V, teacher_V: Tensor = teacher_V
        ) -> tuple[float, list[float]]:
            config = {"estimator": estimator, "aggregation": "token_sum"}
            return expectation(weights_V, logits_V, 2, teacher_V=teacher_V, distillation=config)

        assert_close(distilled("k2")[1], distilled("k3+")[1])
        assert_close(distilled("k3")[0], distilled("k1")[0])
        found.append([distilled("k1")[0], distilled("k3+")[1]])
    assert_close(found, EXPECTED["reverse_kl"])


def test_forward_kl_is_the_expectation_of_cross_entropy() -> None:
    """I17: the supervised stream weighed by the teacher's probabilities, less the teacher's entropy."""
    found = []
    for student, teacher in zip(LOGITS, TEACHER_LOGITS, strict=True):
        logits_V = torch.tensor(student, dtype=torch.float64).requires_grad_()
        teacher_V = torch.tensor(teacher, dtype=torch.float64).log_softmax(0)
        loss, gradient = expectation(teacher_V.exp(), logits_V, 1, supervised={"aggregation": "token_sum"})
        entropy_N, _ = entropies([teacher])
        found.append([loss - entropy_N.item(), gradient])
    assert_close(found, EXPECTED["forward_kl"])


# ------------------------------------------------------------------------------------------------------ streams


def stream_fields(stream: int, mask: Mask, weights: Nested) -> TokenFields:
    """The batch's tokens under another mask as tokens of one stream, with the oracle's weights."""
    batch = dataclasses.replace(BATCH, mask=mask)
    counts = StreamTotals(num_tokens=sum(map(sum, mask)), num_episodes=sum(map(any, mask)))
    return fields_of(
        batch,
        weights_N=flat(weights, mask),
        stream_N=torch.full((counts.num_tokens,), stream),
        teacher_logprobs_N=flat(BATCH.ref, mask) if stream == 2 else None,
        totals=Totals(num_tokens=0, num_episodes=0, max_length=6, supervised=counts, distillation=counts),
    )


def of_stream(stream: int, mask: Mask, **config: Any) -> list[Any]:
    batch = dataclasses.replace(BATCH, mask=mask)
    loss, gradient, _ = run(build(**config), batch, stream_fields(stream, mask, STREAM_WEIGHTS))
    return [loss, gradient]


def test_cross_entropy() -> None:
    """I17: weighed tokens over the stream's own count."""
    assert_close(of_stream(1, SUPERVISED_MASK), EXPECTED["cross_entropy"])


def test_distillation() -> None:
    """I17: k2 towards the teacher; k3+ has its gradient; and the policy gradient with the advantage log teacher - log
    policy, whose value the oracle gives, is that very gradient."""
    assert_close(of_stream(2, MASK, distillation={"estimator": "k2"}), EXPECTED["distillation_k2"])
    assert_close(of_stream(2, MASK)[1], EXPECTED["distillation"][1])
    pull = [[q - p for p, q in zip(*pair, strict=True)] for pair in zip(BATCH.new, BATCH.ref, strict=True)]
    fields = fields_of(BATCH, advantages_N=flat(pull, MASK), weights_N=flat(STREAM_WEIGHTS, MASK))
    loss, gradient, _ = run(build(objective="reinforce", aggregation="token_mean"), BATCH, fields)
    assert_close([loss, gradient], EXPECTED["distillation"])


def joined_streams() -> tuple[float, list[Nested]]:
    """One micro-batch of rl, supervised and distilled tokens, in that order."""
    masks = [MASK, SUPERVISED_MASK, MASK]
    counts = [sum(map(sum, mask)) for mask in masks]
    parts = [fields_of(BATCH), *(stream_fields(s, masks[s], STREAM_WEIGHTS) for s in (1, 2))]

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    totals = Totals(
        num_tokens=counts[0],
        num_episodes=7,
        max_length=6,
        supervised=StreamTotals(num_tokens=counts[1], num_episodes=4),
        distillation=StreamTotals(num_tokens=counts[2], num_episodes=7),
    )
    nothing_N = torch.full((counts[0] + counts[1],), math.nan, dtype=torch.float64)
    fields = TokenFields(
        **{n: cat(n) for n in ("advantages_N", "behaviour_logprobs_N", "proximal_logprobs_N", "weights_N")},
        reference_logprobs_N=None,
        episode_index_N=torch.cat([part.episode_index_N + 7 * k for k, part in enumerate(parts)]),
        num_episodes=21,
        totals=totals,
        stream_N=torch.tensor([0] * counts[0] + [1] * counts[1] + [2] * counts[2]),
        teacher_logprobs_N=torch.cat([nothing_N, flat(BATCH.ref, MASK)]),
    )
    logprobs_N = torch.cat([flat(BATCH.new, mask) for mask in masks]).requires_grad_()
    algorithm = build(
        preset="dapo",
        supervised={"coefficient": 0.3},
        distillation={"coefficient": 0.05, "estimator": "k2"},
    )
    output = algorithm.loss(logprobs_N, fields)
    loss = output.per_token_N.sum() / output.denominator
    loss.backward()
    assert logprobs_N.grad is not None
    gradients = torch.split(logprobs_N.grad, counts)
    return loss.item(), [nest(g, mask) for g, mask in zip(gradients, masks, strict=True)]


def test_streams() -> None:
    """I17: PPO, cross-entropy and distillation in one pack, each over its own count. The oracle's distillation has the
    value of the policy gradient, headrace's that of k2: the difference of the two vectors of that name."""
    loss, gradients = joined_streams()
    loss += 0.05 * (EXPECTED["distillation"][0] - EXPECTED["distillation_k2"][0])
    assert_close([loss, gradients], EXPECTED["streams"])


JOINED = {
    "sequence_ratio",
    "sequence_ratio_capped",
    "trajectory_ratio",
    "opsm_shift",
    "interpolation",
    "interpolated_proximal",
    "covariances",
    "clip_cov_candidates",
    "clip_cov_candidates_wide",
    "m2po_keep",
    "entropy",
    "entropy_bonus",
    "reverse_kl",
    "forward_kl",
    "cross_entropy",
    "distillation",
    "distillation_k2",
    "streams",
}
