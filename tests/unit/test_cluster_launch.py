"""``headrace launch``: manifests that KubeRay's own schema takes, scripts that a shell takes, and no secret in any."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from crd_schema import schema, shared_data, violations

from headrace.cli.launch import rendered
from headrace.cli.main import main
from headrace.config.checks import check_config
from headrace.config.dump import dump_toml
from headrace.config.load import load_config, restore_config
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError

LAUNCH: dict[str, Any] = {
    "num_nodes": 8,
    "gpus_per_node": 8,
    "cpus_per_node": 64,
    "memory_gib_per_node": 512,
    "image": "registry.example/headrace:1",
    "volumes": {"/data": "runs-claim", "/models": "models-claim"},
    "references": [
        {"variable": "HF_TOKEN", "name": "hub", "key": "token"},
        {"variable": "WANDB_API_KEY", "name": "wandb"},
    ],
    "environment": {"NCCL_SOCKET_IFNAME": "eth0"},
    "gang_scheduler": "kueue",
    "queue": "research",
    "gateway": {"name": "public", "namespace": "gateways", "hostname": "runs.example"},
    "time_limit_s": 86400,
}


def config(launch: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    data: dict[str, Any] = {
        "name": "Math_1",
        "output_dir": "/data/runs",
        "model": {"path": "some/model"},
        "tasks": {"type": "arithmetic"},
        "rewards": [{"type": "exact"}],
        "cluster": {"type": "ray", "num_reward_workers": 4},
        "launch": LAUNCH if launch is None else launch,
        **sections,
    }
    return restore_config(data, "the test")


def plain(**launch: Any) -> dict[str, Any]:
    """Of Slurm and mpirun."""
    base = {"num_nodes": 4, "gpus_per_node": 8, "references": [{"variable": "HF_TOKEN"}], "environment": {"A": "b c"}}
    return {**base, **launch}


def objects(made: RunConfig) -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all(rendered(made, "kubernetes"))}


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster.get("workerGroupSpecs", []))]


@pytest.mark.skipif(shared_data() is None, reason="no shared/data with the operators' schemas beside this checkout")
@pytest.mark.parametrize("scheduler", ["none", "kueue", "volcano", "yunikorn", "scheduler_plugins"])
def test_the_rayjob_satisfies_the_operators_schema(scheduler: str) -> None:
    launch = {**LAUNCH, "gang_scheduler": scheduler}
    if scheduler in ("none", "scheduler_plugins"):
        del launch["queue"]
    job = objects(config(launch))["RayJob"]
    of = schema(shared_data() / "kuberay" / "ray.io_rayjobs.yaml", "v1")
    assert [*violations(job, of)] == []
    broken = {**job, "spec": {**job["spec"], "entrypint": "x", "backoffLimit": "three"}}
    assert len([*violations(broken, of)]) == 2, "the check must be able to fail"


def test_the_job_asks_for_every_node_and_resumes_by_itself() -> None:
    job = objects(config())["RayJob"]
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (workers["replicas"], workers["minReplicas"], workers["maxReplicas"]) == (7, 7, 7)
    assert job["spec"]["entrypoint"] == "headrace train /etc/headrace/run.toml --supervise"
    assert job["spec"]["suspend"] is True and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    for pod in pods(job):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert {m["mountPath"] for m in container["volumeMounts"]} == {"/etc/headrace", "/dev/shm", "/data", "/models"}
        claims = {
            v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v
        }
        assert claims == {"runs-claim", "models-claim"}


@pytest.mark.parametrize(
    ("scheduler", "label"),
    [
        ("volcano", ("volcano.sh/queue-name", "research")),
        ("yunikorn", ("yunikorn.apache.org/queue", "research")),
        ("scheduler_plugins", ("ray.io/gang-scheduling-enabled", "true")),
    ],
)
def test_gang_scheduling_labels(scheduler: str, label: tuple[str, str]) -> None:
    launch = {**LAUNCH, "gang_scheduler": scheduler}
    if scheduler == "scheduler_plugins":
        del launch["queue"]
    job = objects(config(launch))["RayJob"]
    assert label in job["metadata"]["labels"].items() and "suspend" not in job["spec"]


def test_secrets_are_references_and_the_runs_file_reads_back(tmp_path: Path) -> None:
    made = config()
    for pod in pods(objects(made)["RayJob"]):
        env = {e["name"]: e for e in pod["spec"]["containers"][0]["env"]}
        assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert env["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"]["key"] == "wandb_api_key"
        assert "value" not in env["HF_TOKEN"] and env["NCCL_SOCKET_IFNAME"]["value"] == "eth0"
    toml = tmp_path / "run.toml"
    toml.write_text(objects(made)["ConfigMap"]["data"]["run.toml"])
    assert load_config(toml) == made.model_copy(update={"launch": None})
    check_config(load_config(toml))  # which the run does before anything else


def test_the_gateway_leads_to_the_head() -> None:
    found = objects(config())
    route, service = found["HTTPRoute"], found["Service"]
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
    assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == service["metadata"]["name"]
    assert service["spec"]["selector"]["ray.io/node-type"] == "head"
    assert "HTTPRoute" not in objects(config({k: v for k, v in LAUNCH.items() if k != "gateway"}))


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "mpirun"])
def test_a_secret_in_the_file_is_refused_by_its_key(target: str) -> None:
    """What is rendered is stored and shown by the cluster."""
    made = config(
        LAUNCH if target == "kubernetes" else plain(),
        monitor={"sinks": ["wandb"], "sink_options": {"wandb": {"api_key": "0123456789abcdef"}}},
    )
    with pytest.raises(ConfigError, match=r"monitor\.sink_options\.wandb\.api_key holds a secret") as caught:
        rendered(made, target)
    assert "0123456789abcdef" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "launch.image is not set"),
        ({"volumes": {}}, "launch.volumes is empty"),
        ({"volumes": {"/other": "claim"}}, "lies on none of launch.volumes"),
        ({"volumes": {"/data": "a", "models": "b"}}, "'models' is no absolute path"),
        ({"queue": None}, "needs launch.queue"),
        ({"gang_scheduler": "none"}, "launch.queue has no effect"),
        ({"references": [{"variable": "HF_TOKEN"}]}, "HF_TOKEN has no name of a Secret"),
        ({"account": "me"}, "launch.account has no effect"),
    ],
)
def test_what_a_rayjob_cannot_be_made_of_is_said_before_it_is(change: dict[str, Any], message: str) -> None:
    launch = {k: v for k, v in {**LAUNCH, **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        rendered(config(launch), "kubernetes")


def test_options_of_another_target_have_no_effect_and_are_refused() -> None:
    """I20."""
    with pytest.raises(ConfigError) as caught:
        rendered(
            config(plain(image="x", queue="q", time_limit_s=600, references=[{"variable": "A", "name": "b"}])), "mpirun"
        )
    for key in ("launch.image", "launch.queue", "launch.time_limit_s", "name and key of A"):
        assert key in str(caught.value)
    with pytest.raises(ConfigError, match=r"cluster\.address = '10\.0\.0\.1:6379' has no effect"):
        rendered(config(plain(), cluster={"type": "ray", "num_reward_workers": 1, "address": "10.0.0.1:6379"}), "slurm")
    with pytest.raises(ConfigError, match=r'launch.num_nodes = 4, but cluster.type is "in_process"'):
        rendered(config(plain(), cluster={"type": "in_process"}), "slurm")
    with pytest.raises(ConfigError, match="starts a RayJob"):
        rendered(config({**LAUNCH, "num_nodes": 1}, cluster={"type": "in_process"}), "kubernetes")


@pytest.mark.parametrize("target", ["slurm", "mpirun"])
@pytest.mark.parametrize("cluster", ["ray", "in_process"])
def test_scripts_are_shell_and_carry_the_run(target: str, cluster: str, tmp_path: Path) -> None:
    launch = plain() if cluster == "ray" else plain(num_nodes=1)
    section = {"type": "ray", "num_reward_workers": 4} if cluster == "ray" else {"type": "in_process"}
    made = config(launch, cluster=section)
    script = tmp_path / "script.sh"
    script.write_text(rendered(made, target))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    text = script.read_text()
    assert 'headrace train "$run_toml" --supervise' in text and "export A='b c'" in text
    assert ("ray start --head" in text) == (cluster == "ray")
    toml = tmp_path / "run.toml"
    toml.write_text(text.split("<<'HEADRACE_RUN_TOML'\n")[1].split("\nHEADRACE_RUN_TOML")[0])
    assert load_config(toml) == made.model_copy(update={"launch": None})
    if target == "slurm":
        assert "#SBATCH --nodes=4" in text or cluster != "ray"
        assert "#SBATCH --gpus-per-node=8" in text and "#SBATCH --export=PATH,HOME,USER,LANG,HF_TOKEN" in text


def test_a_script_names_the_secret_that_its_shell_lacks(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text(rendered(config(plain(num_nodes=1), cluster={"type": "in_process"}), "mpirun"))
    ended = subprocess.run(
        ["bash", str(script)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.returncode != 0 and "HF_TOKEN: is not set in the shell that started this" in ended.stderr


def write(tmp_path: Path, made: RunConfig) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(made))
    return path


def test_dry_run_prints_and_submits_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["launch", str(write(tmp_path, config())), "--target", "kubernetes", "--dry-run", "--launch.num_nodes", "3"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert next(o for o in yaml.safe_load_all(printed) if o["kind"] == "RayJob")
    assert "replicas: 2" in printed


def test_a_missing_program_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert main(["launch", str(write(tmp_path, config())), "--target", "kubernetes"]) == 2
    assert "--target kubernetes needs kubectl, which is not on the PATH" in capsys.readouterr().err
