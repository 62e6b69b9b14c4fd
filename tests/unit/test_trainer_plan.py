"""A rollout batch to minibatches, and the schedule over its steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch

from headrace.algorithms.fields import Minibatch
from headrace.config.base import ScheduleConfig
from headrace.config.schema import TrainerConfig
from headrace.protocols import AlgorithmNeeds
from headrace.testing import Reinforce, make_sample
from headrace.trainer.plan import plan_update
from headrace.trainer.schedule import learning_rate
from headrace.types import PolicyVersion, RolloutBatch, Sample

SAMPLES = tuple(
    make_sample([1, 2], [3] * (1 + g + m), group=g, member=m, reply_mask=[1] * (1 + g + m))
    for g in range(4)
    for m in range(3)
)
ADVANTAGES = {s.id: 0.0 if s.key.group == 2 else 1.0 for s in SAMPLES}


class FakeTrainer:
    """Counts passes; a sample's log-probabilities are its number of ids."""

    def __init__(self) -> None:
        self.passes: list[tuple[str, tuple[str, ...]]] = []

    def forward(self, samples: Sequence[Sample], model: str) -> list[torch.Tensor]:
        self.passes.append((model, tuple(s.id for s in samples)))
        return [torch.full((len(s.ids),), float(len(s.ids))) for s in samples]


def plan(index: int = 0, seed: int = 0, needs: AlgorithmNeeds | None = None, **config: Any) -> tuple[Any, FakeTrainer]:
    trainer = FakeTrainer()
    batch = RolloutBatch(index=index, groups=(), samples=SAMPLES, version=PolicyVersion(0, 0))
    algorithm = Reinforce(ADVANTAGES, needs=needs or AlgorithmNeeds())
    found = plan_update(batch, algorithm, trainer, TrainerConfig(**config), max_new_tokens=9, seed=seed)  # type: ignore[arg-type]
    return found, trainer


def ids(minibatches: Sequence[Minibatch]) -> list[list[str]]:
    return [[s.id for s in m.samples] for m in minibatches]


def test_one_step_makes_no_extra_pass() -> None:
    """The proximal policy of a single step is the current one: no pass is spent on it."""
    minibatches, trainer = plan()
    assert len(minibatches) == 1 and trainer.passes == []
    assert minibatches[0].proximal_logprobs is None and minibatches[0].reference_logprobs is None
    assert minibatches[0].totals.num_tokens == sum(s.num_trained for s in SAMPLES)
    assert (minibatches[0].totals.num_episodes, minibatches[0].totals.max_length) == (12, 9)


def test_several_steps_compute_proximal_once_before_the_first() -> None:
    """Once per batch, by the first epoch's minibatches, without the samples whose pass will be skipped."""
    minibatches, trainer = plan(num_minibatches=2, num_epochs=3)
    assert len(minibatches) == 6
    needed = [tuple(s for s in part if not s.startswith("g2")) for part in ids(minibatches[:2])]
    assert trainer.passes == [("policy", part) for part in needed]
    for minibatch in minibatches:
        assert minibatch.proximal_logprobs is not None
        for sample, logprobs in zip(minibatch.samples, minibatch.proximal_logprobs, strict=True):
            assert float(logprobs[0]) == (0.0 if sample.key.group == 2 else len(sample.ids))


def test_needs_are_served() -> None:
    """Reference and proximal passes over all samples, before the advantages."""
    minibatches, trainer = plan(needs=AlgorithmNeeds(reference=True, proximal=True))
    everything = tuple(s.id for s in SAMPLES)
    assert trainer.passes == [("reference", everything), ("policy", everything)]
    assert minibatches[0].reference_logprobs is not None and minibatches[0].proximal_logprobs is not None


def test_each_epoch_holds_each_sample_once_in_whole_groups() -> None:
    """Nothing lost, nothing twice; groups stay whole; totals are the minibatch's own."""
    minibatches, _ = plan(num_minibatches=2, num_epochs=2)
    for epoch in (minibatches[:2], minibatches[2:]):
        assert sorted(chain(*ids(epoch))) == sorted(s.id for s in SAMPLES)
        groups = [{s.key.group for s in m.samples} for m in epoch]
        assert not groups[0] & groups[1]
        assert all(m.totals.num_tokens == sum(s.num_trained for s in m.samples) for m in epoch)


def test_more_minibatches_than_groups_split_by_episode() -> None:
    """Still the number of optimizer steps that the schedule was told."""
    minibatches, _ = plan(num_minibatches=6)
    assert len(minibatches) == 6
    assert sorted(chain(*ids(minibatches))) == sorted(s.id for s in SAMPLES)


def test_order_depends_on_seed_batch_and_epoch_alone() -> None:
    """I18, and F112: a resumed run cuts a batch as the uninterrupted one did."""
    options = {"num_minibatches": 4, "num_epochs": 2}
    first = ids(plan(**options)[0])
    assert first == ids(plan(**options)[0])
    others = [ids(plan(index=1, **options)[0]), ids(plan(seed=1, **options)[0]), first[4:] + first[:4]]
    assert all(first != other for other in others)


def test_bad_advantages_are_caught() -> None:
    """An algorithm's mistake is named before a pass is made with it."""

    class Wrong(Reinforce):
        def advantage(self, batch: RolloutBatch, **_: Any) -> list[torch.Tensor]:
            return [torch.full((len(s.ids),), float("nan")) for s in batch.samples]

    batch = RolloutBatch(index=0, groups=(), samples=SAMPLES, version=PolicyVersion(0, 0))
    with pytest.raises(ValueError, match="not finite"):
        plan_update(batch, Wrong(ADVANTAGES), FakeTrainer(), TrainerConfig(), max_new_tokens=9)  # type: ignore[arg-type]


def rates(schedule: ScheduleConfig, num_steps: int) -> list[float]:
    return [learning_rate(2.0, schedule, step, num_steps) for step in range(num_steps)]


def test_schedules_by_hand() -> None:
    """F69: stated in optimizer steps, warm-up reaches the full rate at its last step, no step has rate 0."""
    assert rates(ScheduleConfig(), 3) == [2.0, 2.0, 2.0]
    assert rates(ScheduleConfig(warmup_steps=4), 6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(ScheduleConfig(type="linear"), 4) == [2.0, 1.5, 1.0, 0.5]
    assert rates(ScheduleConfig(type="linear", warmup_steps=1, final_fraction=0.5), 3) == [2.0, 2.0, 1.5]
    assert rates(ScheduleConfig(type="cosine"), 4) == pytest.approx([2.0, 1.7071068, 1.0, 0.2928932])
    assert learning_rate(2.0, ScheduleConfig(type="linear", final_fraction=0.25), 50, 10) == 0.5
