"""Whole runs with ``engine.type = "vllm"``, and the canary over real vLLM. Skips where there is no .venv-vllm."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import Process, assert_trained_once, books, write_toml
from vllm_fixture import MODE, make_vllm, perturb, run_data, vllm_model, vllm_python
from vllm_without_the_fix import patches

from headrace.cli.main import main
from headrace.config.schema import TrainerConfig
from headrace.config.vllm_python import VARIABLE
from headrace.model.load import prepare_model
from headrace.protocols import WeightUpdate
from headrace.record.metrics import read_metrics
from headrace.testing import tiny_tokenizer
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import PolicyVersion, Sample
from headrace.weights import checksums, named_parameters
from headrace.weights.canary import Canary, CanaryResult, SyncError

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module", autouse=True)
def there_is_vllm() -> None:
    """Skips before anything is opened."""
    vllm_python()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("max_staleness", [0, 1], ids=["synchronous", "asynchronous"])
def test_a_run_learns_and_every_sync_is_exact(
    tmp_path: Path, max_staleness: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 4, done line 1: after every sync, engine and trainer agree in float32 to 1e-3: on the canary's tokens, and
    (synchronous) on every token of every batch, so p99 is below it too. The reward rises."""
    vllm_python()
    data = run_data(tmp_path, "run", rollout={"max_staleness": max_staleness})
    assert main(["train", str(write_toml(tmp_path / "run.toml", data))]) == 0, capsys.readouterr().err
    metrics = list(read_metrics(tmp_path / "run"))
    assert len(metrics) == 8
    assert all(m["canary/max_gap"] < 1e-4 for m in metrics)
    assert all(0 < m["engine/gap_p99"] < 1e-4 for m in metrics if m.get("engine/num_gap_tokens"))
    if max_staleness:
        assert max(m["staleness/max"] for m in metrics) == 1
    else:
        assert all(m["engine/num_gap_tokens"] == m["train/num_tokens"] for m in metrics)
        assert all(0 < m["engine/gap_max"] < 1e-4 for m in metrics)
    assert "Engine against trainer" in (tmp_path / "run" / "report.html").read_text()
    rewards = [m["reward/mean"] for m in metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05, rewards
    assert "LLM engine" in (tmp_path / "run" / "engine.log").read_text(errors="replace")


@pytest.mark.timeout(200)
def test_replies_that_outlive_an_update_show_their_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They go on over old keys and are of no policy. Replies long enough that generation outlasts training: an update
    then comes in their midst on any machine."""
    data = run_data(tmp_path, "run", rollout={"max_staleness": 1}, trainer={"num_batches": 4})
    data["sampling"]["max_new_tokens"] = 48
    assert main(["train", str(write_toml(tmp_path / "run.toml", data))]) == 0, capsys.readouterr().err
    metrics = list(read_metrics(tmp_path / "run"))
    in_flight = [m["engine/in_flight_gap_max"] for m in metrics if m.get("engine/num_in_flight_gap_tokens")]
    assert in_flight and max(in_flight) > 1e-3


@pytest.mark.timeout(200)
def test_a_run_in_bfloat16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights travel as bfloat16, bit for bit; the two then round differently, which the canary's band allows and the
    metrics show."""
    data = run_data(tmp_path, "run", trainer={"num_batches": 3})
    data["model"]["dtype"] = "bfloat16"
    assert main(["train", str(write_toml(tmp_path / "run.toml", data))]) == 0, capsys.readouterr().err
    metrics = list(read_metrics(tmp_path / "run"))
    assert len(metrics) == 3
    assert all(1e-5 < m["engine/gap_max"] < 0.2 for m in metrics), [m["engine/gap_max"] for m in metrics]


@pytest.mark.timeout(280)
def test_kill_9_of_the_run_and_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I11: the server ends with its run, whose log is complete; a resume goes on from the checkpoint, with every sync
    exact, and the books hold."""
    data = run_data(tmp_path, "run", checkpoint={"every": 2})
    process = Process("train", str(write_toml(tmp_path / "run.toml", data)), log=tmp_path / "log")
    run_dir = tmp_path / "run"
    process.until(lambda: len(list(read_metrics(run_dir)) if run_dir.exists() else ()) >= 5, timeout_s=150.0)
    children = children_of(process.pid)
    process.kill()
    process.wait()
    deadline_s = time.monotonic() + 20.0
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()], "a server outlived its run"
    assert main(["resume", str(run_dir)]) == 0, capsys.readouterr().err
    metrics = list(read_metrics(run_dir))
    assert [m["update"] for m in metrics] == list(range(1, 9)) and {m["lineage"] for m in metrics} == {0, 1}
    assert all(m["canary/max_gap"] < 1e-4 and 0 < m["engine/gap_max"] < 1e-4 for m in metrics)
    assert_trained_once(run_dir)
    books(run_dir)


def children_of(pid: int) -> list[int]:
    """Of all its threads."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in found for child in children]


def test_the_dry_run_shows_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which Python, and how weights travel."""
    python = vllm_python()
    assert main(["train", str(write_toml(tmp_path / "run.toml", run_data(tmp_path, "run"))), "--dry-run"]) == 0
    out = capsys.readouterr().out
    where = (
        f"a server in a process of its own ({python})" if MODE == "server" else "on a thread of the trainer's process"
    )
    assert 'type = "vllm"' in out and where in out


class Sync:
    """A trainer's model, vLLM over it, and the canary between them."""

    def __init__(self, folder: Path, **engine: Any) -> None:
        loaded = prepare_model(vllm_model(), tiny_tokenizer(), "float32")
        self.model = loaded.model
        self.trainer = PolicyTrainer(loaded, TrainerConfig(), num_steps=10)
        self.engine = make_vllm(self.model, folder, vocab_size=loaded.vocab_size, **engine)
        self.canary = Canary(
            self.engine,
            self.score,
            list(range(3, 43)),
            bound=1e-3,
            trainer_checksums=self.checksums,
            shares_weights=False,
        )

    async def checksums(self) -> Mapping[str, str]:
        return checksums(named_parameters(self.model).items())

    async def score(self, samples: Sequence[Sample]) -> Sequence[Sequence[float]]:
        return [t.tolist() for t in self.trainer.forward(samples)]

    async def next_version(self, names: Sequence[str], scale: float) -> CanaryResult:
        perturb(self.model, names, scale)
        version = PolicyVersion(0, self.engine.version.number + 1)
        await self.engine.pause("keep")
        await self.engine.update_weights(WeightUpdate(version=version, tensors=named_parameters(self.model)))
        result = await self.canary.prove(version)
        await self.engine.resume()
        return result


def with_sync(folder: Path, steps: Any, **engine: Any) -> None:
    async def run() -> None:
        torch.manual_seed(0)
        sync = Sync(folder, **engine)
        try:
            await asyncio.wait_for(steps(sync), 240.0)
        finally:
            await sync.engine.close()

    asyncio.run(run())


def test_the_canary_agrees_after_every_sync(tmp_path: Path) -> None:
    """I6: cold and warm, after large and tiny updates of the embedding and of everything."""

    async def steps(sync: Sync) -> None:
        await sync.canary.prove(PolicyVersion(0, 0))
        every = list(named_parameters(sync.model))
        for names, scale in [([EMBEDDING], 0.05), (every, 0.02), (every, 1e-7), ([EMBEDDING], 1e-6)]:
            result = await sync.next_version(names, scale)
            assert result.max_gap < 1e-4 and math.isfinite(result.max_gap)
        assert sync.engine.stats().num_cached_prefix_tokens > 0, "the warm probe never met the cache"

    with_sync(tmp_path, steps)


def without_the_fix(monkeypatch: pytest.MonkeyPatch, *, look_at_modules: bool) -> dict[str, Any]:
    """Options of ``make_vllm`` for a vLLM whose head stays stale."""
    if MODE == "server":
        name = "vllm_without_repacking.py" if look_at_modules else "vllm_without_the_fix.py"
        return {"program": Path(__file__).with_name(name)}
    for owner, name, instead in patches(look_at_modules=look_at_modules):
        monkeypatch.setattr(owner, name, instead)
    return {}


def test_the_canary_finds_the_stale_head_by_its_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENGINES.md, the silent bug: with the fix of the tied head switched off, and nothing looking at modules, vLLM
    takes the update, says so, and computes with the old head. The canary stops the run."""

    async def steps(sync: Sync) -> None:
        with pytest.raises(SyncError, match=r"log-probabilities differ by \S+e[-+]0[01] .*all tensors are equal"):
            await sync.next_version([EMBEDDING], 0.05)
        # Nothing else is wrong: the engine says that it has the new version, and all checksums agree.
        assert sync.engine.version == PolicyVersion(0, 1)
        assert sync.engine.weight_checksums() == checksums(named_parameters(sync.model).items())

    with_sync(tmp_path, steps, **without_the_fix(monkeypatch, look_at_modules=False))


def test_the_stale_head_is_named_also_after_a_tiny_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: with the fix off and the look at the modules on, an update too small for the band is found too, and named."""

    async def steps(sync: Sync) -> None:
        with pytest.raises(
            SyncError, match=rf"these tensors differ between trainer and engine: {EMBEDDING}\."
        ) as caught:
            await sync.next_version([EMBEDDING], 1e-5)
        assert "allowed 1e-03" in str(caught.value)
        assert "lm_head computes with something else" in sync.engine.weight_checksums()[EMBEDDING]

    with_sync(tmp_path, steps, **without_the_fix(monkeypatch, look_at_modules=True))


@pytest.mark.skipif(MODE == "in_process", reason="of a server in another process")
def test_a_run_without_vllm_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One clear error before any work, also where this machine has no vLLM."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nowhere"))
    assert main(["train", str(write_toml(tmp_path / "run.toml", run_data(tmp_path, "run")))]) == 2
    error = capsys.readouterr().err
    assert "make setup-vllm" in error and str(tmp_path / "nowhere") in error
    assert not (tmp_path / "run").exists()


def test_a_model_that_vllm_refuses_ends_the_run_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends; the error holds the server's own words and says where its log is."""
    vllm_python()
    data = run_data(tmp_path, "run", engine={"kv_cache_bytes": 1 << 20})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["architectures"] = ["NobodyKnowsForCausalLM"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert main(["train", str(write_toml(tmp_path / "run.toml", data))]) == 2
    error = capsys.readouterr().err
    assert "the vLLM server failed" in error and "NobodyKnowsForCausalLM" in error
