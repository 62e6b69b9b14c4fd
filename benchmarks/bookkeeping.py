"""What the books cost: ledger, guards, episode records and commits, per episode and per batch.

    python benchmarks/bookkeeping.py --batches 50 --out bookkeeping.json

Runs without torch. The work of one rollout batch (8 groups x 8 episodes x 64 sampled tokens, as in versus_trl.py) is
done as the loop does it: issue and commit for each group, samples and their checks, train, metrics, episode records,
commits; a checkpoint's cut every 10 batches. The last line printed is one JSON object: seconds by part for each
batch, their share of a step of ``--step-s`` seconds, and how the ledger's memory grows between the first half and the
second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.control.checks import check_sample, check_trained_once
from headrace.control.ledger import Ledger
from headrace.control.samples import samples_from_episode
from headrace.record.episodes import EpisodeWriter, episode_record
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.types import (
    AttemptKey,
    Episode,
    Outcome,
    PolicyVersion,
    Sample,
    Score,
    Segment,
    Source,
    Task,
    Trace,
    Turn,
    VersionSpan,
)

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS, NUM_TASKS = 8, 8, 64, 64
TASKS = [Task(id=f"t{i}", messages=({"role": "user", "content": f"{i} * 3 ="},), answer=i) for i in range(NUM_TASKS)]


def episode(key: AttemptKey, version: PolicyVersion) -> Episode:
    segments = (
        Segment(source=Source.TEMPLATE, ids=tuple(range(32))),
        Segment(
            source=Source.POLICY,
            ids=tuple(range(NUM_TOKENS)),
            parent=0,
            logprobs=tuple(-1 / (3 + i) for i in range(NUM_TOKENS)),
            version_spans=(VersionSpan(version, 0, NUM_TOKENS),),
        ),
    )
    return Episode(
        key=key,
        task=TASKS[key.group % NUM_TASKS],
        turns=(Turn(reply="12 " * 20),),
        trace=Trace(segments=segments),
        outcome=Outcome.DONE,
        score=Score(value=1.0, components={"exact": 1.0}),
    )


class Timer:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start_s


def one_batch(
    number: int, timer: Timer, ledger: Ledger, store: LedgerStore, episodes: EpisodeWriter, metrics: MetricsWriter
) -> None:
    version = PolicyVersion(0, number)
    done: list[Episode] = []
    for group in range(number * NUM_GROUPS, (number + 1) * NUM_GROUPS):
        keys = [AttemptKey(group, m) for m in range(GROUP_SIZE)]
        with timer("ledger"):
            ledger.issue(keys, TASKS[group % NUM_TASKS].content_hash, version)
        with timer("ledger_commit"):
            store.commit()
        done += [episode(key, version) for key in keys]
    samples: list[tuple[Episode, list[Sample]]] = []
    with timer("samples_and_guards"):
        for item in done:
            own = samples_from_episode(item, f"g{item.key.group}", 1.0)
            check_trained_once(own, item)
            for sample in own:
                check_sample(sample, item, number)
            samples.append((item, own))
    with timer("ledger"):
        ledger.train([e.key for e in done], number + 1)
        ledger.check(())
    with timer("ledger_commit"):
        store.commit()
    with timer("episode_records"):
        for item, own in samples:
            values = [[0.5] * len(s.ids) for s in own]
            episodes.add(
                episode_record(
                    item, lineage=0, update=number + 1, status="trained", samples=own, trainer_logprobs=values,
                    advantages=values,
                )
            )  # fmt: skip
        episodes.commit()
    with timer("metrics"):
        metrics.log(number + 1, number + 1, {f"m{i}": i / 7 for i in range(60)})
    if number % 10 == 9:
        with timer("ledger"):
            ledger.cut(number + 1)
            ledger.checkpoint(number + 1, oldest_restorable=max(0, number - 9))
        with timer("compaction"):
            episodes.compact(episodes.rotate())


def ledger_growth_bytes(num_batches: int) -> dict[str, int]:
    """Bytes held by the ledger alone after half and after all batches."""
    ledger = Ledger()
    ledger.open_lineage(0)
    held: dict[str, int] = {}
    tracemalloc.start()
    for number in range(num_batches):
        for group in range(number * NUM_GROUPS, (number + 1) * NUM_GROUPS):
            keys = [AttemptKey(group, m) for m in range(GROUP_SIZE)]
            ledger.issue(keys, f"t{group % NUM_TASKS}", PolicyVersion(0, number))
        ledger.train(list(ledger.in_flight), number + 1)
        if number % 10 == 9:
            ledger.cut(number + 1)
            ledger.checkpoint(number + 1, oldest_restorable=max(0, number - 9))
        if number + 1 in (num_batches // 2, num_batches):
            held["half" if number + 1 < num_batches else "all"] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=10.0, help="length of a step to compare with, in seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        ledger = Ledger()
        store = LedgerStore(path / "ledger", ledger)
        store.open_lineage(None)
        episodes, metrics = EpisodeWriter(path / "episodes", 0), MetricsWriter(path / "metrics.jsonl", 0)
        for number in range(args.batches):
            one_batch(number, timer, ledger, store, episodes, metrics)
        for writer in (store, episodes, metrics):
            writer.close()
        with timer("replay"):
            replayed = LedgerStore(path / "ledger", Ledger())
    replay_s = timer.seconds.pop("replay")
    per_batch_s = {part: seconds / args.batches for part, seconds in timer.seconds.items()}
    total_s = sum(per_batch_s.values())
    result = {
        "episodes_per_batch": NUM_GROUPS * GROUP_SIZE,
        "seconds_per_batch": per_batch_s,
        "total_s_per_batch": total_s,
        "share_of_step": total_s / args.step_s,
        "step_s": args.step_s,
        "replay_records_per_s": replayed.num_replayed / replay_s,
        "ledger_bytes": ledger_growth_bytes(20 * args.batches),
    }
    text = json.dumps(result)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
