"""The controller alone: episodes admitted, scored, grouped and booked per second, and whether memory stays flat.

    python benchmarks/controller.py --episodes 1000000 --out controller.json

The real loop runs over engine, environment, judge and trainer that answer at once: no sleep, no model, one thread. So
what is measured is admission, cursor, runner, player, watchdog, grouping, samples with their checks, and the ledger on
disk with its commits, checkpoint cuts included. Left out, because it is measured by ``bookkeeping.py``: episode records
and metrics. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.config.load import restore_config
from headrace.config.schema import RunConfig
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog
from headrace.environments.runner import EpisodeRunner
from headrace.environments.single_turn import SingleTurn
from headrace.environments.task_list import TaskList
from headrace.loop import Loop
from headrace.parts import Parts
from headrace.player import Player
from headrace.protocols import EngineCapabilities, EngineStats, WeightUpdate
from headrace.record.ledger_store import LedgerStore
from headrace.run import nothing_is_garbage_yet
from headrace.types import Episode, Generation, GenerationRequest, PolicyVersion, Sampling, Score, Task, VersionSpan

NUM_TASKS, NUM_TOKENS = 64, 16
TASKS = [Task(id=f"t{i}", messages=({"role": "user", "content": f"{i} * 3 ="},), answer=i) for i in range(NUM_TASKS)]
PROMPT_IDS = tuple(range(32, 64))
IDS = (*range(65, 64 + NUM_TOKENS), 0)
LOGPROBS = (-0.5,) * NUM_TOKENS


class InstantEngine:
    """Answers each request at once with the same ids."""

    capabilities = EngineCapabilities(in_flight_updates=True, max_context=4096)

    def __init__(self) -> None:
        self.version = PolicyVersion(0, 0)

    async def generate(self, request: GenerationRequest) -> Generation:
        spans = (VersionSpan(self.version, 0, NUM_TOKENS),)
        return Generation(request_id=request.id, ids=IDS, logprobs=LOGPROBS, version_spans=spans, finish_reason="stop")

    async def abort(self, request_id: str) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> None:
        self.version = update.version

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats()


class InstantRenderer:
    """Every prompt is the same; what a reply says matters to nobody."""

    stop_ids, vocab_size = (0,), 128

    def render(self, messages: Sequence[Any]) -> tuple[int, ...]:
        return PROMPT_IDS

    def decode(self, ids: Sequence[int]) -> str:
        return "12"


class InstantTrainer:
    def __init__(self) -> None:
        self.version, self.step = PolicyVersion(0, 0), 0

    def publish(self) -> WeightUpdate:
        self.version = PolicyVersion(0, self.version.number + 1)
        return WeightUpdate(version=self.version)

    def save(self, path: Path) -> None: ...


class InstantReward:
    """Every second member is right."""

    name, value_range, deadline_s = "instant", (0.0, 1.0), 60.0

    async def start(self) -> None: ...

    async def score(self, episode: Episode) -> Score:
        return Score(value=float(episode.key.member % 2))

    async def close(self) -> None: ...


class SameThread:
    """Stands for the trainer's thread: the call is made at once."""

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(function(*args))
        return future

    def stop(self) -> None: ...


class BareParts(Parts):
    """Without trainer passes, files of episodes, and metrics."""

    def plan(self, batch: Any) -> list[Any]:
        return []

    def publish(self) -> WeightUpdate:
        return self.trainer.publish()

    async def write_checkpoint(self, number: int, state: dict[str, Any]) -> None:
        """Its books: the files are the trainer's."""
        self.record.ledger_store.commit()
        self.record.ledger.checkpoint(number, number)
        self.record.ledger_store.commit()


class Counter:
    """Stands for the reporter: samples time and memory at every batch."""

    def __init__(self, batch_episodes: int) -> None:
        self._batch_episodes, self.num_episodes = batch_episodes, 0
        self.samples: list[tuple[int, float, int]] = []
        """(episodes, seconds of this process, resident bytes)."""

    def batch(self, batch: Any, attempted: Sequence[Episode], *_: Any) -> None:
        self.num_episodes += len(attempted)
        self.samples.append((self.num_episodes, time.process_time(), resident_bytes()))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **keywords: None


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def parts(config: RunConfig, folder: Path) -> Parts:
    clock = asyncio.get_running_loop().time
    engine, reward, trainer, ledger = InstantEngine(), InstantReward(), InstantTrainer(), Ledger()
    store = LedgerStore(folder / "ledger", ledger)
    store.open_lineage(None)
    watchdog = Watchdog(clock, config.guards.stall_min_s)
    runner = EpisodeRunner(
        engine=engine,
        renderer=InstantRenderer(),
        make_environment=lambda task: SingleTurn(),
        watchdog=watchdog,
        clock=clock,
        run_seed=0,
    )
    algorithm = SimpleNamespace(needs=SimpleNamespace(greedy_baseline=False), keep_group=lambda group: True)
    return BareParts(
        config=config,
        clock=clock,
        tasks=TaskList(TASKS),
        held_out=(),
        engine=engine,
        player=Player(runner=runner, reward=reward, sampling=Sampling(max_new_tokens=NUM_TOKENS)),
        reward=reward,
        model=None,
        trainer=trainer,
        trainer_thread=SameThread(),
        algorithm=algorithm,
        canary=SimpleNamespace(prove=prove),
        max_ratio_error=1.0,
        watchdog=watchdog,
        record=SimpleNamespace(
            ledger=ledger, ledger_store=store, spans=SimpleNamespace(add=lambda *a, **k: None), close=store.close
        ),
        sinks=None,
        progress=SimpleNamespace(update=lambda *a, **k: None, note=print),
        reporter=Counter(config.rollout.groups_per_batch * config.rollout.group_size),
    )


async def prove(version: PolicyVersion) -> Any:
    return SimpleNamespace(max_gap=0.0)


def run(config: RunConfig, folder: Path) -> tuple[list[tuple[int, float, int]], dict[str, int]]:
    async def main() -> tuple[list[tuple[int, float, int]], dict[str, int]]:
        loop = Loop(parts(config, folder))
        with nothing_is_garbage_yet():  # as in a run
            await loop.run()
        loop.parts.record.close()
        return loop.parts.reporter.samples, loop.parts.record.ledger.summary()

    return asyncio.run(main())


def nearest(samples: Sequence[tuple[int, float, int]], num_episodes: int) -> tuple[int, float, int]:
    return min(samples, key=lambda sample: abs(sample[0] - num_episodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--groups-per-batch", type=int, default=64)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    num_batches = max(2, -(-args.episodes // (args.group_size * args.groups_per_batch)))
    with tempfile.TemporaryDirectory() as folder:
        config = restore_config(
            {
                "output_dir": folder,
                "model": {"path": "none"},
                "tasks": {"type": "python", "factory": "none:none"},
                "rewards": [{"type": "exact"}],
                "engine": {"weights": "copy"},
                "trainer": {"num_batches": num_batches},
                "rollout": {
                    "groups_per_batch": args.groups_per_batch,
                    "group_size": args.group_size,
                    "max_staleness": args.max_staleness,
                    "max_concurrent": args.group_size * args.groups_per_batch,
                },
                "checkpoint": {"every": 10},
            },
            "the benchmark",
        )
        samples, books = run(config, Path(folder))
    early, last, first = nearest(samples, args.episodes // 10), samples[-1], samples[0]
    result = {
        "num_episodes": last[0],
        "episodes_per_s": (last[0] - first[0]) / (last[1] - first[1]),
        "num_cores": 1,
        "books": books,
        "resident_bytes": {"at_a_tenth": early[2], "at_the_end": last[2], "growth": last[2] - early[2]},
        "num_tokens": NUM_TOKENS,
        "group_size": args.group_size,
        "groups_per_batch": args.groups_per_batch,
        "max_staleness": args.max_staleness,
    }
    text = json.dumps(result)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
