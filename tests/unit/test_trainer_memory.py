"""Issue 3: the measured peak of each process is told beside its forecast, and nothing about it can end a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_scripted import run_scripted, scripted_config

from headrace.config.base import LoraConfig
from headrace.config.critic import SharedCriticConfig
from headrace.config.schema import ParallelConfig, TrainerConfig
from headrace.model import memory as memory_module
from headrace.model.load import prepare_model
from headrace.model.memory import PeakMemory
from headrace.model.parallel.check import ModelShape
from headrace.model.parallel.forecast import Pass, forecast
from headrace.record.metrics import read_metrics
from headrace.scripted import ScriptedTrainer
from headrace.testing import tiny_model, tiny_tokenizer
from headrace.trainer.critic import Critic
from headrace.trainer.memory import MemoryUse, memory_metrics, memory_text
from headrace.trainer.trainer import PolicyTrainer

CPU = torch.device("cpu")
MEASURE = """
import torch
from headrace.model.memory import PeakMemory
memory = PeakMemory(torch.device("cpu"))
held = torch.ones(64 << 20)
del held
print(memory.growth())
"""


def test_growth_is_that_of_the_peak_not_of_what_is_held_at_the_end() -> None:
    """256 MiB that were allocated and freed; in a process of its own, whose peak nothing else has raised."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == pytest.approx(256 << 20, rel=0.05)


def test_an_earlier_peak_that_hides_the_new_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run in one notebook: the process's peak is the first one's."""
    peak = PeakMemory(CPU)
    monkeypatch.setattr(peak, "_start", (1 << 20, 1 << 60))
    assert peak.growth() == "this process had held more at once before the model was loaded"


@pytest.mark.parametrize("text", [None, "VmRSS:  12 kB\n", "VmRSS: x\nVmHWM: y\n"])
def test_what_cannot_be_measured_is_unknown_with_the_reason(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc, no such line, no such number: never an exception."""

    class Elsewhere:
        def __init__(self, _: str) -> None: ...

        def read_text(self, encoding: str) -> str:
            if text is None:
                raise FileNotFoundError("no such file")
            return text

    monkeypatch.setattr(memory_module, "Path", Elsewhere)
    found = PeakMemory(CPU).growth()
    assert isinstance(found, str) and ("Error" in found)


def test_trainer_knows_its_forecast_or_says_why_not() -> None:
    """The forecast is that of headrace plan; it is unknown for what it does not count."""
    loaded = prepare_model(tiny_model(), tiny_tokenizer())
    config = TrainerConfig(max_microbatch_tokens=256, max_logit_tokens=64)
    (use,) = PolicyTrainer(loaded, config, num_steps=1, with_reference=True).memory()
    shape = ModelShape.of(loaded.model.config.to_dict())
    work = Pass(num_tokens=256, max_logit_tokens=64, with_reference=True)
    assert use.forecast == forecast(ParallelConfig(), shape, work)[0].peak_bytes

    critic = Critic(SharedCriticConfig(), loaded, num_steps=1)
    (use,) = PolicyTrainer(loaded, config, num_steps=1, critic=critic).memory()
    assert use.forecast == "it does not count the critic"
    lora = prepare_model(tiny_model(), tiny_tokenizer(), lora=LoraConfig(rank=4))
    (use,) = PolicyTrainer(lora, config, num_steps=1).memory()
    assert use.forecast == "it does not count the adapter"
    strange = prepare_model(tiny_model(), tiny_tokenizer())
    del strange.model.config.intermediate_size
    (use,) = PolicyTrainer(strange, config, num_steps=1).memory()
    assert isinstance(use.forecast, str) and "'intermediate_size'" in use.forecast


def test_every_rank_has_its_line() -> None:
    uses = [
        MemoryUse(peak=3 << 29, forecast=1 << 30),
        MemoryUse(peak="OSError: no", forecast=1 << 30),
    ]
    text = memory_text(uses, 1, moments_are_new=True)
    assert "rank 0 (the engine included): 1.50 GiB, forecast 1.00 GiB" in text
    assert "rank 1: unknown (OSError: no), forecast 1.00 GiB" in text and "moments" in text
    assert "moments" not in memory_text(uses, 2, moments_are_new=False)
    assert memory_metrics(uses) == {
        "memory/peak_bytes": [3 << 29, None],
        "memory/forecast_bytes": [1 << 30, 1 << 30],
        "memory/unknown": ["memory/peak_bytes of rank 1: OSError: no"],
    }


def test_a_run_tells_it_after_its_first_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the terminal and in metrics.jsonl; a step that moved nothing allocates no moments and is not counted."""

    class StartsEmpty(ScriptedTrainer):
        def optim_step(self) -> dict[str, float]:
            metrics = super().optim_step()
            return metrics | {"num_empty_steps": float(self.step == 1)}

    config = scripted_config(tmp_path)
    _, error, _ = run_scripted(config, trainer=StartsEmpty())
    assert error is None
    peaks: list[Any] = [line.get("memory/peak_bytes") for line in read_metrics(config.run_dir)]
    assert peaks == [None, [2 << 30], [3 << 30], None]
    out = capsys.readouterr().out
    assert out.count("peak memory after optimizer step") == 2 and out.count("moments are new") == 1
    assert "rank 0 (the engine included): 2.00 GiB, forecast unknown (there is no model)" in out
