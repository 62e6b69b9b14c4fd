"""The quickstart: SmolLM2-135M learns one-digit multiplication on a CPU, in a few minutes.

    make quickstart                      or, with headrace installed:
    python examples/quickstart/run.py [--trainer.num_batches 40 ...]

Any key of quickstart.toml can be overridden, as with ``headrace train``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from headrace.cli.common import split_overrides
from headrace.config.load import load_config
from headrace.config.schema import RunConfig
from headrace.errors import HeadraceError
from headrace.evaluation.render import result_table
from headrace.evaluation.result import EvaluationResult
from headrace.run import TrainResult, train

CONFIG = Path(__file__).with_name("quickstart.toml")

WHAT_WAS_LEARNED = """\
What was learned, and what was not. The model knew many of these products before: asked to say only the number, it
would often be right. But sampled at temperature 1, cut after 12 tokens, it mostly began to explain and never reached
a number. The reward paid for the last number of the reply being right, and training made the short, right reply the
likely one, for problems that it never saw, in either order of the factors, as well. It did not teach arithmetic: what
the model did not know before, it may still get wrong. "Exact format" asks for the bare number and nothing else. The
reward never asked for that, so it tells what the reward left open."""


def main() -> int:
    rest, overrides = split_overrides(sys.argv[1:])
    if rest:
        print(f"quickstart takes --section.key value only, not {' '.join(rest)}", file=sys.stderr)
        return 2
    config = load_config(CONFIG, overrides)
    config = _free_name(config)
    console = Console(width=None if sys.stdout.isatty() else 120)  # a log is not 80 columns wide
    console.print(f"Training {config.model.path} on one-digit multiplication; the run's folder is {config.run_dir}\n")
    result = train(config)
    if result.stopped:
        console.print(f"stopped; go on with: headrace resume {result.run_dir}")
        return 130
    _tell(console, result)
    return 0


def _free_name(config: RunConfig) -> RunConfig:
    """quickstart, quickstart-2, ...: an earlier quickstart is never overwritten."""
    name, number = config.name, 1
    while config.run_dir.exists():
        number += 1
        config = config.model_copy(update={"name": f"{name}-{number}"})
    return config


def _tell(console: Console, result: TrainResult) -> None:
    (_, before), (_, after) = result.evaluations[0], result.evaluations[-1]
    console.print("\nHeld-out problems, none of whose pairs of factors was trained on, in either order:")
    console.print(result_table({"before": before, "after": after}))
    console.print(_verdict(before, after))
    console.print(f"\n{WHAT_WAS_LEARNED}\n")
    console.print(f"run folder   {result.run_dir}")
    console.print(f"report       {result.report}   (open it in a browser)")
    console.print("\nTry next:")
    console.print(f"  headrace eval {result.run_dir} --against smollm2-135m    paired comparison, problem by problem")
    console.print(f"  headrace inspect {result.run_dir}                        progress, books, checkpoints")
    console.print("  make quickstart ARGS='--rewards.0.type exact'            pay for the bare number instead")
    console.print("  make quickstart ARGS='--rollout.max_staleness 2'         generate while training")


def _verdict(before: EvaluationResult, after: EvaluationResult) -> str:
    """One line on the sampled accuracy; intervals that touch are no claim."""
    first, last = before.accuracy("sampled"), after.accuracy("sampled")
    if first is None or last is None:
        return "sampled accuracy was not measured on both sides"
    line = f"sampled accuracy went from {first} to {last}"
    return (
        f"{line}; the intervals do not touch." if first.high < last.low else f"{line}; the intervals touch: no claim."
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HeadraceError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        sys.exit(2)
