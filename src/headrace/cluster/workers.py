"""The actors of a run besides its engines: environment and reward workers, and the carrier that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.cluster.actors import ActorHandle, RemoteError
from headrace.cluster.carrier import Carrier, SubprocessCarrier
from headrace.cluster.environments import EnvironmentWorkers
from headrace.cluster.journal import ActorJournal
from headrace.cluster.layout import bundles
from headrace.cluster.pool import ActorPool
from headrace.cluster.ray_actor import RayCarrier, connect
from headrace.cluster.rewards import RemoteReward
from headrace.cluster.spec import ActorNotMade, ActorSpec, Role
from headrace.config.cluster import ActorResources, InProcessCluster, RayCluster, SubprocessCluster
from headrace.config.cluster_checks import actor_counts
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.protocols import Environment, Reward
from headrace.types import Task

Note = Callable[[str], None]


class Workers:
    """What a run has in other processes. ``carrier`` starts the engines of a fleet, too."""

    def __init__(self, config: RunConfig, cluster: SubprocessCluster | RayCluster) -> None:
        """Blocks until a Ray cluster has room for the whole run. Raises ConfigError where it has not."""
        self.journal = ActorJournal()
        self.note: Note = self.journal.note
        self._cluster = cluster
        self._config = config
        self._log_folder = config.run_dir / "logs"
        self.ray_carrier: RayCarrier | None = None
        if isinstance(cluster, RayCluster):
            self.ray_carrier = _reserved(config, cluster, self.journal)
        self._pools: list[ActorPool] = []

    @staticmethod
    def of(config: RunConfig) -> Workers | None:
        """None where everything runs in the controller's process."""
        return None if isinstance(config.cluster, InProcessCluster) else Workers(config, config.cluster)

    def carrier(self, inherited_fds: dict[Role, int] | None = None) -> Carrier:
        """``inherited_fds``: what child processes inherit; on Ray nothing is."""
        if self.ray_carrier is not None:
            return self.ray_carrier
        deadline_s = self._cluster.start_deadline_s
        return SubprocessCarrier(
            self.journal, self._log_folder, start_deadline_s=deadline_s, inherited_fds=inherited_fds
        )

    def environments(self, otherwise: Callable[[Task], Environment]) -> Callable[[Task], Environment]:
        """What makes the environments of episodes: in workers, or ``otherwise``."""
        if not self._cluster.num_environment_workers:
            return otherwise
        pool = self._pool("environment", self._cluster.num_environment_workers, "headrace.actors:environments", {})
        return EnvironmentWorkers(pool, worker_deadline_s=self._cluster.worker_deadline_s).make_environment

    def rewards(self, reward: Reward, gold: Reward | None) -> tuple[Reward, Reward | None]:
        """The run's reward and gold standard: over workers, or as they are."""
        if not self._cluster.num_reward_workers:
            return reward, gold
        options = {"config": resolved(self._config)}
        pool = self._pool("reward", self._cluster.num_reward_workers, "headrace.actors:rewards", options)
        deadline_s = self._cluster.worker_deadline_s
        remote = RemoteReward(reward, pool, "reward", worker_deadline_s=deadline_s)
        return remote, None if gold is None else RemoteReward(gold, pool, "gold", worker_deadline_s=deadline_s)

    def told(self, note: Note) -> None:
        """``note`` hears of deaths and restarts too, besides the journal."""

        def both(text: str) -> None:
            self.journal.note(text)
            note(text)

        self.note = both

    @property
    def start_deadline_s(self) -> float:
        return self._cluster.start_deadline_s

    async def start(self) -> None:
        """Start every pool. Raises ActorDied or ActorNotMade where one does not come up."""
        for pool in self._pools:
            await pool.start()

    async def close(self) -> None:
        """End every worker, and give the cluster's resources back."""
        for pool in self._pools:
            await pool.close()
        if self.ray_carrier is not None:
            await self.ray_carrier.close()

    def _pool(self, role: Role, num_actors: int, factory: str, options: dict[str, Any]) -> ActorPool:
        async def start(index: int, incarnation: int) -> ActorHandle:
            spec = ActorSpec(role=role, index=index, incarnation=incarnation, factory=factory, options=options)
            handle = await self.carrier().start(spec)
            if role == "reward":
                await _proved(handle, spec)
            return handle

        pool = ActorPool(
            role, num_actors, start, max_restarts=self._cluster.max_restarts, note=lambda text: self.note(text)
        )
        self._pools.append(pool)
        return pool


async def _proved(handle: ActorHandle, spec: ActorSpec) -> None:
    """A reward worker judges known answers before it judges any other (I15)."""
    try:
        await handle.call("start")
    except RemoteError as error:
        await handle.close()
        raise ActorNotMade(spec, f"its self-test failed: {error}") from error


def _reserved(config: RunConfig, cluster: RayCluster, journal: ActorJournal) -> RayCarrier:
    ray = connect(cluster.address, namespace=f"headrace-{config.name}")
    counts = {role: num for role, num in actor_counts(config).items() if num}
    demands = {role: demand(getattr(cluster, role)) for role in counts}
    made = bundles(counts, demands, colocated=cluster.layout == "colocated")  # type: ignore[arg-type]  # roles
    carrier = RayCarrier(ray, journal, made, start_deadline_s=cluster.start_deadline_s)
    carrier.reserve(cluster.strategy)
    return carrier


def demand(resources: ActorResources) -> dict[str, float]:
    """As Ray names them."""
    return {"CPU": resources.num_cpus, "GPU": resources.num_gpus, **resources.custom}
