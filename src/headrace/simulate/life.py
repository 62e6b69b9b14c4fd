"""One life of a simulated run: the controller's real parts, the actors that it starts, and the events between them."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from headrace.algorithms.registry import algorithm_of
from headrace.cluster.actors import ActorDied, RemoteError
from headrace.cluster.remote_engine import EngineActor, RemoteEngine
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog, await_with_deadline
from headrace.engines.fleet.fleet import FleetEngine
from headrace.environments.runner import EpisodeRunner
from headrace.environments.task_list import TaskList
from headrace.monitor.fanout import build_sinks
from headrace.monitor.health import HealthMonitor
from headrace.monitor.progress import Progress
from headrace.parts import Overlap, Parts, Record
from headrace.player import Player
from headrace.protocols import Engine, Observation, Probed
from headrace.record.checkpoints import CheckpointStore
from headrace.record.episodes import EpisodeWriter
from headrace.record.files import RecordError
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.run_dir import RunDirectory
from headrace.record.spans import SpanWriter
from headrace.reporting import Reporter
from headrace.scripted import ScriptedRenderer
from headrace.simulate.actors import (
    EnvironmentWorker,
    Judge,
    RemoteThread,
    SimulatedEngine,
    SimulatedTrainer,
    TrainerWorker,
    tensors_of,
)
from headrace.simulate.disk import Disk, die
from headrace.simulate.errors import InvariantBroken
from headrace.simulate.monitor import Monitor, WatchedLoop
from headrace.simulate.network import Network, SimulatedActor
from headrace.simulate.scenario import CALM, NUM_TASKS, Fault, Scenario
from headrace.types import Episode, ErrorClass, Group, PolicyVersion, Sample, Sampling, ScoreError, ScoreResult, Task
from headrace.weights.canary import Canary, CanaryResult
from headrace.weights.catch_up import TrainerCatchUp

TASKS = [Task(id=f"t{i}", messages=({"role": "user", "content": f"{i}?"},), answer="1") for i in range(NUM_TASKS)]
HELD_OUT = [Task(id=f"h{i}", messages=({"role": "user", "content": f"{i}!"},), answer="1") for i in range(2)]
START_DEADLINE_S = 60.0
NO_VERSION = PolicyVersion(-1, 0)
"""Of weights that were never published."""


class WatchedCanary(Canary):
    """The real canary; it tells the monitor what it has proved."""

    life: Life

    async def prove_engine(
        self, engine: Probed, version: PolicyVersion, *, name: str = "the engine", **options: Any
    ) -> CanaryResult:
        actor = self.life.engines[0 if name == "the engine" else int(name.removeprefix("engine-"))]
        result = await super().prove_engine(engine, version, name=name, **options)
        self.life.monitor.proved(actor.name, version)
        return result


class Pool:
    """Workers of one kind. One that is known to be dead is replaced; what it held is lost."""

    def __init__(self, life: Life, kind: str, target: type) -> None:
        self._life, self._kind, self._target = life, kind, target
        self._incarnation = 0
        self.workers = [self._start() for _ in range(life.plan.num_workers)]

    async def call(self, slot: int, method: str, *args: Any) -> Any:
        worker = self.workers[slot % len(self.workers)]
        try:
            return await worker.handle.call(method, *args)
        finally:
            if worker.is_dead and worker in self.workers:
                self.workers[self.workers.index(worker)] = self._start()

    def _start(self) -> SimulatedActor:
        self._incarnation += 1
        return self._life.network.start(self._kind, self._incarnation, self._target(self._life.plan))


class RemoteReward:
    """``protocols.Reward`` whose verdicts come from the pool of judges."""

    name = "simulated"
    value_range = (0.0, 1.0)
    deadline_s = 50.0

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def start(self) -> None:
        """They need no test."""

    async def score(self, episode: Episode) -> ScoreResult:
        try:
            result: ScoreResult = await self._pool.call(episode.key.group + episode.key.member, "score", episode)
        except ActorDied as error:
            return ScoreError(error_class=ErrorClass.CRASH, message=str(error), reward=self.name)
        return result

    async def score_group(self, group: Group) -> list[ScoreResult]:
        return [await self.score(episode) for episode in group.episodes]

    async def close(self) -> None:
        """They end with their life."""


class RemoteEnvironment:
    """``protocols.Environment`` that lives in one of the pool's workers."""

    def __init__(self, pool: Pool, number: int) -> None:
        self._pool, self._number = pool, number

    async def reset(self, task: Task, seed: int) -> Observation:
        return await self._call("reset", task, seed)

    async def step(self, action: str) -> Observation:
        return await self._call("step", action)

    async def close(self) -> None:
        await self._pool.call(self._number, "close", self._number)

    async def _call(self, method: str, *args: Any) -> Observation:
        observation: Observation = await self._pool.call(self._number, method, self._number, *args)
        return observation


class Life:
    """From ``start`` to ``leave``, or to a kill, after which ``bury`` clears away what a dead process does not hold."""

    def __init__(self, number: int, plan: Scenario, disk: Disk, log: list[str]) -> None:
        self.number, self.plan, self.disk, self.log = number, plan, disk, log
        self.monitor = Monitor()
        self.loop: WatchedLoop
        self.trainer = SimulatedTrainer(self.monitor)
        self.ledger = Ledger()
        self.lineage = -1
        self.network: Network
        self._opened: list[Any] = []
        """What has to be closed again, in the order in which it was opened."""
        self._parts: Parts | None = None
        self.engines: dict[int, SimulatedActor] = {}
        """The newest incarnation of each."""
        self._num_events = 0
        self._num_environments = 0
        self._faults: dict[int, list[Fault]] = {}
        for fault in plan.faults[number] if number < len(plan.faults) else ():
            self._faults.setdefault(fault.event, []).append(fault)
        self._had_full_disk = False

    @property
    def is_dead(self) -> bool:
        """Nothing that it does now reaches anybody."""
        return self.monitor.is_over

    @property
    def is_calm(self) -> bool:
        """Nothing may end such a life but the end of the run."""
        return self.number >= len(self.plan.faults)

    # ------------------------------------------------------------------------------------------- events

    def event(self, kind: str, what: str) -> bool:
        """Something is about to happen; False in a dead life. Raises Killed where the controller dies before it."""
        if self.is_dead:
            return False
        number = self._num_events
        self._num_events += 1
        self.log.append(f"{self.number}.{number} {asyncio.get_running_loop().time():.3f} s  {kind} {what}")
        for fault in self._faults.pop(number, ()):
            self._apply(fault)
        if kind != "disk":  # in the middle of a step of the loop
            self.monitor.check()
        return True

    def outlived(self) -> None:
        raise InvariantBroken("I19", "the life does not end: something waits without a deadline")

    def _apply(self, fault: Fault) -> None:
        self.log.append(f"******** {fault}")
        if fault.victim == "controller":
            self.monitor.is_over = True
            die(self.disk)
        elif fault.victim == "disk":
            self._had_full_disk = self.disk.is_full_next = True
        elif self._parts is not None:
            pools = {"reward": self._judges, "environment": self._environments}
            if fault.victim in pools:
                workers = pools[fault.victim].workers
                victim = workers[fault.event % len(workers)]
            elif fault.victim == "engine":
                victim = self.engines[fault.event % len(self.engines)]
            else:
                victim = self._trainer_actor
            victim.kill(is_noticed=fault.is_noticed)

    def explained(self, error: BaseException, allowed: tuple[type[Exception], ...]) -> str:
        """Of an error that ended this life: its name, where a fault or the weather may have caused it."""
        kind = error.kind if isinstance(error, RemoteError) else type(error).__name__
        names = {t.__name__ for t in allowed} | ({"RecordError"} if self._had_full_disk else set())
        if self.is_calm or kind not in names:
            self.log.append("".join(traceback.format_exception(error)))
            raise InvariantBroken("unexpected", f"{type(error).__name__}: {error}") from error
        return f"{kind}: {error}".splitlines()[0].replace(str(self.plan.config.output_dir), "runs")

    # --------------------------------------------------------------------------------------- beginning and end

    async def start(self) -> None:
        """As ``wiring.build_parts``: restore the newest complete checkpoint, open a lineage, start every actor."""
        plan, clock = self.plan, asyncio.get_running_loop().time
        rng = random.Random(f"{plan.seed}/{self.number}")
        weather = plan.weather if not self.is_calm else CALM
        self.network = Network(rng, weather, self.event)
        record, restored = self._open_record(clock)
        watchdog = Watchdog(clock, plan.config.guards.stall_min_s)
        self._judges = Pool(self, "judge", Judge)
        self._environments = Pool(self, "environment", EnvironmentWorker)
        self._trainer_actor = self.network.start("trainer", self.number, TrainerWorker(plan, self.event))
        writer = self.network.start("writer", self.number, TrainerWorker(plan, self.event))
        engine = await self._start_engines(watchdog)
        self._parts = self._connect(record, restored, watchdog, engine, RemoteThread(writer.handle))
        self.loop = WatchedLoop(self._parts)
        self.loop.monitor, self.monitor.loop = self.monitor, self.loop

    async def leave(self) -> None:
        """As a process that ends by itself."""
        self.monitor.loop = None
        try:
            if self._parts is not None:
                await self._parts.close()
        except RecordError:
            if not self._had_full_disk:
                raise
        self.bury()

    def bury(self) -> None:
        """Let go of the files of a dead process; what that writes is on the folder that the next life never sees."""
        for file in reversed(self._opened):
            try:
                file.close()
            except RecordError as error:
                self.log.append(f"while it was buried: {error}")
        self.disk.forget_locks()

    def _open_record(self, clock: Any) -> tuple[Record, dict[str, Any]]:
        config = self.plan.config
        is_resume = (config.run_dir / "run.json").exists()
        run_dir = RunDirectory.open(config.run_dir) if is_resume else RunDirectory.create(config.run_dir, {})
        self._opened.append(run_dir)
        checkpoints = CheckpointStore(run_dir.checkpoints_path, config.checkpoint.keep)
        checkpoint = checkpoints.latest()
        if checkpoint is not None:
            self.trainer.restore(checkpoint.path)
        store = LedgerStore(run_dir.ledger_path, self.ledger)
        self._opened.append(store)
        if self.trainer.version.number < self.ledger.committed_update:
            raise InvariantBroken("I12", f"checkpoint {self.ledger.committed_update} was complete, and is not there")
        self.lineage = store.open_lineage(self.trainer.version.number if store.num_replayed else None)
        assert self.ledger.sink is not None
        self.ledger.sink = self.monitor.listen(self.ledger.sink)
        self.trainer.set_lineage(self.lineage)
        self.monitor.published(self.trainer.version)
        record = Record(
            run_dir=run_dir,
            lineage=self.lineage,
            ledger=self.ledger,
            ledger_store=store,
            checkpoints=checkpoints,
            episodes=EpisodeWriter(run_dir.episodes_path, self.lineage),
            spans=SpanWriter(run_dir.spans_path, "loop", self.lineage, clock),
            metrics=MetricsWriter(run_dir.metrics_path, self.lineage),
        )
        self._opened += [record.episodes, record.spans, record.metrics]
        return record, {} if checkpoint is None else checkpoint.state()

    async def _start_engine(self, index: int, incarnation: int) -> RemoteEngine:
        """As ``wiring.build_fleet``: what is started again holds whatever weights are at hand, as no version at all."""
        trainer, is_first = self.trainer, incarnation == 0
        version, weights = (trainer.version, trainer.weights) if is_first else (NO_VERSION, 0)
        name = f"engine-{index}.{self.number}"
        engine = SimulatedEngine(f"{name}#{incarnation}", version, weights, self.plan, self.monitor)
        actor = self.engines[index] = self.network.start(name, incarnation, EngineActor(engine=engine))
        return await RemoteEngine.connect(actor.handle)

    async def _start_engines(self, watchdog: Watchdog) -> Engine:
        fleet = self.plan.config.fleet
        if fleet is not None:
            return FleetEngine(self._start_engine, fleet, version=self.trainer.version, watchdog=watchdog)
        return await await_with_deadline(
            self._start_engine(0, 0),
            watchdog=watchdog,
            waiter="start",
            on="the engine",
            what="its first answer",
            deadline_s=START_DEADLINE_S,
        )

    def _make_environment(self, task: Task) -> RemoteEnvironment:
        self._num_environments += 1
        return RemoteEnvironment(self._environments, self._num_environments)

    def _connect(
        self, record: Record, restored: dict[str, Any], watchdog: Watchdog, engine: Engine, writer: RemoteThread
    ) -> Parts:
        plan, config, clock = self.plan, self.plan.config, watchdog.now_s
        trainer: Any = self.trainer
        thread: Any = RemoteThread(self._trainer_actor.handle)
        overlapping: Any = writer
        reward = RemoteReward(self._judges)
        progress = Progress(config.trainer.num_batches, enabled=False, console=Console(quiet=True))
        sinks = build_sinks(config.monitor, record.run_dir.path, config.name, {})

        async def score(samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
            return [t.tolist() for t in await thread.call(trainer.forward, samples)]

        canary = WatchedCanary(
            engine, score, (2, 65), bound=1e-6, trainer_checksums=trainer.checksums, shares_weights=False
        )
        canary.life = self
        if isinstance(engine, FleetEngine):
            engine.catch_up_by(TrainerCatchUp(canary, trainer, lambda: tensors_of(trainer.weights), thread.call))
        runner = EpisodeRunner(
            engine=engine,
            renderer=ScriptedRenderer(),
            make_environment=self._make_environment,
            watchdog=watchdog,
            clock=clock,
            run_seed=config.seed,
            max_turns=plan.max_turns,
            generation_deadline_s=config.rollout.generation_deadline_s,
            episode_deadline_s=config.rollout.episode_deadline_s,
        )
        return Parts(
            config=config,
            clock=clock,
            tasks=TaskList(TASKS),
            held_out=HELD_OUT,
            engine=engine,
            player=Player(runner=runner, reward=reward, sampling=Sampling(**config.sampling.model_dump())),
            reward=reward,
            model=trainer,
            trainer=trainer,
            trainer_thread=thread,
            algorithm=algorithm_of(config),
            canary=canary,
            max_ratio_error=1e-6,
            watchdog=watchdog,
            overlap=Overlap(thread=overlapping, snapshot=trainer.snapshot) if config.checkpoint.overlap else None,
            record=record,
            sinks=sinks,
            progress=progress,
            reporter=Reporter(
                record.lineage,
                metrics=record.metrics,
                episodes=record.episodes,
                spans=record.spans,
                sinks=sinks,
                health=HealthMonitor(config.guards),
                progress=progress,
                engine=engine,
                reward=reward,
                watchdog=watchdog,
            ),
            restored=restored,
        )
