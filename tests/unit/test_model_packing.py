"""Packed rows: what lies where, who sees whom, and how samples are cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.head import output_head
from headrace.model.logprobs import token_logprobs
from headrace.model.packing import PackedRow, input_length, pack, split_microbatches
from headrace.testing import make_sample, tiny_model
from headrace.types import RoutingIds, Sample

CPU = torch.device("cpu")


def packed(samples: list[Sample], share: bool = True, dtype: torch.dtype = torch.float32) -> PackedRow:
    return pack(list(enumerate(samples)), share_prompts=share, dtype=dtype, device=CPU)


def score(model: torch.nn.Module, samples: list[Sample], share: bool = True) -> list[torch.Tensor]:
    row = packed(samples, share)
    head = output_head(model, model.config.vocab_size)
    logprobs_N, _ = token_logprobs(model, head, row, max_logit_tokens=100)
    found = dict(zip(row.indices, row.scatter(logprobs_N.detach()), strict=True))
    return [found[i] for i in range(len(samples))]


def test_row_is_the_documented_drawing() -> None:
    """The example in packing.py's docstring, number by number."""
    first = make_sample([1, 2, 3], [10, 20, 21, 11], member=0, reply_mask=[1, 1, 0, 1])
    second = make_sample([1, 2, 3], [12, 13, 14], member=1)
    row = packed([first, second])
    assert row.ids_1T.tolist() == [[1, 2, 3, 10, 20, 21, 12, 13]]
    assert row.positions_1T.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    assert row.target_N.tolist() == [10, 20, 11, 12, 13, 14]
    assert row.predictor_U[row.row_N].tolist() == [2, 3, 5, 2, 6, 7]
    assert len(row.predictor_U) == 5  # the prompt's last token predicts two first tokens, once
    assert row.slot_N.tolist() == [3, 4, 6, 3, 4, 5]


def test_gather_and_scatter_are_inverse() -> None:
    """Per-token fields come back to their own sample and slot, by index and never by order."""
    samples = [make_sample([1, 2], [3, 4, 5], group=g % 2, member=g, prefix_key=f"p{g % 2}") for g in range(4)]
    row = packed(samples)
    assert row.indices == (0, 2, 1, 3)  # regrouped by prompt
    fields = [
        torch.tensor(s.mask) * torch.arange(5.0) + 100.0 * i * torch.tensor(s.mask) for i, s in enumerate(samples)
    ]
    back = dict(zip(row.indices, row.scatter(row.gather(fields)), strict=True))
    assert all(torch.equal(back[i], fields[i]) for i in range(4))


def test_different_temperatures_share_no_predictor() -> None:
    """One predictor has one distribution."""
    samples = [make_sample([1, 2], [3], member=m, temperature=t) for m, t in enumerate((1.0, 0.5, 1.0))]
    row = packed(samples)
    assert row.predictor_U.tolist() == [1, 1]
    assert row.temperature_U.tolist() == [1.0, 0.5]


def test_wrong_prefix_key_is_caught() -> None:
    """Samples that claim one prompt and do not have it would train on each other's prompt."""
    samples = [make_sample([1, 2], [3], member=0), make_sample([1, 9], [3], member=1)]
    with pytest.raises(ValueError, match="prefix key"):
        packed(samples)


@pytest.mark.parametrize("share", [True, False])
def test_neighbours_do_not_leak(share: bool) -> None:
    """F42: other ids in one document leave the others bit-equal, prompts shared or not."""
    model = tiny_model(initializer_range=0.2, num_kv_heads=2)
    samples = [make_sample([1, 2, 3], [4 + m, 5, 6], member=m, group=m // 2) for m in range(4)]
    changed = list(samples)
    changed[1] = replace(samples[1], ids=(*samples[1].ids[:3], 50, 51, 6))
    before, after = score(model, samples, share), score(model, changed, share)
    assert not torch.equal(before[1], after[1])
    assert all(torch.equal(before[i], after[i]) for i in (0, 2, 3))


def test_untrained_tail_and_garbage_behind_the_mask_change_nothing() -> None:
    """F59: NaN log-probabilities and other ids where nothing is trained leave the scores bit-equal."""
    model = tiny_model(initializer_range=0.2)
    sample = make_sample([1, 2, 3], [4, 5, 6, 7], reply_mask=[1, 1, 0, 0])
    nan = float("nan")
    garbage = replace(sample, ids=(1, 2, 3, 4, 5, 99, 98), behaviour_logprobs=(nan, nan, nan, 0.0, 0.0, nan, nan))
    assert input_length(sample) == 4
    assert torch.equal(score(model, [sample])[0], score(model, [garbage])[0])


def test_sample_without_trained_tokens_is_left_out() -> None:
    """A fully masked reply costs nothing and breaks nothing."""
    samples = [make_sample([1, 2], [3, 4], reply_mask=[0, 0]), make_sample([1, 2], [3, 4], member=1)]
    assert [[i for i, _ in batch] for batch in split_microbatches(samples, 100, share_prompts=True)] == [[1]]
    assert split_microbatches(samples[:1], 100, share_prompts=True) == []


def test_reply_of_one_token_adds_no_input() -> None:
    """An end of turn right after the prompt is predicted by the prompt alone."""
    model = tiny_model(initializer_range=0.2)
    samples = [make_sample([1, 2, 3], [4], member=0), make_sample([1, 2, 3], [5], member=1)]
    assert packed(samples).num_tokens == 3
    shared, plain = score(model, samples, True), score(model, samples, False)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(shared, plain, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=12),
    budget=st.integers(5, 60),
    share=st.booleans(),
)
def test_microbatches_hold_each_sample_once_and_keep_episodes_whole(
    lengths: list[tuple[int, int, int]], budget: int, share: bool
) -> None:
    """I4: nothing lost, nothing twice, no episode cut, and no row above the budget that could have been cut."""
    samples = [
        make_sample([1] * (3 + group), [2] * reply, group=group, member=member, branch=i)
        for i, (group, member, reply) in enumerate(lengths)
    ]
    batches = split_microbatches(samples, budget, share_prompts=share)
    assert sorted(i for batch in batches for i, _ in batch) == list(range(len(samples)))
    home = {}
    for number, batch in enumerate(batches):
        keys = {sample.key for _, sample in batch}
        assert all(home.setdefault(key, number) == number for key in keys)
        row = pack(batch, share_prompts=share, dtype=torch.float32, device=CPU)
        assert row.num_tokens <= budget or len(keys) == 1


def test_microbatches_are_balanced() -> None:
    """Rows of about equal length, as few as the budget allows: not a full one and a small rest."""
    samples = [make_sample([1] * 4, [2] * 7, group=g) for g in range(13)]  # 10 tokens to compute each
    batches = split_microbatches(samples, 100, share_prompts=True)
    assert [len(batch) for batch in batches] == [7, 6]
    assert [len(batch) for batch in split_microbatches(samples, 130, share_prompts=True)] == [13]
    lengths = [40, 30, 30, 10, 10, 10]
    mixed = [make_sample([1], [2] * n, group=g) for g, n in enumerate(lengths)]
    sizes = [sum(input_length(s) for _, s in batch) for batch in split_microbatches(mixed, 110, share_prompts=True)]
    assert sizes == [70, 60]


def test_what_replies_have_in_common_is_computed_once() -> None:
    """The docstring's last example: the shared token lies there once and predicts what follows in both."""
    first = make_sample([1, 2, 3], [10, 20, 21, 11], member=0, reply_mask=[1, 1, 0, 1])
    second = make_sample([1, 2, 3], [10, 13, 14], member=1)
    row = packed([first, second])
    assert row.ids_1T.tolist() == [[1, 2, 3, 10, 20, 21, 13]]
    assert row.positions_1T.tolist() == [[0, 1, 2, 3, 4, 5, 4]]
    assert row.predictor_U[row.row_N].tolist() == [2, 3, 5, 2, 3, 6]
    assert row.uses_T.tolist() == [2, 2, 2, 2, 1, 1, 1]
    model = tiny_model(initializer_range=0.2)
    shared, plain = score(model, [first, second]), score(model, [first, second], False)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(shared, plain, strict=True))


def test_replies_with_their_own_experts_share_the_prompt_only() -> None:
    """What an engine's routers chose for a reply belongs to it alone, and is replayed for it."""
    routing = [RoutingIds((torch.full((5, 1, 2), 3 + m, dtype=torch.int16),)) for m in range(2)]
    samples = [make_sample([1, 2, 3], [10, 11], member=m, routing=routing[m]) for m in range(2)]
    row = packed(samples)
    assert row.ids_1T.tolist() == [[1, 2, 3, 10, 10]]
    assert row.recorded_TLK is not None
    assert row.recorded_TLK[:, 0, 0].tolist() == [3, 3, 3, 3, 4]


def test_rows_are_filled_by_what_is_computed() -> None:
    """Equal replies cost the budget once."""
    samples = [make_sample([1, 2], [3] * 9, member=m) for m in range(20)]
    assert len(split_microbatches(samples, 16, share_prompts=True)) == 1
    assert len(split_microbatches(samples, 16, share_prompts=False)) == 20
