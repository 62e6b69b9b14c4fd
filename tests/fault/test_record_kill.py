"""kill -9 while the record is written: what was acknowledged is there, what is there is whole (I11, I12; failures 106,
116). Each test starts a real process, waits for a few of its acknowledgements, kills it, and reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.control.ledger import Ledger
from headrace.record.checkpoints import CheckpointStore
from headrace.record.episodes import read_episodes
from headrace.record.files import RecordError
from headrace.record.ledger_store import LedgerStore
from headrace.record.run_dir import RunDirectory
from headrace.record.segments import SegmentWriter, read_segment
from headrace.types import AttemptKey

MOMENTS = [1, 2, 3, 5, 8]
"""Acknowledgements before the kill; the process runs on while the kill is on its way, so it lands anywhere."""

SEGMENT = """
import itertools, sys
from pathlib import Path
from headrace.record.segments import SegmentWriter
writer = SegmentWriter(Path(sys.argv[1]) / "s.jsonl")
for n in itertools.count():
    for part in range(3):
        writer.append({"n": n, "part": part, "pad": "x" * 200_000})
    writer.commit()
    print(n, flush=True)
"""

CHECKPOINTS = """
import itertools, sys
from pathlib import Path
from headrace.record.checkpoints import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=1)
for n in itertools.count():
    with store.writing(n) as folder:
        (folder / "weights").write_bytes(bytes([n % 256]) * 2_000_000)
        store.write_state(folder, {"n": n})
    print(n, flush=True)
"""

LEDGER = """
import itertools, sys
from pathlib import Path
from headrace.control.ledger import Ledger
from headrace.record.ledger_store import LedgerStore
from headrace.types import AttemptKey, PolicyVersion
ledger = Ledger()
store = LedgerStore(Path(sys.argv[1]), ledger)
start = ledger.committed_update
lineage = store.open_lineage(start if store.num_replayed else None)
for n in itertools.count(start):
    keys = [AttemptKey(n, m) for m in range(4)]
    ledger.issue(keys, f"task{n % 3}", PolicyVersion(lineage, n))
    store.commit()
    ledger.fail(keys[3:], "timeout")
    ledger.train(keys[:3], n + 1)
    store.commit()
    if n % 2:
        ledger.cut(n + 1)
        store.commit()
        ledger.checkpoint(n + 1)
        store.commit()
    print(n, flush=True)
"""

EPISODES = """
import itertools, sys
from pathlib import Path
from headrace.record.episodes import EpisodeWriter, episode_record
from headrace.types import AttemptKey, Episode, Outcome, Segment, Source, Task, Trace
writer = EpisodeWriter(Path(sys.argv[1]) / "episodes", 0)
trace = Trace(segments=(Segment(source=Source.TEMPLATE, ids=tuple(range(20_000))),))
for n in itertools.count():
    episode = Episode(key=AttemptKey(n, 0), task=Task(id="t", messages=()), turns=(), trace=trace, outcome=Outcome.DONE)
    writer.add(episode_record(episode, lineage=0, update=n + 1, status="trained"))
    writer.commit()
    print(n, flush=True)
    if n % 2:
        writer.compact(writer.rotate())
"""

RUN = """
import sys
from pathlib import Path
from headrace.record.run_dir import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]) / "demo", {"name": "demo"})
print(0, flush=True)
sys.stdin.read()
"""


class Victim:
    """A process that prints what it has committed."""

    def __init__(self, code: str, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_for(self, count: int) -> None:
        assert self.process.stdout is not None
        for _ in range(count):
            assert self.process.stdout.readline(), "the process ended by itself"

    def kill(self) -> int:
        """kill -9; returns the last number that it acknowledged, those still in the pipe included."""
        self.process.kill()
        rest, _ = self.process.communicate(timeout=60)
        return int(rest.splitlines()[-1]) if rest.splitlines() else -1


def killed(code: str, path: Path, count: int) -> int:
    victim = Victim(code, path)
    victim.wait_for(count)
    return max(victim.kill(), count - 1)


@pytest.mark.parametrize("moment", MOMENTS)
def test_segment_is_whole_to_its_last_complete_record(tmp_path: Path, moment: int) -> None:
    """I11: every acknowledged group is there in full, later ones perhaps in part, and the writer can go on."""
    last = killed(SEGMENT, tmp_path, moment)
    found = [(r["n"], r["part"]) for r in read_segment(tmp_path / "s.jsonl")]
    assert found == [(i // 3, i % 3) for i in range(len(found))]
    assert len(found) >= 3 * (last + 1)
    writer = SegmentWriter(tmp_path / "s.jsonl")
    writer.append({"n": "next", "part": 0})
    writer.close()
    assert [r["n"] for r in read_segment(tmp_path / "s.jsonl")][len(found) :] == ["next"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_newest_checkpoint_is_always_a_complete_one(tmp_path: Path, moment: int) -> None:
    """I12, failure 116: with keep = 1 there is a complete one at every moment, at least the acknowledged one."""
    last = killed(CHECKPOINTS, tmp_path, moment)
    store = CheckpointStore(tmp_path, keep=1)
    latest = store.latest()
    assert latest is not None
    assert latest.step >= last
    assert latest.state() == {"n": latest.step}
    assert (latest.path / "weights").read_bytes() == bytes([latest.step % 256]) * 2_000_000
    with store.writing(latest.step + 1) as folder:
        (folder / "weights").write_text("next")
    assert [p.name for p in tmp_path.iterdir()] == [f"step-{latest.step + 1}"], "leftovers of the killed process"


def test_books_hold_over_a_chain_of_kills(tmp_path: Path) -> None:
    """I10, I11: five kills, five resumes; nothing acknowledged is lost, nothing is trained twice along the chain."""
    for moment in MOMENTS:
        last = killed(LEDGER, tmp_path, moment)
        ledger = Ledger()
        store = LedgerStore(tmp_path, ledger)
        ledger.check(full=True)
        assert ledger.update >= last + 1, "an acknowledged update is missing"
        store.close()
    lineages = ledger.lineage + 1
    assert lineages == len(MOMENTS)
    surviving = ledger.surviving()
    surviving.check("surviving")
    trained = surviving.total["trained"] + surviving.total["trained_uncommitted"]
    assert trained == 3 * ledger.update
    assert surviving.total["failed:timeout"] in (ledger.update, ledger.update + 1)
    assert all(key.group >= ledger.committed_update for key in ledger.in_flight)
    assert all(isinstance(key, AttemptKey) for key in ledger.in_flight)


@pytest.mark.parametrize("moment", MOMENTS)
def test_episodes_are_there_once_whatever_compaction_was_doing(tmp_path: Path, moment: int) -> None:
    """I11: acknowledged episodes are read once and in full, from JSON lines or Parquet."""
    last = killed(EPISODES, tmp_path, moment)
    found = [r["group"] for r in read_episodes(tmp_path)]
    assert found == list(range(len(found)))
    assert len(found) >= last + 1


def test_a_run_has_one_writing_process_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    """One writer per file: the second process is told who has the run; after kill -9 nothing stale is in the way."""
    victim = Victim(RUN, tmp_path)
    victim.wait_for(1)
    with pytest.raises(RecordError, match=rf"is being written by pid {victim.process.pid} on "):
        RunDirectory.open(tmp_path / "demo")
    victim.kill()
    run = RunDirectory.open(tmp_path / "demo")
    assert run.info["name"] == "demo"
    run.close()
