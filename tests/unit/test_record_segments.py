"""Append-only segments and the ledger on disk: whole to the last complete record (I11; DESIGN.md section 7)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.control.ledger import Ledger
from headrace.record import segments
from headrace.record.files import RecordError
from headrace.record.ledger_store import LedgerStore, Survival, read_records
from headrace.record.segments import SegmentWriter, read_segment
from headrace.types import AttemptKey, PolicyVersion

V0 = PolicyVersion(0, 0)
KEYS = [AttemptKey(0, 0), AttemptKey(0, 1)]


def test_nothing_is_there_before_commit_and_everything_after(tmp_path: Path) -> None:
    """Group commit: many appends, one write and one fsync."""
    writer = SegmentWriter(tmp_path / "s.jsonl")
    for n in range(3):
        writer.append({"n": n, "text": "é\n"})
    assert writer.num_pending == 3
    assert list(read_segment(tmp_path / "s.jsonl")) == []
    writer.commit()
    assert [r["n"] for r in read_segment(tmp_path / "s.jsonl")] == [0, 1, 2]
    assert writer.size_bytes == (tmp_path / "s.jsonl").stat().st_size
    writer.close()
    writer.close()


def test_a_record_is_taken_as_it_was_when_appended(tmp_path: Path) -> None:
    """Later changes of the caller's dict do not reach the file."""
    record = {"n": 1}
    with_writer = SegmentWriter(tmp_path / "s.jsonl")
    with_writer.append(record)
    record["n"] = 2
    with_writer.close()
    assert list(read_segment(tmp_path / "s.jsonl")) == [{"n": 1}]


@given(cut=st.integers(0, 200))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_cut_anywhere_leaves_a_readable_prefix_that_goes_on(tmp_path: Path, cut: int) -> None:
    """I11: whatever byte the write was torn at, the reader sees whole records, and the writer goes on behind them."""
    path = tmp_path / "s.jsonl"
    lines = [f'{{"n":{n},"pad":"{"x" * n}"}}\n'.encode() for n in range(8)]
    whole = b"".join(lines)
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut])
    num_whole = whole[:cut].count(b"\n")
    assert [r["n"] for r in read_segment(path)] == list(range(num_whole))
    writer = SegmentWriter(path)
    writer.append({"n": "next"})
    writer.close()
    assert [r["n"] for r in read_segment(path)] == [*range(num_whole), "next"]


def test_torn_line_longer_than_a_read_block_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is searched backwards in blocks."""
    monkeypatch.setattr(segments, "_CHUNK_BYTES", 16)
    path = tmp_path / "s.jsonl"
    path.write_bytes(b'{"n":0}\n' + b'{"n":"' + b"x" * 100)
    SegmentWriter(path).close()
    assert path.read_bytes() == b'{"n":0}\n'


def test_damage_inside_a_segment_is_an_error_with_its_line(tmp_path: Path) -> None:
    """No kill can make it, so it is not passed over in silence."""
    (tmp_path / "s.jsonl").write_bytes(b'{"n":0}\nbroken\n{"n":2}\n')
    with pytest.raises(RecordError, match="line 2 is not JSON"):
        list(read_segment(tmp_path / "s.jsonl"))


def test_a_segment_has_one_writer(tmp_path: Path) -> None:
    """One writer per file."""
    writer = SegmentWriter(tmp_path / "s.jsonl")
    with pytest.raises(RecordError, match="is open in this process already"):
        SegmentWriter(tmp_path / "s.jsonl")
    writer.close()
    SegmentWriter(tmp_path / "s.jsonl").close()


def test_disk_full_is_a_clear_error_and_costs_nothing_that_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure 143: half a line was written; the file is cut back, earlier records stand, and the commit can be tried
    again when there is space."""
    path = tmp_path / "s.jsonl"
    writer = SegmentWriter(path)
    writer.append({"n": 0})
    writer.commit()

    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    writer.append({"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_all", full)
        with pytest.raises(RecordError, match=r"appending to .*s\.jsonl: the disk is full"):
            writer.commit()
    assert path.read_bytes() == b'{"n":0}\n'
    writer.commit()
    writer.close()
    assert [r["n"] for r in read_segment(path)] == [0, 1]


def store(path: Path) -> tuple[LedgerStore, Ledger]:
    ledger = Ledger()
    return LedgerStore(path, ledger), ledger


def test_ledger_goes_through_files_and_lineages(tmp_path: Path) -> None:
    """I11: killed without close, replayed, resumed from checkpoint 1: the books are those of before."""
    first, ledger = store(tmp_path)
    assert first.open_lineage(None) == 0
    ledger.issue(KEYS, "t", V0)
    ledger.train(KEYS, 1)
    ledger.cut(1)
    ledger.checkpoint(1)
    ledger.issue([AttemptKey(1, 0)], "t", V0)
    first.commit()
    position = first.position
    ledger.drop([AttemptKey(1, 0)], "filtered")
    first._writer._pending.clear()  # type: ignore[union-attr]  # killed before the commit
    first.close()

    second, ledger = store(tmp_path)
    assert second.num_replayed == 6
    assert list(ledger.in_flight) == [AttemptKey(1, 0)]
    assert second.open_lineage(1) == 1
    assert ledger.summary()["dropped:lost_on_resume"] == 1
    assert position == {"segment": "lineage-0.jsonl", "size_bytes": (tmp_path / "lineage-0.jsonl").stat().st_size}
    second.close()
    assert [r["kind"] for r in read_records(tmp_path)][-1] == "lineage"
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == ["lineage-0.jsonl", "lineage-1.jsonl"]


def test_killed_before_the_first_record_was_durable(tmp_path: Path) -> None:
    """I11: an empty or torn first segment is no lineage; the next one starts the run."""
    (tmp_path / "lineage-0.jsonl").write_bytes(b'{"kind":"line')
    again, ledger = store(tmp_path)
    assert again.open_lineage(0) == 1
    assert ledger.lineage == 1
    again.close()
    third, _ = store(tmp_path)
    assert third.open_lineage(0) == 2
    third.close()


def test_eleven_lineages_replay_in_their_order(tmp_path: Path) -> None:
    """lineage-10 comes after lineage-9, not after lineage-1."""
    for n in range(12):
        books, ledger = store(tmp_path)
        assert books.open_lineage(0 if n else None) == n
        books.close()
    assert ledger.lineage == 11


def test_illegal_record_names_its_line(tmp_path: Path) -> None:
    """A ledger that does not follow from itself is refused before work starts."""
    first, _ = store(tmp_path)
    first.open_lineage(None)
    first.close()
    with (tmp_path / "lineage-0.jsonl").open("a") as file:
        file.write('{"kind":"checkpoint","update":9,"oldest_restorable":null}\n')
    with pytest.raises(RecordError, match=r"lineage-0\.jsonl, line 2 .*was never cut"):
        store(tmp_path)


def test_one_process_opens_one_lineage(tmp_path: Path) -> None:
    """Misuse is an error, not a second segment."""
    first, _ = store(tmp_path)
    with pytest.raises(RecordError, match="no lineage is open"):
        _ = first.position
    first.open_lineage(None)
    with pytest.raises(RecordError, match="one process writes one lineage"):
        first.open_lineage(0)
    first.close()


def test_survival_is_cut_by_the_lowest_later_fork(tmp_path: Path) -> None:
    """I11: lineage 0 ran to update 9, lineage 1 started from 6, lineage 2 from 4."""
    for n, update in enumerate(["null", "6", "4"]):
        line = f'{{"kind":"lineage","lineage":{n},"checkpoint_update":{update}}}\n'
        (tmp_path / f"lineage-{n}.jsonl").write_text(line)
    survival = Survival(tmp_path)
    alive = [(n, u) for n in range(3) for u in (3, 4, 5, 7) if survival.holds(n, u)]
    assert alive == [(0, 3), (0, 4), (1, 3), (1, 4), (2, 3), (2, 4), (2, 5), (2, 7)]
    (tmp_path / "lineage-3.jsonl").write_text('{"kind":"cut","update":1}\n')
    with pytest.raises(RecordError, match="does not begin with its lineage record"):
        Survival(tmp_path)
