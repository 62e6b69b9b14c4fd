"""I20 for the section ``cluster``: what would have no effect, and what cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.config.cluster import InProcessCluster, RayCluster
from headrace.config.engines import SglangEngineConfig, TransformersEngineConfig

if TYPE_CHECKING:
    from headrace.config.schema import RunConfig


def cluster_problems(config: RunConfig) -> Iterator[str]:
    cluster = config.cluster
    if isinstance(cluster, InProcessCluster):
        return
    counts = actor_counts(config)
    if not any(counts.values()):
        more = " or an axis of [parallel]" if isinstance(cluster, RayCluster) else ""
        yield (
            f'cluster.type = "{cluster.type}" has no effect: there is no actor to carry; set '
            f"cluster.num_environment_workers, cluster.num_reward_workers, [fleet]{more}, or remove the section"
        )
        return
    if not counts["environment"] and not counts["reward"]:
        for name in ("max_restarts", "worker_deadline_s"):
            if name in cluster.model_fields_set:
                yield (
                    f"cluster.{name} has no effect: there are no environment and no reward workers (engines have "
                    "fleet.max_restarts); remove it"
                )
    engine = config.engine
    if counts["engine"] and isinstance(engine, TransformersEngineConfig) and engine.carrier.type != "memory":
        yield (
            f'engine.carrier.type = "{engine.carrier.type}" has no effect: with cluster.type = "{cluster.type}", '
            "weights reach the engines by shared memory or Ray's object store; remove it"
        )
    if isinstance(cluster, RayCluster):
        yield from _ray(cluster, counts)


def _ray(cluster: RayCluster, counts: dict[str, int]) -> Iterator[str]:
    how = {
        "engine": "there is no [fleet]",
        "trainer": "all axes of [parallel] are 1, so the controller's process trains alone",
        "environment": "cluster.num_environment_workers is 0",
        "reward": "cluster.num_reward_workers is 0",
    }
    for role, why in how.items():
        if getattr(cluster, role).model_fields_set and not counts[role]:
            yield f"cluster.{role} has no effect: {why}; remove it"
    if cluster.layout == "colocated" and not (counts["engine"] and counts["trainer"]):
        yield (
            'cluster.layout = "colocated" has no effect: it needs engines ([fleet]) and trainer ranks besides the '
            f"controller's ([parallel]), and there are {counts['engine']} and {counts['trainer']}"
        )
    for role in ("engine", "trainer", "environment", "reward", "controller"):
        gpus = getattr(cluster, role).num_gpus
        if gpus > 1 and gpus != int(gpus):
            yield f"cluster.{role}.num_gpus = {gpus:g}: above 1, devices are counted whole; round it"


def actor_counts(config: RunConfig) -> dict[str, int]:
    """Role -> actors that the cluster carries, the controller aside."""
    cluster = config.cluster
    if isinstance(cluster, InProcessCluster):
        return dict.fromkeys(("engine", "trainer", "environment", "reward"), 0)
    has_servers = isinstance(config.engine, SglangEngineConfig)  # somebody else's processes, called from here
    return {
        "engine": 0 if config.fleet is None or has_servers else config.fleet.num_engines,
        "trainer": config.parallel.world_size - 1 if isinstance(cluster, RayCluster) else 0,
        "environment": cluster.num_environment_workers,
        "reward": cluster.num_reward_workers,
    }
