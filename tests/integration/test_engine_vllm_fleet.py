"""A whole run over two vLLM servers: one is killed with -9, and the run goes on. Skips where there is no .venv-vllm."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loop_runs import small_config
from vllm_fixture import save_config, vllm_model, vllm_python

from headrace.config.schema import RunConfig
from headrace.engines.fleet.fleet import FleetEngine
from headrace.engines.vllm.client import VllmEngine
from headrace.loop import Loop
from headrace.record.metrics import read_metrics
from headrace.record.spans import read_spans
from headrace.run import _run_watched
from headrace.testing import SMALL_ALPHABET, tiny_tokenizer
from headrace.wiring import build_parts


@pytest.fixture(scope="module", autouse=True)
def there_is_vllm() -> None:
    """Skips before anything is opened."""
    vllm_python()


def settings(folder: Path, carrier: str) -> RunConfig:
    tokenizer = tiny_tokenizer(SMALL_ALPHABET)
    model = vllm_model(vocab_size=len(tokenizer), initializer_range=0.02, max_context=64)
    path = folder / "model"
    model.save_pretrained(path)
    save_config(model, path)
    tokenizer.save_pretrained(path)
    sections: dict[str, Any] = {
        "rewards": [{"type": f"{Path(__file__).with_name('vllm_reward.py')}:share_of_letters"}],
        "engine": {"type": "vllm", "max_batch_size": 16, "kv_cache_bytes": 1 << 26, "num_threads": 1}
        | {"carrier": {"type": carrier}},
        "fleet": {"num_engines": 2, "restart_backoff_s": 0.5, "health_every_s": 2.0},
        "trainer": {"num_batches": 14, "learning_rate": 2e-3, "schedule": {"type": "constant"}},
        "rollout": {"groups_per_batch": 8, "group_size": 8, "max_staleness": 1},
        "checkpoint": {"every": 0},
        "model": {"path": str(path)},
    }
    return small_config(folder, "run", **sections)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("carrier", ["memory", "delta"])
def test_a_run_outlives_kill_9_of_one_of_its_vllm_servers(tmp_path: Path, carrier: str) -> None:
    """Issue 4: partial tokens go on at the other server, each with its version; the dead one starts again, is given the
    published weights, is proved, and serves; the books are complete and the reward rises. With differences, both
    servers read what was published once, and the one that starts again begins with the newest of that."""
    parts = build_parts(settings(tmp_path, carrier), resume_from=None)
    fleet = parts.engine
    assert isinstance(fleet, FleetEngine)
    killed: list[int] = []

    async def kill(loop: Loop) -> None:
        while True:
            await asyncio.sleep(0.002)
            member = fleet.supervisor.members.get(0)
            if loop.batch_index < 3 or member is None or not fleet.router.num_in_flight(0):
                continue
            engine = member.engine
            assert isinstance(engine, VllmEngine) and engine._server is not None
            if any(running.ids for running in engine._by_handle.values()):
                killed.append(engine._server.pid)
                os.kill(engine._server.pid, signal.SIGKILL)
                return

    async def main() -> Loop:
        await parts.reward.start()
        loop = Loop(parts)
        beside = asyncio.create_task(kill(loop))
        try:
            await _run_watched(loop)
        finally:
            beside.cancel()
            await parts.close()
        return loop

    loop = asyncio.run(main())
    assert len(killed) == 1
    loop.parts.record.ledger.check(full=True)
    assert loop.parts.record.ledger.summary()["trained"] == 14 * 64
    lines = list(read_metrics(tmp_path / "run"))
    assert sum(line["fleet/num_deaths"] for line in lines) == 1.0
    assert sum(line["fleet/num_continued"] for line in lines) >= 1.0
    assert all(line["canary/max_gap"] < 1e-4 for line in lines)
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05, rewards
    spans = [s for s in read_spans(tmp_path / "run") if s["actor"] == "engine-0"]
    assert any(s["what"] == "starting" and s["incarnation"] == 1 for s in spans)
