"""The objects that actors hold, made in their own processes from the run's configuration. Called by name
(:class:`headrace.cluster.spec.ActorSpec`), never directly; each factory imports what it needs and no more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.cluster.environments import EnvironmentActor
    from headrace.cluster.remote_engine import EngineActor
    from headrace.cluster.rewards import RewardActor
    from headrace.run import Controls


def environments() -> EnvironmentActor:
    """An environment worker. Imports no torch."""
    from headrace.cluster.environments import EnvironmentActor
    from headrace.environments.registry import make_environment

    return EnvironmentActor(make_environment)


def rewards(config: Mapping[str, Any]) -> RewardActor:
    """A reward worker: the run's rewards and its gold standard. Imports no torch."""
    from headrace.cluster.rewards import RewardActor
    from headrace.config.load import restore_config
    from headrace.rewards.build import build_rewards
    from headrace.rewards.composite import with_gold

    run = restore_config(dict(config), "the controller")
    reward = build_rewards(run.rewards)
    if run.gold is None:
        return RewardActor(reward)
    return RewardActor(reward, with_gold(reward, build_rewards(run.gold.rewards, where="gold.rewards")))


def engine(config: Mapping[str, Any], inherited_fd: int | None = None) -> EngineActor:
    """One engine of a fleet, with the weights that the run started from; ``inherited_fd``: of the shared memory in
    which newer ones come, else they come from Ray's store."""
    from headrace.checked import load_policy
    from headrace.cluster.boards import SharedMemoryInbox, receive_from_ray
    from headrace.cluster.remote_engine import EngineActor
    from headrace.config.load import restore_config
    from headrace.engine_wiring import NO_VERSION, build_engine

    run = restore_config(dict(config), "the controller")
    policy = load_policy(run)
    receive = receive_from_ray if inherited_fd is None else SharedMemoryInbox(inherited_fd).receive
    return EngineActor(engine=build_engine(run, policy, NO_VERSION), receive_weights=receive)


class TrainerRank:
    """A process that trains along and runs no loop."""

    def __init__(self, config: Mapping[str, Any], rank: int, address: str, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._config, self._rank, self._address = config, rank, address

    async def run(self) -> None:
        """Make the leader's calls until it is gone. Raises what ``torch.distributed`` raises then."""
        from headrace.config.load import restore_config
        from headrace.follower import follow_run

        await asyncio.to_thread(
            follow_run, restore_config(dict(self._config), "the controller"), self._rank, self._address
        )


class Controller:
    """A whole run, started by a supervisor on another node (``headrace.supervise``)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._controls: Controls | None = None
        self._is_stopped = False

    async def run(self, resume_from: str | None) -> dict[str, Any]:
        """``{"ended": "done" | "stopped" | "failed" | "lost", "message": str}``: see ``supervise.Ending``. All of it on
        a thread, imports too: heartbeats are answered meanwhile."""
        return await asyncio.to_thread(self._train, resume_from)

    def _train(self, resume_from: str | None) -> dict[str, Any]:
        from headrace.config.load import restore_config
        from headrace.errors import HeadraceError
        from headrace.run import Controls, RunFailed, train

        self._controls = Controls()
        if self._is_stopped:
            self._controls.stop()
        config = restore_config(dict(self._config), "the supervisor")
        try:
            path = None if resume_from is None else Path(resume_from)
            result = train(config, resume_from=path, controls=self._controls)
        except HeadraceError as error:
            lost = isinstance(error, RunFailed) and error.part_lost
            return {"ended": "lost" if lost else "failed", "message": str(error)}
        return {"ended": "stopped" if result.stopped else "done", "message": f"report: {result.report}"}

    def heartbeat(self) -> int:
        """Answers at once; returns the number of published updates of this controller."""
        return 0 if self._controls is None else self._controls.num_updates

    def stop(self) -> None:
        """Ask the run to end at its next safe point."""
        self._is_stopped = True
        if self._controls is not None:
            self._controls.stop()


def controller(config: Mapping[str, Any]) -> Controller:
    return Controller(config)


def trainer_rank(config: Mapping[str, Any], rank: int, address: str, environment: Mapping[str, str]) -> TrainerRank:
    return TrainerRank(config, rank, address, environment)
