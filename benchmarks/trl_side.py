"""TRL's half of versus_trl.py: one GRPOTrainer run, in TRL's own virtual environment.

    .venv-bench/bin/python benchmarks/trl_side.py SPEC.json

``SPEC.json`` (written by versus_sides.py) says everything: model, prompts, sizes, seed, micro-batch, output file. The
output gets one line about the set-up, then one JSON line for each optimizer step: ``end_s`` (seconds since the first
step began), reward, counts, and seconds by phase. The trainer is TRL's own; only its phases are timed.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Recorder(TrainerCallback):
    """Seconds by phase, rewards and token counts of the current step; a line for each finished one."""

    def __init__(self, spec: dict[str, Any], out: Any) -> None:
        self._stop_window, self._stop_level = spec["stop_window"], spec["stop_level"]
        self._out = out
        self._origin_s: float | None = None
        self._reward_means: list[float] = []
        self._clear()

    def _clear(self) -> None:
        self.phase_s = {"generate": 0.0, "prepare": 0.0, "forward": 0.0}
        self.num_tokens = 0
        self.rewards: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began_s = time.perf_counter()
        if self._origin_s is None:
            self._origin_s = self._began_s

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now_s = time.perf_counter()
        if not (self.phase_s["generate"] and self.phase_s["forward"]):
            raise RuntimeError("a phase of this TRL version was not seen; trl_side.py must be adapted to it")
        training_s = now_s - self._began_s - self.phase_s["prepare"]
        reward = sum(self.rewards) / len(self.rewards)
        line = {
            "end_s": now_s - self._origin_s,
            "reward": reward,
            "num_samples": len(self.rewards),
            "num_tokens": self.num_tokens,
            "generation_s": self.phase_s["generate"],
            "training_s": training_s,
            "forward_s": self.phase_s["forward"],
            "backward_and_step_s": training_s - self.phase_s["forward"],
        }
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()
        self._reward_means.append(reward)
        window = self._reward_means[-self._stop_window :]
        is_full = self._stop_level is not None and len(window) == self._stop_window
        if is_full and sum(window) / len(window) > self._stop_level:
            control.should_training_stop = True
        self._clear()


class TimedTrainer(GRPOTrainer):  # type: ignore[misc,unused-ignore]
    """GRPOTrainer, its three phases timed."""

    recorder: Recorder

    def _timed(self, phase: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        result = function(*args, **kwargs)
        self.recorder.phase_s[phase] += time.perf_counter() - started_s
        return result

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("generate", super()._generate_single_turn, *args, **kwargs)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("prepare", super()._prepare_inputs, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("forward", super().compute_loss, *args, **kwargs)


def last_number_reward(recorder: Recorder) -> Any:
    """headrace's own ``last_number`` verdict, by headrace's own code (it needs neither torch nor pydantic)."""
    from headrace.rewards.extract import last_number, number_value

    def last_number_is_right(completions: Any, answer: Any, completion_ids: Any, **_: Any) -> list[float]:
        rewards = []
        for text, gold in zip(completions, answer, strict=True):
            found = last_number(text).text
            rewards.append(float(found is not None and number_value(found) == number_value(gold)))
        recorder.rewards += rewards
        recorder.num_tokens += sum(len(ids) for ids in completion_ids)
        return rewards

    return last_number_is_right


def grpo_config(spec: dict[str, Any]) -> GRPOConfig:
    """Everything that decides what is computed as in headrace's run; what only costs time is off."""
    batch_size = spec["groups_per_batch"] * spec["group_size"]
    options: dict[str, Any] = {
        "output_dir": spec["output_dir"],
        "seed": spec["seed"],
        "max_steps": spec["num_steps"],
        "per_device_train_batch_size": spec["micro_batch"],
        "gradient_accumulation_steps": batch_size // spec["micro_batch"],
        "num_generations": spec["group_size"],
        "max_completion_length": spec["max_new_tokens"],
        "shuffle_dataset": False,  # the rows stand in the order in which headrace draws them
        "temperature": 1.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "num_iterations": 1,
        "beta": 0.0,
        "mask_truncated_completions": False,
        "learning_rate": spec["learning_rate"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,  # on by default in TRL; it saves memory, and costs about a forward pass
        "model_init_kwargs": {"dtype": "float32"},
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return GRPOConfig(**(options | spec["trl_options"]))


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    sys.path.insert(0, spec["headrace_src"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    for row in spec["rows"]:
        if tokenizer(text=row["prompt"])["input_ids"] != row["prompt_ids"]:
            raise RuntimeError(f"TRL's tokenizer makes other ids of {row['prompt']!r} than headrace's renderer")
    with open(spec["steps_file"], "w") as out:
        recorder = Recorder(spec, out)
        trainer = TimedTrainer(
            model=spec["model"],
            reward_funcs=last_number_reward(recorder),
            args=grpo_config(spec),
            train_dataset=Dataset.from_list([{k: row[k] for k in ("prompt", "answer")} for row in spec["rows"]]),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        trainer.recorder = recorder
        setup = {
            "versions": {name: version(name) for name in ("trl", "transformers", "torch", "accelerate")},
            "num_threads": torch.get_num_threads(),
            "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        }
        out.write(json.dumps(setup) + "\n")
        trainer.train()


if __name__ == "__main__":
    main()
