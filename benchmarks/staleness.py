"""What staleness costs and buys: synchronous against asynchronous runs of the string-reversal fixture.

For each seed one run with ``max_staleness`` 0 and one with 2 (``--max-staleness``), in alternation: held-out accuracy
before and after, wall time, seconds in which generation and training overlapped, and how old the trained tokens were.
The last line printed is one JSON object; ``--out`` also writes it to a file.

    python benchmarks/staleness.py --seeds 0 1 2

An asynchronous run lags behind by the versions that its tokens are old, so that at a fixed batch of a steep curve it is
below a synchronous one by that lag alone; 120 batches are where the fixture has become slow.

Overlap is counted where an episode was in flight while the trainer computed. With shared weights the engine is paused
from a batch's first optimizer step until its publish, so decoding overlaps with gradients, not with steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "learning"))

import reversal

from headrace.config.load import restore_config
from headrace.record.episodes import read_episodes
from headrace.record.spans import busy_s, overlap_s, read_spans
from headrace.run import train


def run(model: Path, folder: Path, seed: int, max_staleness: int, num_batches: int) -> dict[str, Any]:
    """One run; what it came to."""
    data = reversal.run_config(
        model,
        folder,
        f"staleness-{max_staleness}-seed-{seed}",
        seed=seed,
        trainer={"num_batches": num_batches},
        rollout={"max_staleness": max_staleness},
        evaluation={"at_start": True, "at_end": True, "num_samples": 8, "greedy": False},
    )
    started_s = time.perf_counter()
    result = train(restore_config(data, "benchmarks/staleness.py"))
    wall_s = time.perf_counter() - started_s
    before, after = (e.metrics()["eval/sampled_accuracy"] for _, e in result.evaluations)
    spans = list(read_spans(result.run_dir))
    return {
        "accuracy_before": before,
        "accuracy": after,
        "wall_s": wall_s,
        "trainer_s": busy_s(spans, "trainer"),
        "overlap_s": overlap_s(spans, "engine", "trainer"),
        "token_ages": token_ages(result.run_dir),
    }


def token_ages(run_dir: Path) -> dict[str, int]:
    """Age in versions -> trained tokens."""
    ages: Counter[int] = Counter()
    for record in read_episodes(run_dir):
        if record["status"] == "trained":
            for _, _, number, start, end in record["version_spans"]:
                ages[record["update"] - 1 - number] += end - start
    return {str(age): count for age, count in sorted(ages.items())}


def summary(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    means = {kind: statistics.fmean(seed[kind]["accuracy"] for seed in seeds) for kind in ("sync", "async")}
    return {
        "benchmark": "staleness",
        "seeds": seeds,
        "mean_sync_accuracy": means["sync"],
        "mean_async_accuracy": means["async"],
        "difference": means["async"] - means["sync"],
        "wall_ratio": sum(s["async"]["wall_s"] for s in seeds) / sum(s["sync"]["wall_s"] for s in seeds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num-batches", type=int, default=120)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--model", type=Path, help="a warmed-up model; default: made anew")
    parser.add_argument("--work-dir", type=Path, help="where the runs are kept; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="also write the JSON object there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-staleness-") as temporary:
        folder = args.work_dir or Path(temporary)
        model = args.model or reversal.warmed_up_model(folder / "model")
        seeds = []
        for seed in args.seeds:
            found = {"seed": seed, "sync": run(model, folder, seed, 0, args.num_batches)}
            found["async"] = run(model, folder, seed, args.max_staleness, args.num_batches)
            print(json.dumps(found), flush=True)
            seeds.append(found)
    text = json.dumps(summary(seeds))
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
