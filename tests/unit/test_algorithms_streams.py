"""Streams that share a minibatch: terms, weights and denominators of their own. Legend: N tokens, T of a sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.algorithms import ComposedAlgorithm, build_algorithm
from headrace.algorithms.fields import STREAMS, LossOutput, StreamTotals, TokenFields, Totals, sample_columns
from headrace.config.schema import AlgorithmConfig
from headrace.types import AttemptKey, Episode, Group, Outcome, PolicyVersion, Sample, Task, Trace

NAN = math.nan


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def build(**options: Any) -> ComposedAlgorithm:
    config = AlgorithmConfig.model_validate({"objective": "reinforce", **options})
    algorithm = build_algorithm(config, asynchronous=False, max_new_tokens=16)
    assert isinstance(algorithm, ComposedAlgorithm)
    return algorithm


# Tokens: two of an rl episode, one of another with a teacher, two supervised, one of the distillation stream.
STREAM = torch.tensor([0, 0, 0, 1, 1, 2])
LOGPROBS, TEACHER = f64(-1.0, -2.0, -0.5, -3.0, -1.0, -0.7), f64(NAN, NAN, -0.9, NAN, NAN, -0.2)
TOTALS = Totals(
    num_tokens=8,
    num_episodes=4,
    max_length=16,
    supervised=StreamTotals(num_tokens=5, num_episodes=2),
    distillation=StreamTotals(num_tokens=3, num_episodes=2),
)


def mixed(**changes: Any) -> TokenFields:
    return TokenFields(
        **{
            "advantages_N": f64(2, 2, -1, 0, 0, 0),
            "behaviour_logprobs_N": LOGPROBS,
            "proximal_logprobs_N": LOGPROBS,
            "reference_logprobs_N": None,
            "weights_N": f64(1, 1, 1, 0.5, 1, 1),
            "episode_index_N": torch.tensor([0, 0, 1, 2, 2, 3]),
            "num_episodes": 4,
            "totals": TOTALS,
            "stream_N": STREAM,
            "teacher_logprobs_N": TEACHER,
            **changes,
        }
    )


def run(algorithm: ComposedAlgorithm, fields: TokenFields, values: Tensor = LOGPROBS) -> tuple[float, list[float]]:
    leaf = values.clone().requires_grad_()
    output: LossOutput = algorithm.loss(leaf, fields)
    loss = output.per_token_N.sum() / output.denominator
    loss.backward()
    assert leaf.grad is not None
    return loss.item(), leaf.grad.tolist()


def test_each_stream_has_its_own_denominator_and_weights() -> None:
    """rl over 8 tokens, cross-entropy over 5 with weights .5 and 1, k3+ to the teacher over 3."""
    loss, gradient = run(build(aggregation="token_mean"), mixed())
    d_rl, d_own = -0.5 + 0.9, -0.7 + 0.2
    k3 = [math.exp(-d) - 1 + d for d in (d_rl, d_own)]
    expected = (2 * 1 + 2 * 2 - 0.5) / 8 + (0.5 * 3 + 1) / 5 + sum(k3) / 3
    assert loss == pytest.approx(expected, rel=1e-12)
    assert gradient == pytest.approx([-2 / 8, -2 / 8, 1 / 8 + d_rl / 3, -0.5 / 5, -1 / 5, d_own / 3], rel=1e-12)


def test_coefficients_and_aggregations_of_the_streams() -> None:
    """Cross-entropy halved and over 2 episodes, the teacher's k1 doubled and summed; rl by its own aggregation."""
    algorithm = build(
        aggregation="token_sum",
        supervised={"coefficient": 0.5, "aggregation": "seq_mean_token_mean"},
        distillation={"coefficient": 2.0, "estimator": "k1", "aggregation": "token_sum"},
    )
    loss, gradient = run(algorithm, mixed())
    assert loss == pytest.approx(5.5 + 0.5 * (0.5 * 3 + 1) / 2 / 2 + 2 * (0.4 - 0.5), rel=1e-12)
    assert gradient == pytest.approx([-2, -2, 1 + 2, -0.5 * 0.5 / 4, -0.5 / 4, 2], rel=1e-12)


def test_unbiased_distillation_carries_the_ratio() -> None:
    """Times exp(l - lo) with its gradient: slope r (k + k')."""
    proximal = LOGPROBS - 0.3
    algorithm = build(aggregation="token_sum", distillation={"estimator": "k1", "unbiased": True})
    _, gradient = run(algorithm, mixed(proximal_logprobs_N=proximal))
    assert gradient[5] == pytest.approx(math.exp(0.3) * (-0.5 + 1) / 3, rel=1e-12)
    to_behaviour = build(
        objective="ratio", ratio_anchor="behaviour", distillation={"estimator": "k1", "unbiased": True}
    )
    _, gradient = run(to_behaviour, mixed(behaviour_logprobs_N=LOGPROBS + 0.1))
    assert gradient[5] == pytest.approx(math.exp(-0.1) * (-0.5 + 1) / 3, rel=1e-12)


def test_supervised_tokens_alone_are_supervised_fine_tuning() -> None:
    """Without any rl token, whatever the preset: -l over the tokens of the minibatch."""
    totals = Totals(num_tokens=0, num_episodes=0, max_length=16, supervised=StreamTotals(num_tokens=4, num_episodes=1))
    for preset in ("grpo", "dapo", "m2po"):
        fields = TokenFields(
            advantages_N=f64(0, 0),
            behaviour_logprobs_N=f64(0, 0),
            proximal_logprobs_N=None,
            reference_logprobs_N=None,
            weights_N=f64(1, 1),
            episode_index_N=torch.tensor([0, 0]),
            num_episodes=1,
            totals=totals,
            stream_N=torch.tensor([1, 1]),
        )
        algorithm = build_algorithm(AlgorithmConfig(preset=preset), asynchronous=False, max_new_tokens=16)
        assert isinstance(algorithm, ComposedAlgorithm)
        loss, gradient = run(algorithm, fields, f64(-1.0, -3.0))
        assert loss == 1.0 and gradient == [-0.25, -0.25]
        output = algorithm.loss(f64(-1.0, -3.0), fields)
        assert output.metrics == {"supervised/nll": (4.0, 2.0)}


def test_metrics_count_the_tokens_of_their_stream() -> None:
    """FAILURES 63: ratio over the rl tokens alone, cross-entropy over the supervised ones."""
    metrics = build().loss(LOGPROBS, mixed()).metrics
    assert metrics["policy/ratio"] == (3.0, 3.0)
    assert metrics["supervised/nll"] == (4.0, 2.0)
    total, count = metrics["distillation/kl"]
    assert count == 2 and total == pytest.approx(math.exp(-0.4) - 0.6 + math.exp(0.5) - 1.5)


def test_masks_and_kinds_that_do_not_fit_are_named() -> None:
    """A distillation token without a teacher, tokens that the minibatch's counts do not know, nothing at all."""
    with pytest.raises(ValueError, match=r"needs fields\.teacher_logprobs_N"):
        build().loss(LOGPROBS, mixed(teacher_logprobs_N=None))
    with pytest.raises(ValueError, match="a token of the distillation stream has no teacher"):
        build().loss(LOGPROBS, mixed(teacher_logprobs_N=f64(NAN, NAN, -1, NAN, NAN, NAN)))
    with pytest.raises(ValueError, match="stream 'supervised'"):
        build().loss(LOGPROBS, mixed(totals=Totals(num_tokens=8, num_episodes=4, max_length=16)))
    with pytest.raises(ValueError, match="without trained tokens"):
        empty = torch.empty(0, dtype=torch.int64)
        build().loss(torch.empty(0), mixed(stream_N=empty, teacher_logprobs_N=None))


# ------------------------------------------------------------------------------------------- from the samples


def sample(member: int, mask: tuple[int, ...] = (0, 1, 0, 1), **fields: Any) -> Sample:
    key = AttemptKey(0, member)
    return Sample(
        **{
            "id": f"{key}/0",
            "key": key,
            "ids": tuple(range(len(mask))),
            "mask": mask,
            "behaviour_logprobs": tuple(-float(t) for t in range(len(mask))),
            "versions": tuple(PolicyVersion(1, t) for t in range(len(mask))),
            **fields,
        }
    )


SUPERVISED = sample(1, (0, 1, 1, 1), stream="supervised", weight=0.5, weight_T=(9.0, 1.0, 2.0, 4.0))
TAUGHT = sample(2, stream="distillation", teacher_logprobs=(-9.0, -0.5, -9.0, -0.25), versions=(None,) * 4)
RL_TAUGHT = sample(3, (0, 0, 1, 0), teacher_logprobs=(-9.0, -9.0, -0.75, -9.0), reward=0.25, weight=2.0)


def test_totals_count_each_stream() -> None:
    """Distillation counts whoever has a teacher; rl and supervised their own; episodes are counted once."""
    branch = sample(0, (0, 1), id="g0m0/1", reward=1.0)
    totals = Totals.count([sample(0, reward=1.0), branch, SUPERVISED, TAUGHT, RL_TAUGHT], 7)
    assert (totals.num_tokens, totals.num_episodes, totals.max_length) == (2 + 1 + 1, 2, 7)
    assert totals.supervised == StreamTotals(num_tokens=3, num_episodes=1)
    assert totals.distillation == StreamTotals(num_tokens=3, num_episodes=2)
    assert totals.of("rl") is totals
    assert totals.of("supervised") == Totals(num_tokens=3, num_episodes=1, max_length=7)


def test_columns_follow_the_samples() -> None:
    """Trained tokens in order of the samples: weights multiply, ages count from the batch's version, NaN where there
    is neither teacher nor reward."""
    columns = sample_columns([SUPERVISED, TAUGHT, RL_TAUGHT], PolicyVersion(2, 5), torch.device("cpu"))
    assert columns["behaviour_logprobs_N"].tolist() == [-1, -2, -3, -1, -3, -2]
    assert columns["weights_N"].tolist() == [0.5, 1.0, 2.0, 1.0, 1.0, 2.0]
    assert columns["episode_index_N"].tolist() == [0, 0, 0, 1, 1, 2] and columns["num_episodes"] == 3
    assert columns["stream_N"] is not None
    assert [STREAMS[i] for i in columns["stream_N"].tolist()] == ["supervised"] * 3 + ["distillation"] * 2 + ["rl"]
    assert columns["teacher_logprobs_N"] is not None
    assert columns["teacher_logprobs_N"].nan_to_num(7.0).tolist() == [7, 7, 7, -0.5, -0.25, -0.75]
    assert columns["rewards_N"].nan_to_num(7.0).tolist() == [7, 7, 7, 7, 7, 0.25]
    assert columns["ages_N"] is not None and columns["ages_N"].tolist() == [4, 3, 2, 0, 0, 3]


def test_plain_rl_samples_have_plain_columns() -> None:
    """Nothing is built that no stream needs."""
    columns = sample_columns([sample(0, reward=1.0)], None, torch.device("cpu"))
    assert columns["stream_N"] is columns["teacher_logprobs_N"] is columns["ages_N"] is None
    assert columns["rewards_N"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weight_T": (1.0,)}, "weight_T has 1 entries for 4 ids"),
        ({"teacher_logprobs": (0.0,) * 5}, "teacher_logprobs has 5 entries for 4 ids"),
        ({"stream": "distillation"}, "no teacher"),
        ({"stream": "supervised", "teacher_logprobs": (0.0,) * 4}, "has a teacher"),
    ],
)
def test_samples_that_contradict_their_stream_are_refused(fields: dict[str, Any], message: str) -> None:
    """I2: the stream and what it needs are known when the sample is made."""
    with pytest.raises(ValueError, match=f"g0m0/0.*{message}"):
        sample(0, **fields)


def test_a_groups_baseline_is_of_its_group() -> None:
    """FAILURES 50: joined by id, as its members are."""
    task = Task(id="t", messages=({"role": "user", "content": "?"},))

    def episode(group: int) -> Episode:
        return Episode(key=AttemptKey(group, 4), task=task, turns=(), trace=Trace(), outcome=Outcome.DONE)

    assert Group(id=5, task=task, episodes=(), baseline=episode(5)).episodes == ()
    with pytest.raises(ValueError, match="g6m4 of task t was put into group 5"):
        Group(id=5, task=task, episodes=(), baseline=episode(6))
