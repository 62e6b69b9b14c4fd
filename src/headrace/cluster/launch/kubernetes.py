"""A run as a KubeRay RayJob (``ray.io/v1``), with a ConfigMap for its file and, where asked for, a route to its head.

Checked by the tests against the operator's own schema. Every pod sees the run's file, the volumes and the secrets, the
latter by reference only. The controller is started by the job's submitter with ``--supervise``, so that it outlives the
pods of the cluster; where the submitter dies, ``backoffLimit`` starts another, which goes on with the run.
"""

from __future__ import annotations

import re
from typing import Any

from headrace.cluster.launch.checks import run_toml
from headrace.config.launch import LaunchConfig
from headrace.config.schema import RunConfig

RAY_VERSION = "2.60.0"
CONFIG_FOLDER = "/etc/headrace"
DASHBOARD_PORT = 8265
_SHARED_MEMORY = "shared-memory"

Manifest = dict[str, Any]


def manifests(config: RunConfig, launch: LaunchConfig) -> list[Manifest]:
    """In the order in which they are applied. ``launch``: of ``checks.checked_launch``."""
    name = object_name(config.name)
    rendered = [_config_map(config, launch, name), _ray_job(config, launch, name)]
    if launch.gateway is not None:
        rendered += [_service(launch, name), _route(launch, name)]
    return rendered


def object_name(run_name: str) -> str:
    """A name that Kubernetes takes: lower case, at most 40 characters, so that the operator may append to it."""
    name = re.sub(r"[^a-z0-9-]+", "-", run_name.lower()).strip("-")[:30].strip("-")
    return f"headrace-{name or 'run'}"


def _metadata(launch: LaunchConfig, name: str, labels: dict[str, str] | None = None) -> Manifest:
    own = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": name}
    return {"name": name, "namespace": launch.namespace, "labels": own | (labels or {})}


def _config_map(config: RunConfig, launch: LaunchConfig, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(launch, name),
        "data": {"run.toml": run_toml(config)},
    }


def _ray_job(config: RunConfig, launch: LaunchConfig, name: str) -> Manifest:
    spec: Manifest = {
        "entrypoint": f"headrace train {CONFIG_FOLDER}/run.toml --supervise",
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "backoffLimit": config.cluster.controller_restarts,
        "rayClusterSpec": _cluster(launch, name),
    }
    if launch.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = launch.time_limit_s
    if launch.gang_scheduler == "kueue":
        spec["suspend"] = True  # until the queue has room for all of it
    labels = _gang_labels(launch, name)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": _metadata(launch, name, labels), "spec": spec}


def _gang_labels(launch: LaunchConfig, name: str) -> dict[str, str]:
    queue = launch.queue
    if launch.gang_scheduler == "kueue":
        return {"kueue.x-k8s.io/queue-name": queue or ""}
    if launch.gang_scheduler == "volcano":
        return {"ray.io/scheduler-name": "volcano"} | ({"volcano.sh/queue-name": queue} if queue else {})
    if launch.gang_scheduler == "yunikorn":
        own = {"yunikorn.apache.org/app-id": name, "yunikorn.apache.org/queue": queue or ""}
        return {"ray.io/gang-scheduling-enabled": "true"} | own
    return {"ray.io/gang-scheduling-enabled": "true"} if launch.gang_scheduler == "scheduler_plugins" else {}


def _cluster(launch: LaunchConfig, name: str) -> Manifest:
    """One pod for each node: the head does its share of the work, since it holds the controller."""
    spec: Manifest = {
        "rayVersion": RAY_VERSION,
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0"},
            "template": _pod(launch, name, "head", [DASHBOARD_PORT]),
        },
    }
    num_workers = launch.num_nodes - 1
    if num_workers:
        counts = {"replicas": num_workers, "minReplicas": num_workers, "maxReplicas": num_workers}
        spec["workerGroupSpecs"] = [
            {"groupName": "workers", **counts, "rayStartParams": {}, "template": _pod(launch, name, "worker", [])}
        ]
    return spec


def _pod(launch: LaunchConfig, name: str, role: str, ports: list[int]) -> Manifest:
    resources: dict[str, Any] = {"cpu": str(launch.cpus_per_node), "memory": f"{launch.memory_gib_per_node}Gi"}
    if launch.gpus_per_node:
        resources["nvidia.com/gpu"] = str(launch.gpus_per_node)
    claims = {path: f"volume-{number}" for number, path in enumerate(launch.volumes)}
    container: Manifest = {
        "name": role,
        "image": launch.image,
        "env": _environment(launch),
        "resources": {"requests": resources, "limits": dict(resources)},
        "volumeMounts": [
            {"name": "run", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},
            *({"name": volume, "mountPath": path} for path, volume in claims.items()),
        ],
    }
    if ports:
        container["ports"] = [{"containerPort": port, "name": "dashboard"} for port in ports]
    spec: Manifest = {
        "containers": [container],
        "volumes": [
            {"name": "run", "configMap": {"name": name}},
            {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": f"{_shared_gib(launch)}Gi"}},
            *(
                {"name": claims[path], "persistentVolumeClaim": {"claimName": claim}}
                for path, claim in launch.volumes.items()
            ),
        ],
    }
    if launch.node_selector:
        spec["nodeSelector"] = dict(launch.node_selector)
    labels = {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": name}
    return {"metadata": {"labels": labels}, "spec": spec}


def _shared_gib(launch: LaunchConfig) -> int:
    """For Ray's object store, and weights on their way: a third of the node's memory, which it counts against."""
    return max(1, launch.memory_gib_per_node // 3)


def _environment(launch: LaunchConfig) -> list[Manifest]:
    plain = {"RAY_USAGE_STATS_ENABLED": "0", **launch.environment}
    return [
        *({"name": name, "value": value} for name, value in plain.items()),
        *(
            {
                "name": secret.variable,
                "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key or secret.variable.lower()}},
            }
            for secret in launch.references
        ),
    ]


def _service(launch: LaunchConfig, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(launch, f"{name}-head"),
        "spec": {
            "selector": {"app.kubernetes.io/instance": name, "ray.io/node-type": "head"},
            "ports": [{"name": "dashboard", "port": DASHBOARD_PORT, "targetPort": DASHBOARD_PORT}],
        },
    }


def _route(launch: LaunchConfig, name: str) -> Manifest:
    assert launch.gateway is not None
    parent = {"name": launch.gateway.name}
    if launch.gateway.namespace is not None:
        parent["namespace"] = launch.gateway.namespace
    spec: Manifest = {
        "parentRefs": [parent],
        "rules": [{"backendRefs": [{"name": f"{name}-head", "port": DASHBOARD_PORT}]}],
    }
    if launch.gateway.hostname is not None:
        spec["hostnames"] = [launch.gateway.hostname]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": _metadata(launch, name),
        "spec": spec,
    }
