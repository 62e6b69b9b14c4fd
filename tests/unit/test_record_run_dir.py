"""The run's folder, atomic files, locks and redaction (DESIGN.md section 7; failures 114, 116, 142)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.record import files
from headrace.record.files import FileLock, RecordError, write_atomically
from headrace.record.redact import REDACTED, redact
from headrace.record.run_dir import SCHEMA_VERSION, RunDirectory, collect_run_info, read_run_info


def info(name: str = "demo", **config: Any) -> dict[str, Any]:
    return collect_run_info(name=name, config=config, seeds={"run": 7}, dataset_fingerprints={"train": "abc"})


def test_run_json_says_what_the_run_is_and_hides_secrets(tmp_path: Path) -> None:
    """Schema version, resolved config redacted, seeds, package and hardware versions, data set fingerprints."""
    run = RunDirectory.create(tmp_path / "demo", info(api_key="sk-abcdefgh1234", rate=1e-6))
    run.close()
    read = read_run_info(tmp_path / "demo")
    assert read["schema_version"] == SCHEMA_VERSION
    assert read["config"] == {"api_key": REDACTED, "rate": 1e-6}
    assert (read["seeds"], read["dataset_fingerprints"]) == ({"run": 7}, {"train": "abc"})
    assert {"headrace", "pyarrow"} <= read["packages"].keys()
    assert read["hardware"]["num_cpus"] >= 1
    assert "abcdefgh1234" not in (tmp_path / "demo" / "run.json").read_text()


def test_output_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    """Issue 2, point 6: one clear error that says how to go on; the other run is not touched."""
    RunDirectory.create(tmp_path / "demo", info("first")).close()
    with pytest.raises(RecordError, match=r"holds another run \(first\).*headrace resume"):
        RunDirectory.create(tmp_path / "demo", info("second"))
    assert read_run_info(tmp_path / "demo")["name"] == "first"


def test_folder_with_other_files_and_a_file_in_its_place_are_refused(tmp_path: Path) -> None:
    """headrace never mixes its files with others."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(RecordError, match="is not empty and holds no run"):
        RunDirectory.create(tmp_path / "full", info())
    with pytest.raises(RecordError, match="is a file"):
        RunDirectory.create(tmp_path / "full" / "thesis.txt", info())
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".run.json.17.tmp").write_text("{")  # of a process that was killed before it had begun
    RunDirectory.create(tmp_path / "empty", info()).close()


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    """One writer per file: a second open fails while the first holds the run, and works after."""
    run = RunDirectory.create(tmp_path / "demo", info())
    with pytest.raises(RecordError, match="is open in this process already"):
        RunDirectory.open(tmp_path / "demo")
    run.close()
    run.close()
    again = RunDirectory.open(tmp_path / "demo")
    assert again.info["name"] == "demo"
    again.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no run.json"),
        ("{", "is not JSON"),
        ("[]", "not written by headrace"),
        ('{"name": "x"}', "not written by headrace"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), "update it"),
    ],
)
def test_a_folder_that_is_no_run_is_one_clear_error(tmp_path: Path, text: str | None, message: str) -> None:
    """Resume and inspect meet any folder."""
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        RunDirectory.open(tmp_path)


def test_atomic_write_leaves_the_old_file_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failure 116: all or nothing, and no litter."""
    path = tmp_path / "state.json"
    write_atomically(path, b"old")

    def full(fd: int, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(RecordError, match=r"writing .*state\.json: the disk is full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_lock_of_this_process_is_released_with_its_block(tmp_path: Path) -> None:
    """A lock ends with its holder."""
    with FileLock(tmp_path / "lock", "thing"), pytest.raises(RecordError, match="thing is open in this process"):
        FileLock(tmp_path / "lock", "thing")
    FileLock(tmp_path / "lock", "thing").release()


@pytest.mark.parametrize(
    "key",
    ["api_key", "apiKey", "token", "hf_token", "HF_TOKEN", "password", "wandb-api-key", "secret", "client_secret",
     "authorization", "Authorization", "private_key", "aws_secret_access_key", "access_token"],
)  # fmt: skip
def test_telling_keys_hide_their_values(key: str) -> None:
    """Failure 142: secrets never reach the record."""
    assert redact({"sink_options": {"x": [{key: "do-not-show"}]}}) == {"sink_options": {"x": [{key: REDACTED}]}}


@pytest.mark.parametrize(
    "value",
    [
        {"max_tokens": 5, "num_tokens": 7, "max_microbatch_tokens": 8192, "stop_token": None, "tokenizer": "gpt2"},
        {"key": "mul-3x4", "monkey": "banana", "prefix_key": "g4", "path": "skills/task-1", "token": 3},
        ["a", 1, 2.5, None, True],
    ],
)
def test_what_is_no_secret_stays(value: Any) -> None:
    """A redacted configuration must still say what ran."""
    assert redact(value) == value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://joe:pw@host/x", f"https://{REDACTED}@host/x"),
        ("postgres://u:p@db:5432/r?sslmode=off", f"postgres://{REDACTED}@db:5432/r?sslmode=off"),
        ("https://host/x?token=abc&n=1", f"https://host/x?token={REDACTED}&n=1"),
        ("use hf_AbCdEfGhIj please", f"use {REDACTED} please"),
        ("Bearer abcdefghij", REDACTED),
        ("mail me at joe@host", "mail me at joe@host"),
    ],
)
def test_secrets_inside_strings_are_cut_out(text: str, shown: str) -> None:
    """Token forms and the credentials of URLs, wherever they stand."""
    assert redact({"url": text})["url"] == shown


def test_paths_and_tuples_become_plain_json() -> None:
    """The redacted configuration is written as JSON."""
    assert json.dumps(redact({"p": Path("a/b"), "t": (1, Path("c"))})) == '{"p": "a/b", "t": [1, "c"]}'
