"""One measured run of either side of versus_trl.py: a subprocess, and the steps that it wrote down.

Both sides get the same prompts in the same order, by ids; both report, for each step, ``end_s`` (seconds since the
first step began, so that loading the model does not count), reward, counts and seconds by phase.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import headrace
from headrace.child_process import how_it_ended
from headrace.config.schema import ArithmeticTasks
from headrace.control.cursor import TaskCursor
from headrace.environments.tasks import build_tasks
from headrace.model.load import load_tokenizer
from headrace.model.renderer import CHATML, ChatRenderer, generation_eos_ids

STOP_WINDOW = 3
"""The reward level of scenario C is that of the mean over so many successive steps."""
POLL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained, on both sides."""

    name: str
    groups_per_batch: int
    group_size: int = 8
    max_new_tokens: int
    num_steps: int
    """Optimizer steps of a run; where ``stop_level`` is set, at most so many."""
    skip_zero_gradient: bool = False
    """headrace only; TRL always computes every group's gradient."""
    stop_level: float | None = None
    learning_rate: float = 2e-5

    @property
    def batch_size(self) -> int:
        return self.groups_per_batch * self.group_size


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where both sides run."""

    model: Path
    trl_python: Path
    num_threads: int
    deadline_s: float
    """For one run; a side that takes longer is killed, and the benchmark ends with an error that names it."""
    trl_options: dict[str, Any] = field(default_factory=dict)
    """Further GRPOConfig options."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of one side left behind."""

    steps: list[dict[str, float]]
    peak_memory_bytes: int
    """Largest resident size of the process (ru_maxrss), loading and headrace's last checkpoint included."""
    cpu_s: float
    """CPU seconds of the process, set-up included."""
    wall_s: float
    foreign_share: float | None
    """Share of all cores' time that others used meanwhile (other processes, and what a hypervisor took away), so that
    a run on a busy machine can be told from one on a quiet one; None where the system does not say."""
    setup: dict[str, Any] = field(default_factory=dict)


class SideFailed(RuntimeError):
    """A side that did not end well; the message has the end of its output."""


def has_reached(rewards: list[float], level: float | None) -> bool:
    """True where the mean of the last STOP_WINDOW rewards is above ``level``."""
    window = rewards[-STOP_WINDOW:]
    return level is not None and len(window) == STOP_WINDOW and sum(window) / len(window) > level


def run_headrace(scenario: Scenario, machine: Machine, seed: int) -> Run:
    """``headrace train`` with everything at its default but what the scenario says; evaluation is off by default."""
    with tempfile.TemporaryDirectory(prefix="versus-headrace-") as folder:
        toml, metrics = Path(folder, "run.toml"), Path(folder, "runs", "versus", "metrics.jsonl")
        toml.write_text(run_toml(scenario, machine, seed, Path(folder, "runs")))

        def is_done() -> bool:
            return has_reached([line["reward/mean"] for line in read_lines(metrics)], scenario.stop_level)

        command = [sys.executable, "-m", "headrace.cli.main", "train", str(toml)]
        usage = watched(command, machine, f"headrace, scenario {scenario.name}", Path(folder), is_done)
        lines = read_lines(metrics)
    origin_s = lines[0]["time"] - lines[0]["time/step_s"]
    steps = [
        {
            "end_s": line["time"] - origin_s,
            "reward": line["reward/mean"],
            "num_samples": line["train/num_samples"],
            "num_tokens": line["rollout/num_generated_tokens"],
            "generation_s": line["time/generation_s"],
            "training_s": line["time/train_s"],
            "num_trained_tokens": line["train/num_tokens"],
            "num_skipped_samples": line["train/num_skipped_samples"],
        }
        for line in lines
    ]
    return Run(steps=steps, **usage, setup={"version": headrace.__version__})


def run_toml(scenario: Scenario, machine: Machine, seed: int, output_dir: Path) -> str:
    return f"""\
name = "versus"
seed = {seed}
output_dir = {json.dumps(str(output_dir))}
[model]
path = {json.dumps(str(machine.model))}
dtype = "float32"
chat_template = "chatml"
[engine]
num_threads = {machine.num_threads}
[tasks]
type = "arithmetic"
operation = "multiply"
[[rewards]]
type = "last_number"
[sampling]
max_new_tokens = {scenario.max_new_tokens}
temperature = 1.0
[algorithm]
preset = "grpo"
[rollout]
groups_per_batch = {scenario.groups_per_batch}
group_size = {scenario.group_size}
[trainer]
num_batches = {scenario.num_steps}
num_threads = {machine.num_threads}
learning_rate = {scenario.learning_rate}
skip_zero_gradient = {json.dumps(scenario.skip_zero_gradient)}
[checkpoint]
every = 0
[monitor]
progress = false
"""


def run_trl(scenario: Scenario, machine: Machine, seed: int, micro_batch: int) -> Run:
    """TRL's GRPOTrainer on the same prompts; ``micro_batch`` samples in each forward and backward pass."""
    with tempfile.TemporaryDirectory(prefix="versus-trl-") as folder:
        steps_file = Path(folder, "steps.jsonl")
        spec = asdict(scenario) | {
            "model": str(machine.model),
            "seed": seed,
            "micro_batch": micro_batch,
            "rows": task_rows(scenario, machine.model, seed),
            "stop_window": STOP_WINDOW,
            "headrace_src": str(Path(headrace.__file__).parents[1]),
            "output_dir": str(Path(folder, "out")),
            "steps_file": str(steps_file),
            "trl_options": machine.trl_options,
        }
        spec_file = Path(folder, "spec.json")
        spec_file.write_text(json.dumps(spec))
        command = [str(machine.trl_python), str(Path(__file__).with_name("trl_side.py")), str(spec_file)]
        usage = watched(command, machine, f"TRL, scenario {scenario.name}", Path(folder), lambda: False)
        setup, *steps = read_lines(steps_file)
    if setup["num_threads"] != machine.num_threads or setup["dtypes"] != ["torch.float32"]:
        raise SideFailed(f"TRL ran with {setup}, not with {machine.num_threads} threads in float32")
    return Run(steps=steps, **usage, setup=setup)


def task_rows(scenario: Scenario, model: Path, seed: int) -> list[dict[str, Any]]:
    """The prompts of each step's groups, in the order in which headrace's cursor draws them."""
    tokenizer = load_tokenizer(model)
    renderer = ChatRenderer(tokenizer, "chatml", generation_eos_ids(model))
    tasks = build_tasks(ArithmeticTasks(operation="multiply")).train
    cursor = TaskCursor(len(tasks), seed)
    rows = []
    for group in range(scenario.num_steps * scenario.groups_per_batch):
        task = tasks[cursor.task_index(group)]
        text = tokenizer.apply_chat_template(
            [dict(m) for m in task.messages], chat_template=CHATML, tokenize=False, add_generation_prompt=True
        )
        rows.append({"prompt": text, "prompt_ids": list(renderer.render(task.messages)), "answer": task.answer})
    return rows


def watched(
    command: list[str], machine: Machine, what: str, folder: Path, is_done: Callable[[], bool]
) -> dict[str, Any]:
    """Run to the end, or until ``is_done`` and then to a clean stop; returns what the process used, as Run has it.

    Raises SideFailed where it fails or takes longer than the deadline."""
    env = os.environ | {
        "OMP_NUM_THREADS": str(machine.num_threads),
        "MKL_NUM_THREADS": str(machine.num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    log = folder / "output.txt"
    started_s, busy_before_s = time.monotonic(), busy_s()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=folder)
    was_stopped = False
    pid = 0
    try:
        while pid == 0:
            time.sleep(POLL_S)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid == 0 and time.monotonic() - started_s > machine.deadline_s:
                raise SideFailed(f"{what}: no end after {machine.deadline_s:.0f} s.{tail(log)}")
            if pid == 0 and not was_stopped and is_done():
                os.kill(process.pid, signal.SIGTERM)
                was_stopped = True
    finally:
        if pid == 0:
            os.kill(process.pid, signal.SIGKILL)  # Popen's own kill() might reap it, and its usage with it
            _, status, _ = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)  # Popen did not see it end
    wall_s = time.monotonic() - started_s
    if code != 0 and not (was_stopped and code == 130):
        raise SideFailed(f"{what}: {how_it_ended(code)}.{tail(log)}")
    cpu_s, busy_after_s = usage.ru_utime + usage.ru_stime, busy_s()
    foreign_share = None
    if busy_before_s is not None and busy_after_s is not None:
        foreign_share = max(0.0, busy_after_s - busy_before_s - cpu_s) / (wall_s * (os.cpu_count() or 1))
    peak_memory_bytes = usage.ru_maxrss * 1024
    return {"peak_memory_bytes": peak_memory_bytes, "cpu_s": cpu_s, "wall_s": wall_s, "foreign_share": foreign_share}


def busy_s() -> float | None:
    """CPU seconds that all processes together have used since boot, those that a hypervisor took away included."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def tail(log: Path) -> str:
    return "\n" + log.read_text(errors="replace")[-3000:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines that are complete; none where there is no file yet."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
