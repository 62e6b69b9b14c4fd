"""THE loop: issue tasks, play episodes, score, group, train, publish, prove, repeat.

One asyncio event loop owns all coordination state, so no lock exists here. Blocking work runs elsewhere: decoding on
the engine's thread, gradients on the trainer's thread, verifiers in worker processes. ``run.py`` starts and ends a
run, ``wiring.py`` builds the parts, ``control/`` holds the rules as pure logic.

::

    TaskCursor --group--> Admission --attempts--> EpisodeRunner <---ids---> Engine
      ^  (which task)     (how many)                  | Episode               ^ pause, update_weights, canary, resume
      | pending                                       v                       |
    checkpoint                                     Reward                  publish
      ^                                               | Score                 ^
      |                                               v                       |
      +------ Ledger books every attempt       GroupAssembler             optim_step
                                                      | Group                 ^
                                                      v                       |
                                               BatchSelector --batch--> plan, forward_backward

What waits for what. A deadline is a key of the configuration and bounds each single wait (in ``_gather`` all of them
together); a wait that outlasts it raises DeadlineError with its name. For an attempt that ends in a failed or unscored
episode, and so does a reward that raises; elsewhere it ends the run:

    part           consumes         waits for                    unblocked by     deadline
    _issue_groups  tasks            nothing: issues what there   (called when     -
                                    is room for, and returns     room may appear)
    _attempt       one attempt      engine.generate, in play     the engine       rollout.generation_deadline_s
                                    environment reset, step      the environment  rollout.episode_deadline_s
                                    reward.score, in play        verifier workers the rewards' longest deadline_s
                                    after a failure: its health  the engine       30 s, then it counts as dead
    _gather        complete groups  groups_per_batch of them, no _settle_ended,   waits.rollout_batch_s
                                    one in flight that overages  stop
    _update        a rollout batch  the trainer's thread         the trainer      waits.forward_backward_s, optim_step_s
    _publish       an update        the trainer's thread, then   trainer, engine  waits.publish_s
    _pause_engine                   the engine's decode step;
                                    the new weights, the canary
    _evaluate      held-out tasks   its own episodes             engine, rewards  evaluation.deadline_s
    _checkpoint    a version        the trainer's thread, disk   the disk         waits.checkpoint_s
    run._watch     heartbeats       any progress for max(guards.stall_min_s, 10 x the median time between two)

Rules that hold here:

* Staleness is bounded twice. Admission issues at most (max_staleness + version + 1) x groups_per_batch groups, and
  ``_gather`` holds a batch until training without the groups in flight makes none of them older than allowed
  (on_overage = wait), or masks the tokens or drops the groups that are too old (mask, drop). With max_staleness 0 that
  is the synchronous run: groups are issued in waves, when nothing is in flight, and a wave is settled as a whole, in
  order of keys. Deadlines apart, nothing in it depends on time.
* Where an attempt fails (engine, environment, their deadlines; not its reward), the engine is asked for its health. If
  it is dead (of a fleet: all are), the run ends with EngineDied, and the attempt stays 'in flight' in the books. If
  not, the attempt is booked as failed, never scored, and on_failure says whether its member is tried again. Whatever
  the cause, an attempt without a score enters no baseline.
* Books before work: 'issued' is on disk before an attempt starts, 'trained' before its update is published; it is
  trained for good once a checkpoint of that update or a later one is complete. Commits are short and on this thread.
* A checkpoint is cut right after a publish, whenever it is written. It names the groups that were in flight or
  complete and untrained then: a resume issues exactly those again, with the same keys and so the same seeds, then
  goes on with the cursor; what the books say after the cut is taken back.
* The engine stays paused from a batch's first optimizer step (shared weights), or from update_weights (copied weights),
  until the canary has agreed, so that no token is served by weights that are not proved: at start and at every publish,
  unless guards.canary_every makes it rarer.
* What raises here ends the run without a further checkpoint: a dead engine, a failed check (tokens, masks, ratio,
  canary, books, error share), non-finite loss, gradient or weights (before they are published), a health check.
* Ctrl-C (``stop``) ends the wait for rollouts, gives up evaluations, lets the update and publish of a complete batch
  finish, and checkpoints; ``headrace resume`` goes on. ``run.py`` prints that, and every error with what to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from headrace.control.admission import Admission
from headrace.control.checks import check_error_share, check_first_ratio, check_group
from headrace.control.cursor import TaskCursor
from headrace.control.grouping import Complete, Discard, GroupAssembler, Retry
from headrace.control.samples import checked_samples
from headrace.control.staleness import BatchSelector, mask_overage, overage
from headrace.errors import PartLost
from headrace.evaluation.result import EvaluationResult
from headrace.parts import Parts
from headrace.reporting import TrainRecord, failure_class
from headrace.types import AttemptKey, Episode, Group, RolloutBatch, Task

T = TypeVar("T")


class StopRequested(Exception):
    """Somebody asked the run to stop (Ctrl-C); it ends at the next safe point."""


class EngineDied(PartLost):
    """The engine failed for good. What was in flight was not trained, and is issued again by a resume."""


class Loop:
    """The state of a running loop. ``parts`` do the work; this class says what happens when."""

    def __init__(self, parts: Parts) -> None:
        rollout = parts.config.rollout
        self.parts = parts
        self.config = parts.config
        self.is_synchronous = rollout.max_staleness == 0
        self.admission = Admission(
            rollout.groups_per_batch,
            rollout.max_staleness,
            max_concurrent_groups=max(1, rollout.max_concurrent // (rollout.group_size + parts.with_baseline)),
            num_batches=parts.config.trainer.num_batches,
        )
        self.cursor = TaskCursor(len(parts.tasks), parts.config.seed)
        self.assembler = GroupAssembler(
            rollout.group_size, rollout.min_group_size, rollout.on_failure, rollout.max_retries, parts.with_baseline
        )
        self.selector = BatchSelector(rollout.groups_per_batch, rollout.max_staleness, rollout.on_overage)
        self.batch_index = parts.trainer.version.number
        """Published updates; also the index of the batch that is being gathered."""
        self.ready: dict[int, Group] = {}
        """Complete groups that wait to be trained."""
        self.issued_at: dict[int, int] = {}
        """Group in flight -> version number at its issue: no token of it is older."""
        self.ended: list[Episode] = []
        """Every episode that ended since the last batch."""
        self.evaluations: list[tuple[int, EvaluationResult]] = []
        self.num_filtered = 0
        self.stop_requested = False
        self._engine_is_paused = False
        self._changed = asyncio.Event()
        self._attempts: dict[AttemptKey, asyncio.Task[None]] = {}
        self._unsettled: list[Episode] = []
        """Ended episodes of the running wave; their attempts are in flight in the books."""
        self._cut: dict[str, Any] = {}
        """What a checkpoint of this version holds besides the trainer."""
        if parts.restored:
            self.cursor.restore(parts.restored["cursor"])
            self.admission.restore(self.batch_index)

    async def run(self) -> None:
        """All batches, one after another, until done or asked to stop; then the last checkpoint."""
        async with asyncio.TaskGroup() as self._tasks:
            try:
                await self._prove()
                if self.batch_index == 0 and self.config.evaluation.at_start:
                    await self._evaluate()
                while self.batch_index < self.config.trainer.num_batches:
                    await self._one_batch()
                    if self.stop_requested:
                        raise StopRequested
            except StopRequested:
                self.parts.progress.note("stopping at the next safe point")
            finally:
                for attempt in self._attempts.values():
                    attempt.cancel()
        await self._checkpoint()
        await self.parts.settle_checkpoint(wait=True)

    def stop(self) -> None:
        """Ask the loop to end at the next safe point."""
        self.stop_requested = True
        self.parts.give_up_evaluation()
        self._changed.set()

    async def _one_batch(self) -> None:
        """The loop body: gather, train, publish, then whatever is due at this version."""
        clock, started_s = self.parts.clock, self.parts.clock()
        self.parts.progress.update({}, phase="rollouts")
        batch = await self._gather()
        gathered_s = clock()
        self.parts.progress.update({}, phase="training")
        metrics = await self._update(batch)
        trained_s = clock()
        metrics |= await self._publish()
        published_s = clock()
        if not self.is_synchronous:
            self._issue_groups()  # before evaluation and checkpoint, so that decoding does not wait for them
        evaluation, checkpoint = self.config.evaluation, self.config.checkpoint
        is_last = self.batch_index == self.config.trainer.num_batches
        if (evaluation.every and self.batch_index % evaluation.every == 0) or (is_last and evaluation.at_end):
            metrics |= await self._evaluate()
        metrics |= {
            "time/gather_s": gathered_s - started_s,
            "time/train_s": trained_s - gathered_s,
            "time/publish_s": published_s - trained_s,
            "time/step_s": published_s - started_s,
        }
        self.parts.reporter.batch(batch, self.ended, metrics, self.parts.record.ledger, self.parts.trainer.step)
        self.ended = []
        await self.parts.settle_checkpoint(wait=False)
        if checkpoint.every and self.batch_index % checkpoint.every == 0 and not is_last:
            await self._checkpoint()

    # -------------------------------------------------------------------------------------------- rollouts

    def _issue_groups(self) -> None:
        """Issue every group that admission has room for. Synchronous runs issue in waves, so that the engine's
        batches, and with them the last bits of every float, depend on nothing but seed and configuration."""
        may_issue = not (self.stop_requested or (self.is_synchronous and self._attempts))
        while may_issue and self.admission.capacity(self.batch_index) > 0:
            draw = self.cursor.next()
            self.admission.issue()
            self.issued_at[draw.group] = self.batch_index
            task = self.parts.tasks[draw.task_index]
            self._issue(self.assembler.start(draw.group, task), task)

    def _issue(self, keys: list[AttemptKey], task: Task) -> None:
        """Start attempts; they run once the loop's thread waits."""
        self.parts.record.ledger.issue(keys, task.content_hash, self.parts.trainer.version)
        for key in keys:
            self._attempts[key] = self._tasks.create_task(self._attempt(key, task), name=f"attempt {key}")

    async def _attempt(self, key: AttemptKey, task: Task) -> None:
        self.parts.record.ledger_store.commit()  # 'issued' is on disk before work, for all that was issued meanwhile
        episode = await self.parts.player.play(key, task, self.parts.player.sampling_of(key), "rollout")
        self.parts.reporter.episode_ended(episode)
        if episode.outcome.is_failure and not await self.parts.engine_is_healthy():
            raise EngineDied(f"the engine died; its last words, to attempt {key}: {episode.error}")
        self._unsettled.append(episode)
        if not self.is_synchronous or len(self._unsettled) == len(self._attempts):
            self._settle_ended()

    def _settle_ended(self) -> None:
        """Settle what ended. Synchronous runs settle a whole wave, in order of keys, so that no retry, no replacement
        and no sum depends on whose reply was judged first."""
        ended, self._unsettled = sorted(self._unsettled, key=lambda e: e.key), []
        for episode in ended:
            del self._attempts[episode.key]
        for episode in ended:
            self._settle(episode)
        self._issue_groups()
        self._changed.set()

    def _settle(self, episode: Episode) -> None:
        """Book an ended attempt and do what its group now calls for."""
        self.ended.append(episode)
        if not episode.is_scored:
            self.parts.record.ledger.fail([episode.key], failure_class(episode))
            self.parts.reporter.not_trained([episode], f"failed:{failure_class(episode)}", self.batch_index + 1)
            if len(self.ended) >= self.config.rollout.groups_per_batch * self.config.rollout.group_size:
                check_error_share(self.ended, self.config.guards.max_error_share)
        decision = self.assembler.add(episode)
        if isinstance(decision, Retry):
            self._issue([decision.key], episode.task)
        elif isinstance(decision, Discard):
            self._drop_group(decision.group_id, decision.episodes, decision.reason)
        elif isinstance(decision, Complete):
            self._finish_group(decision.group)

    def _finish_group(self, group: Group) -> None:
        """A complete group waits for its batch, or is filtered out and replaced (dynamic sampling), until a batch has
        cost max_filter_factor times its groups: then the rest of it is taken as it comes."""
        rollout = self.config.rollout
        check_group(group, rollout.group_size, rollout.min_group_size)
        if group.baseline is not None:  # compared with, never trained
            self.parts.record.ledger.drop([group.baseline.key], "baseline")
            self.parts.reporter.not_trained([group.baseline], "dropped:baseline", self.batch_index + 1)
        may_filter = self.num_filtered < (rollout.max_filter_factor - 1) * rollout.groups_per_batch
        if may_filter and not self.parts.algorithm.keep_group(group):
            self.num_filtered += 1
            self._drop_group(group.id, group.episodes, "filtered")
            return
        self.ready[group.id] = group
        self.admission.accept()
        del self.issued_at[group.id]

    def _drop_group(self, group_id: int, episodes: Sequence[Episode], reason: str) -> None:
        """A group that will not be trained and was not accepted: its place is free again."""
        self.admission.reject()
        del self.issued_at[group_id]
        self._drop_episodes(group_id, episodes, reason)

    def _drop_episodes(self, group_id: int, episodes: Sequence[Episode], reason: str) -> None:
        """Of episodes that ended, the scored ones are dropped; the others are booked as failed already."""
        scored = [e for e in episodes if e.is_scored]
        if scored:
            self.parts.record.ledger.drop([e.key for e in scored], reason)
            self.parts.reporter.not_trained(scored, f"dropped:{reason}", self.batch_index + 1)
        self.cursor.settle(group_id)

    async def _gather(self) -> RolloutBatch:
        """Wait for the groups of the next batch, and for those in flight that the next step would make too old."""
        deadline_at_s = self.parts.clock() + self.config.waits.rollout_batch_s
        while True:
            selection = self.selector.select(list(self.ready.values()), self.issued_at, self.batch_index)
            self._drop_stale(selection.stale)
            self._issue_groups()  # also what a drop made room for
            if selection.batch:
                break
            if self.stop_requested:
                raise StopRequested
            self._changed.clear()
            held = f", held by the age of groups {selection.held_by} in flight" if selection.held_by else ""
            what = f"batch {self.batch_index} ({selection.num_missing} groups missing{held})"
            left_s = max(0.001, deadline_at_s - self.parts.clock())
            await self.parts.wait(self._changed.wait(), waiter="loop", on="rollouts", what=what, deadline_s=left_s)
        self.num_filtered = 0
        check_error_share(self.ended, self.config.guards.max_error_share)
        return self._close_batch(selection.batch)

    def _drop_stale(self, groups: Sequence[Group]) -> None:
        """on_overage = drop: buffered groups that are too old, and those in flight that already are."""
        for group in groups:
            del self.ready[group.id]
            self.admission.withdraw()
            self._drop_episodes(group.id, group.episodes, "stale")
        if self.config.rollout.on_overage != "drop":
            return
        for group_id in overage(self.issued_at, self.batch_index, self.config.rollout.max_staleness):
            discarded = self.assembler.abandon(group_id, "stale")
            for key in discarded.open_keys:
                self._attempts.pop(key).cancel()
            self.parts.record.ledger.drop(list(discarded.open_keys), "stale")
            self._drop_group(group_id, discarded.episodes, "stale")

    def _close_batch(self, groups: Sequence[Group]) -> RolloutBatch:
        """Groups -> samples, checked token by token (I1, I2)."""
        for group in groups:
            del self.ready[group.id]
        samples = checked_samples(groups, self.config.sampling.temperature, self.batch_index)
        if self.config.rollout.on_overage == "mask":
            samples = [mask_overage(s, self.batch_index, self.config.rollout.max_staleness) for s in samples]
        self.admission.close_batch(len(groups))
        version = self.parts.trainer.version
        return RolloutBatch(index=self.batch_index, groups=tuple(groups), samples=tuple(samples), version=version)

    # -------------------------------------------------------------------------------------- train and publish

    async def _update(self, batch: RolloutBatch) -> dict[str, float]:
        """Optimizer steps of one rollout batch. Before the first, fresh tokens must have ratio 1 (I5)."""
        parts, waits = self.parts, self.config.waits
        record = TrainRecord(batch)
        plan = await parts.on_trainer(
            parts.plan, batch, what=f"plan of batch {batch.index}", deadline_s=waits.forward_backward_s
        )
        for number, minibatch in enumerate(plan):
            what = f"step {number + 1} of {len(plan)} of batch {batch.index}"
            metrics = await parts.on_trainer(
                parts.forward_backward, minibatch, what=f"gradient of {what}", deadline_s=waits.forward_backward_s
            )
            if number == 0:
                check_first_ratio(metrics, parts.max_ratio_error, batch.index)
            record.add(minibatch, metrics, parts.trainer.last_logprobs())
            if parts.shares_weights:
                await self._pause_engine()
            record.add_step(await parts.optim_step(what))
        parts.record.ledger.train([e.key for e in batch.episodes if e.is_scored], batch.index + 1)
        for group in batch.groups:
            self.cursor.settle(group.id)
        parts.record.ledger_store.commit()
        parts.reporter.trained(record)
        return record.metrics()

    async def _publish(self) -> dict[str, float]:
        """The new version reaches the engine and is proved before anything is served by it (I6)."""
        deadline_s = self.config.waits.publish_s
        update = await self.parts.on_trainer(self.parts.publish, what="publish", deadline_s=deadline_s)
        await self._pause_engine()
        await self._on_engine(self.parts.engine.update_weights(update), f"update_weights to {update.version}")
        self.batch_index += 1
        is_due = self.batch_index % self.config.guards.canary_every == 0
        metrics = await self._prove() if is_due else {}
        await self._on_engine(self.parts.engine.resume(), "resume")
        self._engine_is_paused = False
        self._cut = self.parts.cut(self.batch_index, self.cursor.state())
        self.parts.watchdog.progress(f"published {update.version}")
        return metrics

    async def _prove(self) -> dict[str, float]:
        """Raises SyncError unless the engine serves the trainer's weights; other requests stand still meanwhile."""
        version = self.parts.trainer.version
        proof = await self._on_engine(self.parts.canary.prove(version), f"canary of {version}")
        return {"canary/max_gap": proof.max_gap}

    async def _pause_engine(self) -> None:
        if not self._engine_is_paused:
            await self._on_engine(self.parts.engine.pause("keep"), "pause, after its current decode step")
            self._engine_is_paused = True

    async def _on_engine(self, call: Awaitable[T], what: str) -> T:
        deadline_s = self.config.waits.publish_s
        return await self.parts.wait(call, waiter="loop", on="engine", what=what, deadline_s=deadline_s)

    # --------------------------------------------------------------------------------- evaluate and checkpoint

    async def _evaluate(self) -> dict[str, float]:
        """Held-out tasks on the current version. It stays pinned: nothing publishes while the loop waits here."""
        self.parts.progress.update({}, phase="evaluation")
        result = await self.parts.evaluate()
        if result is None:
            return {}  # given up: somebody asked the run to stop
        self.evaluations.append((self.batch_index, result))
        return result.metrics() | self.parts.check_gold(self.batch_index, result)

    async def _checkpoint(self) -> None:
        """Write what was cut at this version's publish."""
        await self.parts.settle_checkpoint(wait=True)  # one at a time
        ledger, update = self.parts.record.ledger, self.batch_index
        if ledger.committed_update == update:
            return  # this very version is safe already
        owed = [*self._attempts, *(e.key for g in self.ready.values() for e in g.scored)]
        owed += [e.key for g in self.assembler.open_groups for e in self.assembler.ended(g) if e.is_scored]
        ledger.check(in_flight=owed, full=True)  # issued = trained + dropped + failed + in flight (I10)
        await self.parts.write_checkpoint(update, self._cut)
