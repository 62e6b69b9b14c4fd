"""Grouping: which attempts make a group, what happens when one fails, and when the group is complete.

Groups are joined by id, never by position or arrival. Only scored members count. An episode without a score (a failed
outcome, or a reward that could not judge) is never turned into a reward (I14); ``on_failure`` says what happens:

* ``refill``: the same member is tried again, up to ``max_retries`` times; after that the group goes on without it;
* ``shrink``: the group goes on without it;
* ``discard``: the group is discarded once its other members have ended.

A group is settled when none of its attempts is open. It is then complete if it has ``min_group_size`` scored members
(for ``discard``: if all are scored), else discarded.

With a baseline one more attempt is issued, member number ``group_size``: a greedy reply that the members are compared
with (ReMax). It is retried as they are, is no member of the group, and without its score the group is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.types import AttemptKey, Episode, Group, Task

OnFailure = Literal["refill", "shrink", "discard"]


class GroupingError(RuntimeError):
    """An episode came back that nobody is waiting for, or that was not judged."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Other members of the group are still open."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Issue this attempt: the same member, one retry later."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Complete:
    """The group is settled. It holds the last episode of each member, in member order, scored or not."""

    group: Group


@dataclass(frozen=True, slots=True)
class Discard:
    """The group is settled and cannot be used."""

    group_id: int
    reason: str
    """``member_failed`` (on_failure = discard), ``too_few_scored``, ``baseline_failed``, or what
    :meth:`GroupAssembler.abandon` was told."""
    episodes: tuple[Episode, ...]
    """The last episode of each member that ended."""
    open_keys: tuple[AttemptKey, ...] = ()
    """Attempts that still run; only an abandoned group has any."""


Decision = Wait | Retry | Complete | Discard


@dataclass(slots=True)
class _Open:
    task: Task
    open_keys: set[AttemptKey]
    ended: dict[int, Episode] = field(default_factory=dict)

    def num_scored(self, group_size: int) -> int:
        """Members alone, without the baseline."""
        return sum(e.is_scored for member, e in self.ended.items() if member < group_size)


class GroupAssembler:
    """Joins episodes into groups. Not thread-safe: the loop's thread owns it."""

    def __init__(
        self,
        group_size: int,
        min_group_size: int,
        on_failure: OnFailure,
        max_retries: int,
        with_baseline: bool = False,
    ) -> None:
        if not 1 <= min_group_size <= group_size:
            raise ValueError(
                f"rollout.min_group_size = {min_group_size} must lie between 1 and rollout.group_size = {group_size}"
            )
        self._group_size = group_size
        self._min_group_size = min_group_size
        self._on_failure = on_failure
        self._max_retries = max_retries
        self._with_baseline = with_baseline
        self._groups: dict[int, _Open] = {}

    @property
    def open_groups(self) -> tuple[int, ...]:
        """Ids of groups that are not settled, in the order in which they were started."""
        return tuple(self._groups)

    def open_keys(self, group_id: int) -> tuple[AttemptKey, ...]:
        """Attempts of an open group that have not ended, sorted."""
        return tuple(sorted(self._group(group_id, "open_keys").open_keys))

    def ended(self, group_id: int) -> tuple[Episode, ...]:
        """The last episode of each member of an open group that has ended, in member order."""
        return _in_order(self._group(group_id, "ended").ended)

    def start(self, group_id: int, task: Task) -> list[AttemptKey]:
        """Open a group; returns the attempts to issue."""
        if group_id in self._groups:
            raise GroupingError(f"group {group_id} is open already; a group id is used once in a lineage")
        keys = [AttemptKey(group_id, member) for member in range(self._group_size + self._with_baseline)]
        self._groups[group_id] = _Open(task=task, open_keys=set(keys))
        return keys

    def add(self, episode: Episode) -> Decision:
        """An attempt ended. Raises GroupingError where it is not open, is of another task, or was not judged."""
        key = episode.key
        group = self._group(key.group, f"episode {key}")
        self._check(episode, group)
        group.open_keys.remove(key)
        group.ended[key.member] = episode
        if not episode.is_scored and self._may_retry(key, group):
            retry = key._replace(retry=key.retry + 1)
            group.open_keys.add(retry)
            del group.ended[key.member]
            return Retry(retry)
        if group.open_keys:
            return Wait()
        return self._settle(key.group, group)

    def abandon(self, group_id: int, reason: str) -> Discard:
        """Give up an open group (too old, run over). The caller ends its open attempts and does not add them."""
        group = self._group(group_id, "abandon")
        del self._groups[group_id]
        return Discard(group_id, reason, _in_order(group.ended), tuple(sorted(group.open_keys)))

    def _may_retry(self, key: AttemptKey, group: _Open) -> bool:
        if self._on_failure != "refill" or key.retry >= self._max_retries:
            return False
        # No more work for a group that cannot reach its minimum whatever this member does.
        num_open = sum(k.member < self._group_size for k in (key, *group.open_keys))
        return group.num_scored(self._group_size) + num_open >= self._min_group_size

    def _settle(self, group_id: int, group: _Open) -> Complete | Discard:
        del self._groups[group_id]
        episodes = _in_order(group.ended)
        num_scored = group.num_scored(self._group_size)
        if self._on_failure == "discard" and num_scored < self._group_size:
            return Discard(group_id, "member_failed", episodes)
        if num_scored < self._min_group_size:
            return Discard(group_id, "too_few_scored", episodes)
        baseline = group.ended.pop(self._group_size) if self._with_baseline else None
        if baseline is not None and not baseline.is_scored:
            return Discard(group_id, "baseline_failed", episodes)
        members = _in_order(group.ended)
        return Complete(Group(id=group_id, task=group.task, episodes=members, baseline=baseline))

    def _group(self, group_id: int, what: str) -> _Open:
        try:
            return self._groups[group_id]
        except KeyError:
            raise GroupingError(
                f"{what}: group {group_id} is not open (never started, settled or abandoned); "
                "an episode may be added once, while its group is open"
            ) from None

    @staticmethod
    def _check(episode: Episode, group: _Open) -> None:
        key = episode.key
        if key not in group.open_keys:
            raise GroupingError(
                f"episode {key} is not open in its group: it was added before, or a later retry replaced it"
            )
        if not episode.task.is_same(group.task):
            raise GroupingError(
                f"episode {key} is of task {episode.task.id}, its group of task {group.task.id}: joined by a wrong id"
            )
        if episode.score is None and not episode.outcome.is_failure:
            raise GroupingError(
                f"episode {key} ended '{episode.outcome}' and was not judged; score it before it joins its group"
            )
        if episode.is_scored and episode.outcome.is_failure:
            raise GroupingError(
                f"episode {key} failed ('{episode.outcome}') and carries a score; a failure is never a reward (I14)"
            )


def _in_order(ended: dict[int, Episode]) -> tuple[Episode, ...]:
    return tuple(ended[member] for member in sorted(ended))
