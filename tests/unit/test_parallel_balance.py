"""Dealing a minibatch out to data ranks: nothing lost, nothing twice, episodes whole, loads about equal."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.packing import split_microbatches
from headrace.testing import make_sample
from headrace.trainer.balance import _cost, microbatches, share_out
from headrace.types import Sample


def samples_of(shape: list[tuple[int, list[int]]], seed: int = 0) -> list[Sample]:
    """Groups of (prompt length, reply lengths); every third episode has a second branch."""
    rng = random.Random(seed)
    out = []
    for group, (prompt_length, replies) in enumerate(shape):
        prompt = [rng.randrange(50) for _ in range(prompt_length)]
        for member, length in enumerate(replies):
            first, second = ([rng.randrange(50) for _ in range(length)] for _ in range(2))
            out.append(make_sample(prompt, first, group=group, member=member))
            if member % 3 == 0:
                out.append(make_sample([2], second, group=group, member=member, branch=1, prefix_key="other"))
    rng.shuffle(out)
    return out


shapes = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 30), min_size=1, max_size=5)), min_size=1, max_size=6
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5), st.booleans())
def test_every_sample_goes_to_one_rank_and_episodes_stay_whole(
    shape: list[tuple[int, list[int]]], num_ranks: int, share: bool
) -> None:
    samples = samples_of(shape)
    shares = share_out(samples, num_ranks, share_prompts=share)
    assert sorted(i for part in shares for i in part) == list(range(len(samples)))
    rank_of = {}
    for rank, part in enumerate(shares):
        for i in part:
            assert rank_of.setdefault(samples[i].key, rank) == rank
    heaviest = max(
        _cost(samples, [i for i, s in enumerate(samples) if s.key == key], share) for key in {s.key for s in samples}
    )
    loads = [_cost(samples, part, share) for part in shares]
    total = _cost(samples, range(len(samples)), False)
    assert max(loads) <= total / num_ranks + heaviest  # longest-first never does worse


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 4), st.integers(1, 3), st.integers(20, 80))
def test_all_ranks_compute_the_same_number_of_rows(
    shape: list[tuple[int, list[int]]], num_ranks: int, num_stages: int, max_tokens: int
) -> None:
    """F95: a rank with fewer micro-batches is told of the others', and its own hold its samples once each."""
    samples = samples_of(shape)
    shares = share_out(samples, num_ranks, share_prompts=True)
    options = {"max_tokens": max_tokens, "share_prompts": True, "num_stages": num_stages}
    planned = [microbatches(samples, shares, rank, **options) for rank in range(num_ranks)]
    numbers = {number for _, number in planned}
    assert len(numbers) == 1
    assert max(len(own) for own, _ in planned) <= numbers.pop() >= num_stages
    found = sorted(i for own, _ in planned for batch in own for i, _ in batch)
    assert found == [i for i, s in enumerate(samples) if s.num_trained]


def test_equal_groups_stay_whole_and_one_large_group_is_split() -> None:
    """Prompts are computed once where that costs no balance."""
    equal = samples_of([(20, [5, 5]), (20, [5, 5])])
    for part in share_out(equal, 2, share_prompts=True):
        assert len({equal[i].key.group for i in part}) == 1
    large = samples_of([(2, [10, 10, 10, 10])])
    assert all(share_out(large, 2, share_prompts=True))


def test_balance_of_a_typical_batch() -> None:
    rng = random.Random(3)
    samples = samples_of([(40, [rng.randint(10, 300) for _ in range(8)]) for _ in range(16)])
    loads = [_cost(samples, part, True) for part in share_out(samples, 4, share_prompts=True)]
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_pipeline_gets_a_row_for_each_stage(num_stages: int) -> None:
    samples = samples_of([(4, [10] * 6)] * 4)
    own, number = microbatches(
        samples, [list(range(len(samples)))], 0, max_tokens=10_000, share_prompts=True, num_stages=num_stages
    )
    assert len(own) >= num_stages and number == len(own)
    assert num_stages > 1 or own == split_microbatches(samples, 10_000, share_prompts=True)
