"""Admission: how many groups may be started now, so that what they sample is not too old when it is trained.

The rule is AReaL's (arXiv 2505.24298, eq. 3), counted in groups, B groups to a batch::

    capacity = min(max_concurrent - running, (max_staleness + version + 1) * B - (accepted + running))

``accepted`` counts the places in batches that are taken for good, from the run's start: so it is always
``version * B`` plus the finished groups that wait in the buffer. Three things keep it so: a group that fails or is
filtered gives its place back, a batch that was closed short books its empty places as taken, and a resume starts
again at ``version * B`` (otherwise the bound inflates by all that was issued before the crash).

At most ``(max_staleness + 1) * B`` groups are outstanding at any time, which is what ``staleness.py`` needs to fit each
into a batch before it is too old.
"""

from __future__ import annotations


class Admission:
    """The gate in front of generation. Not thread-safe: the loop's thread owns it.

    Example::

        gate = Admission(groups_per_batch=4, max_staleness=0, max_concurrent_groups=64)
        while gate.capacity(version) > 0:
            gate.issue()
    """

    def __init__(
        self, groups_per_batch: int, max_staleness: int, max_concurrent_groups: int, num_batches: int | None = None
    ) -> None:
        """``num_batches``: batches of the whole run; no group is admitted that no batch is left for. None: endless."""
        if groups_per_batch < 1 or max_staleness < 0 or max_concurrent_groups < 1:
            raise ValueError(
                f"admission needs groups_per_batch >= 1, max_staleness >= 0 and max_concurrent_groups >= 1, got "
                f"{groups_per_batch}, {max_staleness} and {max_concurrent_groups}; correct the section [rollout]"
            )
        self._groups_per_batch = groups_per_batch
        self._max_staleness = max_staleness
        self._max_concurrent_groups = max_concurrent_groups
        self._num_batches = num_batches
        self._running = 0
        self._accepted = 0

    @property
    def running(self) -> int:
        """Groups issued and neither accepted nor rejected."""
        return self._running

    @property
    def accepted(self) -> int:
        """Places in batches that are taken for good, since the run's start."""
        return self._accepted

    def capacity(self, version: int) -> int:
        """Groups that may be issued now, never negative. ``version``: number of published updates."""
        num_admitted_batches = self._max_staleness + version + 1
        if self._num_batches is not None:
            num_admitted_batches = min(num_admitted_batches, self._num_batches)
        places = num_admitted_batches * self._groups_per_batch - (self._accepted + self._running)
        return max(0, min(self._max_concurrent_groups - self._running, places))

    def issue(self) -> None:
        """A group was started. The caller asked :meth:`capacity` first."""
        self._running += 1

    def accept(self) -> None:
        """A running group is finished and will be trained."""
        self._leave("accept")
        self._accepted += 1

    def reject(self) -> None:
        """A running group failed, was filtered or was cancelled: its place is free again."""
        self._leave("reject")

    def withdraw(self) -> None:
        """A group that was accepted is dropped from the buffer after all (too old): its place is free again."""
        if self._accepted == 0:
            raise RuntimeError("admission: withdraw() without an accepted group; accept() must come first")
        self._accepted -= 1

    def close_batch(self, num_groups: int) -> None:
        """A batch of ``num_groups`` was chosen. Missing ones count as taken, or the bound would inflate by them: so
        call it when the batch is chosen, before anything more is issued, not when it is trained."""
        if not 0 <= num_groups <= self._groups_per_batch:
            raise ValueError(f"admission: a batch of {num_groups} groups was closed, {self._groups_per_batch} fit in")
        self._accepted += self._groups_per_batch - num_groups

    def restore(self, version: int) -> None:
        """Resume at ``version``: everything that was running or buffered is gone and is issued again."""
        self._running = 0
        self._accepted = version * self._groups_per_batch

    def _leave(self, what: str) -> None:
        if self._running == 0:
            raise RuntimeError(f"admission: {what}() without a running group; every group leaves once")
        self._running -= 1
