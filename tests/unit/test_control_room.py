"""The whole control room in virtual time: admission, cursor, grouping, selection and ledger driven by a scripted
world of random durations, failures, filtered groups and kills. What must hold: I7, I8, I9, I10, I11; failures 72, 91,
92, 98, 99, 108, 109, 111."""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.control.admission import Admission
from headrace.control.cursor import TaskCursor
from headrace.control.grouping import Complete, Discard, GroupAssembler, Retry
from headrace.control.ledger import Ledger
from headrace.control.staleness import BatchSelector, oldest_version
from headrace.types import (
    AttemptKey,
    Episode,
    Group,
    Outcome,
    PolicyVersion,
    Score,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)

NUM_TASKS = 7
TASKS = [Task(id=f"t{i}", messages=({"role": "user", "content": str(i)},)) for i in range(NUM_TASKS)]


@dataclass
class World:
    """One run, with its kills. ``durable`` is all that a kill leaves: committed ledger records and checkpoints."""

    groups_per_batch: int
    max_staleness: int
    num_batches: int
    seed: int
    group_size: int = 2
    max_concurrent: int = 6
    failure_rate: float = 0.1
    filter_rate: float = 0.15
    kill_rate: float = 0.0
    checkpoint_every: int = 2
    on_overage: Any = "wait"
    on_failure: Any = "refill"
    outcome_seed: int = 0
    capped: bool = True
    short_rate: float = 0.0
    """How often a batch is closed with whatever is there, as when dynamic sampling gives up."""
    durable_records: list[str] = field(default_factory=list)
    checkpoints: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    trained: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(lineage, update, group ids) of each batch on the surviving chain."""
    ages: list[int] = field(default_factory=list)
    num_held: int = 0
    num_kills: int = 0
    overlap: bool = False

    def run(self) -> Ledger:
        self.random = random.Random(self.seed)
        lineage = 0
        while True:
            session = Session(self, lineage)
            if session.run():
                return session.ledger
            self.num_kills += 1
            lineage += 1


class Session:
    """One process of the run: from start or resume to the end or a kill."""

    def __init__(self, world: World, lineage: int) -> None:
        self.w = world
        self.lineage = lineage
        self.now, self.sequence = 0.0, 0
        self.events: list[tuple[float, int, str, Any]] = []
        self.buffered: list[Group] = []
        self.issued_under: dict[AttemptKey, int] = {}
        self.training: tuple[Group, ...] | None = None
        self.writing: int | None = None
        self.version = 0
        self.cursor = TaskCursor(NUM_TASKS, seed=3)
        self.gate = Admission(
            world.groups_per_batch,
            world.max_staleness,
            world.max_concurrent,
            world.num_batches if world.capped else None,
        )
        self.assembler = GroupAssembler(world.group_size, 1, world.on_failure, max_retries=2)
        self.selector = BatchSelector(world.groups_per_batch, world.max_staleness, world.on_overage)
        self.pending_records: list[str] = []
        self.ledger = Ledger()
        for record in world.durable_records:
            self.ledger.apply(json.loads(record))
        self.ledger.sink = lambda record: self.pending_records.append(json.dumps(record))
        self._restore()

    def _restore(self) -> None:
        if self.lineage == 0 or not self.w.durable_records:
            self.ledger.open_lineage(self.lineage)
        else:
            self.version, state = self.w.checkpoints[-1] if self.w.checkpoints else (0, None)
            if state is not None:
                self.cursor.restore(json.loads(json.dumps(state)))
            self.gate.restore(self.version)
            self.ledger.open_lineage(self.lineage, self.version)
            self.w.trained = [t for t in self.w.trained if t[1] <= self.version]
        self.commit()
        self.ledger.check([], full=True)

    def commit(self) -> None:
        self.w.durable_records += self.pending_records
        self.pending_records.clear()

    def run(self) -> bool:
        """True when all batches are trained, False when it was killed."""
        self.step()
        while self.version < self.w.num_batches:
            assert self.events, f"deadlock at version {self.version}: {self.gate.running} running, none will end"
            self.now, _, kind, payload = heapq.heappop(self.events)
            getattr(self, f"on_{kind}")(payload)
            self.step()
            self.ledger.check(self.expected_in_flight())
            if self.w.random.random() < self.w.kill_rate:
                return False
        self.finish()
        return True

    def finish(self) -> None:
        for group in self.assembler.open_groups:
            discard = self.assembler.abandon(group, "run_ended")
            self.ledger.drop([*discard.open_keys, *(e.key for e in discard.episodes if e.is_scored)], "run_ended")
        for group in self.buffered:
            self.ledger.drop([e.key for e in group.scored], "run_ended")
        if self.writing != self.version:  # else that one only has to end
            self.ledger.cut(self.version)
        self.ledger.checkpoint(self.version)
        self.ledger.check([], full=True)

    def expected_in_flight(self) -> list[AttemptKey]:
        held = [e.key for g in (*self.buffered, *(self.training or ())) for e in g.scored]
        for group in self.assembler.open_groups:
            held += self.assembler.open_keys(group)
            held += [e.key for e in self.assembler.ended(group) if e.is_scored]
        return held

    def after(self, delay_s: float, kind: str, payload: Any) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay_s, self.sequence, kind, payload))

    # -- the loop's work ----------------------------------------------------------------------------

    def step(self) -> None:
        while self.fill() or self.choose():
            pass

    def fill(self) -> None:
        while self.gate.capacity(self.version) > 0:
            draw = self.cursor.next()
            self.gate.issue()
            self.start(self.assembler.start(draw.group, TASKS[draw.task_index]), TASKS[draw.task_index])

    def choose(self) -> bool:
        """True where groups were dropped, so that places are free again."""
        if self.training is None and self.version < self.w.num_batches:
            least = 1 if self.w.short_rate and self.w.random.random() < self.w.short_rate else None
            selection = self.selector.select(self.buffered, self.in_flight(), self.version, min_groups=least)
            for group in selection.stale:
                assert self.w.on_overage == "drop"
                self.buffered.remove(group)
                self.ledger.drop([e.key for e in group.scored], "stale")
                self.gate.withdraw()
                self.cursor.settle(group.id)
            self.w.num_held += bool(selection.held_by)
            if selection.batch:
                self.training = selection.batch
                self.gate.close_batch(len(selection.batch))
                self.buffered = [g for g in self.buffered if g not in selection.batch]
                self.w.ages += [self.version - oldest_version(g) for g in selection.batch]
                self.after(self.w.random.uniform(0.2, 2.0), "trained", None)
            return bool(selection.stale)
        return False

    def in_flight(self) -> dict[int, int]:
        oldest = {}
        for group in self.assembler.open_groups:
            versions = [self.issued_under[k] for k in self.assembler.open_keys(group)]
            versions += [oldest_version(e) for e in self.assembler.ended(group)]
            oldest[group] = min(versions)
        return oldest

    def start(self, keys: list[AttemptKey], task: Task) -> None:
        self.ledger.issue(keys, task.content_hash, PolicyVersion(self.lineage, self.version))
        self.commit()
        for key in keys:
            self.issued_under[key] = self.version
            slow = 12.0 if self.w.random.random() < 0.15 else 1.0
            self.after(self.w.random.expovariate(1.0) * slow + 0.01, "ended", (key, task))

    def on_ended(self, payload: tuple[AttemptKey, Task]) -> None:
        key, task = payload
        self.w.overlap |= self.training is not None
        chance = random.Random(f"{self.w.outcome_seed}/{key}")
        failed = chance.random() < self.w.failure_rate
        first, last = self.issued_under[key], self.version
        spans = (
            VersionSpan(PolicyVersion(self.lineage, first), 0, 1),
            VersionSpan(PolicyVersion(self.lineage, last), 1, 2),
        )
        segments = (
            Segment(source=Source.TEMPLATE, ids=(1,)),
            Segment(source=Source.POLICY, ids=(2, 3), parent=0, logprobs=(-0.5, -0.5), version_spans=spans),
        )
        episode = Episode(
            key=key,
            task=task,
            turns=(),
            trace=Trace(segments=segments),
            outcome=Outcome.INFRASTRUCTURE_ERROR if failed else Outcome.DONE,
            score=None if failed else Score(value=1.0),
        )
        if failed:
            self.ledger.fail([key], episode.outcome)
        decision = self.assembler.add(episode)
        if isinstance(decision, Retry):
            self.start([decision.key], task)
        elif isinstance(decision, Discard):
            self.leave([e.key for e in decision.episodes if e.is_scored], key.group, "group_discarded")
        elif isinstance(decision, Complete):
            keys = [e.key for e in decision.group.scored]
            if random.Random(f"filter/{self.w.outcome_seed}/{key.group}").random() < self.w.filter_rate:
                self.leave(keys, key.group, "filtered")
            else:
                self.gate.accept()
                self.buffered.append(decision.group)
        self.commit()

    def leave(self, keys: list[AttemptKey], group: int, reason: str) -> None:
        self.ledger.drop(keys, reason)
        self.gate.reject()
        self.cursor.settle(group)

    def on_trained(self, _: None) -> None:
        assert self.training is not None
        batch, self.training = self.training, None
        self.version += 1
        if self.w.on_overage == "wait":
            for group in self.buffered:
                assert self.version - oldest_version(group) <= self.w.max_staleness
            assert all(self.version - u <= self.w.max_staleness for u in self.in_flight().values())
        self.ledger.train([e.key for g in batch for e in g.scored], self.version)
        for group in batch:
            self.cursor.settle(group.id)
        self.w.trained.append((self.lineage, self.version, tuple(g.id for g in batch)))
        self.commit()
        if self.version % self.w.checkpoint_every == 0 and self.writing is None:
            self.writing = self.version
            self.ledger.cut(self.version)
            self.commit()
            self.after(self.w.random.uniform(0.1, 3.0), "written", (self.version, self.cursor.state()))

    def on_written(self, checkpoint: tuple[int, dict[str, Any]]) -> None:
        self.writing = None
        self.w.checkpoints.append(checkpoint)  # complete on disk from here on ...
        if self.w.random.random() < self.w.kill_rate * 5:
            return  # ... and killed before the ledger heard of it, or as good as: it hears at the next resume
        self.ledger.checkpoint(checkpoint[0], oldest_restorable=self.w.checkpoints[-2:][0][0])
        self.commit()


def trained_groups(world: World) -> list[int]:
    return [g for _, _, groups in world.trained for g in groups]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_token_is_older_than_the_bound_and_nothing_deadlocks(max_staleness: int, seed: int) -> None:
    """I7, ALGORITHMS staleness (a), (b): rejections and long tails neither break the bound nor stop the run."""
    world = World(groups_per_batch=3, max_staleness=max_staleness, num_batches=15, seed=seed, failure_rate=0.3)
    ledger = world.run()
    assert max(world.ages) <= max_staleness
    assert len(trained_groups(world)) == len(set(trained_groups(world))) == 45
    assert ledger.summary()["dropped:filtered"] > 0
    assert "dropped:stale" not in ledger.summary()  # I9: pacing, not dropping


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_books_and_bound_survive_kills(max_staleness: int, seed: int) -> None:
    """I10, I11, ALGORITHMS (c), failures 108, 109: after any number of kills each group is trained at most once along
    the surviving chain, none is skipped, the bound holds and the books balance."""
    world = World(
        groups_per_batch=2, max_staleness=max_staleness, num_batches=12, seed=seed, kill_rate=0.05, max_concurrent=5
    )
    ledger = world.run()
    groups = trained_groups(world)
    assert world.num_kills > 0
    assert max(world.ages) <= max_staleness
    assert len(groups) == len(set(groups)) == 24
    assert [update for _, update, _ in world.trained] == list(range(1, 13))
    surviving = ledger.surviving()
    surviving.check("surviving")
    assert surviving.total["dropped:lost_on_resume"] == surviving.total["dropped:rolled_back"] == 0
    assert ledger.summary()["trained"] == surviving.total["trained"]
    assert ledger.summary()["dropped:lost_on_resume"] > 0
    untrained = {g for g in range(max(groups)) if g not in groups}
    filtered = {g for g in untrained if random.Random(f"filter/0/{g}").random() < world.filter_rate}
    failed = {g for g in untrained if all(_fails(g, m) for m in range(2))}
    assert untrained <= filtered | failed, "a group was skipped by a resume"


def _fails(group: int, member: int) -> bool:
    return all(random.Random(f"0/{AttemptKey(group, member, r)}").random() < 0.1 for r in range(3))


@given(
    seed=st.integers(0, 10**6),
    groups_per_batch=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    max_concurrent=st.integers(1, 12),
    group_size=st.integers(1, 3),
    failure_rate=st.sampled_from([0.0, 0.2, 0.6]),
    kill_rate=st.sampled_from([0.0, 0.01]),
    short_rate=st.sampled_from([0.0, 0.3]),
    on_failure=st.sampled_from(["refill", "shrink", "discard"]),
    capped=st.booleans(),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_any_setting_keeps_bound_and_books_and_ends(**setting: Any) -> None:
    """I7, I10, I11: bound, books and progress for any shape of run, batches closed short and few concurrent groups
    included; every batch of the surviving chain is there once, and no group is in two of them."""
    world = World(num_batches=8, **setting)
    ledger = world.run()
    assert max(world.ages) <= world.max_staleness
    assert [update for _, update, _ in world.trained] == list(range(1, 9))
    assert len(trained_groups(world)) == len(set(trained_groups(world)))
    if not world.short_rate:
        assert len(trained_groups(world)) == 8 * world.groups_per_batch
    ledger.surviving().check("surviving")


def test_kills_without_a_checkpoint_start_over() -> None:
    """I11: with no checkpoint yet a resume starts from the initial weights, and its books hold."""
    world = World(groups_per_batch=2, max_staleness=1, num_batches=3, seed=5, kill_rate=0.03, checkpoint_every=100)
    ledger = world.run()
    assert world.num_kills > 1
    assert len(set(trained_groups(world))) == 6
    assert ledger.surviving().total["trained"] == ledger.summary()["trained"]


def test_synchronous_batches_do_not_depend_on_timing() -> None:
    """I8, I18: with max_staleness 0 the same outcomes give the same batches in the same order, whatever takes how
    long."""
    runs = []
    for seed in range(6):
        world = World(groups_per_batch=3, max_staleness=0, num_batches=8, seed=seed)
        world.run()
        assert not world.overlap
        runs.append([groups for _, _, groups in world.trained])
    assert all(run == runs[0] for run in runs)


def test_synchronous_batches_are_those_of_the_uninterrupted_run() -> None:
    """I11, failures 107, 108, 112: kills do not change which groups a synchronous run trains in which batch."""
    whole = World(groups_per_batch=2, max_staleness=0, num_batches=10, seed=0)
    whole.run()
    for seed in range(8):
        killed = World(groups_per_batch=2, max_staleness=0, num_batches=10, seed=seed, kill_rate=0.04)
        killed.run()
        assert killed.num_kills > 0
        assert [(u, g) for _, u, g in killed.trained] == [(u, g) for _, u, g in whole.trained]


def test_asynchronous_run_overlaps_and_sometimes_waits() -> None:
    """I7: above 0, generation goes on while the trainer works, and a slow group holds the step instead of being
    lost."""
    worlds = [World(groups_per_batch=2, max_staleness=2, num_batches=20, seed=seed) for seed in range(4)]
    for world in worlds:
        world.run()
    assert all(w.overlap for w in worlds)
    assert any(w.num_held for w in worlds)
    assert max(max(w.ages) for w in worlds) == 2


@pytest.mark.parametrize("capped", [True, False])
def test_the_run_ends_with_nothing_left_over_where_admission_knows_its_length(capped: bool) -> None:
    """I9: with num_batches given, no group is generated that no batch is left for."""
    world = World(groups_per_batch=2, max_staleness=3, num_batches=6, seed=1, capped=capped)
    summary = world.run().summary()
    assert ("dropped:run_ended" in summary) is not capped


def test_drop_never_waits_and_books_what_it_drops() -> None:
    """I7, I9, failure 98: with on_overage = drop stale groups leave with a reason, give their place back, and no
    trained token is older than the bound."""
    worlds = [
        World(groups_per_batch=2, max_staleness=1, num_batches=25, seed=seed, on_overage="drop") for seed in range(6)
    ]
    summaries = [w.run().summary() for w in worlds]
    assert all(w.num_held == 0 and max(w.ages) <= 1 for w in worlds)
    assert any(s.get("dropped:stale", 0) > 0 for s in summaries)


def test_mask_never_waits_and_keeps_groups() -> None:
    """I7: with on_overage = mask older groups are trained all the same; their old tokens are masked by the loop."""
    worlds = [
        World(groups_per_batch=2, max_staleness=1, num_batches=25, seed=seed, on_overage="mask") for seed in range(6)
    ]
    summaries = [w.run().summary() for w in worlds]
    assert all(w.num_held == 0 for w in worlds)
    assert max(max(w.ages) for w in worlds) > 1
    assert all("dropped:stale" not in s for s in summaries)
