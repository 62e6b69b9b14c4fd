"""Where ``headrace launch`` starts a run: images, nodes, volumes, queues. Nothing here changes the run itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.base import Section


class SecretReference(Section):
    """A secret that the cluster holds already; its value never passes through headrace."""

    variable: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that the run finds it in (``HF_TOKEN``)."""
    name: str | None = None
    """Kubernetes: the Secret object. Slurm and mpirun pass the variable of the submitting shell on."""
    key: str | None = None
    """Kubernetes: the key in it; None: the variable's name in lower case."""


class GatewayConfig(Section):
    """A route from a Gateway of the cluster to Ray's dashboard and job interface on the head."""

    name: str
    namespace: str | None = None
    hostname: str | None = None


class LaunchConfig(Section):
    """``[launch]``, for ``headrace launch`` only."""

    num_nodes: int = Field(1, ge=1)
    """The head's node included; the controller runs with the head or beside it."""
    cpus_per_node: int = Field(8, ge=1)
    gpus_per_node: int = Field(0, ge=0)
    memory_gib_per_node: int = Field(64, ge=1)
    time_limit_s: int | None = Field(None, ge=60)
    """After which the cluster ends the job."""
    queue: str | None = None
    """Kubernetes: of the batch scheduler; Slurm: the partition."""
    references: tuple[SecretReference, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    """Plain environment variables of every process (``NCCL_SOCKET_IFNAME``). No secrets."""
    image: str | None = None
    """Kubernetes: the container image (recipe: Dockerfile)."""
    namespace: str = "default"
    """Kubernetes."""
    volumes: dict[str, str] = Field(default_factory=dict)
    """Kubernetes: path in every pod -> PersistentVolumeClaim (ReadWriteMany). The run's folder lies on one of them."""
    gang_scheduler: Literal["none", "kueue", "volcano", "yunikorn", "scheduler_plugins"] = "none"
    """Kubernetes: who starts all pods of the job or none. All but ``none`` need their operator in the cluster."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Kubernetes: labels of the nodes."""
    gateway: GatewayConfig | None = None
    """Kubernetes."""
    account: str | None = None
    """Slurm."""
