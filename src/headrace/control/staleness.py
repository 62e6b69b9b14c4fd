"""Staleness: how old a token is, which groups make the next batch, and what may hold the next optimizer step (I7, I9).

Words. ``version`` v is the number of published updates. The age of a token is v minus the token's number; numbers go on
across lineages, since a resumed lineage continues from the restored number. A group is as old as its oldest token u.
K is ``max_staleness``, B is ``groups_per_batch``. A group must be trained at a version of at most u + K: its deadline.

The rule of ``on_overage = "wait"``. The step from v to v + 1 may be made with a batch only if

1. every group in the batch has v - u <= K;
2. every group left out, in flight or buffered, has (v + 1) - u <= K;
3. what is left out still fits: for each d >= 0, at most (d + 1) * B of the groups left out have a deadline of
   v + 1 + d or earlier.

(2) alone is not enough: with K = 2 and B = 1, one fast group may overtake two slow ones, after which both are due for
the same batch and one of them must grow too old. (3) is earliest-deadline-first feasibility. Admission keeps at most
(K + 1) * B groups outstanding, so (3) can always be met by waiting for the oldest, and the wait ends when those end.
With K = 0 the rule says: all that is outstanding, and nothing else, makes the batch. That is the synchronous run (I8).

``mask`` never waits: tokens with v - number > K get mask 0 when the batch is closed and the episode stays in its group.
``drop`` never waits: a group with v - u > K is dropped with reason ``stale``, in the buffer and in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from headrace.types import Episode, Group, Sample

OnOverage = Literal["wait", "mask", "drop"]


class StalenessError(RuntimeError):
    """The bound on staleness was broken: a defect of headrace, never of the run's data."""


def oldest_version(item: Episode | Group) -> int:
    """Number of the oldest token's version; where nothing was sampled yet, of the version it was issued under."""
    if isinstance(item, Group):
        return min(oldest_version(e) for e in item.episodes)
    versions = item.trace.versions
    return min(v.number for v in versions) if versions else item.issued_version.number


def age(token_number: int, version: int) -> int:
    """Published updates between the token's version and ``version``."""
    return version - token_number


def overage(oldest: Mapping[int, int], version: int, max_staleness: int) -> tuple[int, ...]:
    """Of groups, given as id -> number of the oldest token's version, those that would train a token older than
    ``max_staleness`` at ``version``; sorted ids."""
    return tuple(sorted(g for g, number in oldest.items() if age(number, version) > max_staleness))


def mask_overage(sample: Sample, version: int, max_staleness: int) -> Sample:
    """``on_overage = "mask"``: tokens older than ``max_staleness`` at ``version`` get mask 0 and say nothing more."""
    old = [v is not None and age(v.number, version) > max_staleness for v in sample.versions]
    if not any(old):
        return sample
    return replace(
        sample,
        mask=tuple(0 if o else m for o, m in zip(old, sample.mask, strict=True)),
        behaviour_logprobs=tuple(0.0 if o else x for o, x in zip(old, sample.behaviour_logprobs, strict=True)),
        versions=tuple(None if o else v for o, v in zip(old, sample.versions, strict=True)),
    )


def must_wait_for(
    in_flight: Mapping[int, int],
    buffered: Mapping[int, int],
    version: int,
    max_staleness: int,
    groups_per_batch: int,
    batch: Iterable[int] = (),
) -> tuple[int, ...]:
    """The running groups that hold the step from ``version`` to ``version + 1``, oldest first; empty: it may be made.

    ``in_flight`` and ``buffered``: group id -> number of the oldest token's version. ``batch``: the buffered ids
    that this step would train. Rules 2 and 3 of the module's docstring; one pass over the deadlines. Raises
    StalenessError where the rules are broken and no running group could mend that.
    """
    chosen = set(batch)
    left_out = {g: n for g, n in (*in_flight.items(), *buffered.items()) if g not in chosen}
    by_deadline = sorted(left_out, key=lambda g: (left_out[g], g))
    last_overfull = -1
    for position, group in enumerate(by_deadline):
        batches_left = left_out[group] + max_staleness - version
        if position + 1 > batches_left * groups_per_batch:
            last_overfull = position
    due = by_deadline[: last_overfull + 1]
    held_by = tuple(g for g in due if g in in_flight)
    if due and not held_by:
        raise StalenessError(
            f"groups {due} are finished and left out of the batch of version {version}, after which they cannot all be "
            f"trained within max_staleness = {max_staleness}; choose the oldest first, {groups_per_batch} to a batch"
        )
    return held_by


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to do next: train ``batch``, or, where it is empty, wait."""

    batch: tuple[Group, ...] = ()
    """The groups to train, oldest first."""
    held_by: tuple[int, ...] = ()
    """Ids of running groups that the next step waits for because of their age."""
    num_missing: int = 0
    """Groups that the buffer lacks for a batch."""
    stale: tuple[Group, ...] = ()
    """``on_overage = "drop"``: buffered groups to drop now with reason ``stale``."""


class BatchSelector:
    """Chooses the groups of the next batch: oldest token first, then group id, so that the choice is deterministic."""

    def __init__(self, groups_per_batch: int, max_staleness: int, on_overage: OnOverage = "wait") -> None:
        self._groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._on_overage = on_overage
        self._oldest: dict[int, int] = {}
        """Of the groups that were buffered at the last call."""

    def select(
        self, buffered: Sequence[Group], in_flight: Mapping[int, int], version: int, min_groups: int | None = None
    ) -> Selection:
        """``in_flight``: id of each group that may still become complete -> number of its oldest token's version (of
        the version it was issued under while it has no token). ``min_groups`` (at least 1): close the batch
        with so many where there are no more, as when dynamic sampling gives up; None means ``groups_per_batch``.

        Raises StalenessError where rule 1 is broken under ``wait``.
        """
        needed = self._groups_per_batch if min_groups is None else max(1, min_groups)
        known = self._oldest
        ages = self._oldest = {g.id: known[g.id] if g.id in known else oldest_version(g) for g in buffered}
        late = overage(ages, version, self._max_staleness) if self._on_overage != "mask" else ()
        stale = tuple(g for g in buffered if g.id in late)
        if stale and self._on_overage == "wait":
            raise StalenessError(
                f"buffered group {stale[0].id} has a token of version {ages[stale[0].id]}, older than max_staleness = "
                f"{self._max_staleness} at version {version}, although on_overage = 'wait' holds the step before that "
                "happens (I7); this is a defect of headrace: please report it with the run's ledger"
            )
        num_missing = needed - (len(buffered) - len(stale))
        if num_missing > 0:
            return Selection(num_missing=num_missing, stale=stale)
        fresh = sorted((g for g in buffered if g.id not in late), key=lambda g: (ages[g.id], g.id))
        batch = tuple(fresh[: self._groups_per_batch])
        if self._on_overage == "wait":
            held_by = must_wait_for(
                in_flight, ages, version, self._max_staleness, self._groups_per_batch, [g.id for g in batch]
            )
            if held_by:
                return Selection(held_by=held_by)
        return Selection(batch=batch, stale=stale)
