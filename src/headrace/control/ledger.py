"""The ledger: what became of every attempt, across kill -9 and resume (I10, I11).

    issued = trained + trained_uncommitted + dropped(reason) + failed(class) + in flight

for each task and in total. An attempt is identified by (lineage, AttemptKey): a resume opens a new lineage, in which
the groups that were lost are issued again under the same keys. In one lineage an attempt is issued once and ends once.

Life of an attempt::

    issue --> in flight --> train(update) --> trained_uncommitted --> checkpoint(>= update) --> trained
                   |--> drop(reason)                  |
                   |--> fail(class)                   '--> open_lineage(older checkpoint) --> dropped:rolled_back
                   '--> open_lineage --> dropped:lost_on_resume

A checkpoint is made in two records: ``cut(update)`` when its state is taken, committed before the checkpoint can be
complete; ``checkpoint(update)`` when it is. Between the two the run goes on. A resume names the update of the
checkpoint that it restored; the ledger then commits what that one holds (even where the process died before it wrote
``checkpoint``) and takes back what it does not hold, trained attempts of later checkpoints included.

Two books are kept. The full ones count every lineage. ``surviving()`` counts along the surviving chain only: what was
resolved before each fork, and everything since the last.

State is flat in the number of episodes: counters for each task, attempts in flight, counts since the oldest checkpoint
that can still be restored, and closed group ids as intervals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from headrace.control.books import (
    DROPPED,
    FAILED,
    IN_FLIGHT,
    ISSUED,
    TRAINED,
    UNCOMMITTED,
    Books,
    BooksError,
    Entries,
)
from headrace.control.intervals import IntervalSet
from headrace.types import AttemptKey, PolicyVersion

__all__ = ["BooksError", "Ledger", "Record"]

Record = dict[str, Any]
"""One line of the ledger: JSON values, with ``kind`` = lineage, issued, trained, dropped, failed, cut or checkpoint."""


class Ledger:
    """The books as a state machine. Every method either does its whole work and hands the record to ``sink``, or
    raises BooksError and changes nothing. Not thread-safe: the loop's thread owns it.

    Example::

        ledger = Ledger(sink=segment.append)
        ledger.open_lineage(0)
        ledger.issue(keys, task.content_hash, version)
        ledger.train(keys, update=1)
        ledger.cut(1)                       # state taken, then the checkpoint is written
        ledger.checkpoint(1)
    """

    def __init__(self, sink: Callable[[Record], None] | None = None) -> None:
        self.sink = sink
        self._lineage = -1
        self._books = Books()
        self._open: dict[AttemptKey, str] = {}
        self._groups: dict[int, _GroupAttempts] = {}
        self._closed = IntervalSet()
        self._settled_before: set[int] = set()
        self._uncommitted: dict[int, Counter[str]] = {}
        self._update = 0
        self._touched: set[str] = set()
        # The surviving chain: folded base, entries up to each restorable checkpoint, up to each cut, and since.
        self._base = Books()
        self._base_update = 0
        self._committed: list[tuple[int, Entries]] = []
        self._cuts: list[tuple[int, Entries]] = []
        self._since: Entries = Counter()
        self._surviving_issued = 0

    # ------------------------------------------------------------------------------------------- what is known

    @property
    def lineage(self) -> int:
        """The open lineage; -1 before the first."""
        return self._lineage

    @property
    def update(self) -> int:
        """The newest update that anything was trained in, or that the lineage started from."""
        return self._update

    @property
    def committed_update(self) -> int:
        """The update of the newest complete checkpoint; 0 without one."""
        return self._committed[-1][0] if self._committed else self._base_update

    @property
    def lag(self) -> int:
        """Updates that a kill now would take back."""
        return self._update - self.committed_update

    @property
    def in_flight(self) -> Mapping[AttemptKey, str]:
        """Attempts of the open lineage that are not resolved -> task, oldest first."""
        return dict(self._open)

    def summary(self) -> dict[str, int]:
        """Counts by status over all lineages, for metrics and report: cheap, call it at every step."""
        return self._books.summary()

    def task_counts(self, task: str) -> dict[str, int]:
        """Counts by status of one task over all lineages, without zeros."""
        return {status: n for status, n in self._books.by_task.get(task, Counter[str]()).items() if n}

    def surviving(self) -> Books:
        """The books along the surviving lineage: a copy, built in time linear in the number of tasks."""
        books = Books()
        for task, counts in self._base.by_task.items():
            for status, count in counts.items():
                books.add(task, status, count)
        for _, entries in (*self._committed, *self._cuts):
            books.add_entries(entries)
        books.add_entries(self._since)
        for by_task in self._uncommitted.values():
            for task, count in by_task.items():
                books.add(task, UNCOMMITTED, count)
        for task in self._open.values():
            books.add(task, IN_FLIGHT)
        for task, counts in books.by_task.items():
            books.add(task, ISSUED, sum(counts.values()))
        return books

    def check(self, in_flight: Collection[AttemptKey] | None = None, *, full: bool = False) -> None:
        """Raises BooksError naming the imbalance. ``in_flight``: the attempts that the loop knows to run or hold; the
        ledger must know the same ones (an attempt whose exception was swallowed is found here, failure 92). Looks at
        the tasks touched since the last check; ``full`` looks at all, and at the surviving chain."""
        self._books.check("all lineages", None if full else self._touched)
        self._touched.clear()
        if (counted := self._books.total[IN_FLIGHT]) != len(self._open):
            raise BooksError(f"{counted} attempts in flight are counted, {len(self._open)} are known (I10)")
        if in_flight is not None and (difference := self._open.keys() ^ set(in_flight)):
            lost = sorted(difference & self._open.keys())
            unknown = sorted(difference - self._open.keys())
            raise BooksError(
                "attempts in flight differ between ledger and loop: "
                f"lost by the loop: {_names(lost)}; unknown to the ledger: {_names(unknown)} (I10). "
                "Every issued attempt must end in train, drop or fail"
            )
        if full and (found := self.surviving().total[ISSUED]) != self._surviving_issued:
            raise BooksError(f"surviving chain: issued {self._surviving_issued}, accounted for {found} (I11)")

    # --------------------------------------------------------------------------------------------- transitions

    def open_lineage(self, lineage: int, checkpoint_update: int | None = None) -> None:
        """Start the run (``checkpoint_update`` None) or resume it from the checkpoint of that update; 0 means from the
        initial weights. Attempts in flight become dropped:lost_on_resume, those trained in later updates
        dropped:rolled_back. Raises BooksError where the ledger knows no such checkpoint."""
        if lineage <= self._lineage or (self._lineage == -1) != (checkpoint_update is None):
            raise BooksError(
                f"lineage {lineage} cannot be opened after lineage {self._lineage} from checkpoint "
                f"{checkpoint_update}: numbers grow, the first lineage has no checkpoint and each later one has"
            )
        if checkpoint_update is not None:
            self._roll_back(checkpoint_update)
        self._lineage = lineage
        self._emit({"kind": "lineage", "lineage": lineage, "checkpoint_update": checkpoint_update})

    def issue(self, keys: Sequence[AttemptKey], task: str, version: PolicyVersion) -> None:
        """Attempts at ``task`` (its content hash) are about to start. Commit the ledger before work begins."""
        self._need_lineage()
        for key in keys:
            self._check_new(key)
        if len(set(keys)) != len(keys):
            raise BooksError(f"attempts {_names(keys)} are issued twice in one record")
        for key in keys:
            self._groups.setdefault(key.group, _GroupAttempts()).issue(key)
            self._open[key] = task
        self._touched.add(task)
        self._books.add(task, ISSUED, len(keys))
        self._books.add(task, IN_FLIGHT, len(keys))
        self._surviving_issued += len(keys)
        self._emit({"kind": "issued", "task": task, "keys": [list(k) for k in keys], "version": list(version)})

    def train(self, keys: Sequence[AttemptKey], update: int) -> None:
        """The attempts were trained in the batch that leads to policy number ``update``."""
        last_cut = self._cuts[-1][0] if self._cuts else self.committed_update
        if update < self._update or update <= last_cut:
            raise BooksError(
                f"attempts {_names(keys)} trained in update {update}, but update {max(self._update, last_cut)} came "
                f"before it and checkpoint {last_cut} is cut: updates grow, and a cut update is closed"
            )
        tasks = self._resolve(keys, "trained", f"trained in update {update}")
        if update > self._update:
            self._close_settled_groups()
        self._update = update
        by_task = self._uncommitted.setdefault(update, Counter())
        for task in tasks:
            self._books.move(task, IN_FLIGHT, UNCOMMITTED)
            by_task[task] += 1
        self._emit({"kind": "trained", "update": update, "keys": [list(k) for k in keys]})

    def drop(self, keys: Sequence[AttemptKey], reason: str) -> None:
        """The attempts are not trained, and nothing failed: stale, filtered, group_discarded, run_ended, ..."""
        self._end(keys, "dropped", DROPPED, reason)

    def fail(self, keys: Sequence[AttemptKey], error_class: str) -> None:
        """The attempts have no score: an outcome or an error class."""
        self._end(keys, "failed", FAILED, error_class)

    def cut(self, update: int) -> None:
        """The state of the checkpoint of ``update`` was taken. Commit the ledger before that one is complete."""
        self._need_lineage()
        last_cut = self._cuts[-1][0] if self._cuts else self.committed_update
        if update < self._update or update < last_cut or (update == last_cut and self._cuts):
            raise BooksError(
                f"checkpoint {update} is cut after update {self._update} and checkpoint {last_cut}: a cut names the "
                "newest update, and the same update is cut again only after its checkpoint is complete"
            )
        self._cuts.append((update, self._since))
        self._since = Counter()
        self._emit({"kind": "cut", "update": update})

    def checkpoint(self, update: int, oldest_restorable: int | None = None) -> None:
        """The checkpoint of ``update`` is complete: what was trained up to it is trained for good.
        ``oldest_restorable``: update of the oldest checkpoint kept on disk; what is older need not be told apart."""
        if update not in (u for u, _ in self._cuts):
            raise BooksError(f"checkpoint {update} is complete but was never cut; call cut() when its state is taken")
        self._commit(update)
        if oldest_restorable is not None:
            self._fold(oldest_restorable)
        self._emit({"kind": "checkpoint", "update": update, "oldest_restorable": oldest_restorable})

    def apply(self, record: Mapping[str, Any]) -> None:
        """Do again what a record says: the way back from files. Raises BooksError for a record of no known kind."""
        kind = record.get("kind")
        if kind == "lineage":
            self.open_lineage(record["lineage"], record["checkpoint_update"])
        elif kind == "issued":
            self.issue(_keys(record), record["task"], PolicyVersion(*record["version"]))
        elif kind == "trained":
            self.train(_keys(record), record["update"])
        elif kind == "dropped":
            self.drop(_keys(record), record["reason"])
        elif kind == "failed":
            self.fail(_keys(record), record["reason"])
        elif kind == "cut":
            self.cut(record["update"])
        elif kind == "checkpoint":
            self.checkpoint(record["update"], record["oldest_restorable"])
        else:
            raise BooksError(f"a ledger record is of unknown kind {kind!r}; it was written by a newer headrace")

    # -------------------------------------------------------------------------------------------------- inside

    def _emit(self, record: Record) -> None:
        if self.sink is not None:
            self.sink(record)

    def _need_lineage(self) -> None:
        if self._lineage == -1:
            raise BooksError("no lineage is open; call open_lineage() first")

    def _check_new(self, key: AttemptKey) -> None:
        group = self._groups.get(key.group)
        if key.group in self._closed or (group is not None and not group.may_issue(key)):
            raise BooksError(
                f"attempt {key} cannot be issued in lineage {self._lineage}: it, a later retry of its member, or the "
                "end of its group is in the ledger already (I11)"
            )

    def _resolve(self, keys: Sequence[AttemptKey], status: str, what: str) -> list[str]:
        """Take the attempts out of flight; returns their tasks. Checks all before it changes any."""
        for key in keys:
            if key not in self._open:
                group = self._groups.get(key.group)
                known = "its group is closed" if key.group in self._closed else "it was never issued"
                if group is not None and key in group.status:
                    known = f"it is {group.status[key]} already"
                raise BooksError(f"attempt {key} cannot be {what} in lineage {self._lineage}: {known} (I11)")
        if len(set(keys)) != len(keys):
            raise BooksError(f"attempts {_names(keys)} are {what} twice in one record (I11)")
        tasks = []
        for key in keys:
            tasks.append(self._open.pop(key))
            self._groups[key.group].resolve(key, status)
        self._touched.update(tasks)
        return tasks

    def _end(self, keys: Sequence[AttemptKey], kind: str, prefix: str, reason: str) -> None:
        for task in self._resolve(keys, kind, f"{kind} ({reason})"):
            self._books.move(task, IN_FLIGHT, prefix + reason)
            self._since[task, prefix + reason] += 1
        self._emit({"kind": kind, "reason": reason, "keys": [list(k) for k in keys]})

    def _close_settled_groups(self) -> None:
        """Forget groups that had no attempt in flight at two successive updates: a retry follows its failure at
        once, so none of them can still get one."""
        settled = {g for g, attempts in self._groups.items() if attempts.num_in_flight == 0}
        for group in settled & self._settled_before:
            del self._groups[group]
            self._closed.add(group)
        self._settled_before = settled

    def _commit(self, update: int) -> None:
        entries: Entries = Counter()
        while self._cuts and self._cuts[0][0] <= update:
            entries.update(self._cuts.pop(0)[1])
        for trained_in in [u for u in self._uncommitted if u <= update]:
            for task, count in self._uncommitted.pop(trained_in).items():
                self._books.move(task, UNCOMMITTED, TRAINED, count)
                entries[task, TRAINED] += count
                self._touched.add(task)
        self._committed.append((update, entries))

    def _fold(self, oldest_restorable: int) -> None:
        while self._committed and self._committed[0][0] <= oldest_restorable:
            self._base_update, entries = self._committed.pop(0)
            self._base.add_entries(entries)

    def _roll_back(self, update: int) -> None:
        if update in (u for u, _ in self._cuts):
            self._commit(update)
        known = [self._base_update, *(u for u, _ in self._committed)]
        if update not in known:
            raise BooksError(
                f"a resume from the checkpoint of update {update}, but the ledger knows checkpoints {known}: "
                "checkpoint and ledger folder are not of one run, or that checkpoint was declared removed"
            )
        dead: list[Entries] = []
        while self._committed and self._committed[-1][0] > update:
            dead.append(self._committed.pop()[1])
        for entries in dead:
            for (task, status), count in entries.items():
                if status == TRAINED:
                    self._books.move(task, TRAINED, DROPPED + "rolled_back", count)
        for by_task in self._uncommitted.values():
            for task, count in by_task.items():
                self._books.move(task, UNCOMMITTED, DROPPED + "rolled_back", count)
        for task in self._open.values():
            self._books.move(task, IN_FLIGHT, DROPPED + "lost_on_resume")
        self._uncommitted, self._open, self._groups, self._settled_before = {}, {}, {}, set()
        self._closed = IntervalSet()
        self._cuts, self._since = [], Counter()
        self._update = update
        self._touched = set(self._books.by_task)
        self._surviving_issued = self.surviving().total[ISSUED]


class _GroupAttempts:
    """Attempts of one group in the open lineage: enough to refuse a second issue or a second end."""

    __slots__ = ("num_in_flight", "status")

    def __init__(self) -> None:
        self.status: dict[AttemptKey, str] = {}
        self.num_in_flight = 0

    def may_issue(self, key: AttemptKey) -> bool:
        return all(k.member != key.member or k.retry < key.retry for k in self.status)

    def issue(self, key: AttemptKey) -> None:
        self.status[key] = IN_FLIGHT
        self.num_in_flight += 1

    def resolve(self, key: AttemptKey, status: str) -> None:
        self.status[key] = status
        self.num_in_flight -= 1


def _keys(record: Mapping[str, Any]) -> list[AttemptKey]:
    return [AttemptKey(*key) for key in record["keys"]]


def _names(keys: Sequence[AttemptKey]) -> str:
    shown = ", ".join(str(k) for k in keys[:8])
    return (shown + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")) or "none"
