"""Samples to micro-batches to packed rows, without padding.

* All samples of one episode are in one micro-batch (sequence-level losses need that).
* Samples with one ``prefix_key`` are laid side by side as a tree: their shared prompt is computed once, and so is what
  their replies have in common. Replies of one group begin alike, the more so the surer the policy is.
* A row ends, for each sample, just before its last trained token: that token is only ever predicted.

Two samples, a prompt of three tokens and the trained tokens in capitals::

    ids   p q r A B c D       row       p q r | A B c | E F        (D and G are predicted, never fed)
          p q r E F G         position  0 1 2 | 3 4 5 | 3 4
                              predicts  A,E from r (once); B from A; D from c; F from E; G from F

Were E the same id as A, it would lie there once: p q r A | B c | F, and A predict B and F.

Legend: T tokens of the row, U distinct predictors, N trained tokens, L routers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.model.attention import AttentionLayout
from headrace.model.layout import PackedLayout
from headrace.model.linear import onednn_computes, round_up
from headrace.model.trees import DistinctTokens, Ids, TokenTree, TreeShape
from headrace.types import AttemptKey, Sample

IndexedSample = tuple[int, Sample]
"""A sample and its place in the caller's list."""


BALANCE_STEPS = 64
"""Micro-batches are balanced to this fraction of their largest length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """One micro-batch as a single row of tokens, and where its N trained tokens come from."""

    samples: tuple[Sample, ...]
    indices: tuple[int, ...]
    """Place of each sample in the caller's list."""
    ids_1T: Tensor
    positions_1T: Tensor
    layout: AttentionLayout
    predictor_U: Tensor
    """Places in the row whose hidden state predicts a trained token; no place twice for one temperature."""
    temperature_U: Tensor
    row_N: Tensor
    """For each trained token the index in [0, U) of its predictor."""
    target_N: Tensor
    """The trained ids."""
    slot_N: Tensor
    """Where the token stands in its sample."""
    num_N: tuple[int, ...]
    """Trained tokens of each sample; tokens are in sample order, then in order of their slots."""
    kept_N: tuple[tuple[int, ...] | None, ...] | None
    """Ids that could have been sampled, for truncated sampling; None where no token carries any."""
    uses_T: Tensor
    """Of how many samples the token of the row is a part; 0 for padding."""
    recorded_TLK: Tensor | None
    """The experts that the engine chose: int16, -1 for tokens without a record. None where no sample has one."""

    @property
    def num_tokens(self) -> int:
        return self.ids_1T.shape[1]

    def gather(self, per_sample: Sequence[Tensor]) -> Tensor:
        """[N]: the entries at trained tokens of a list of [T] tensors aligned with the caller's samples."""
        slots = torch.split(self.slot_N, list(self.num_N))
        return torch.cat([per_sample[i].to(slot.device)[slot] for i, slot in zip(self.indices, slots, strict=True)])

    def field(self, name: str) -> list[Any]:
        """The N entries at trained tokens of a per-token field of the samples."""
        values: list[Any] = []
        for sample, slots in zip(self.samples, torch.split(self.slot_N, list(self.num_N)), strict=True):
            per_token = getattr(sample, name)
            values.extend(per_token[t] for t in slots.tolist())
        return values

    def scatter(self, values_N: Tensor) -> list[Tensor]:
        """The reverse of gather: for each of ``samples`` a float32 [T] on the CPU, 0 where the mask is 0."""
        out = []
        slots = torch.split(self.slot_N.cpu(), list(self.num_N))
        for sample, slot, values in zip(
            self.samples, slots, torch.split(values_N.float().cpu(), list(self.num_N)), strict=True
        ):
            per_token_T = torch.zeros(len(sample.ids))
            per_token_T[slot] = values
            out.append(per_token_T)
        return out


def input_length(sample: Sample) -> int:
    """Tokens of a sample that a pass must compute: all before the last trained one."""
    for t in range(len(sample.ids) - 1, 0, -1):
        if sample.mask[t]:
            return t
    return 0


def split_microbatches(samples: Sequence[Sample], max_tokens: int, *, share_prompts: bool) -> list[list[IndexedSample]]:
    """Micro-batches of at most ``max_tokens`` packed tokens; an episode that is longer gets one of its own.

    As few as filling them in order needs, and of about equal length: a full one and a small rest would cost the same
    time and more memory at the peak. Samples without trained tokens are left out. The same samples in the same order
    give the same micro-batches.
    """
    batches = _fill(samples, max_tokens, share_prompts)
    if len(batches) < 2:
        return batches
    low, high = max_tokens // len(batches), max_tokens  # low: too small, or nearly
    while high - low > max(1, max_tokens // BALANCE_STEPS):
        middle = (low + high) // 2
        tried = _fill(samples, middle, share_prompts)
        if len(tried) > len(batches):
            low = middle
        else:
            batches, high = tried, middle
    return batches


def _fill(samples: Sequence[Sample], max_tokens: int, share_prompts: bool) -> list[list[IndexedSample]]:
    """Micro-batches filled one after another, a group's samples side by side."""
    groups: dict[object, dict[AttemptKey, list[IndexedSample]]] = {}
    group_of: dict[AttemptKey, object] = {}
    for index, sample in enumerate(samples):
        if not sample.num_trained:
            continue
        own = sample.prefix_key if share_prompts and sample.prefix_key else sample.key
        group = group_of.setdefault(sample.key, own)
        groups.setdefault(group, {}).setdefault(sample.key, []).append((index, sample))
    batches: list[list[IndexedSample]] = []
    row = RowLength(share_prompts)  # of the last batch; the first group opens one
    for episodes in groups.values():
        whole = [item for episode in episodes.values() for item in episode]
        tried = row.with_more(whole)
        if batches and tried.num_tokens <= max_tokens:
            batches[-1].extend(whole)
            row = tried
            continue
        batches.append([])
        row = RowLength(share_prompts)
        for episode in episodes.values():
            tried = row.with_more(episode)
            if batches[-1] and tried.num_tokens > max_tokens:
                batches.append([])
                tried = RowLength(share_prompts).with_more(episode)
            batches[-1].extend(episode)
            row = tried
    return batches


class RowLength:
    """How many tokens a pass over some samples in one row computes."""

    def __init__(self, share_prompts: bool) -> None:
        self._share_prompts = share_prompts
        self._trees: dict[object, DistinctTokens] = {}
        self.num_tokens = 0

    def with_more(self, items: Sequence[IndexedSample]) -> RowLength:
        """That of a row which holds ``items``, too. Samples without trained tokens count as nothing."""
        items = [item for item in items if item[1].num_trained]
        other = RowLength(self._share_prompts)
        other._trees, other.num_tokens = dict(self._trees), self.num_tokens
        trees = {key: DistinctTokens() for key in {_tree_key(item, self._share_prompts) for item in items}}
        for key in trees.keys() & self._trees.keys():
            trees[key] = self._trees[key].copy()
        for item in items:
            tree = trees[_tree_key(item, self._share_prompts)]
            other.num_tokens -= tree.num_tokens
            tree.add(_shareable_ids(item))
            other.num_tokens += tree.num_tokens
        other._trees |= trees
        return other


def packed_rows(
    samples: Sequence[Sample], max_tokens: int, *, share_prompts: bool, dtype: torch.dtype, device: torch.device
) -> Iterator[PackedRow]:
    """The samples' micro-batches, one packed row after the other."""
    for items in split_microbatches(samples, max_tokens, share_prompts=share_prompts):
        yield fitted(pack(items, share_prompts=share_prompts, dtype=dtype, device=device), dtype)


def _tree_key(item: IndexedSample, share_prompts: bool) -> object:
    """Samples with one key lie in one tree."""
    index, sample = item
    shared = share_prompts and sample.prefix_key and sample.prefix_length
    return (sample.prefix_key, sample.prefix_length) if shared else index


def _shareable_ids(item: IndexedSample) -> Ids:
    """What is computed of a sample, with equal ids where it may be computed once for several samples: what goes into a
    pass beside ids must be equal, too. The experts that an engine chose for a reply are the sample's own, so its first
    token is made one that no other has."""
    index, sample = item
    ids = sample.ids[: input_length(sample)]
    if sample.routing is None:
        return ids
    start = sample.prefix_length
    return (*ids[:start], -1 - index, *ids[start + 1 :])[: len(ids)]


_Tree = tuple[TokenTree, list[IndexedSample]]


def _trees(items: Iterable[IndexedSample], share_prompts: bool) -> list[_Tree]:
    """Samples by shared prompt, in order of first appearance, each with its tree."""
    by_prompt: dict[object, list[IndexedSample]] = {}
    for item in items:
        by_prompt.setdefault(_tree_key(item, share_prompts), []).append(item)
    for members in by_prompt.values():
        _, first = members[0]
        prompt_length = first.prefix_length
        for _, sample in members[1:]:
            if sample.ids[:prompt_length] != first.ids[:prompt_length]:
                raise ValueError(
                    f"samples {first.id} and {sample.id} have the prefix key '{sample.prefix_key}' "
                    f"but differ within their first {prompt_length} ids"
                )
    return [(TokenTree.of([_shareable_ids(item) for item in members]), members) for members in by_prompt.values()]


def pack(items: Sequence[IndexedSample], *, share_prompts: bool, dtype: torch.dtype, device: torch.device) -> PackedRow:
    """Lay one micro-batch out. Every sample must have at least one trained token. ``dtype`` is the model's."""
    trees = _trees(items, share_prompts)
    ids: list[int] = []
    positions: list[int] = []
    places: dict[tuple[int, float], int] = {}
    row: list[int] = []
    target: list[int] = []
    slot: list[int] = []
    ordered = [member for _, members in trees for member in members]
    for tree, members in trees:
        start = len(ids)
        ids += [0] * tree.shape.num_tokens
        positions += [0] * tree.shape.num_tokens
        for number, (_, sample) in enumerate(members):
            place_T: list[int] = []
            for stretch in tree.stretches(number):
                first, t = start + stretch.start, len(place_T)
                ids[first : first + len(stretch)] = sample.ids[t : t + len(stretch)]
                positions[first : first + len(stretch)] = range(t, t + len(stretch))
                place_T += range(first, first + len(stretch))
            temperature = sample.temperature or 1.0  # greedy replies carry log-probabilities at temperature 1
            for t, trained in enumerate(sample.mask):
                if trained:
                    row.append(places.setdefault((place_T[t - 1], temperature), len(places)))
                    target.append(sample.ids[t])
                    slot.append(t)
    return PackedRow(
        samples=tuple(sample for _, sample in ordered),
        indices=tuple(index for index, _ in ordered),
        ids_1T=torch.tensor([ids], device=device),
        positions_1T=torch.tensor([positions], device=device),
        layout=PackedLayout([tree.shape for tree, _ in trees], dtype, device),
        predictor_U=torch.tensor([place for place, _ in places], device=device),
        temperature_U=torch.tensor([t for _, t in places], dtype=torch.float64).to(_at_least_float32(dtype)).to(device),
        row_N=torch.tensor(row, device=device),
        target_N=torch.tensor(target, device=device),
        slot_N=torch.tensor(slot, device=device),
        num_N=tuple(sample.num_trained for _, sample in ordered),
        kept_N=_kept_ids(ordered),
        uses_T=_uses(trees).to(device),
        recorded_TLK=_recorded(trees, device),
    )


def _uses(trees: Sequence[_Tree]) -> Tensor:
    uses_T = torch.zeros(sum(tree.shape.num_tokens for tree, _ in trees), dtype=torch.long)
    start = 0
    for tree, members in trees:
        for number in range(len(members)):
            for stretch in tree.stretches(number):
                uses_T[start + stretch.start : start + stretch.stop] += 1
        start += tree.shape.num_tokens
    return uses_T


def _recorded(trees: Sequence[_Tree], device: torch.device) -> Tensor | None:
    """A shared prompt has the record of its first sample that has one: the others' is the same prompt's."""
    samples = [sample for _, members in trees for _, sample in members]
    one = next((sample.routing for sample in samples if sample.routing is not None), None)
    if one is None:
        return None
    shape = one.parts[0].shape[1:]
    recorded_TLK = torch.full((sum(tree.shape.num_tokens for tree, _ in trees), *shape), -1, dtype=torch.int16)
    start = 0
    for tree, members in trees:
        for number, (_, sample) in reversed([*enumerate(members)]):  # so that the first one's stays
            if sample.routing is not None:
                places = torch.tensor(tree.places(number)) + start
                parts = [part.to(torch.int16) for part in sample.routing.span(0, len(places)).parts]
                recorded_TLK[places] = torch.cat(parts)
        start += tree.shape.num_tokens
    return recorded_TLK.to(device)


def pad_row(row: PackedRow, num_tokens: int) -> PackedRow:
    """``row`` with tokens of id 0 behind it, up to ``num_tokens``; nobody attends to them and nothing reads them.

    For places where several processes must agree on a length (pipeline stages, context parallel), and for
    :func:`fitted`."""
    missing = num_tokens - row.num_tokens
    if missing <= 0:
        return row
    assert isinstance(row.layout, PackedLayout)
    zeros_1T = row.ids_1T.new_zeros(1, missing)
    return replace(
        row,
        ids_1T=torch.cat((row.ids_1T, zeros_1T), dim=1),
        positions_1T=torch.cat((row.positions_1T, zeros_1T), dim=1),
        layout=row.layout.padded(missing),
        uses_T=_padded(row.uses_T, missing, 0),
        recorded_TLK=None if row.recorded_TLK is None else _padded(row.recorded_TLK, missing, -1),
    )


def fitted(row: PackedRow, dtype: torch.dtype) -> PackedRow:
    """``row`` with a number of tokens that products in ``dtype`` like: a few more where they run in oneDNN."""
    if not onednn_computes(dtype, row.ids_1T.device):
        return row
    return pad_row(row, round_up(row.num_tokens))


def _padded(values_T: Tensor, missing: int, value: int) -> Tensor:
    return torch.cat((values_T, values_T.new_full((missing, *values_T.shape[1:]), value)))


def empty_row(dtype: torch.dtype, device: torch.device) -> PackedRow:
    """A row of one token that belongs to no sample and predicts id 0: work for a process that has none left, so that
    it reaches the same collectives as the others (F95). Its loss must be multiplied by 0."""
    zero = torch.zeros(1, dtype=torch.long, device=device)
    return PackedRow(
        samples=(),
        indices=(),
        ids_1T=zero[None],
        positions_1T=zero[None],
        layout=PackedLayout([TreeShape((-1,), (1,))], dtype, device),
        predictor_U=zero,
        temperature_U=torch.ones(1, dtype=_at_least_float32(dtype), device=device),
        row_N=zero,
        target_N=zero,
        slot_N=zero,
        num_N=(),
        kept_N=None,
        uses_T=zero,
        recorded_TLK=None,
    )


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _kept_ids(items: Iterable[IndexedSample]) -> tuple[tuple[int, ...] | None, ...] | None:
    kept: list[tuple[int, ...] | None] = []
    for _, sample in items:
        for t, trained in enumerate(sample.mask):
            if trained:
                kept.append(None if sample.kept_ids is None else sample.kept_ids[t])
    return tuple(kept) if any(k is not None for k in kept) else None
