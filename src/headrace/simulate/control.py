"""One seed, from its first life to the end of its run: ``simulate(seed)``.

A life is one process of the controller with the actors that it started. It ends with the run's last checkpoint, with an
error that a fault explains, or with a kill; the next life finds the disk as it was and resumes, as ``headrace resume``
does. After the last one the run's record is read from disk and must say what really happened (I10, I11).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from headrace.cluster.actors import ActorDied
from headrace.control.ledger import Ledger
from headrace.control.watchdog import DeadlineError
from headrace.engines.errors import EngineError
from headrace.errors import EngineLost
from headrace.loop import EngineDied
from headrace.record.episodes import read_episodes
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import read_metrics
from headrace.run import StallError, _run_watched, first_cause
from headrace.scripted import Deadlock, run_in_virtual_time
from headrace.simulate.disk import Disk, temporary_folder
from headrace.simulate.errors import InvariantBroken, Killed, PlannedFault
from headrace.simulate.life import Life
from headrace.simulate.scenario import NUM_FAULTY_LIVES, Scenario, scenario
from headrace.types import AttemptKey

MAX_LIVES = NUM_FAULTY_LIVES + 3
MAX_LIFE_S = 400_000.0
"""Virtual seconds. Every wait has a deadline, so no life is longer."""
_EXPLAINED = (EngineDied, DeadlineError, StallError, ActorDied, PlannedFault, EngineError, EngineLost)
"""Errors that a fault of the seed may end a life with, in a life that has any."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a seed. ``broken`` is empty where everything held."""

    seed: int
    broken: str = ""
    log: list[str] = field(default_factory=list)
    """Its events, life by life."""
    num_checks: int = 0
    lives: list[str] = field(default_factory=list)
    """How each ended."""
    weights: int = 0
    num_failed: int = 0
    """Attempts that failed, over all lives."""

    def line(self) -> str:
        """For a failed one: what broke, and how to see it again."""
        return f"seed {self.seed}: {self.broken} -- replay: headrace simulate control --seed {self.seed}"


def simulate(seed: int) -> Outcome:
    """Run ``seed``. A synchronous run in which no attempt failed is also run without any fault: both must end with the
    same weights (I8, I11)."""
    outcome = _simulate(seed)
    if outcome.broken:
        return outcome
    with temporary_folder() as folder:
        is_synchronous = scenario(seed, folder).config.rollout.max_staleness == 0
    if is_synchronous and outcome.num_failed == 0:
        calm = _simulate(seed, calm=True)
        if calm.broken or calm.num_failed or calm.weights != outcome.weights:
            outcome.broken = calm.broken or "I8, I11: it ends with other weights than the same run without any fault"
    return outcome


def _simulate(seed: int, *, calm: bool = False) -> Outcome:
    outcome = Outcome(seed=seed)
    logger = logging.getLogger("headrace")
    level = logger.level
    logger.setLevel(logging.ERROR)  # what is closed late is no news here
    try:
        with temporary_folder() as folder:
            _all_lives(scenario(seed, folder, calm=calm), outcome)
    except InvariantBroken as broken:
        outcome.broken = str(broken)
    except Deadlock as deadlock:
        outcome.broken = f"I19: {deadlock}"
    finally:
        logger.setLevel(level)
    return outcome


def _all_lives(plan: Scenario, outcome: Outcome) -> None:
    disk = Disk(plan.config.run_dir)
    for number in range(MAX_LIVES):
        life = Life(number, plan, disk, outcome.log)
        try:
            end = _one_life(life)
        except Killed:
            life.bury()
            disk.restore()
            end = "killed"
        except BaseException:
            life.bury()
            raise
        finally:
            outcome.num_checks += life.monitor.num_checks
        outcome.lives.append(end)
        outcome.log.append(f"-------- life {number}: {end}")
        if end == "finished":
            outcome.weights = life.trainer.weights
            outcome.num_failed = life.ledger.summary()["failed"]
            _check_record(plan, life)
            return
    raise InvariantBroken("I19", f"the run is not finished after {MAX_LIVES} lives: {outcome.lives}")


def _one_life(life: Life) -> str:
    """Returns how it ended; raises Killed and InvariantBroken."""

    async def main() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # of what was left behind
        asyncio.get_running_loop().call_later(MAX_LIFE_S, life.outlived)
        try:
            await life.start()
            await _run_watched(life.loop)
            return "finished"
        except Exception as error:
            return life.explained(first_cause(error), _EXPLAINED)
        finally:
            if not life.is_dead:
                await life.leave()

    with life.disk.watched(life.event):
        return run_in_virtual_time(main)


def _check_record(plan: Scenario, life: Life) -> None:
    """What is on disk after the run's end says what the trainer did, along the surviving lineage (I10, I11)."""
    run_dir, consumed = plan.config.run_dir, sorted(life.trainer.consumed)
    ledger = Ledger()
    LedgerStore(run_dir / "ledger", ledger)
    ledger.check(full=True)
    books = ledger.surviving().total
    if ledger.lineage != life.lineage:
        raise InvariantBroken("I11", f"the books on disk end in lineage {ledger.lineage}, the run in {life.lineage}")
    if books["trained"] != len(consumed) or books["trained_uncommitted"]:
        raise InvariantBroken("I11", f"the trainer has seen {len(consumed)} attempts, the books say {dict(books)}")
    trained = sorted(
        AttemptKey(r["group"], r["member"], r["retry"]) for r in read_episodes(run_dir) if r["status"] == "trained"
    )
    if trained != consumed:
        raise InvariantBroken("I11", f"trained {consumed}, episodes on disk {trained}")
    updates = [line["update"] for line in read_metrics(run_dir)]
    if updates != list(range(1, plan.config.trainer.num_batches + 1)):
        raise InvariantBroken("I11", f"metrics of the surviving lineage are of updates {updates}")
    for number, result in life.loop.evaluations:
        if any(version.number != number for version in result.versions):
            raise InvariantBroken("I7", f"the evaluation of version {number} was sampled by {result.versions}")
