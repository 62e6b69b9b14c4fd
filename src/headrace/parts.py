"""The parts that a loop works with, and the few calls that cross from the event loop to another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedModel

from headrace.algorithms.fields import Minibatch
from headrace.cluster.workers import Workers
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.control.watchdog import DeadlineError, Watchdog, await_with_deadline
from headrace.daemon_thread import DaemonThread
from headrace.errors import HeadraceError
from headrace.evaluation.gold import GoldCheck
from headrace.evaluation.result import EvaluationResult
from headrace.monitor.fanout import FanOut, SinkHealth
from headrace.monitor.progress import Progress
from headrace.player import Player
from headrace.protocols import Algorithm, Clock, Engine, Reward, TaskSource, WeightUpdate
from headrace.record.checkpoints import CheckpointStore
from headrace.record.episodes import EpisodeWriter
from headrace.record.files import RecordError
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.run_dir import RunDirectory, write_atomically
from headrace.record.spans import SpanWriter
from headrace.reporting import Reporter
from headrace.supervised import SupervisedStream, counted_apart
from headrace.teacher import Teacher
from headrace.trainer.crew import LeadingTrainer
from headrace.trainer.plan import plan_update
from headrace.trainer.trainer import PolicyTrainer
from headrace.trainer.weights import Write
from headrace.types import RolloutBatch, Task
from headrace.weights.canary import Canary
from headrace.weights.checksums import named_parameters
from headrace.weights.parameters import adapter_travels

T = TypeVar("T")

CLOSE_DEADLINE_S = 30.0
"""For an engine or a reward to let go of what it holds."""
HEALTH_DEADLINE_S = 30.0
"""For an engine to say whether it lives."""
NUM_MEMORY_REPORTS = 2
"""After the first optimizer step, and after the first whose passes hold the optimizer's moments too."""


@dataclass(kw_only=True)
class Record:
    """The run's files, open for writing. One lineage is one process."""

    run_dir: RunDirectory
    lineage: int
    ledger: Ledger
    ledger_store: LedgerStore
    checkpoints: CheckpointStore
    episodes: EpisodeWriter
    spans: SpanWriter
    metrics: MetricsWriter

    def close(self) -> None:
        """Close every file, also where one of them cannot be written any more, and raise what that one said."""
        errors: list[RecordError] = []
        for file in (self.ledger_store, self.episodes, self.spans, self.metrics):
            try:
                file.close()
            except RecordError as error:
                errors.append(error)
        self.run_dir.close()
        if errors:
            raise errors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What it takes to write a checkpoint while the run goes on."""

    thread: DaemonThread
    snapshot: Callable[[], Write]
    """Called on the trainer's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writing:
    """A checkpoint whose files are being written."""

    number: int
    call: asyncio.Future[None]
    deadline_at_s: float


@dataclass(kw_only=True)
class Parts:
    """Everything a loop works with."""

    config: RunConfig
    clock: Clock
    tasks: TaskSource
    held_out: Sequence[Task]
    engine: Engine
    player: Player
    reward: Reward
    """Of training and, where there is a gold standard, with it: what has to be started and closed."""
    model: PreTrainedModel
    """The trainer's; the engine's too where it shares weights."""
    trainer: PolicyTrainer | LeadingTrainer
    trainer_thread: DaemonThread
    algorithm: Algorithm
    canary: Canary
    max_ratio_error: float
    """I5: largest |ratio - 1| of fresh tokens, for the model's dtype."""
    watchdog: Watchdog
    record: Record
    sinks: FanOut
    progress: Progress
    reporter: Reporter
    overlap: Overlap | None = None
    """None: the run waits for its checkpoints."""
    gold_check: GoldCheck | None = None
    workers: Workers | None = None
    """What runs in other processes besides engines and trainer ranks."""
    supervised: SupervisedStream | None = None
    """What is imitated beside the rollouts."""
    teacher: Teacher | None = None
    """What the policy is drawn towards on its own tokens."""
    restored: Mapping[str, Any] = field(default_factory=dict)
    """Extra state of the checkpoint that was restored; empty for a fresh start."""
    _evaluation: asyncio.Task[EvaluationResult] | None = field(default=None, init=False)
    _evaluations_are_given_up: bool = field(default=False, init=False)
    _num_memory_reports: int = field(default=0, init=False)
    _writing: _Writing | None = field(default=None, init=False)

    @property
    def with_baseline(self) -> bool:
        """Each group has one more attempt, a greedy reply."""
        return self.algorithm.needs.greedy_baseline

    @property
    def shares_weights(self) -> bool:
        """The engine reads the trainer's own storage, so it must not decode while an optimizer step writes."""
        return self.config.engine.shares_weights and self.config.parallel.world_size == 1

    async def wait(self, awaitable: Awaitable[T], *, waiter: str, on: str, what: str, deadline_s: float) -> T:
        """Await with a name and a deadline (I19)."""
        return await await_with_deadline(
            awaitable, watchdog=self.watchdog, waiter=waiter, on=on, what=what, deadline_s=deadline_s
        )

    async def on_trainer(self, function: Callable[..., T], *args: Any, what: str, deadline_s: float) -> T:
        """Run a blocking call on the trainer's thread, on the timeline and under a deadline."""
        started_s = self.clock()
        call = self.trainer_thread.call(function, *args)
        result = await self.wait(call, waiter="loop", on="trainer", what=what, deadline_s=deadline_s)
        self.record.spans.add("trainer", what, started_s, self.clock())
        self.watchdog.progress(what)
        return result

    async def optim_step(self, what: str) -> dict[str, float]:
        """One optimizer step; the first that move weights are followed by what memory was needed."""
        deadline_s = self.config.waits.optim_step_s
        metrics = await self.on_trainer(self.trainer.optim_step, what=what, deadline_s=deadline_s)
        if self._num_memory_reports < NUM_MEMORY_REPORTS and metrics.get("num_empty_steps") == 0.0:
            uses = await self.on_trainer(self.trainer.memory, what=f"memory after {what}", deadline_s=deadline_s)
            are_new = self._num_memory_reports == 0 and not self.restored
            self.reporter.memory(uses, self.trainer.step, moments_are_new=are_new)
            self._num_memory_reports += 1
        return metrics

    # ------------------------------------------------------------- called on the trainer's thread

    def plan(self, batch: RolloutBatch) -> list[Minibatch]:
        """The batch's minibatches, in the order of their optimizer steps."""
        config = self.config
        if self.teacher is not None:
            batch = self.teacher.mark(batch)
        plan = plan_update(
            batch,
            self.algorithm,
            self.trainer,
            config.trainer,
            max_new_tokens=config.sampling.max_new_tokens,
            seed=config.seed,
        )
        if self.teacher is not None:
            plan = self.teacher.assign(plan)
        return plan if self.supervised is None else self.supervised.mix(plan, batch.index)

    def forward_backward(self, minibatch: Minibatch) -> dict[str, float]:
        metrics = self.trainer.forward_backward(minibatch, self.algorithm)
        return metrics if self.supervised is None else counted_apart(metrics, minibatch)

    def publish(self) -> WeightUpdate:
        """The next version; with its tensors where the engine holds a copy."""
        update = self.trainer.publish()
        if self.shares_weights or update.buckets is not None:
            return update
        tensors = named_parameters(self.model)
        if self.config.model.lora is not None:  # the base is frozen, and the engine has it
            tensors = {name: tensor for name, tensor in tensors.items() if adapter_travels(name)}
        return WeightUpdate(version=update.version, tensors=tensors)

    def save_checkpoint(self, number: int, write: Write, state: dict[str, Any]) -> None:
        """Trainer, state and episodes of one moment, complete or not at all (I12). With an overlap on its thread."""
        with self.record.checkpoints.writing(number) as folder:
            write(folder)
            self.record.checkpoints.write_state(folder, state)

    # --------------------------------------------------------------------------- called by the loop

    def cut(self, number: int, cursor: Mapping[str, Any]) -> dict[str, Any]:
        """Take the state of this moment for a checkpoint of version ``number``; the books say so. The trainer's part
        is not in it: it stands still until the next optimizer step."""
        self.record.ledger.cut(number)
        return {"batch_index": number, "cursor": cursor, "ledger": self.record.ledger_store.position}

    async def write_checkpoint(self, number: int, state: dict[str, Any]) -> None:
        """Order: books say 'cut' (they do in memory already), files, completeness marker, books say 'checkpoint'. With
        an overlap this returns once the trainer's state is copied, and :meth:`settle_checkpoint` does the rest."""
        self.record.ledger_store.commit()
        deadline_s, what = self.config.waits.checkpoint_s, f"checkpoint {number}"
        if self.overlap is None:
            write = self.trainer.save
            await self.on_trainer(self.save_checkpoint, number, write, state, what=what, deadline_s=deadline_s)
            await self._book_checkpoint(number)
            return
        copy = await self.on_trainer(self.overlap.snapshot, what=f"copy for {what}", deadline_s=deadline_s)
        call = self.overlap.thread.call(self.save_checkpoint, number, copy, state)
        self._writing = _Writing(number=number, call=call, deadline_at_s=self.clock() + deadline_s)

    async def settle_checkpoint(self, *, wait: bool) -> None:
        """Where a checkpoint was written meanwhile, the books say so now. Raises what went wrong, or DeadlineError.
        ``wait``: also where it is not complete yet."""
        writing = self._writing
        if writing is None:
            return
        left_s = max(0.001, writing.deadline_at_s - self.clock())
        if not wait and not writing.call.done() and left_s > 0.001:
            return
        self._writing = None  # whatever comes of it is told once
        what = f"checkpoint {writing.number} (being written for {self.config.waits.checkpoint_s - left_s:.0f} s)"
        await self.wait(writing.call, waiter="loop", on="checkpoint writer", what=what, deadline_s=left_s)
        await self._book_checkpoint(writing.number)

    async def _book_checkpoint(self, number: int) -> None:
        """It is complete: books, and the episodes up to here."""
        record, deadline_s = self.record, self.config.waits.checkpoint_s
        oldest = record.checkpoints.oldest()
        record.ledger.checkpoint(number, None if oldest is None else oldest.step)
        record.ledger_store.commit()
        segments = record.episodes.rotate()
        what = "compacting episodes"
        if self.overlap is None:
            await self.on_trainer(record.episodes.compact, segments, what=what, deadline_s=deadline_s)
            return
        call = self.overlap.thread.call(record.episodes.compact, segments)
        await self.wait(call, waiter="loop", on="checkpoint writer", what=what, deadline_s=deadline_s)

    async def engine_is_healthy(self) -> bool:
        """False also where the engine does not even answer that."""
        call, deadline_s = self.engine.healthy(), HEALTH_DEADLINE_S
        try:
            return await self.wait(call, waiter="loop", on="engine", what="its health", deadline_s=deadline_s)
        except DeadlineError:
            return False

    async def evaluate(self) -> EvaluationResult | None:
        """The held-out tasks on the engine's current version; the result is a file of the run. None where it was given
        up. Its deadline is evaluation.deadline_s."""
        if self._evaluations_are_given_up:
            return None
        config = self.config
        concurrency = config.rollout.max_concurrent
        play = self.player.evaluate(self.held_out, config.evaluation, concurrency=concurrency)
        self._evaluation = asyncio.create_task(play, name="evaluation")
        try:
            await asyncio.wait({self._evaluation})
        finally:
            self._evaluation.cancel()
        if self._evaluation.cancelled():
            return None
        result = self._evaluation.result()
        folder = self.record.run_dir.path / "evaluations"
        folder.mkdir(exist_ok=True)
        write_atomically(folder / f"version-{self.trainer.version}.json", result.to_json().encode())
        return result

    def check_gold(self, update: int, result: EvaluationResult) -> dict[str, float]:
        """What the gold standard says of an evaluation; nothing where the run has none."""
        return {} if self.gold_check is None else self.gold_check.add(update, result)

    def give_up_evaluation(self) -> None:
        """End the one that runs, and make no other: the run is about to stop."""
        self._evaluations_are_given_up = True
        if self._evaluation is not None:
            self._evaluation.cancel()

    async def close(self) -> list[SinkHealth]:
        """Let go of everything, so that nothing writes into what is closed; returns how the sinks fared."""
        self.progress.stop()
        closes: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("engine", self.engine.close),
            ("reward", self.reward.close),
        ]
        if self.workers is not None:
            closes.append(("workers", self.workers.close))
        for name, close in closes:
            try:
                await self.wait(close(), waiter="run", on=name, what="its end", deadline_s=CLOSE_DEADLINE_S)
            except DeadlineError as error:
                self.progress.note(str(error))
        try:
            await self.settle_checkpoint(wait=True)
        except HeadraceError as error:
            self.progress.note(str(error))
        if self.overlap is not None:
            self.overlap.thread.stop()
        self.trainer_thread.stop()
        if isinstance(self.trainer, LeadingTrainer):
            self.trainer.close()
        sinks = self.sinks.close()
        self.record.close()
        return sinks
