"""headrace against TRL's GRPOTrainer: same model, prompts, sizes, dtype and threads, in alternation in one run.

    python benchmarks/versus_trl.py --model MODEL_FOLDER --trl-python .venv-bench/bin/python --out versus.json

* ``A``: 4 prompts x 8 replies x at most 12 tokens, every group trained on both sides.
* ``B``: 8 prompts x 8 replies x at most 64 tokens, every group trained on both sides.
* ``C``: A with headrace's default of skipping groups whose gradient is provably zero (TRL has no such thing): seconds
  until the mean reward of three successive steps is above 0.9.

Each round runs headrace, then TRL, each in a process of its own, with one seed for both. The first step of a run warms
up and does not count for A and B; C counts from the begin of the first step. The last line printed is one JSON object:
figures of each round, medians, ratios (above 1: headrace is faster), and whether the targets were met.
docs/benchmarks.md says what exactly is measured and how equal the two sides are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from versus_sides import Machine, Run, Scenario, SideFailed, run_headrace, run_trl
from versus_summary import rates, summary, time_to_level

SCENARIOS = {
    "A": Scenario(name="A", groups_per_batch=4, max_new_tokens=12, num_steps=6),
    "B": Scenario(name="B", groups_per_batch=8, max_new_tokens=64, num_steps=3),
    "C": Scenario(
        name="C", groups_per_batch=4, max_new_tokens=12, num_steps=40, skip_zero_gradient=True, stop_level=0.9
    ),
}
TARGETS = {"A": 2.0, "B": 2.0, "C": 2.5}
ROUNDS = {"A": 3, "B": 3, "C": 7}
"""How often each runs unless told otherwise: the number of steps that C takes depends on luck."""
CALIBRATION_STEPS = 2
SMALLEST_MICRO_BATCH = 8
QUIET_SHARE = 0.05
"""Of the machine's time that others may use before the figures count as disturbed."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def figures_of(run: Run, scenario: Scenario, num_warm_up: int) -> dict[str, Any]:
    """What one run of one side came to."""
    speed = time_to_level(run.steps, scenario.stop_level) if scenario.stop_level else rates(run.steps, num_warm_up)
    process = {
        "peak_memory_bytes": run.peak_memory_bytes,
        "process_cpu_s": run.cpu_s,
        "process_wall_s": run.wall_s,
        "foreign_share": run.foreign_share,
    }
    return speed | process | {"rewards": [round(step["reward"], 4) for step in run.steps], "setup": run.setup}


def fastest_micro_batch(scenario: Scenario, machine: Machine) -> tuple[int, dict[str, Any]]:
    """TRL's best micro-batch for this scenario and machine, by trained tokens/s of a short run of each."""
    tried: dict[int, float | str] = {}
    size = scenario.batch_size
    while size >= SMALLEST_MICRO_BATCH and scenario.batch_size % size == 0:
        try:
            run = run_trl(replace(scenario, num_steps=CALIBRATION_STEPS, stop_level=None), machine, 0, size)
            tried[size] = rates(run.steps, num_warm_up=1)["training_tokens_per_s"]
        except SideFailed as error:  # most likely out of memory: told in the result, and no reason to end
            tried[size] = str(error)[-500:]
        say(f"calibration of TRL, scenario {scenario.name}: micro-batch {size}: {tried[size]}")
        size //= 2
    speeds = {size: speed for size, speed in tried.items() if isinstance(speed, float)}
    if not speeds:
        raise SideFailed(f"TRL ran with no micro-batch: {tried}")
    return max(speeds, key=speeds.__getitem__), {"training_tokens_per_s": tried}


def run_scenario(scenario: Scenario, machine: Machine, args: argparse.Namespace, micro_batch: int) -> dict[str, Any]:
    """All rounds of one scenario."""
    rounds = []
    for seed in range(args.first_seed, args.first_seed + (args.rounds or ROUNDS[scenario.name])):
        sides = {}
        for name in ("headrace", "trl"):
            run = (
                run_headrace(scenario, machine, seed)
                if name == "headrace"
                else run_trl(scenario, machine, seed, micro_batch)
            )
            sides[name] = figures_of(run, scenario, args.warm_up)
            say(f"scenario {scenario.name}, seed {seed}, {name}: {json.dumps(sides[name])}")
        rounds.append({"seed": seed, **sides})
    return {"settings": asdict(scenario), "trl_micro_batch": micro_batch} | summary(rounds, TARGETS[scenario.name])


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    machine = Machine(
        model=args.model.absolute(),
        trl_python=args.trl_python.absolute(),
        num_threads=args.threads,
        deadline_s=args.deadline_s,
        trl_options=json.loads(args.trl_options),
    )
    chosen = [replace(SCENARIOS[n], num_steps=args.steps or SCENARIOS[n].num_steps) for n in args.scenarios]
    result: dict[str, Any] = {
        "model": str(args.model),
        "num_threads": args.threads,
        "num_cores": os.cpu_count(),
        "machine": platform.platform(),
        "num_warm_up_steps": args.warm_up,
        "trl_options": machine.trl_options,
        "calibration": {},
    }
    micro_batches: dict[int, int] = {}
    for scenario in chosen:
        size = scenario.batch_size
        if size not in micro_batches and args.trl_micro_batch:
            micro_batches[size] = min(args.trl_micro_batch, size)
        elif size not in micro_batches:  # A and C compute the same, and share it
            micro_batches[size], result["calibration"][scenario.name] = fastest_micro_batch(scenario, machine)
        result[scenario.name] = run_scenario(scenario, machine, args, micro_batches[size])
    runs = [r[side] for s in chosen for r in result[s.name]["rounds"] for side in ("headrace", "trl")]
    shares = [run["foreign_share"] for run in runs if run["foreign_share"] is not None]
    result["largest_foreign_share"] = max(shares, default=None)
    result["all_targets_met"] = all(result[scenario.name]["met"] for scenario in chosen)
    if shares and max(shares) > QUIET_SHARE:
        say(f"the machine was not idle: others used up to {max(shares):.0%} of it, so these figures are no measurement")
    return result


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder, such as SmolLM2-135M's")
    parser.add_argument("--trl-python", type=Path, required=True, help="the interpreter of TRL's virtual environment")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, help="of each scenario; default: A and B 3, C 7")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first round; each later one has the next")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run (for C: at most); default: the scenario's")
    parser.add_argument("--warm-up", type=int, default=1, help="first steps of a run that do not count for A and B")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--trl-micro-batch", type=int, help="samples a pass; default: tries them and takes the fastest")
    parser.add_argument("--trl-options", default="{}", help="more GRPOConfig options, as JSON")
    parser.add_argument("--deadline-s", type=float, default=3600.0, help="for one run of one side")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for scenario in args.scenarios:
        if scenario != "C" and (args.steps or SCENARIOS[scenario].num_steps) <= args.warm_up:
            parser.error(f"scenario {scenario} needs more steps than the --warm-up of {args.warm_up}")
    if not args.trl_python.exists():
        parser.error(f"there is no {args.trl_python}; `make setup-bench` makes TRL's environment")
    return args


def main() -> None:
    args = arguments()
    line = json.dumps(benchmark(args))
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
