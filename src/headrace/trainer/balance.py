"""A minibatch to the data ranks: about equal token counts, and the same number of micro-batches on each.

Every process holds all samples and computes the whole division, so nothing has to be agreed on; that they really hold
the same samples is checked before any other collective (F95).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from headrace.model.packing import IndexedSample, RowLength, split_microbatches
from headrace.model.parallel.check import ParallelError
from headrace.types import Sample


def share_out(samples: Sequence[Sample], num_ranks: int, *, share_prompts: bool) -> list[list[int]]:
    """Places of the samples of each data rank. An episode is never split.

    Groups stay whole, so that their prompt is computed once, unless dealing out single episodes makes the longest
    rank shorter. The heaviest unit goes first, always to the lightest rank.
    """
    by_group: dict[object, list[int]] = {}
    by_episode: dict[object, list[int]] = {}
    group_of: dict[object, object] = {}
    for i, sample in enumerate(samples):
        key = sample.prefix_key if share_prompts and sample.prefix_key else sample.key
        by_group.setdefault(group_of.setdefault(sample.key, key), []).append(i)
        by_episode.setdefault(sample.key, []).append(i)
    plans = [_deal(samples, list(units.values()), num_ranks, share_prompts) for units in (by_group, by_episode)]
    return min(plans, key=lambda plan: max(_cost(samples, share, share_prompts) for share in plan))


def _deal(samples: Sequence[Sample], units: list[list[int]], num_ranks: int, share_prompts: bool) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    rows = [RowLength(share_prompts)] * num_ranks
    for unit in sorted(units, key=lambda unit: -_cost(samples, unit, share_prompts)):
        lightest = min(range(num_ranks), key=lambda rank: rows[rank].num_tokens)
        shares[lightest] += unit
        rows[lightest] = rows[lightest].with_more([(i, samples[i]) for i in unit])
    return [sorted(share) for share in shares]


def _cost(samples: Sequence[Sample], places: Sequence[int], share_prompts: bool) -> int:
    """Tokens that a pass over these samples computes."""
    return RowLength(share_prompts).with_more([(i, samples[i]) for i in places]).num_tokens


def microbatches(
    samples: Sequence[Sample],
    shares: Sequence[Sequence[int]],
    rank: int,
    *,
    max_tokens: int,
    share_prompts: bool,
    num_stages: int,
) -> tuple[list[list[IndexedSample]], int]:
    """(this data rank's micro-batches, how many every rank must compute). The difference is filled with empty rows.

    With a pipeline, micro-batches are made small enough that there is one for each stage.
    """
    each: list[list[list[IndexedSample]]] = []
    for share in shares:
        limit = max_tokens
        if num_stages > 1:
            limit = min(limit, max(1, -(-_cost(samples, share, share_prompts) // num_stages)))
        batches = split_microbatches([samples[i] for i in share], limit, share_prompts=share_prompts)
        each.append([[(share[i], sample) for i, sample in batch] for batch in batches])
    return each[rank], max(1 if num_stages == 1 else num_stages, *(len(batches) for batches in each))


def check_same_samples(samples: Sequence[Sample], what: str) -> None:
    """Raises ParallelError on every process where they were not all given the same samples."""
    digest = hashlib.blake2b(what.encode(), digest_size=8)
    for sample in samples:
        digest.update(repr((sample.id, sample.ids, sample.mask)).encode())
    own = torch.tensor([int.from_bytes(digest.digest()[:7], "big"), len(samples)])
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    different = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
    if different:
        raise ParallelError(
            f"{what}: the processes were given different samples (rank 0 has {int(found[0][1])}, rank {different[0]} "
            f"has {int(found[different[0]][1])} or others; {len(different)} ranks differ). Every process must call the "
            "trainer with the whole minibatch"
        )
