"""``--supervise``: a run's controller is started, and again with ``resume`` whenever it is lost, until it is done.

The supervisor knows nothing of training. It looks at how a controller ended, at the run's checkpoints, at a budget::

    done, stopped (Ctrl-C)     the end
    failed                     the end: somebody has to mend something, and the message says what
    lost                       killed, crashed, its node gone, or a part of its run gone: again, from the newest
                               checkpoint, up to ``cluster.controller_restarts`` times in a row without a new one

A controller is a child process of the supervisor or, where ``cluster.type`` is "ray", an actor on some node of the
cluster, so that it survives the loss of any node but the supervisor's own (the head, where Ray's own state lies).

    who          waits for                    unblocked by                  deadline
    supervisor   the controller's end         it                            none: a run is as long as it is. The
                                                                            controller's own watchdog ends a stall
                 an answer to a heartbeat     the controller's actor        HEARTBEAT_DEADLINE_S: then it is lost
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from headrace.child_process import EXIT_LOST, how_it_ended
from headrace.cluster.journal import ActorJournal
from headrace.cluster.ray_actor import connect, hosted, make
from headrace.cluster.spec import ActorSpec
from headrace.cluster.workers import demand
from headrace.config.cluster import RayCluster
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.record.checkpoints import find_checkpoints
from headrace.record.recorded_config import recorded_config
from headrace.record.redact import redact

POLL_S = 0.2
HEARTBEAT_S = 5.0
HEARTBEAT_DEADLINE_S = 120.0
MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a controller ended."""

    kind: Literal["done", "stopped", "failed", "lost"]
    message: str


class Attempt(Protocol):
    """One controller that runs."""

    def poll(self) -> Ending | None:
        """How it ended; None while it runs. Returns soon."""
        ...

    def stop(self) -> None:
        """Ask it to end at its next safe point; asked again, at once."""
        ...


Start = Callable[[Path | None, int], Attempt]
"""(run folder to resume from, or None for a fresh start; number of starts before) -> a controller that runs."""


class GaveUp(HeadraceError):
    """The restarts are used up."""


def check_same_run(config: RunConfig) -> None:
    """Where the run's folder holds a run already, it must be this one: it would be gone on with. Raises ConfigError."""
    if not (config.run_dir / "run.json").exists():
        return
    recorded, now = redact(resolved(recorded_config(config.run_dir))), redact(resolved(config))
    different = [key for key in now if key not in ("name", "output_dir") and recorded.get(key) != now[key]]
    if different:
        raise ConfigError(
            f"{config.run_dir} holds a run whose configuration differs in: {', '.join(different)}. Go on with that one "
            f"by headrace resume {config.run_dir} --supervise, or give this one another --name"
        )


def supervise(
    config: RunConfig,
    start: Start,
    *,
    note: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Ending:
    """Run ``config`` to its end. Raises GaveUp where its controller is lost too often without a new checkpoint."""
    budget = config.cluster.controller_restarts
    num_starts, num_in_a_row, newest = 0, 0, _newest_checkpoint(config.run_dir)
    while True:
        resume_from = config.run_dir if (config.run_dir / "run.json").exists() else None
        ending = _until_it_ends(start(resume_from, num_starts), sleep)
        num_starts += 1
        if ending.kind != "lost":
            return ending
        now = _newest_checkpoint(config.run_dir)
        num_in_a_row = 1 if now > newest else num_in_a_row + 1
        newest = now
        if num_in_a_row > budget:
            raise GaveUp(
                f"the controller was lost {num_in_a_row} times without a new checkpoint, which is more than "
                f"cluster.controller_restarts = {budget} allows. The last end: {ending.message}\n"
                f"Nothing is lost up to checkpoint {now}; once mended, go on with: headrace resume {config.run_dir}"
            )
        note(f"{ending.message}\nheadrace: starting the controller again ({num_in_a_row} of {budget} without a new "
             f"checkpoint; the newest is {now})")  # fmt: skip
        sleep(min(2.0 ** (num_in_a_row - 1) - 1.0, MAX_BACKOFF_S))


def _until_it_ends(attempt: Attempt, sleep: Callable[[float], None]) -> Ending:
    with _passed_on(attempt):
        while (ending := attempt.poll()) is None:
            sleep(POLL_S)
        return ending


@contextmanager
def _passed_on(attempt: Attempt) -> Iterator[None]:
    """Ctrl-C and SIGTERM are for the controller, which ends at a safe point."""
    old = {number: signal.signal(number, lambda *_: attempt.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _newest_checkpoint(run_dir: Path) -> int:
    """0 where there is none."""
    checkpoints = find_checkpoints(run_dir / "checkpoints")
    return checkpoints[-1].step if checkpoints else 0


# ------------------------------------------------------------------------------------ a child process


class ChildController:
    """``headrace train`` or ``headrace resume`` as a child process, which ends with the supervisor."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", "headrace.cli.main", *arguments, "--supervised", str(os.getpid())]
        self._process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C is passed on, once

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> Ending | None:
        code = self._process.poll()
        if code is None:
            return None
        how = f"the controller (process {self.pid}) {how_it_ended(code)}"
        if code == 0:
            return Ending("done", how)
        if code == 128 + signal.SIGINT:
            return Ending("stopped", how)
        return Ending("lost" if code < 0 or code == EXIT_LOST else "failed", how)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)


# --------------------------------------------------------------------------------------- an actor on Ray


class RayController:
    """The controller as an actor on Ray."""

    def __init__(self, config: RunConfig, cluster: RayCluster, resume_from: Path | None, incarnation: int) -> None:
        self._ray = connect(cluster.address, namespace=f"headrace-{config.name}")
        spec = ActorSpec(
            role="controller",
            index=0,
            incarnation=incarnation,
            factory="headrace.actors:controller",
            options={"config": resolved(config)},
        )
        self._spec, self._journal = spec, ActorJournal()
        self._run_dir = config.run_dir
        self._place: tuple[int, str] | None = None
        """Process id and node, once it is there."""
        self._is_journaled = False
        self._deadline_s = cluster.start_deadline_s
        self._actor: Any = hosted(self._ray, demand(cluster.controller), "SPREAD")
        self._made = make(self._actor, spec)
        self._resume_from = None if resume_from is None else str(resume_from.absolute())
        self._run: Any = None
        self._num_stops = 0
        self._started_s = time.monotonic()
        self._heartbeat: Any = None
        self._heartbeat_since_s = self._started_s

    def poll(self) -> Ending | None:
        if self._num_stops > 1:
            self._ray.kill(self._actor, no_restart=True)
            return Ending("stopped", "left at once, without a checkpoint")
        pending = self._made if self._run is None else self._run
        ended, _ = self._ray.wait([pending], timeout=0)
        if not ended:
            return self._lost_where_silent()
        kind, value = self._value(pending)
        if kind == "lost":
            return Ending("lost", f"the controller {self._spec.name} died: {value}")
        if kind == "error":
            self._ray.kill(self._actor, no_restart=True)
            return Ending("failed", f"the controller {self._spec.name} failed: {value[0]}: {value[1]}")
        if self._run is None:
            self._place = value
            self._run = self._actor.invoke.remote("run", self._resume_from)
            if self._num_stops:
                self._actor.invoke.remote("stop")
            return None
        self._ray.kill(self._actor, no_restart=True)
        return Ending(value["ended"], value["message"])

    def stop(self) -> None:
        self._num_stops += 1
        if self._run is not None:
            self._actor.invoke.remote("stop")

    def _value(self, reference: Any) -> tuple[str, Any]:
        """What a call that has ended came to; ("lost", why) where the actor is gone."""
        try:
            kind, value = self._ray.get(reference, timeout=30.0)
        except self._ray.exceptions.RayError as error:
            return "lost", " ".join(line.strip() for line in str(error).splitlines()[:4] if line.strip())
        return kind, value

    def _lost_where_silent(self) -> Ending | None:
        """Its process answers heartbeats whatever the run does."""
        now_s = time.monotonic()
        if self._place is None:
            if now_s - self._started_s > self._deadline_s:
                self._ray.kill(self._actor, no_restart=True)
                message = f"the controller was not there after {self._deadline_s:g} s: no node had room for it"
                return Ending("lost", message)
            return None
        self._journal_start(self._place)
        if self._heartbeat is None:
            if now_s - self._heartbeat_since_s > HEARTBEAT_S:
                self._heartbeat, self._heartbeat_since_s = self._actor.invoke.remote("heartbeat"), now_s
            return None
        answered, _ = self._ray.wait([self._heartbeat], timeout=0)
        if answered:
            self._heartbeat = None
        elif now_s - self._heartbeat_since_s > HEARTBEAT_DEADLINE_S:
            self._ray.kill(self._actor, no_restart=True)
            return Ending("lost", f"the controller did not answer for {HEARTBEAT_DEADLINE_S:g} s and was ended")
        return None

    def _journal_start(self, place: tuple[int, str]) -> None:
        """Once the run's folder is there: nobody else may write into an empty one before the run does."""
        if not self._is_journaled and (self._run_dir / "run.json").exists():
            self._is_journaled = True
            self._journal.open(self._run_dir)
            self._journal.started(self._spec, pid=place[0], node=place[1])
