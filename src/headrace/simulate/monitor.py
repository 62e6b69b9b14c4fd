"""What must hold at every event of a simulated run, whoever asks: I7 to I12 and I19.

The monitor keeps books of its own, from the ledger's records and from what engine and trainer do, and compares. It
looks between two steps of any task, so that what it sees is what a kill at that moment would leave behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.control.books import BooksError
from headrace.loop import Loop
from headrace.simulate.errors import InvariantBroken
from headrace.types import AttemptKey, PolicyVersion, RolloutBatch, Sample

TOLERANCE_S = 1e-3
"""Of a deadline: the clock of the event loop is a float."""
FULL_EVERY = 8
"""Events between two looks at the tasks that nothing has touched and at the surviving chain."""


class Monitor:
    """Watches one life. Every method raises InvariantBroken, which ends the simulation."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.batch: RolloutBatch | None = None
        """The newest that was closed."""
        self.num_checks = 0
        self.is_over = False
        """The life has ended, in whatever way: what is cleared away now breaks no rule."""
        self._proved: set[tuple[str, PolicyVersion]] = set()
        self._trainer_version = PolicyVersion(0, 0)
        self._in_flight: set[AttemptKey] = set()
        """By the ledger's records."""

    def _broken(self, invariant: str, what: str) -> None:
        if not self.is_over:
            self.is_over = True
            raise InvariantBroken(invariant, what)

    # --------------------------------------------------------------------------------- what the actors do

    def proved(self, engine: str, version: PolicyVersion) -> None:
        """The canary has agreed."""
        self._proved.add((engine, version))

    def sampled(self, engine: str, version: PolicyVersion, request: str) -> None:
        """A token of a reply, not of a probe."""
        if (engine, version) not in self._proved:
            self._broken("I7", f"{engine} samples for {request} with version {version}, which nobody proved")
        if self.loop is None:
            return
        fleet = self.loop.config.fleet
        if version.number < self.loop.batch_index - (0 if fleet is None else fleet.max_engine_lag):
            self._broken(
                "I7", f"{engine} samples for {request} with version {version}, the run is at {self.loop.batch_index}"
            )
        if self.loop.is_synchronous and self._is_training() and request.startswith("rollout"):
            self._broken("I8", f"{engine} samples for {request} while a synchronous run trains")

    def published(self, version: PolicyVersion) -> None:
        """By the trainer; the engine does not have it yet."""
        if version.number != self._trainer_version.number + 1 and self._trainer_version.number:
            self._broken("I7", f"version {version} is published after {self._trainer_version}")
        self._trainer_version = version

    def trained(self, samples: Sequence[Sample], version: PolicyVersion, consumed: Sequence[AttemptKey]) -> None:
        """A gradient of ``samples`` at ``version``, after ``consumed`` along the surviving lineage."""
        assert self.loop is not None
        bound = self.loop.config.rollout.max_staleness
        for sample in samples:
            for trained, token in zip(sample.mask, sample.versions, strict=True):
                if trained and (token is None or version.number - token.number > bound):
                    self._broken(
                        "I7", f"sample {sample.id} trains a token of version {token} at {version}; {bound} is allowed"
                    )
        members = [(key.group, key.member) for key in (*consumed, *(s.key for s in samples))]
        if twice := {m for m in members if members.count(m) > 1}:
            self._broken("I11", f"group and member {sorted(twice)} are trained twice in one lineage")

    # ------------------------------------------------------------------------------------- the books' records

    def listen(self, sink: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """Stand between the ledger and its file."""

        def record(entry: dict[str, Any]) -> None:
            self._book(entry)
            sink(entry)

        return record

    def _book(self, entry: Mapping[str, Any]) -> None:
        keys = {AttemptKey(*key) for key in entry.get("keys", ())}
        kind = entry["kind"]
        if kind == "issued":
            if known := keys & self._in_flight:
                self._broken("I10", f"attempts {sorted(known)} are issued while they are in flight")
            self._in_flight |= keys
        elif kind in ("trained", "dropped", "failed"):
            if unknown := keys - self._in_flight:
                self._broken("I10", f"attempts {sorted(unknown)} are {kind}, and none is in flight")
            self._in_flight -= keys
        if kind == "dropped" and self.loop is not None:
            rollout, reason = self.loop.config.rollout, entry["reason"]
            may_drop = {
                "stale": rollout.on_overage == "drop",
                "filtered": self.loop.config.algorithm.dynamic_sampling,
                "member_failed": rollout.on_failure == "discard",
                "too_few_scored": True,
            }
            if not may_drop.get(reason, False):
                self._broken("I9", f"attempts {sorted(keys)} are dropped as {reason!r}, which nobody asked for")

    # ------------------------------------------------------------------------------------------ at every event

    def check(self) -> None:
        loop = self.loop
        if loop is None or self.is_over:
            return
        self.num_checks += 1
        self._check_books(loop)
        self._check_outstanding(loop)
        now_s = loop.parts.clock()
        for wait in loop.parts.watchdog.waits():
            if now_s - wait.since_s > wait.deadline_s + TOLERANCE_S:
                self._broken("I19", f"a wait outlasts its deadline: {wait.line(now_s)}")

    def _check_books(self, loop: Loop) -> None:
        """Everything that was issued is somewhere, and once."""
        ledger = loop.parts.record.ledger
        owed = [*loop._attempts, *(e.key for g in loop.ready.values() for e in g.scored)]
        owed += [e.key for g in loop.assembler.open_groups for e in loop.assembler.ended(g) if e.is_scored]
        if self.batch is not None:
            trained = [e.key for e in self.batch.episodes if e.is_scored]
            owed += [key for key in trained if key in self._in_flight]
        if len(set(owed)) != len(owed):
            self._broken("I10", f"an attempt is at two places: {sorted(k for k in owed if owed.count(k) > 1)}")
        if self._in_flight != set(owed):
            difference = sorted(self._in_flight ^ set(owed))
            self._broken("I10", f"attempts {difference} are in flight by the records or by the loop, not by both")
        try:
            ledger.check(owed, full=self.num_checks % FULL_EVERY == 0)
        except BooksError as error:
            self._broken("I10", str(error))

    def _check_outstanding(self, loop: Loop) -> None:
        rollout = loop.config.rollout
        in_training = len(self.batch.groups) if self.batch is not None and self._is_training() else 0
        outstanding = len(loop.issued_at) + len(loop.ready) + in_training
        bound = (rollout.max_staleness + 1) * rollout.groups_per_batch
        if outstanding > bound:
            self._broken(
                "I7",
                f"{outstanding} groups are outstanding at version {loop.batch_index}; {bound} keep the bound on age",
            )
        if loop.is_synchronous and self._is_training() and loop._attempts:
            self._broken("I8", f"attempts {sorted(loop._attempts)} run while a synchronous run trains")

    def _is_training(self) -> bool:
        """From the close of a batch to its publish."""
        return self.batch is not None and self.loop is not None and self.batch.index == self.loop.batch_index


class WatchedLoop(Loop):
    """The real loop; it tells the monitor which batch it has closed."""

    monitor: Monitor

    async def _update(self, batch: RolloutBatch) -> dict[str, float]:
        self.monitor.batch = batch
        return await super()._update(batch)
