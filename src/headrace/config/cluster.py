"""Where the actors of a run are: a section for each carrier, told apart by ``type``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from headrace.config.base import Section


class ActorResources(Section):
    """What one actor of a role takes of a node. Fractions share a device; nothing but the books enforces them."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    custom: dict[str, float] = Field(default_factory=dict)
    """A cluster's own resources. Node affinity is one of them: ``"node:10.0.0.2" = 0.001`` is on that node only."""


class _Cluster(Section):
    controller_restarts: int = Field(3, ge=0)
    """With ``--supervise``: times in a row that the controller is started again without a new checkpoint between."""


class InProcessCluster(_Cluster):
    """Everything in one process, and the processes that trainer, verifiers and vLLM have of their own."""

    is_default_type: ClassVar[bool] = True
    type: Literal["in_process"] = "in_process"


class _Workers(_Cluster):
    num_environment_workers: int = Field(0, ge=0)
    """Processes that hold the environments of episodes; 0: the controller's own."""
    num_reward_workers: int = Field(0, ge=0)
    """Processes that hold the rewards, each with as many verifiers as a reward's ``num_workers``; 0: the
    controller's own."""
    max_restarts: int = Field(3, ge=0)
    """Of each environment and reward worker; work that went well gives them back. Engines: ``fleet.max_restarts``."""
    start_deadline_s: float = Field(180.0, gt=0)
    """For an actor to be placed and to have made what it holds."""
    worker_deadline_s: float = Field(60.0, gt=0)
    """For an environment or reward worker to be there, restarts included."""


class SubprocessCluster(_Workers):
    """Engines of a fleet, environment workers and reward workers as child processes of the controller."""

    type: Literal["subprocess"] = "subprocess"


class RayCluster(_Workers):
    """Engines of a fleet, environment workers, reward workers and trainer ranks on a Ray cluster; with
    ``--supervise`` the controller too. Every node must see the run's folder and the model under the same path."""

    type: Literal["ray"] = "ray"
    address: str | None = None
    """Of the cluster's head (``10.0.0.1:6379``); None: $RAY_ADDRESS."""
    layout: Literal["disaggregated", "colocated"] = "disaggregated"
    """``colocated``: engine i shares node and devices with trainer rank i + 1; give both fractions of a device."""
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """How Ray lays the actors' bundles over the nodes."""
    engine: ActorResources = ActorResources()
    trainer: ActorResources = ActorResources()
    """Of each trainer rank but the first, which is the controller's process."""
    environment: ActorResources = ActorResources()
    reward: ActorResources = ActorResources()
    controller: ActorResources = ActorResources()
    """With ``--supervise``."""


def _cluster_type(cluster: Any) -> Any:
    return cluster.get("type", "in_process") if isinstance(cluster, dict) else getattr(cluster, "type", None)


ClusterConfig = Annotated[
    Annotated[InProcessCluster, Tag("in_process")]
    | Annotated[SubprocessCluster, Tag("subprocess")]
    | Annotated[RayCluster, Tag("ray")],
    Discriminator(_cluster_type),
]
