"""The ledger: every attempt ends once, the books balance, resume takes back what the checkpoint lacks (I10, I11; D10;
failures 92, 108, 109)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.control.books import Books
from headrace.control.intervals import IntervalSet
from headrace.control.ledger import BooksError, Ledger, Record
from headrace.types import AttemptKey, PolicyVersion

V0 = PolicyVersion(0, 0)


def keys(group: int, size: int = 2, retry: int = 0) -> list[AttemptKey]:
    return [AttemptKey(group, m, retry) for m in range(size)]


def started(*groups: int) -> Ledger:
    ledger = Ledger()
    ledger.open_lineage(0)
    for group in groups:
        ledger.issue(keys(group), f"task{group}", V0)
    return ledger


def test_life_of_attempts_in_numbers() -> None:
    """I10: issued = trained + trained_uncommitted + dropped(reason) + failed(class) + in flight, with each reason."""
    ledger = started(0, 1, 2, 3)
    ledger.train(keys(0), 1)
    ledger.drop(keys(1), "filtered")
    ledger.fail([AttemptKey(2, 0)], "timeout")
    assert ledger.summary() == {
        "issued": 8,
        "trained": 0,
        "trained_uncommitted": 2,
        "dropped": 2,
        "dropped:filtered": 2,
        "failed": 1,
        "failed:timeout": 1,
        "in_flight": 3,
    }
    assert ledger.task_counts("task2") == {"issued": 2, "failed:timeout": 1, "in_flight": 1}
    assert list(ledger.in_flight) == [AttemptKey(2, 1), *keys(3)]
    ledger.check([AttemptKey(2, 1), *keys(3)], full=True)


def test_trained_for_good_only_with_a_complete_checkpoint() -> None:
    """I11: an attempt is trained when the checkpoint that holds its update is complete, trained-uncommitted before."""
    ledger = started(0, 1)
    ledger.train(keys(0), 1)
    ledger.cut(1)
    ledger.train(keys(1), 2)
    assert (ledger.summary()["trained"], ledger.lag) == (0, 2)
    ledger.checkpoint(1)
    assert (ledger.summary()["trained"], ledger.summary()["trained_uncommitted"], ledger.lag) == (2, 2, 1)


def test_resume_drops_what_the_checkpoint_lacks_and_the_same_keys_are_issued_again() -> None:
    """I11: in flight becomes lost_on_resume, later updates rolled_back; a new lineage may use the keys again."""
    ledger = started(0, 1, 2)
    ledger.train(keys(0), 1)
    ledger.cut(1)
    ledger.checkpoint(1)
    ledger.train(keys(1), 2)
    ledger.open_lineage(1, checkpoint_update=1)
    summary = ledger.summary()
    assert (summary["trained"], summary["dropped:rolled_back"], summary["dropped:lost_on_resume"]) == (2, 2, 2)
    ledger.issue(keys(1), "task1", PolicyVersion(1, 1))
    ledger.train(keys(1), 2)
    ledger.check([], full=True)
    surviving = ledger.surviving()
    assert surviving.summary() == {
        "issued": 4, "trained": 2, "trained_uncommitted": 2, "in_flight": 0, "dropped": 0, "failed": 0
    }  # fmt: skip


def test_checkpoint_complete_on_disk_counts_although_the_ledger_never_heard() -> None:
    """I11: killed between the COMPLETE marker and the ledger's record."""
    ledger = started(0, 1)
    ledger.train(keys(0), 1)
    ledger.cut(1)
    ledger.drop(keys(1), "filtered")
    ledger.open_lineage(1, checkpoint_update=1)
    assert ledger.summary()["trained"] == 2
    assert ledger.committed_update == 1
    # What was dropped after the cut is in the checkpoint's pending groups: it comes again, so it does not survive.
    assert ledger.surviving().total["dropped:filtered"] == 0


def test_resume_from_an_older_checkpoint_takes_back_trained_attempts() -> None:
    """I11: tokens of updates that the restored checkpoint does not contain are discarded, committed or not."""
    ledger = started(0, 1, 2)
    for update, group in enumerate((0, 1), start=1):
        ledger.train(keys(group), update)
        ledger.cut(update)
        ledger.checkpoint(update, oldest_restorable=1)
    ledger.drop(keys(2), "filtered")
    ledger.open_lineage(1, checkpoint_update=1)
    assert ledger.summary()["trained"] == 2
    assert ledger.summary()["dropped:rolled_back"] == 2
    assert ledger.surviving().summary()["issued"] == 2


def test_resume_from_a_checkpoint_that_was_declared_removed_or_never_was() -> None:
    """I11: a checkpoint of another run, or one that is gone, is one clear error."""
    ledger = started(0, 1)
    for update in (1, 2):
        ledger.train(keys(update - 1), update)
        ledger.cut(update)
        ledger.checkpoint(update, oldest_restorable=update)
    for update in (1, 7):
        with pytest.raises(BooksError, match=rf"checkpoint of update {update}, but the ledger knows checkpoints \[2\]"):
            ledger.open_lineage(1, checkpoint_update=update)
    assert ledger.lineage == 0


ILLEGAL: list[tuple[str, Any, str]] = [
    ("issue twice", lambda x: x.issue(keys(0), "task0", V0), "cannot be issued"),
    ("issue a lower retry", lambda x: [x.issue(keys(9, 1, r), "t", V0) for r in (2, 1)], "later retry"),
    ("issue twice in a record", lambda x: x.issue([*keys(9), *keys(9)], "t", V0), "twice in one record"),
    ("train what was never issued", lambda x: x.train(keys(7), 1), "never issued"),
    ("train twice", lambda x: (x.train(keys(0), 1), x.train(keys(0), 1)), "it is trained already"),
    ("train twice in a record", lambda x: x.train([*keys(0), *keys(0)], 1), "twice in one record"),
    ("train after drop", lambda x: (x.drop(keys(0), "stale"), x.train(keys(0), 1)), "it is dropped already"),
    ("drop after train", lambda x: (x.train(keys(0), 1), x.drop(keys(0), "stale")), "it is trained already"),
    ("fail after drop", lambda x: (x.drop(keys(0), "stale"), x.fail(keys(0), "crash")), "it is dropped already"),
    ("train in an older update", lambda x: (x.train(keys(0), 2), x.train(keys(1), 1)), "updates grow"),
    ("train in a cut update", lambda x: (x.train(keys(0), 1), x.cut(1), x.train(keys(1), 1)), "is closed"),
    ("cut an older update", lambda x: (x.train(keys(0), 2), x.cut(1)), "a cut names the newest"),
    ("cut twice", lambda x: (x.cut(0), x.cut(0)), "a cut names the newest"),
    ("checkpoint without a cut", lambda x: (x.train(keys(0), 1), x.checkpoint(1)), "was never cut"),
    ("open a lineage again", lambda x: x.open_lineage(0, 0), "numbers grow"),
    ("resume without a checkpoint", lambda x: x.open_lineage(1), "numbers grow"),
    ("unknown record", lambda x: x.apply({"kind": "gift"}), "unknown kind 'gift'"),
]


@pytest.mark.parametrize(("name", "do", "message"), ILLEGAL, ids=[name for name, _, _ in ILLEGAL])
def test_illegal_transition(name: str, do: Any, message: str) -> None:
    """I11: an attempt is issued once, ends once, and is trained once in a lineage; the books stay as they were."""
    ledger = started(0, 1)
    with pytest.raises(BooksError, match=message):
        do(ledger)
    ledger.check(full=True)


def test_nothing_before_the_first_lineage() -> None:
    """Records cannot be written into the air."""
    with pytest.raises(BooksError, match=r"open_lineage\(\) first"):
        Ledger().issue(keys(0), "t", V0)
    with pytest.raises(BooksError, match="the first lineage has no checkpoint"):
        Ledger().open_lineage(0, 3)


def test_lost_and_unknown_attempts_are_named() -> None:
    """I10, failure 92: an attempt whose exception was swallowed is named, and so is one that was never booked."""
    ledger = started(0)
    with pytest.raises(BooksError, match=r"lost by the loop: g0m1; unknown to the ledger: g5m0"):
        ledger.check([AttemptKey(0, 0), AttemptKey(5, 0)])


def test_imbalance_names_the_task_and_the_difference() -> None:
    """I10: the report says where to look."""
    books = Books()
    books.add("t", "issued", 3)
    books.add("t", "trained", 2)
    with pytest.raises(BooksError, match=r"total: issued 3 != 2 trained \(off by 1\)"):
        books.check("run")
    books.add("other", "trained", 1)
    with pytest.raises(BooksError, match="task t: issued 3 != 2 trained"):
        books.check("run")
    negative = Books()
    negative.add("t", "in_flight", -1)
    negative.add("t", "trained", 1)
    with pytest.raises(BooksError, match="negative: in_flight"):
        negative.check("run")


def test_closed_groups_stay_closed_when_they_are_forgotten() -> None:
    """I11: a terminal attempt that left memory still cannot be issued or trained again."""
    ledger = started(*range(20))
    for update in range(1, 11):
        ledger.train(keys(2 * update - 2) + keys(2 * update - 1), update)
    assert len(ledger._groups) < 8
    with pytest.raises(BooksError, match="end of its group"):
        ledger.issue(keys(0, retry=1), "task0", V0)
    with pytest.raises(BooksError, match="its group is closed"):
        ledger.train(keys(1), 11)


def test_state_is_flat_in_the_number_of_episodes() -> None:
    """A long run over few tasks does not grow the ledger: 20 and 2000 batches leave states of nearly one size."""

    def size_after(num_batches: int) -> int:
        ledger = Ledger()
        ledger.open_lineage(0)
        for batch in range(num_batches):
            ledger.issue(keys(batch), f"task{batch % 5}", V0)
            ledger.train(keys(batch), batch + 1)
            if batch % 10 == 9:
                ledger.cut(batch + 1)
                ledger.checkpoint(batch + 1, oldest_restorable=batch - 9)
        return _deep_size(ledger)

    assert size_after(2000) < 1.3 * size_after(20)


def _deep_size(value: Any) -> int:
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_deep_size(k) + _deep_size(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set)):
        return size + sum(_deep_size(v) for v in value)
    if hasattr(value, "__dict__"):
        return size + _deep_size(vars(value))
    return size + sum(_deep_size(getattr(value, name)) for name in getattr(value, "__slots__", ()))


def test_interval_set_is_a_set() -> None:
    """Closed group ids are kept as intervals: same answers as a set, memory by holes."""
    order = [5, 3, 4, 10, 9, 0, 3, 11, 1]
    intervals = IntervalSet()
    for position, value in enumerate(order):
        intervals.add(value)
        assert {v for v in range(15) if v in intervals} == set(order[: position + 1])
    assert intervals.num_intervals == 3


class LedgerMachine(RuleBasedStateMachine):
    """Against a naive model that keeps every attempt: the books, the survivors and the replay agree at every moment."""

    @initialize()
    def start(self) -> None:
        self.records: list[Record] = []
        self.ledger = Ledger(sink=self.records.append)
        self.ledger.open_lineage(0)
        self.status: dict[tuple[int, AttemptKey], Any] = {}
        """(lineage, key) -> in_flight, ('update', u), trained status or an ended status."""
        self.ended_at: dict[tuple[int, AttemptKey], int] = {}
        """Position of dropped and failed ones in the order of events."""
        self.events = 0
        self.cuts: dict[int, int] = {0: 0}
        """Update -> position of its cut in the order of events; update 0 is the start."""
        self.complete = [0]
        self.lineage, self.update, self.next_group = 0, 0, 0
        self.owed: set[int] = set()
        self.dead: set[tuple[int, AttemptKey]] = set()

    def open(self) -> list[AttemptKey]:
        return [k for (n, k), s in self.status.items() if n == self.lineage and s == "in_flight"]

    @rule(size=st.integers(1, 3))
    def issue(self, size: int) -> None:
        if self.owed:
            group = min(self.owed)
            self.owed.remove(group)
        else:
            group = self.next_group
            self.next_group += 1
        self.ledger.issue(keys(group, size), f"task{group % 3}", PolicyVersion(self.lineage, self.update))
        self.status |= {(self.lineage, k): "in_flight" for k in keys(group, size)}

    @precondition(lambda self: self.open())
    @rule(data=st.data(), how=st.sampled_from(["drop", "fail"]), reason=st.sampled_from(["a", "b"]))
    def end(self, data: st.DataObject, how: str, reason: str) -> None:
        key = data.draw(st.sampled_from(self.open()))
        getattr(self.ledger, how)([key], reason)
        self.events += 1
        self.status[self.lineage, key] = {"drop": "dropped:", "fail": "failed:"}[how] + reason
        self.ended_at[self.lineage, key] = self.events

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.open()), min_size=1, unique=True))
        self.update += 1
        self.ledger.train(chosen, self.update)
        for key in chosen:
            self.status[self.lineage, key] = ("update", self.update)

    @precondition(lambda self: self.update > max(self.cuts))
    @rule()
    def cut(self) -> None:
        self.ledger.cut(self.update)
        self.cuts[self.update] = self.events

    @precondition(lambda self: max(self.cuts) > self.complete[-1])
    @rule(fold=st.booleans(), heard=st.booleans())
    def checkpoint(self, fold: bool, heard: bool) -> None:
        self.complete.append(max(self.cuts))
        if heard:  # else killed, or late: the folder is complete and the ledger does not know
            self.ledger.checkpoint(self.complete[-1], self.complete[-2] if fold else None)
        if heard and fold:
            self.complete = self.complete[-2:]

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        # Any complete checkpoint that the ledger was told of, or the last one.
        update = data.draw(st.sampled_from([*(u for u in self.complete if u in self.known()), self.complete[-1]]))
        self.lineage += 1
        self.ledger.open_lineage(self.lineage, update)
        for (n, key), status in list(self.status.items()):
            lost = status == "in_flight" or (isinstance(status, tuple) and status[1] > update)
            late = self.ended_at.get((n, key), -1) > self.cuts[update]
            if lost or (late and not isinstance(status, tuple)):
                self.dead.add((n, key))
                self.owed.add(key.group)
            if lost:
                rolled_back = isinstance(status, tuple)
                self.status[n, key] = "dropped:rolled_back" if rolled_back else "dropped:lost_on_resume"
        # Groups of which a part was settled before the cut are the loop's affair; here each group lives once a lineage.
        settled = {k.group for (n, k) in self.status if (n, k) not in self.dead}
        self.owed -= settled
        self.complete = [u for u in self.complete if u <= update]
        self.cuts = {u: e for u, e in self.cuts.items() if u <= update}
        self.update = update

    def known(self) -> list[int]:
        return [self.ledger._base_update, *(u for u, _ in self.ledger._committed)]

    def expected(self, surviving: bool) -> Counter[str]:
        counts: Counter[str] = Counter()
        for who, status in self.status.items():
            if surviving and who in self.dead:
                continue
            counts["issued"] += 1
            if isinstance(status, tuple):
                status = "trained" if status[1] <= self.ledger.committed_update else "trained_uncommitted"
            counts[status] += 1
        return counts

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check(self.open(), full=True)
        assert +self.ledger._books.total == self.expected(surviving=False)
        surviving = self.ledger.surviving()
        surviving.check("surviving")
        assert +surviving.total == self.expected(surviving=True)

    @invariant()
    def replay_agrees(self) -> None:
        replayed = Ledger()
        for record in self.records:
            replayed.apply(json.loads(json.dumps(record)))
        assert replayed.summary() == self.ledger.summary()
        assert replayed.in_flight == self.ledger.in_flight
        assert +replayed.surviving().total == +self.ledger.surviving().total
        assert replayed.lag == self.ledger.lag


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


class TestLedgerMachine(LedgerMachine.TestCase):  # type: ignore[name-defined,misc]
    """I10, I11: any order of issue, end, train, cut, checkpoint, kill and resume."""
