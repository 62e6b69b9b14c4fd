"""What a launch needs of a run's configuration, checked before anything is rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from headrace.config.cluster import RayCluster
from headrace.config.dump import dump_toml
from headrace.config.launch import LaunchConfig
from headrace.config.load import config_error, resolved
from headrace.config.schema import RunConfig
from headrace.record.redact import redact

Target = Literal["kubernetes", "slurm", "mpirun"]

_OF_KUBERNETES = ("image", "namespace", "volumes", "gang_scheduler", "node_selector", "gateway")


def checked_launch(config: RunConfig, target: Target) -> LaunchConfig:
    """The section ``launch``. Raises ConfigError, one sentence for each problem: also for a secret in the file, since
    what is rendered is stored and shown by the cluster."""
    launch = config.launch or LaunchConfig()
    problems = [*_problems(config, launch, target)]
    if problems:
        raise config_error(problems)
    return launch


def run_toml(config: RunConfig) -> str:
    """The run's file as the cluster gets it, without the section ``launch``."""
    return dump_toml(config.model_copy(update={"launch": None}))


def _problems(config: RunConfig, launch: LaunchConfig, target: Target) -> Iterator[str]:
    if not isinstance(config.cluster, RayCluster):
        if launch.num_nodes > 1:
            yield (
                f'launch.num_nodes = {launch.num_nodes}, but cluster.type is "{config.cluster.type}", which stays on '
                'one node: set cluster.type = "ray", or num_nodes = 1'
            )
        elif target == "kubernetes":
            yield 'launch --target kubernetes starts a RayJob: set cluster.type = "ray" (one node is enough)'
    elif config.cluster.address is not None:
        yield (
            f"cluster.address = {config.cluster.address!r} has no effect: the launch starts a cluster of its own; "
            "remove it"
        )
    values = resolved(config)
    for key in _differences(values, redact(values), ""):
        yield (
            f"{key} holds a secret, which would be written into the manifest: take it out of the file and name it in "
            "launch.references (variable, and where the cluster keeps it)"
        )
    if target == "kubernetes":
        yield from _kubernetes(config, launch)
        return
    for name in _OF_KUBERNETES:
        if name in launch.model_fields_set:
            yield f"launch.{name} has no effect with --target {target}; remove it"
    if target == "mpirun":
        for name in ("queue", "account", "time_limit_s"):
            if name in launch.model_fields_set:
                yield f"launch.{name} has no effect with --target mpirun, which asks nobody for nodes; remove it"
    for secret in launch.references:
        if secret.name is not None or secret.key is not None:
            yield (
                f"launch.references: name and key of {secret.variable} have no effect with --target {target}, which "
                "passes the variable of your shell on; remove them"
            )


def _kubernetes(config: RunConfig, launch: LaunchConfig) -> Iterator[str]:
    if launch.image is None:
        yield "launch.image is not set: name the container image (its recipe is the repository's Dockerfile)"
    if not launch.volumes:
        yield (
            "launch.volumes is empty: the run's folder must outlive any pod; name a PersistentVolumeClaim for it, as "
            'in launch.volumes = { "/data" = "my-claim" }'
        )
    elif not any(config.output_dir.is_relative_to(path) for path in launch.volumes):
        paths = ", ".join(launch.volumes)
        yield f"output_dir = {str(config.output_dir)!r} lies on none of launch.volumes ({paths}); put it below one"
    for path in launch.volumes:
        if not path.startswith("/"):
            yield f"launch.volumes: {path!r} is no absolute path"
    if launch.queue is None and launch.gang_scheduler in ("kueue", "yunikorn"):
        yield f'launch.gang_scheduler = "{launch.gang_scheduler}" needs launch.queue'
    if launch.queue is not None and launch.gang_scheduler in ("none", "scheduler_plugins"):
        yield f'launch.queue has no effect: launch.gang_scheduler is "{launch.gang_scheduler}"; remove it'
    for secret in launch.references:
        if secret.name is None:
            yield f"launch.references: {secret.variable} has no name of a Secret object of the cluster"
    if launch.account is not None:
        yield "launch.account has no effect with --target kubernetes; remove it"


def _differences(values: Any, redacted: Any, key: str) -> Iterator[str]:
    if isinstance(values, Mapping) and isinstance(redacted, Mapping):
        for name, value in values.items():
            yield from _differences(value, redacted[name], f"{key}.{name}" if key else str(name))
    elif isinstance(values, (list, tuple)) and isinstance(redacted, (list, tuple)):
        for number, (value, other) in enumerate(zip(values, redacted, strict=True)):
            yield from _differences(value, other, f"{key}[{number}]")
    elif str(values) != str(redacted):
        yield key
