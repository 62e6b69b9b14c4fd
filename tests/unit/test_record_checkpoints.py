"""Checkpoints: complete or not there, the old goes after the new is whole (I12; failure 116)."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.record import checkpoints
from headrace.record.checkpoints import CheckpointStore, find_checkpoints
from headrace.record.files import RecordError


def write(store: CheckpointStore, step: int, text: str = "weights") -> None:
    with store.writing(step) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        store.write_state(folder, {"step": step, "cursor": {"next_group": 3}})


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_newest_complete_ones_are_kept(tmp_path: Path) -> None:
    """checkpoint.keep, by number and not by name (step-10 is newer than step-9)."""
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (8, 9, 10):
        write(store, step)
    assert names(tmp_path) == ["step-10", "step-9"]
    latest, oldest = store.latest(), store.oldest()
    assert latest is not None
    assert oldest is not None
    assert (latest.step, oldest.step) == (10, 9)
    assert latest.state() == {"step": 10, "cursor": {"next_group": 3}}
    assert (latest.path / "model" / "weights").read_text() == "weights"


def test_a_failed_save_leaves_the_old_ones_and_nothing_else(tmp_path: Path) -> None:
    """I12: the new one is whole before anything is removed."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)
    with pytest.raises(RuntimeError, match="no"), store.writing(2) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("no")
    assert names(tmp_path) == ["step-1"]


def test_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failure 143: the earlier checkpoint stands, and the message says what to do."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "fsync_file", full)
    with pytest.raises(RecordError, match=r"writing checkpoint .*step-2: the disk is full.*resume"):
        write(store, 2)
    assert names(tmp_path) == ["step-1"]


def test_a_full_disk_while_old_ones_are_removed_is_a_clear_error_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 4806 of the simulation: the new checkpoint is complete by then, and stays."""
    store = CheckpointStore(tmp_path, keep=1)
    write(store, 1)

    def full(path: Path) -> None:
        if path.name == "step-1":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "fsync_folder", full)
    with pytest.raises(RecordError, match=r"removing the old checkpoint .*step-1: the disk is full.*resume"):
        write(store, 2)
    latest = CheckpointStore(tmp_path, keep=1).latest()
    assert latest is not None and latest.step == 2 and names(tmp_path) == ["step-2"]


@pytest.mark.parametrize("leftover", ["step-3.tmp", "step-3"])
def test_what_cannot_be_cleaned_up_is_a_clear_error(
    leftover: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / leftover).mkdir()

    def read_only(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", read_only)
    with pytest.raises(RecordError, match=r"opening .* failed: Read-only file system"):
        CheckpointStore(tmp_path, keep=1)


def test_incomplete_and_foreign_folders_are_ignored(tmp_path: Path) -> None:
    """Failure 116: a half-written folder is never taken for the newest."""
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 3)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-best").mkdir()
    (tmp_path / "step-best" / "COMPLETE").touch()
    assert [c.step for c in find_checkpoints(tmp_path)] == [3]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_leftovers_of_a_killed_process_go_at_the_next_start(tmp_path: Path) -> None:
    """I12: temporary folders are removed; a complete one in the middle of being replaced comes back."""
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1, "old")
    (tmp_path / "step-1").rename(tmp_path / "step-1.old")
    (tmp_path / "step-1").mkdir()  # renamed, and killed before the marker
    (tmp_path / "step-2.tmp").mkdir()
    again = CheckpointStore(tmp_path, keep=2)
    assert names(tmp_path) == ["step-1"]
    latest = again.latest()
    assert latest is not None
    assert (latest.path / "model" / "weights").read_text() == "old"
    (tmp_path / "step-1.old").mkdir()  # replaced and marked, and killed before the old was removed
    CheckpointStore(tmp_path, keep=2)
    assert names(tmp_path) == ["step-1"]


def test_same_step_is_replaced_by_the_new_one(tmp_path: Path) -> None:
    """A rolled-back lineage wrote step 5, the surviving one writes it again."""
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5, "dead branch")
    write(store, 5, "alive")
    latest = store.latest()
    assert latest is not None
    assert (latest.path / "model" / "weights").read_text() == "alive"
    assert names(tmp_path) == ["step-5"]


def test_checkpoints_of_a_dead_branch_are_removed(tmp_path: Path) -> None:
    """I11: after a resume from step 2, step 4 must not be taken for the newest."""
    store = CheckpointStore(tmp_path, keep=3)
    for step in (2, 4):
        write(store, step)
    store.remove_after(2)
    assert names(tmp_path) == ["step-2"]


def test_nested_writing_broken_state_and_bad_keep_are_errors(tmp_path: Path) -> None:
    """One clear error each."""
    store = CheckpointStore(tmp_path, keep=1)
    with store.writing(1) as folder:
        with pytest.raises(RecordError, match="is being written already"), store.writing(1):
            pass
        (folder / "state.json").write_text("{")
    latest = store.latest()
    assert latest is not None
    with pytest.raises(RecordError, match=r"no readable state\.json"):
        latest.state()
    (latest.path / "state.json").write_text("[]")
    with pytest.raises(RecordError, match="is not a JSON object"):
        latest.state()
    with pytest.raises(ValueError, match=r"checkpoint\.keep = 0"):
        CheckpointStore(tmp_path, keep=0)
