"""Whole runs with ``engine.type = "sglang"`` against the scripted server, which computes with the weights it is sent.

No SGLang runs here. The server is the one that is built from SGLang's contract, with transformers' forward pass behind
it: what is proved is our side of it, from the configuration to the canary of each sync.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from http_loopback import Answer, in_thread
from loop_runs import small_data, warm_model, write_toml
from safetensors.torch import load_file
from sglang_scripted_server import Row, ScriptedSglang, serving
from transformers import AutoModelForCausalLM

from headrace.cli.main import main
from headrace.record.episodes import read_episodes
from headrace.record.metrics import read_metrics
from headrace.testing import save_tiny


class ModelSglang(ScriptedSglang):
    """Loads what it is told to load, and samples from that. The model is made at once, in the test's own thread:
    transformers makes models in one thread at a time."""

    num_loads = 0

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        super().__init__(architectures=tuple(self.model.config.architectures), **options)

    async def update_weights_from_disk(self, body: Any) -> Answer:
        answer = await super().update_weights_from_disk(body)
        if answer.status == 200 and (self.fault != "loads-nothing-after-the-first" or not self.num_loads):
            folder = Path(body["model_path"])
            files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
            state: dict[str, torch.Tensor] = {}
            for file in sorted(set(files)):
                state |= load_file(folder / file)
            missing, unexpected = self.model.load_state_dict(state, strict=False)
            assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.num_loads += 1
        return answer

    @torch.no_grad()
    def options(self, row: Row) -> tuple[dict[int, float], dict[int, float]]:
        ids = torch.tensor([[*row.body["input_ids"], *row.ids]])
        params = row.body["sampling_params"]
        logits = self.model(ids).logits[0, -1].float() / (params["temperature"] or 1.0)
        whole = dict(enumerate(torch.log_softmax(logits, -1).tolist()))
        order = sorted(whole, key=whole.__getitem__, reverse=True)
        top_k = 1 if params["temperature"] == 0 else params.get("top_k", -1)
        order = order[:top_k] if top_k > 0 else order
        kept, mass = [], 0.0
        for token in order:
            if mass >= params.get("top_p", 1.0):
                break
            kept.append(token)
            mass += torch.tensor(whole[token]).exp().item()
        among = torch.logsumexp(torch.tensor([whole[i] for i in kept], dtype=torch.float64), 0).item()
        return whole, {i: whole[i] - among for i in kept}


def server(**options: Any) -> ModelSglang:
    return ModelSglang(warm_model(), **options)


def run_file(folder: Path, url: str, **sections: Any) -> Path:
    base: dict[str, Any] = {
        "engine": {"type": "sglang", "urls": [url], "start_deadline_s": 2.0},
        "trainer": {"num_batches": 3, "schedule": {"type": "constant"}},
        "rollout": {"groups_per_batch": 2, "group_size": 4},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values} if isinstance(values, dict) else values
    data = small_data(folder, "run", **base)
    data["engine"] = base["engine"]
    return write_toml(folder / "run.toml", data)


@pytest.mark.parametrize(
    "sections",
    [{}, {"rollout": {"max_staleness": 1}, "sampling": {"top_k": 5}, "trainer": {"num_batches": 4}}],
    ids=["synchronous", "asynchronous"],
)
def test_a_run_learns_from_what_the_server_samples(tmp_path: Path, sections: dict[str, Any]) -> None:
    """I5, I6, I7 hold at every batch: fresh ratios are 1, each sync is proved, each token has its version."""
    sglang = server()
    with in_thread(lambda: serving(sglang)) as url:
        assert main(["train", str(run_file(tmp_path, url, **sections))]) == 0
    num_batches = sections.get("trainer", {}).get("num_batches", 3)
    metrics = list(read_metrics(tmp_path / "run"))
    assert len(metrics) == num_batches
    assert all(row["canary/max_gap"] < 1e-4 for row in metrics)
    assert sglang.num_loads == num_batches + 1
    assert sorted(path.name for path in (tmp_path / "run" / "weights").iterdir()) == [
        f"version-0.{n}" for n in (num_batches - 1, num_batches)
    ]
    versions = {span[2] for record in read_episodes(tmp_path / "run") for span in record["version_spans"]}
    assert versions >= set(range(num_batches - 1))  # the last batch may be of older tokens


def test_two_servers_behind_one_engine(tmp_path: Path) -> None:
    """Each is brought every version and proved; both serve. A version is written once for both."""
    first, second = server(), server()
    with in_thread(lambda: serving(first)) as url, in_thread(lambda: serving(second)) as other:
        file = run_file(tmp_path, url, engine={"urls": [url, other]}, fleet={"num_engines": 2})
        assert main(["train", str(file)]) == 0
    assert len(list(read_metrics(tmp_path / "run"))) == 3
    for sglang in (first, second):
        assert sglang.num_loads == 4
        salts = [body["cache_salt"] for path, body in sglang.bodies if path == "/generate" and "cache_salt" in body]
        assert sum(salt.endswith("/") for salt in salts) > 0, "no rollout came here, probes alone"
    assert len(list((tmp_path / "run" / "weights").iterdir())) == 2


def test_an_update_that_the_server_did_not_load_stops_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I6: its own checksum changes, its answers are right, and the canary still sees the old weights."""
    sglang = server(fault="loads-nothing-after-the-first")
    with in_thread(lambda: serving(sglang)) as url:
        assert main(["train", str(run_file(tmp_path, url, trainer={"learning_rate": 0.05}))]) != 0
    error = capsys.readouterr().err
    assert "canary of version 0.1: the engine and trainer log-probabilities differ" in error


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("old", "it says that it is SGLang 0.4.9"),
        ("no-logprobs", "returns ids without log-probabilities"),
        ("ignores-seeds", "--enable-deterministic-inference"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, message: str
) -> None:
    """No folder is made, no model is loaded: one line."""
    unfit = server(fault=fault)
    with in_thread(lambda: serving(unfit)) as url:
        assert main(["train", str(run_file(tmp_path, url))]) != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_wrong_model_or_a_dead_address_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = server()
    wrong.architectures = ("Qwen3MoeForCausalLM",)
    with in_thread(lambda: serving(wrong)) as url:
        assert main(["train", str(run_file(tmp_path, url))]) != 0
    assert "serves another model: Qwen3MoeForCausalLM" in capsys.readouterr().err
    assert main(["train", str(run_file(tmp_path, "http://127.0.0.1:1"))]) != 0
    assert "nothing answers at http://127.0.0.1:1/model_info" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_server_that_falls_silent_ends_the_run_and_a_resume_goes_on_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I11, I19: nothing is trained on what was lost; the next lineage brings its weights to the next server."""
    file = tmp_path / "run.toml"

    class Mortal(ModelSglang):
        async def handle(self, request: Any) -> Answer:
            if self.num_loads >= 3:
                await asyncio.sleep(3600)
            return await super().handle(request)

    mortal = Mortal(warm_model())
    with in_thread(lambda: serving(mortal)) as url:
        file = run_file(tmp_path, url, checkpoint={"every": 1}, waits={"publish_s": 3.0}, trainer={"num_batches": 4})
        assert main(["train", str(file)]) != 0
    assert "headrace resume" in capsys.readouterr().err
    next_one = server()
    with in_thread(lambda: serving(next_one)) as url:
        assert main(["resume", str(tmp_path / "run"), f'--engine.urls=["{url}"]', "--waits.publish_s=60"]) == 0
    assert len(list(read_metrics(tmp_path / "run"))) >= 4


def test_the_gpu_check_runs_against_the_scripted_server(tmp_path: Path) -> None:
    """It waits for a GPU, and says so; every part of it works against the server that is built from the contract."""
    model = tmp_path / "model"
    save_tiny(model, initializer_range=0.2, max_context=256)
    made = ModelSglang(model, step_s=0.01)
    script = Path(__file__).parents[2] / "benchmarks" / "sglang_check.py"
    done = subprocess.run([sys.executable, script, "--model", model], capture_output=True, text=True, check=False)
    assert (done.returncode, "waits for a machine that has one" in done.stdout) == (3, True)
    out = tmp_path / "check.json"
    with in_thread(lambda: serving(made)) as url:
        options = ["--model", model, "--url", url, "--device", "cpu", "--dtype", "float32", "--out", out]
        options += ["--max-context", "200", "--num-tokens", "8", "--long-tokens", "120", "--flight-s", "0.1"]
        done = subprocess.run(
            [sys.executable, script, *map(str, options)], capture_output=True, text=True, check=False, timeout=120
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["passed"] and set(found["parts"]) == {"start", "parity", "updates", "in_flight", "abort", "memory"}
    assert len(found["parts"]["in_flight"]["recompute"]["spans"]) == 2
