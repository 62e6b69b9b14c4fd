"""A pool of killable worker processes with one judge: hung, bombed and crashed workers are replaced.

What can happen to a score, and what it is then (never a 0):

| the worker | error class | unverifiable |
|---|---|---|
| used up its CPU seconds | timeout | yes: the answer itself was too expensive, on any machine |
| ran into its memory cap | memory | yes |
| raised | exception | yes |
| gave no answer in ``deadline_s`` | timeout | no: it may have been the machine (F136) |
| died, or could not be started | crash, infrastructure | no |
| was never free | infrastructure | no |
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import HeadraceError
from headrace.rewards.base import ValueRange, to_score
from headrace.rewards.worker_process import WorkerDied, WorkerProcess
from headrace.types import ErrorClass, Score, ScoreError, ScoreResult

MAX_CRASHES_IN_A_ROW = 10
"""Deaths that the pool knows no reason of, and failed starts, without a score between them; then it gives up."""
_PROBE_DEADLINE_S = 0.3
_START_DEADLINE_S = 120.0
_LOAD_CPU_S = 110.0
_UNLIMITED_CPU_S = 1e6
_PROVEN_MEMORY_BYTES: set[int] = set()


class RewardStartError(HeadraceError):
    """A reward's workers do not start, or fail their self-test: the run must not begin (I15)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A payload whose value is known."""

    payload: Mapping[str, Any]
    value: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A result, and whether it is an error that the judged answer itself caused, on any machine."""

    result: ScoreResult
    unverifiable: bool = False


class WorkerPool:
    """Workers ``name[0]``, ``name[1]``, ... of one judge.

    Args:
        name: the reward's name, for errors.
        judge: which judge, as ``judges.load_judge`` reads it.
        cpu_s: CPU seconds of one score; None: only the clock counts. What runs out of them is ``unverifiable``, on
            any machine, so they should be few enough to be used up well before the deadline on a busy one.
        queue_deadline_s: the longest wait for a free worker.
        probes: known right and wrong inputs, run in each worker as it starts.
    """

    def __init__(
        self,
        name: str,
        judge: Mapping[str, Any],
        *,
        num_workers: int = 1,
        memory_bytes: int = 2 << 30,
        cpu_s: float | None = None,
        queue_deadline_s: float = 300.0,
        probes: Sequence[Probe] = (),
    ) -> None:
        self.name = name
        self.queue_deadline_s = queue_deadline_s
        self.value_range: ValueRange = (0.0, 1.0)
        self._judge = dict(judge)
        self._num_workers = num_workers
        self._memory_bytes = memory_bytes
        self._cpu_s = _UNLIMITED_CPU_S if cpu_s is None else cpu_s
        self._probes = tuple(probes)
        self._workers: list[WorkerProcess | None] = [None] * num_workers
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        self._replacing: set[asyncio.Task[None]] = set()
        self._start_lock = asyncio.Lock()
        self._state = "new"
        self._crashes_in_a_row = 0
        self._broken: str | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that stand ready or work."""
        return tuple(worker.pid for worker in self._workers if worker is not None)

    @property
    def num_idle(self) -> int:
        return self._idle.qsize()

    async def start(self) -> None:
        """Start all workers and prove that a right, a wrong, a hanging and a bombing input end as they must (I15).

        Raises:
            RewardStartError: naming what failed; nothing is left running.
        """
        async with self._start_lock:
            if self._state == "ready":
                return
            if self._state == "closed":
                raise RewardStartError(f"reward {self.name!r} was closed and cannot be started again")
            try:
                # Every start must have ended before the first failure is told, or some would be left running.
                starts = [self._prove_walls(), *(self._launch(slot) for slot in range(self._num_workers))]
                for problem in await asyncio.gather(*starts, return_exceptions=True):
                    if isinstance(problem, BaseException):
                        raise problem
            except BaseException:
                await self._kill_all()
                raise
            for slot in range(self._num_workers):
                self._idle.put_nowait(slot)
            self._state = "ready"

    async def score(self, payload: Mapping[str, Any], deadline_s: float) -> ScoreResult:
        """Judge one payload; see the table at the top for errors."""
        return (await self.judge(payload, deadline_s)).result

    async def judge(self, payload: Mapping[str, Any], deadline_s: float) -> Verdict:
        """As :meth:`score`, with the cause of an error. ``deadline_s`` runs from when a worker took it up."""
        await self.start()
        if self._broken is not None:
            return self._failed(ErrorClass.INFRASTRUCTURE, self._broken)
        try:
            async with asyncio.timeout(self.queue_deadline_s):
                slot = await self._idle.get()
        except TimeoutError:
            return self._failed(
                ErrorClass.INFRASTRUCTURE,
                f"no worker of reward {self.name!r} became free in {self.queue_deadline_s:g} s ({self._num_workers} "
                "workers); raise its num_workers",
            )
        return await self._judge_in(slot, payload, deadline_s)

    async def close(self) -> None:
        """Kill and reap every worker. Idempotent."""
        self._state = "closed"
        await self._kill_all()
        while self._replacing:
            # Cancelled in the middle of a start, a task could lose its process; killed, its wait ends at once.
            await asyncio.wait(self._replacing, timeout=0.05)
            await self._kill_all()
        self._idle.put_nowait(0)  # wakes whoever still waits for a worker

    # ----------------------------------------------------------------------------------------- one score

    async def _judge_in(self, slot: int, payload: Mapping[str, Any], deadline_s: float) -> Verdict:
        worker = self._workers[slot]
        if worker is None or self._state != "ready":
            self._idle.put_nowait(slot)  # so that the next in the queue hears of it, too
            return self._failed(ErrorClass.INFRASTRUCTURE, self._broken or f"reward {self.name!r} is closed")
        verdict: Verdict | None = None
        try:
            answer = await worker.request("score", payload=payload, deadline_s=deadline_s, cpu_s=self._cpu_s)
            verdict = self._verdict(answer)
        except TimeoutError:
            message = f"{self._worker_name(slot)} gave no answer in {deadline_s:g} s and was killed"
            verdict = self._failed(ErrorClass.TIMEOUT, message)
        except WorkerDied as death:
            verdict = self._after_death(death)
        finally:
            # A worker whose judgement was cut off (a time-out, a cancelled caller) is in no known state.
            fresh = verdict is not None and not self._must_be_replaced(verdict)
            if fresh and self._state == "ready":
                self._idle.put_nowait(slot)
            else:
                self._replace(slot, worker)
        return verdict

    def _verdict(self, answer: Mapping[str, Any]) -> Verdict:
        if "error" in answer:
            error = answer["error"]
            error_class = ErrorClass(error["error_class"])
            unverifiable = error_class in (ErrorClass.EXCEPTION, ErrorClass.MEMORY)
            return self._failed(error_class, error["message"], unverifiable=unverifiable)
        self._crashes_in_a_row = 0
        fields = answer["score"]
        try:
            score = Score(
                value=fields["value"],
                components=fields["components"],
                value_T=None if fields["value_T"] is None else tuple(fields["value_T"]),
            )
        except ValueError as error:
            return self._failed(ErrorClass.INVALID_SCORE, f"reward {self.name!r}: {error}")
        return Verdict(to_score(score, self.value_range, self.name))

    def _after_death(self, death: WorkerDied) -> Verdict:
        if death.cause == "cpu":
            return self._failed(ErrorClass.TIMEOUT, f"unverifiable: {death} ({self._cpu_s:g} s)", unverifiable=True)
        self._count_crash(str(death))
        return self._failed(ErrorClass.CRASH, str(death))

    def _failed(self, error_class: ErrorClass, message: str, *, unverifiable: bool = False) -> Verdict:
        return Verdict(ScoreError(error_class=error_class, message=message, reward=self.name), unverifiable)

    @staticmethod
    def _must_be_replaced(verdict: Verdict) -> bool:
        return isinstance(verdict.result, ScoreError) and verdict.result.error_class in (
            ErrorClass.TIMEOUT,
            ErrorClass.CRASH,
            ErrorClass.MEMORY,
        )

    # ---------------------------------------------------------------------------------- life of a worker

    def _worker_name(self, slot: int) -> str:
        return f"reward worker {self.name}[{slot}]"

    async def _launch(self, slot: int) -> None:
        """A new worker in ``slot``, its judge loaded and its known inputs judged."""
        name = self._worker_name(slot)
        worker = await WorkerProcess.start(name, self._judge, self._memory_bytes)
        self._workers[slot] = worker
        if self._state == "closed":
            raise RewardStartError(f"reward {self.name!r} was closed while {name} started")
        try:
            answer = await worker.request("load", deadline_s=_START_DEADLINE_S, cpu_s=_LOAD_CPU_S)
            if "error" in answer:
                raise RewardStartError(f"{name} cannot load its judge: {answer['error']['message']}")
            self.value_range = (answer["loaded"][0], answer["loaded"][1])
            for probe in self._probes:
                answer = await worker.request("score", payload=probe.payload, deadline_s=_START_DEADLINE_S, cpu_s=60.0)
                if answer.get("score", {}).get("value") != probe.value:
                    raise RewardStartError(
                        f"{name} failed its self-test: {dict(probe.payload)} must score {probe.value:g}, got "
                        f"{answer.get('score') or answer.get('error')}"
                    )
        except TimeoutError:
            raise RewardStartError(f"{name} was not ready after {_START_DEADLINE_S:g} s") from None
        except WorkerDied as death:
            raise RewardStartError(f"{name} died while starting: {death}") from death

    async def _prove_walls(self) -> None:
        """Without the judge, so that it is quick: each wall must end what runs against it. The walls are the
        system's, not the reward's: one proof for each memory cap holds for all pools of this process."""
        if self._memory_bytes in _PROVEN_MEMORY_BYTES:
            return
        expected = {"bomb": "memory", "spin": "cpu", "sleep": "wall clock"}
        endings = await asyncio.gather(*(self._ended_by(probe) for probe in expected))
        for (probe, wall), ended_by in zip(expected.items(), endings, strict=True):
            if ended_by != wall:
                raise RewardStartError(
                    f"the workers of reward {self.name!r} failed their self-test: the input {probe!r} should have been "
                    f"ended by the {wall} limit, but: {ended_by}"
                )
        _PROVEN_MEMORY_BYTES.add(self._memory_bytes)

    async def _ended_by(self, probe: str) -> str:
        """Which wall ended a worker that was given this input, or what it did instead."""
        worker = await WorkerProcess.start(f"self-test of reward {self.name}", {}, self._memory_bytes)
        # The clock must give the CPU timer time to act on a busy machine; nothing but the clock ends a sleeper.
        deadline_s = _PROBE_DEADLINE_S if probe == "sleep" else 60.0
        try:
            await worker.request("probe", probe="ready", deadline_s=_START_DEADLINE_S, cpu_s=_LOAD_CPU_S)
            answer = await worker.request(
                "probe", probe=probe, deadline_s=deadline_s, cpu_s=30.0 if probe == "bomb" else _PROBE_DEADLINE_S
            )
        except TimeoutError:
            return "wall clock"
        except WorkerDied as death:
            return death.cause if death.cause == "cpu" else str(death)
        finally:
            await worker.kill()
        error = answer.get("error", {})
        return "memory" if error.get("error_class") == ErrorClass.MEMORY else str(error.get("message", answer))

    def _replace(self, slot: int, worker: WorkerProcess) -> None:
        self._workers[slot] = None
        task = asyncio.get_running_loop().create_task(self._kill_and_relaunch(slot, worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _kill_and_relaunch(self, slot: int, worker: WorkerProcess) -> None:
        try:
            await worker.kill()
        finally:
            while self._state == "ready" and self._broken is None and self._workers[slot] is None:
                try:
                    await self._launch(slot)
                except RewardStartError as error:
                    await self._discard(slot)
                    self._count_crash(str(error))
        if self._state == "ready":
            self._idle.put_nowait(slot)  # broken or not: who waits for a worker must hear of it

    async def _discard(self, slot: int) -> None:
        worker, self._workers[slot] = self._workers[slot], None
        if worker is not None:
            await worker.kill()

    def _count_crash(self, message: str) -> None:
        self._crashes_in_a_row += 1
        if self._crashes_in_a_row >= MAX_CRASHES_IN_A_ROW and self._broken is None:
            self._broken = (
                f"the workers of reward {self.name!r} died {self._crashes_in_a_row} times in a row without one score; "
                f"the last: {message}"
            )

    async def _kill_all(self) -> None:
        await asyncio.gather(*(self._discard(slot) for slot in range(self._num_workers)))
