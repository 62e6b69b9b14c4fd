"""Synchronous against asynchronous runs with real engines on equal cores: with waits, and with nothing but compute.

The task is the learning fixture (string reversal, a 134k-parameter model, 256 replies a batch). Runs on each load:

* ``sync``: ``max_staleness`` 0, engine and trainer take turns on all cores (or on one each, where that is faster: both
  are measured on the compute load, and the faster counts);
* ``async``: ``max_staleness`` K (``--max-staleness``), engine and trainer at the same time, half of the cores each;
* ``fleet``: the same with two engines behind one (``[fleet]``), on the same cores;
* ``async_for_as_long``, on the load with waits: ``async`` with as many batches as take what ``sync`` took: a batch
  of older tokens teaches less, and what counts is what was learnt by then.

Loads: ``waits``, where a tool answers each reply after a log-normal latency (median ``--median-s``, sigma 1, at most 20
times the median: the slowest of 256 is about 18 times the median), drawn from the episode's seed, so that all runs wait
for the same; and ``compute``, where the environment answers at once.

Seconds are those of the loop's batches (rollouts, training, publish), without start and evaluations. Beside the ratios
stand the staleness of the trained tokens, who waited on whom, reward by batch and by second, and held-out accuracy
before and after: a ratio that is bought with learning would show there. The last line printed is one JSON object.

    python benchmarks/async.py --out async.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "learning"))

import reversal

from headrace.config.load import restore_config
from headrace.environments import registry
from headrace.environments.single_turn import SingleTurn
from headrace.environments.task_list import TaskList
from headrace.protocols import Observation
from headrace.record.metrics import read_metrics
from headrace.run import train
from headrace.types import Task

HERE = Path(__file__).resolve()
ENVIRONMENT = "benchmark_slow_tool"
MEDIAN_NAME = "HEADRACE_BENCHMARK_MEDIAN_S"
MAX_FACTOR = 20.0


class SlowTool(SingleTurn):
    """A single turn whose answer takes a while; nobody computes meanwhile."""

    _latency_s = 0.0

    async def reset(self, task: Task, seed: int) -> Observation:
        median_s = float(os.environ[MEDIAN_NAME])
        self._latency_s = min(MAX_FACTOR, random.Random(seed).lognormvariate(0.0, 1.0)) * median_s
        return await super().reset(task, seed)

    async def step(self, action: str) -> Observation:
        await asyncio.sleep(self._latency_s)
        return await super().step(action)


def slow_tasks(num_train: int = 2048, num_held_out: int = 256) -> tuple[TaskList, TaskList]:
    """The fixture's tasks, trained with the slow tool; what ``tasks.factory`` calls."""
    train_tasks = [reversal.task(w) for w in reversal.words(num_train, fresh=False, seed=0)]
    held_out = [reversal.task(w) for w in reversal.words(num_held_out, fresh=True, seed=0)]
    slow = [Task(id=t.id, messages=t.messages, answer=t.answer, environment=ENVIRONMENT) for t in train_tasks]
    return TaskList(slow), TaskList(held_out)


def run(model: Path, folder: Path, name: str, args: argparse.Namespace, **sections: Any) -> dict[str, Any]:
    """One run; what it came to."""
    data = reversal.run_config(
        model,
        folder,
        name,
        **{
            "trainer": {"num_batches": args.num_batches, **sections.pop("trainer", {})},
            "rollout": {
                "groups_per_batch": args.groups_per_batch,
                "group_size": args.group_size,
                "max_concurrent": 4096,
                **sections.pop("rollout", {}),
            },
            "evaluation": {"at_start": True, "at_end": True, "num_samples": args.num_samples, "greedy": False},
            **sections,
        },
    )
    started_s = time.perf_counter()
    result = train(restore_config(data, str(HERE)))
    wall_s = time.perf_counter() - started_s
    lines = sorted(read_metrics(result.run_dir), key=lambda line: line["update"])
    before, after = (e.metrics()["eval/sampled_accuracy"] for _, e in result.evaluations)
    return {"accuracy_before": before, "accuracy": after, "wall_s": wall_s, **summary(lines)}


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """From the metrics of a run's batches."""
    found: dict[str, Any] = {"loop_s": sum(line["time/step_s"] for line in lines)}
    seconds, curve = 0.0, []
    for line in lines:
        seconds += line["time/step_s"]
        curve.append([line["update"], round(seconds, 3), round(line["reward/mean"], 4)])
    found["curve"] = curve
    for kind, prefix in (("staleness", "staleness/tokens_at_"), ("waits_s", "wait/"), ("idle_s", "idle/")):
        names = sorted({name for line in lines for name in line if name.startswith(prefix)})
        found[kind] = {n.removeprefix(prefix): round(sum(line.get(n, 0.0) for line in lines), 3) for n in names}
    return found


def variants(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The sections of each kind of run, apart from what the load decides. All take ``args.cores``."""
    half = max(1, args.cores // 2)
    apart = {
        "rollout": {"max_staleness": args.max_staleness},
        "engine": {"weights": "copy", "num_threads": half},
        "trainer": {"num_threads": half},
    }
    return {
        "sync": {"engine": {"num_threads": args.cores}, "trainer": {"num_threads": args.cores}},
        "sync_one_thread": {"engine": {"num_threads": 1}, "trainer": {"num_threads": 1}},
        "async": apart,
        "fleet": {**apart, "fleet": {"num_engines": 2}},
    }


def compare(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both loads; the faster way to run synchronously is found on the compute load."""
    kinds = variants(args)
    result: dict[str, Any] = {"benchmark": "async", "cores": args.cores, "max_staleness": args.max_staleness}
    result |= {"num_batches": args.num_batches, "median_s": args.median_s}
    slow = {"tasks": {"factory": f"{HERE}:slow_tasks"}}
    best = "sync"
    for load, extra in (("compute", {}), ("waits", slow)):
        runs: dict[str, Any] = {}
        for kind, sections in kinds.items():
            if load == "waits" and kind.startswith("sync") and kind != best:
                continue
            runs[kind] = run(model, folder, f"{load}-{kind}", args, **sections, **extra)
            print(json.dumps({"load": load, "kind": kind, "loop_s": round(runs[kind]["loop_s"], 2)}), flush=True)
        if load == "compute":
            best = min(("sync", "sync_one_thread"), key=lambda kind: runs[kind]["loop_s"])
        base_s = runs[best]["loop_s"]
        ratios = {kind: base_s / runs[kind]["loop_s"] for kind in ("async", "fleet")}
        if load == "waits":
            longer = {**kinds["async"], "trainer": {**kinds["async"]["trainer"]}}
            longer["trainer"]["num_batches"] = round(args.num_batches * ratios["async"])
            runs["async_for_as_long"] = run(model, folder, f"{load}-for-as-long", args, **longer, **extra)
        result[load] = {"sync_is": best, "speedup": ratios, "runs": runs}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-batches", type=int, default=30)
    parser.add_argument("--groups-per-batch", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--median-s", type=float, default=0.12, help="latency of the tool on the load with waits")
    parser.add_argument("--num-samples", type=int, default=4, help="replies to each held-out task")
    parser.add_argument("--cores", type=int, default=2, help="threads that each kind of run may use in all")
    parser.add_argument("--model", type=Path, help="a warmed-up model; default: made anew")
    parser.add_argument("--work-dir", type=Path, help="where the runs are kept; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="also write the JSON object there")
    args = parser.parse_args()
    registry._BUILT_IN[ENVIRONMENT] = SlowTool  # a package would declare an entry point
    os.environ[MEDIAN_NAME] = str(args.median_s)
    with tempfile.TemporaryDirectory(prefix="headrace-async-") as temporary:
        folder = args.work_dir or Path(temporary)
        model = args.model or reversal.warmed_up_model(folder / "model")
        result = compare(model, folder, args)
    text = json.dumps(result)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
