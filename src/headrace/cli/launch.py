"""``headrace launch RUN.TOML --target kubernetes|slurm|mpirun``: start a run on somebody's cluster, or show how."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.child_process import how_it_ended
from headrace.cli.common import add_command
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.cli.common import Subparsers
    from headrace.config.schema import RunConfig

SUBMIT_DEADLINE_S = 120.0


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "launch",
        "Start a run on a cluster: as a KubeRay RayJob, a Slurm job, or by mpirun",
        "What is submitted comes from the run's file, with its sections [cluster] and [launch].\n"
        "  headrace launch run.toml --target slurm --dry-run      prints it and stops",
    )
    parser.add_argument("config", type=Path, metavar="RUN.TOML")
    parser.add_argument("--target", required=True, choices=("kubernetes", "slurm", "mpirun"))
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, then stop")
    parser.set_defaults(handler=_launch)


def _launch(args: argparse.Namespace) -> int:
    from headrace.cluster.launch.scripts import mpirun_command
    from headrace.config.checks import check_config
    from headrace.config.load import load_config

    config = load_config(args.config, args.overrides)
    check_config(config)
    text = rendered(config, args.target)
    if args.dry_run:
        print(text, end="")
        return 0
    if args.target == "kubernetes":
        return _submit(["kubectl", "apply", "-f", "-"], text, args.target)
    if args.target == "slurm":
        return _submit(["sbatch"], text, args.target)
    script = config.output_dir / f"{config.name}.mpirun.sh"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text)
    from headrace.config.launch import LaunchConfig

    command = mpirun_command(config.launch or LaunchConfig(), str(script))
    _require(command[0], args.target)
    return _told(command, subprocess.run(command, check=False).returncode)  # as long as the run takes


def rendered(config: RunConfig, target: str) -> str:
    """What is submitted. Raises ConfigError for what cannot be launched there."""
    from headrace.cluster.launch.checks import checked_launch
    from headrace.cluster.launch.kubernetes import manifests
    from headrace.cluster.launch.scripts import mpirun_script, slurm_script

    if target == "kubernetes":
        import yaml

        launch = checked_launch(config, "kubernetes")
        text: str = yaml.safe_dump_all(manifests(config, launch), sort_keys=False)
        return text
    if target == "slurm":
        return slurm_script(config, checked_launch(config, "slurm"))
    return mpirun_script(config, checked_launch(config, "mpirun"))


def _submit(command: list[str], text: str, target: str) -> int:
    _require(command[0], target)
    try:
        ended = subprocess.run(command, input=text, text=True, check=False, timeout=SUBMIT_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise HeadraceError(
            f"{command[0]} had not taken the run after {SUBMIT_DEADLINE_S:g} s; see whether it is there before you "
            "submit it again"
        ) from None
    return _told(command, ended.returncode)


def _told(command: list[str], returncode: int) -> int:
    """The exit status of ``headrace``; how the other program ended is said where it was not well."""
    if returncode:
        print(f"headrace: {command[0]} {how_it_ended(returncode)}", file=sys.stderr)
    return 2 if returncode < 0 else returncode


def _require(program: str, target: str) -> None:
    if shutil.which(program) is None:
        raise HeadraceError(
            f"--target {target} needs {program}, which is not on the PATH; with --dry-run, headrace prints what you "
            "can take to where it is"
        )
