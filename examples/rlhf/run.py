"""RLHF from preferences to policy, on a CPU: SFT, reward model, policy with a gold check, and DPO beside it.

    python examples/rlhf/run.py                          a tiny model from random weights, a few minutes
    python examples/rlhf/run.py --kl 0                   without holding back: the over-optimisation alarm fires
    python examples/rlhf/run.py --model smollm2-135m     a real language model; minutes for each step

``rule.py`` states the rule and makes the data; each step is one TOML file, which the headrace command takes as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import rule
from rich.console import Console

from headrace.config.load import load_as, load_config
from headrace.config.offline import DpoConfig, RewardModelConfig, SftConfig
from headrace.errors import HeadraceError
from headrace.evaluation.result import EvaluationResult, compare
from headrace.loop_eval import evaluate_checkpoint
from headrace.offline.dpo import train_dpo
from headrace.offline.reward_model import train_reward_model
from headrace.offline.sft import train_sft
from headrace.run import TrainResult, train
from headrace.testing import SMALL_ALPHABET, save_tiny

HERE = Path(__file__).parent
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
        self.console.rule("1. supervised fine-tuning")
        overrides = [*self._common("sft", start), ("data.path", str(self.out / "conversations.jsonl"))]
        sft = train_sft(load_as(SftConfig, HERE / "sft.toml", overrides))
        self.console.rule("2. reward model")
        pairs = ("data.path", str(self.out / "pairs.jsonl"))
        overrides = [*self._common("reward_model", sft.export), pairs]
        reward_model = train_reward_model(load_as(RewardModelConfig, HERE / "reward_model.toml", overrides))
        self.console.print(f"calibration: {reward_model.export / 'calibration.png'}")
        self.console.rule("3. policy against the reward model")
        policy = self._policy(sft.export, reward_model.export)
        self.console.rule("DPO, from the same start and pairs")
        dpo = train_dpo(load_as(DpoConfig, HERE / "dpo.toml", [*self._common("dpo", sft.export), pairs]))
        self.console.rule("gold standard, on held-out prompts")
        return self._tell(policy, self._gold(sft.export), self._gold(policy.run_dir), self._gold(dpo.export))

    def _data(self) -> Path | str:
        self.out.mkdir(parents=True, exist_ok=True)
        sizes = (4096, 2000) if self.is_tiny else (1024, 1000)
        rule.write_jsonl(self.out / "conversations.jsonl", rule.conversations(sizes[0], self.seed))
        rule.write_jsonl(self.out / "pairs.jsonl", rule.pairs(sizes[1], self.seed))
        if not self.is_tiny:
            return str(self.model)
        return save_tiny(self.out / "start", alphabet=SMALL_ALPHABET, max_context=64, seed=self.seed)

    def _common(self, step: str, model: Path | str) -> Overrides:
        own = [] if self.is_tiny else [("model.chat_template", "chatml"), *REAL_MODEL[step]]
        return [("output_dir", str(self.out)), ("seed", str(self.seed)), ("model.path", str(model)), *own]

    def _policy(self, start: Path, reward_model: Path) -> TrainResult:
        overrides = [*self._common("policy", start), ("rewards.0.options.path", str(reward_model))]
        overrides.append(("algorithm.kl.coefficient", str(self.kl)))
        if self.num_batches is not None:
            overrides.append(("trainer.num_batches", str(self.num_batches)))
        return train(load_config(HERE / "policy.toml", overrides))

    def _gold(self, target: Path) -> EvaluationResult:
        """By the rule alone, 4 replies to each held-out prompt."""
        [result] = evaluate_checkpoint(str(target), tasks_from=self._gold_file())
        return result

    def _gold_file(self) -> Path:
        """gold.toml with its paths made absolute, and the model's template."""
        text = (HERE / "gold.toml").read_text().replace("rule.py", str(HERE / "rule.py"))
        template = "" if self.is_tiny else '\nchat_template = "chatml"'
        file = self.out / "gold.toml"
        file.write_text(
            text.replace('path = "runs/rlhf/sft/export"', f'path = "{self.out / "sft" / "export"}"{template}')
        )
        return file

    def _tell(
        self, policy: TrainResult, before: EvaluationResult, after: EvaluationResult, dpo: EvaluationResult
    ) -> int:
        say = self.console.print
        say("\nThe policy's way, on the held-out prompts (95 % intervals):")
        for update, result in policy.evaluations:
            say(f"  update {update:3d}   reward {result.component('reward')}   gold {result.component('gold')}")
        for line in (policy.run_dir / "metrics.jsonl").read_text().splitlines():
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
        say(f"\nreport: {policy.report}")
        return 0 if beyond or not self.kl else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HeadraceError as error:
        print(f"rlhf: {error}", file=sys.stderr)
        sys.exit(2)
