"""RLHF from preferences to policy, on a CPU: SFT, reward model, policy with a gold check, and DPO beside it.

    python examples/rlhf/run.py                          a tiny model from random weights, a few minutes
    python examples/rlhf/run.py --kl 0                   without holding back: the over-optimisation alarm fires
    python examples/rlhf/run.py --model smollm2-135m     a real language model; minutes for each step

``rule.py`` states the rule and makes the data; each stage is one TOML file and one headrace command, a process of its
own: its memory is free again when it ends, and if something kills it, this process is there to tell.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rule
from rich.console import Console

from headrace.child_process import how_it_ended
from headrace.errors import HeadraceError
from headrace.evaluation.gold import recorded_evaluations
from headrace.evaluation.result import EvaluationResult, compare

HERE = Path(__file__).parent
INTERRUPTED = 130
Overrides = list[tuple[str, str]]

CORES = str(os.cpu_count() or 1)
REAL_MODEL: dict[str, Overrides] = {
    "sft": [("trainer.batch_size", "16"), ("trainer.learning_rate", "5e-5"), ("trainer.num_threads", CORES)],
    "reward_model": [
        ("trainer.num_epochs", "1"),
        ("trainer.learning_rate", "3e-5"),
        ("trainer.num_threads", CORES),
    ],
    "policy": [
        ("trainer.learning_rate", "2e-5"),
        ("rollout.groups_per_batch", "8"),
        ("evaluation.num_tasks", "32"),
        ("trainer.num_threads", CORES),
        ("engine.num_threads", CORES),
    ],
    "dpo": [("trainer.num_epochs", "1"), ("trainer.learning_rate", "1e-5"), ("trainer.num_threads", CORES)],
}
"""What a model of 135 million parameters needs otherwise."""

LESS_MEMORY = {
    "sft": "trainer.max_microbatch_tokens or trainer.batch_size",
    "reward-model": "trainer.max_microbatch_tokens or trainer.batch_size",
    "train": "trainer.max_microbatch_tokens, engine.max_batch_size or rollout.groups_per_batch",
    "dpo": "trainer.max_microbatch_tokens or trainer.batch_size",
    "eval": "engine.max_batch_size",
}
"""Command -> the keys of its file that decide how much it needs."""


class StageFailed(HeadraceError):
    """A stage of the example did not end well."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_stage(*arguments: str) -> None:
    """Run one headrace command to its end. Raises StageFailed, which says how it ended, if it did not succeed."""
    command = [sys.executable, "-m", "headrace.cli.main", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as process, _passing_on_signals(process):
        code = process.wait()
    if code == 0:
        return
    name = arguments[0]
    told = f"the stage 'headrace {name}' {how_it_ended(code, lower=f'{LESS_MEMORY[name]} in its file')}"
    if code == INTERRUPTED:
        told = f"the stage 'headrace {name}' was interrupted"
    elif code > 0:
        told += ", with the message above"
    raise StageFailed(f"{told}. By itself it is:\n  headrace {shlex.join(arguments)}", code if code > 0 else 2)


@contextmanager
def _passing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl-C and SIGTERM are the stage's, once each (it is in a process group of its own): it checkpoints and ends."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: process.send_signal(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="'tiny', or what model.path takes (smollm2-135m)")
    parser.add_argument("--kl", type=float, default=0.3, help="coefficient of the reference KL; 0 turns it off")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-batches", type=int, help="rollout batches of the policy")
    parser.add_argument("--output", type=Path, default=Path("runs/rlhf"), help="a new folder")
    args = parser.parse_args()
    if args.output.exists() and any(args.output.iterdir()):
        print(f"rlhf: {args.output} is not empty; give a new folder with --output", file=sys.stderr)
        return 2
    return Example(args).run()


class Example:
    """The steps, in order."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.output.absolute()
        self.model, self.kl, self.seed, self.num_batches = args.model, args.kl, args.seed, args.num_batches
        self.is_tiny = args.model == "tiny"
        self.console = Console(highlight=False)

    def run(self) -> int:
        start = self._data()
        pairs = ("data.path", str(self.out / "pairs.jsonl"))
        conversations = ("data.path", str(self.out / "conversations.jsonl"))
        self._stage("1. supervised fine-tuning", "sft", [*self._common("sft", start), conversations])
        sft = self.out / "sft" / "export"
        self._stage("2. reward model", "reward-model", [*self._common("reward_model", sft), pairs])
        reward_model = self.out / "reward-model" / "export"
        self.console.print(f"calibration: {reward_model / 'calibration.png'}")
        self._stage("3. policy against the reward model", "train", self._policy(sft, reward_model))
        self._stage("DPO, from the same start and pairs", "dpo", [*self._common("dpo", sft), pairs])
        self.console.rule("gold standard, on held-out prompts")
        return self._tell(*(self._gold(path) for path in (sft, self.out / "policy", self.out / "dpo" / "export")))

    def _stage(self, title: str, command: str, overrides: Overrides) -> None:
        self.console.rule(title)
        file = HERE / f"{'policy' if command == 'train' else command.replace('-', '_')}.toml"
        run_stage(command, str(file), *(text for key, value in overrides for text in (f"--{key}", value)))

    def _data(self) -> Path | str:
        self.out.mkdir(parents=True, exist_ok=True)
        sizes = (4096, 2000) if self.is_tiny else (1024, 1000)
        rule.write_jsonl(self.out / "conversations.jsonl", rule.conversations(sizes[0], self.seed))
        rule.write_jsonl(self.out / "pairs.jsonl", rule.pairs(sizes[1], self.seed))
        if not self.is_tiny:
            return str(self.model)
        from headrace.testing import SMALL_ALPHABET, save_tiny  # here: it imports torch, which is not small

        return save_tiny(self.out / "start", alphabet=SMALL_ALPHABET, max_context=64, seed=self.seed)

    def _common(self, step: str, model: Path | str) -> Overrides:
        own = [] if self.is_tiny else [("model.chat_template", "chatml"), *REAL_MODEL[step]]
        return [("output_dir", str(self.out)), ("seed", str(self.seed)), ("model.path", str(model)), *own]

    def _policy(self, start: Path, reward_model: Path) -> Overrides:
        overrides = [*self._common("policy", start), ("rewards.0.options.path", str(reward_model))]
        overrides.append(("algorithm.kl.coefficient", str(self.kl)))
        if self.num_batches is not None:
            overrides.append(("trainer.num_batches", str(self.num_batches)))
        return overrides

    def _gold(self, target: Path) -> EvaluationResult:
        """By the rule alone, 4 replies to each held-out prompt."""
        file = self.out / f"gold-{target.relative_to(self.out).parts[0]}.json"
        run_stage("eval", str(target), "--tasks", str(self._gold_file()), "--output", str(file))
        return EvaluationResult.from_json(file.read_text())

    def _gold_file(self) -> Path:
        """gold.toml with its paths made absolute, and the model's template."""
        text = (HERE / "gold.toml").read_text().replace("rule.py", str(HERE / "rule.py"))
        template = "" if self.is_tiny else '\nchat_template = "chatml"'
        file = self.out / "gold.toml"
        file.write_text(
            text.replace('path = "runs/rlhf/sft/export"', f'path = "{self.out / "sft" / "export"}"{template}')
        )
        return file

    def _tell(self, before: EvaluationResult, after: EvaluationResult, dpo: EvaluationResult) -> int:
        say, policy = self.console.print, self.out / "policy"
        say("\nThe policy's way, on the held-out prompts (95 % intervals):")
        for update, result in recorded_evaluations(policy):
            say(f"  update {update:3d}   reward {result.component('reward')}   gold {result.component('gold')}")
        for line in (policy / "metrics.jsonl").read_text().splitlines():
            metrics = json.loads(line)
            for alarm in metrics["health/alarms"]:
                if "over_optimisation" in alarm and metrics.get("gold/over_optimised"):
                    say(f"  [bold red]update {metrics['update']}[/]: {alarm}")
        say("\nGold reward:")
        for name, result in (("after SFT", before), ("policy", after), ("DPO", dpo)):
            say(f"  {name:<10} {result.accuracy('sampled')}")
        say(f"  policy against SFT, in pairs by prompt: {compare(before, after).sampled}")
        say(f"  DPO against SFT, in pairs by prompt:    {compare(before, dpo).sampled}")
        first, last = before.accuracy("sampled"), after.accuracy("sampled")
        assert first is not None and last is not None
        beyond = first.high < last.low
        say(
            "The policy raised gold reward beyond its interval."
            if beyond
            else "Gold reward did not rise beyond chance."
        )
        say(f"\nreport: {policy / 'report.html'}")
        return 0 if beyond or not self.kl else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StageFailed as failed:
        print(f"rlhf: {failed}", file=sys.stderr)
        sys.exit(failed.exit_code)
    except HeadraceError as error:
        print(f"rlhf: {error}", file=sys.stderr)
        sys.exit(2)
