"""LoRA with vLLM: the adapter travels, is loaded while requests run, and is compared with transformers and peft. Skips
where there is no .venv-vllm."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import write_toml
from vllm_fixture import (
    MODE,
    Session,
    gaps,
    make_vllm,
    perturb,
    request,
    run_data,
    sync,
    travelling,
    vllm_model,
    vllm_python,
)

from headrace.cli.main import main
from headrace.config.base import LoraConfig
from headrace.engine_wiring import adapter_options
from headrace.engines.vllm.server.adapter import is_adapter
from headrace.model.load import prepare_model
from headrace.protocols import WeightUpdate
from headrace.record.metrics import read_metrics
from headrace.testing import tiny_tokenizer
from headrace.types import Generation, PolicyVersion
from headrace.weights import WeightUpdateError, checksums, named_parameters

PROMPT = tuple(range(3, 43))
EXACT = 1e-4
LORA = LoraConfig(rank=4, alpha=24.0)


@pytest.fixture(scope="module", autouse=True)
def there_is_vllm() -> None:
    """Skips before anything is opened."""
    vllm_python()


class Adapted:
    """A model with an adapter, and vLLM over it."""

    def __init__(self, folder: Path, lora: LoraConfig = LORA, **config: Any) -> None:
        loaded = prepare_model(vllm_model(tied=True), tiny_tokenizer(), "float32", lora=lora)
        self.model: Any = loaded.model
        self.names = [name for name in named_parameters(self.model) if is_adapter(name)]
        adapter = adapter_options(lora, self.model)
        self.session = Session(lambda: make_vllm(self.model, folder, adapter=adapter, **config))
        self.engine, self.run = self.session.engine, self.session.run
        self.number = 0

    def sync(self) -> None:
        self.number += 1
        self.run(sync(self.engine, self.model, self.number))

    def generate(self, asked: Any) -> Generation:
        return self.run(self.engine.generate(asked))


def test_every_tensor_of_an_adapter_arrives(tmp_path: Path) -> None:
    """F79: each of them in turn, against a forward pass of transformers and peft; the frozen weights stay as they are,
    and a module without the adapter shows in the checksums."""
    adapted = Adapted(tmp_path)
    asked = request("r", PROMPT[:9], max_new_tokens=6)
    try:
        assert float(gaps(adapted.model, asked, adapted.generate(asked)).max()) < EXACT, (
            "an adapter that changes nothing"
        )
        perturb(adapted.model, adapted.names)
        adapted.sync()
        for number, name in enumerate(adapted.names):
            old = copy.deepcopy(adapted.model)
            perturb(adapted.model, [name], scale=0.1, seed=number)
            adapted.sync()
            reply = adapted.generate(asked)
            assert float(gaps(adapted.model, asked, reply).max()) < EXACT, name
            assert float(gaps(old, asked, reply).max()) > EXACT, name
            assert adapted.engine.weight_checksums() == checksums(named_parameters(adapted.model).items())
        with pytest.raises(WeightUpdateError, match=r"embed_tokens\.weight was never part of it"):
            update = WeightUpdate(version=PolicyVersion(0, 99), tensors=named_parameters(adapted.model))
            adapted.run(adapted.engine.pause("keep"))
            adapted.run(adapted.engine.update_weights(update))
    finally:
        adapted.session.close()


def test_an_adapter_of_some_layers_changes_in_flight(tmp_path: Path) -> None:
    """I7 with recompute: tokens before the switch are of the old adapter, those after it of the new one, and a prompt
    that was cached under the old one is computed anew."""
    adapted = Adapted(
        tmp_path, LoraConfig(rank=9, alpha=9.0, target_modules=("q_proj", "down_proj")), kv_policy="recompute"
    )
    perturb(adapted.model, adapted.names)
    adapted.sync()
    old = copy.deepcopy(adapted.model)
    asked = request("long", PROMPT, max_new_tokens=60)

    async def switch() -> Generation:
        engine = adapted.engine
        task = asyncio.create_task(engine.generate(asked))
        while not (engine._by_id and len(engine._by_handle[engine._by_id["long"]].ids) > 5):
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        perturb(adapted.model, adapted.names, seed=1)
        await engine.update_weights(WeightUpdate(version=PolicyVersion(0, 2), tensors=travelling(adapted.model)))
        await engine.resume()
        return await task

    try:
        reply = adapted.run(switch())
        again = adapted.generate(request("again", PROMPT, max_new_tokens=8))
    finally:
        adapted.session.close()
    assert [span.version.number for span in reply.version_spans] == [1, 2]
    cut = reply.version_spans[0].end
    assert float(gaps(old, asked, reply)[:cut].max()) < EXACT
    assert float(gaps(adapted.model, asked, reply)[cut:].max()) < EXACT
    assert float(gaps(old, asked, reply)[cut:].max()) > EXACT
    assert float(gaps(adapted.model, request("again", PROMPT), again).max()) < EXACT


@pytest.mark.timeout(280)
def test_a_run_with_an_adapter_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A whole run: only the adapter trains, every sync is proved, and engine and trainer agree on every token."""
    torch.manual_seed(0)
    data = run_data(tmp_path, "run", trainer={"learning_rate": 1e-2})
    data["model"]["lora"] = {"rank": 8, "alpha": 16.0}
    assert main(["train", str(write_toml(tmp_path / "run.toml", data))]) == 0, capsys.readouterr().err
    metrics = list(read_metrics(tmp_path / "run"))
    assert all(m["canary/max_gap"] < EXACT and 0 < m["engine/gap_max"] < EXACT for m in metrics)
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05, rewards
    assert MODE in (tmp_path / "run" / "run.json").read_text()
