"""Do the presets learn? Each one, several seeds, on the string-reversal fixture of tests/learning.

    python benchmarks/presets.py --presets grpo rloo reinforce++ gspo cispo ppo_critic --seeds 5 --out presets.json

A seed makes its own half-trained model and its own run; all presets of a seed start from the same model. A run is
``--batches`` rollout batches of 16 x 16 episodes with two optimizer steps each (four with a critic), so that ratios
and clips act. What is measured is sampled accuracy on 256 fresh words, before the first and after the last batch; its
difference is the gain. The last line printed is one JSON object: for each preset its runs and its smallest gain, and
whether every run of every preset gained at least ``--min-gain``. A preset with a critic spends its first batches on
the critic alone, out of the same number of batches.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "learning"))

import reversal
import torch

from headrace.config.schema import RunConfig
from headrace.run import train

PRESETS = ("ppo_critic", "grpo", "rloo", "reinforce++", "gspo", "cispo")
START_ACCURACY = 0.35
"""Of the half-trained model on its training words; a fixed number of steps would leave some seeds at 0.8 already, with
little left to gain."""
CRITIC = {"type": "separate", "learning_rate": 1e-3, "warmup_batches": 2}


def sections(preset: str, num_batches: int) -> dict[str, Any]:
    """What a run of ``preset`` sets beyond the fixture's own settings."""
    chosen: dict[str, Any] = {
        "algorithm": {"preset": preset},
        "trainer": {"num_batches": num_batches, "num_minibatches": 2, "learning_rate": 4e-4},
        "evaluation": {"at_start": True, "at_end": True, "greedy": False, "num_samples": 2},
    }
    if preset == "ppo_critic":
        chosen["critic"] = CRITIC
        chosen["trainer"] |= {"num_minibatches": 4, "learning_rate": 3e-4}  # a critic wants steps
    return chosen


def measure(model: Path, output_dir: Path, preset: str, seed: int, num_batches: int) -> dict[str, float]:
    """One run. ``seconds`` is wall time, evaluation included."""
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    name = f"{preset.replace('+', 'p')}-{seed}"
    data = reversal.run_config(model, output_dir, name, seed=seed, **sections(preset, num_batches))
    result = train(RunConfig.model_validate(data))
    (_, before), (_, after) = (
        (number, evaluation.metrics()["eval/sampled_accuracy"]) for number, evaluation in result.evaluations
    )
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "gain": after - before,
        "seconds": time.perf_counter() - started_s,
        "cpu_seconds": time.process_time() - started_cpu_s,
    }


def run(presets: list[str], num_seeds: int, num_batches: int, min_gain: float) -> dict[str, Any]:
    """All runs; seeds outside, presets inside, so that a run that is cut short has compared like with like."""
    runs: dict[str, list[dict[str, float]]] = {preset: [] for preset in presets}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(num_seeds):
            model = reversal.warmed_up_model(Path(folder) / f"model-{seed}", seed=seed, accuracy=START_ACCURACY)
            for preset in presets:
                runs[preset].append(measure(model, Path(folder), preset, seed, num_batches))
                print(json.dumps({"preset": preset, **runs[preset][-1]}), file=sys.stderr, flush=True)
    smallest = {preset: min(r["gain"] for r in rows) for preset, rows in runs.items()}
    return {
        "num_batches": num_batches,
        "num_seeds": num_seeds,
        "min_gain": min_gain,
        "smallest_gain": smallest,
        "runs": runs,
        "passed": all(gain >= min_gain for gain in smallest.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--min-gain", type=float, default=0.15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = run(args.presets, args.seeds, args.batches, args.min_gain)
    text = json.dumps(result)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
