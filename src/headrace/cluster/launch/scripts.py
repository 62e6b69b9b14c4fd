"""A run as a Slurm batch script, and as a script for mpirun. Both start Ray on every node, wait until all have joined,
start the run under supervision on the first, and end Ray with it.

Secrets are passed on by their names from the submitting shell; no value is in a script.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from headrace.cluster.launch.checks import run_toml
from headrace.config.cluster import RayCluster
from headrace.config.launch import LaunchConfig
from headrace.config.schema import RunConfig

PORT = 6379
JOIN_DEADLINE_S = 300
_MARK = "HEADRACE_RUN_TOML"


def slurm_script(config: RunConfig, launch: LaunchConfig) -> str:
    """For ``sbatch``."""
    return "\n".join([*_slurm_header(config, launch), *_prelude(config, launch), *_slurm_body(config)]) + "\n"


def mpirun_script(config: RunConfig, launch: LaunchConfig) -> str:
    """Run by ``mpirun``, one process a node; the first one is the head."""
    num = launch.num_nodes
    passed = " ".join(f"-x {secret.variable}" for secret in launch.references)
    usage = f"mpirun -np {num} --map-by ppr:1:node --hostfile HOSTS {passed + ' ' if passed else ''}bash THIS_FILE"
    return "\n".join(["#!/bin/bash", f"# {usage}", *_prelude(config, launch), *_mpirun_body(config, num)]) + "\n"


def mpirun_command(launch: LaunchConfig, script: str) -> list[str]:
    """How :func:`mpirun_script` is started, apart from the hosts, which mpirun finds by itself."""
    passed = [part for secret in launch.references for part in ("-x", secret.variable)]
    return ["mpirun", "-np", str(launch.num_nodes), "--map-by", "ppr:1:node", *passed, "bash", script]


def _slurm_header(config: RunConfig, launch: LaunchConfig) -> Iterator[str]:
    yield "#!/bin/bash"
    yield f"#SBATCH --job-name={config.name}"
    yield f"#SBATCH --nodes={launch.num_nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    yield f"#SBATCH --cpus-per-task={launch.cpus_per_node}"
    yield f"#SBATCH --mem={launch.memory_gib_per_node}G"
    if launch.gpus_per_node:
        yield f"#SBATCH --gpus-per-node={launch.gpus_per_node}"
    if launch.time_limit_s is not None:
        yield f"#SBATCH --time={-(-launch.time_limit_s // 60)}"
    if launch.queue is not None:
        yield f"#SBATCH --partition={launch.queue}"
    if launch.account is not None:
        yield f"#SBATCH --account={launch.account}"
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    yield "#SBATCH --signal=B:TERM@120"
    names = ",".join(["PATH", "HOME", "USER", "LANG", *(secret.variable for secret in launch.references)])
    yield f"#SBATCH --export={names}"


def _prelude(config: RunConfig, launch: LaunchConfig) -> Iterator[str]:
    yield "set -euo pipefail"
    yield "export RAY_USAGE_STATS_ENABLED=0"
    for name, value in launch.environment.items():
        yield f"export {name}={shlex.quote(value)}"
    for secret in launch.references:
        yield f': "${{{secret.variable}:?is not set in the shell that started this}}"'
    folder = shlex.quote(str(config.output_dir))
    yield f"mkdir -p {folder}"
    yield f"run_toml={folder}/{config.name}.toml"


def _write_toml(config: RunConfig) -> Iterator[str]:
    text = run_toml(config)
    assert _MARK not in text
    yield f"cat > \"$run_toml\" <<'{_MARK}'"
    yield text.rstrip("\n")
    yield _MARK


def _joined(num_nodes: str) -> Iterator[str]:
    """Wait until all nodes are there, or end with a clear error."""
    yield "for ((second = 0; ; second += 5)); do"
    yield '    joined=$(python3 -c \'import ray; ray.init(address="auto", log_to_driver=False)'
    yield 'print(sum(node["Alive"] for node in ray.nodes()))\' 2>/dev/null || echo 0)'
    yield f'    [ "$joined" -ge "{num_nodes}" ] && break'
    yield f"    if [ $second -ge {JOIN_DEADLINE_S} ]; then"
    yield f'        echo "headrace: only $joined of {num_nodes} nodes joined Ray in {JOIN_DEADLINE_S} s" >&2; exit 1'
    yield "    fi"
    yield "    sleep 5"
    yield "done"


def _slurm_body(config: RunConfig) -> Iterator[str]:
    yield from _write_toml(config)
    run = 'headrace train "$run_toml" --supervise & run=$!'
    if isinstance(config.cluster, RayCluster):
        yield 'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))'
        yield "head=${nodes[0]}"
        yield "address=$(srun --nodes=1 --ntasks=1 -w \"$head\" hostname --ip-address | awk '{print $1}')"
        yield f'export RAY_ADDRESS="$address:{PORT}"'
        yield (
            f'srun --nodes=1 --ntasks=1 -w "$head" --overlap ray start --head --node-ip-address="$address" '
            f"--port={PORT} --disable-usage-stats --block &"
        )
        yield "sleep 10"
        yield 'if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then'
        yield '    srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --exclude="$head" \\'
        yield '        ray start --address="$RAY_ADDRESS" --disable-usage-stats --block &'
        yield "fi"
        yield from _joined("$SLURM_JOB_NUM_NODES")
    yield run
    yield "trap 'kill -TERM $run' TERM"
    yield "status=0; wait $run || status=$?"
    yield "while kill -0 $run 2>/dev/null; do wait $run || status=$?; done"
    yield "kill $(jobs -p) 2>/dev/null || true"
    yield "exit $status"


def _mpirun_body(config: RunConfig, num_nodes: int) -> Iterator[str]:
    if not isinstance(config.cluster, RayCluster):
        yield from _write_toml(config)
        yield 'exec headrace train "$run_toml" --supervise'
        return
    yield "rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-${PMIX_RANK:?start this file by mpirun}}}"
    yield 'address_file="$run_toml.address"'
    yield 'if [ "$rank" -eq 0 ]; then'
    yield from _write_toml(config)
    yield "address=$(hostname --ip-address | awk '{print $1}')"
    yield f'export RAY_ADDRESS="$address:{PORT}"'
    yield f'ray start --head --node-ip-address="$address" --port={PORT} --disable-usage-stats --block & ray=$!'
    yield "trap 'kill $ray 2>/dev/null; rm -f \"$address_file\"' EXIT"
    yield "sleep 10"
    yield 'echo "$RAY_ADDRESS" > "$address_file.tmp" && mv "$address_file.tmp" "$address_file"'
    yield from _joined(str(num_nodes))
    yield 'headrace train "$run_toml" --supervise'
    yield "else"
    yield f'for ((second = 0; second < {JOIN_DEADLINE_S}; second++)); do [ -s "$address_file" ] && break; sleep 1; done'
    yield '[ -s "$address_file" ] || { echo "headrace: the first node did not start Ray" >&2; exit 1; }'
    yield 'ray start --address="$(cat "$address_file")" --disable-usage-stats --block || true  # ends with the head'
    yield "fi"
