"""What a user can get wrong ends before any work, with exit code 2 and exactly one clear error (issue 2, item 6)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_runs import run_to_end, small_data, write_toml

from headrace.cli.main import main


def write(folder: Path, data: dict[str, Any]) -> Path:
    """A run's file without checking it: it is meant to be wrong."""

    def value(item: Any) -> str:
        if isinstance(item, dict):
            return "{" + ", ".join(f"{k} = {value(v)}" for k, v in item.items()) + "}"
        if isinstance(item, list):
            return "[" + ", ".join(map(value, item)) + "]"
        return json.dumps(item)

    path = folder / "run.toml"
    path.write_text("\n".join(f"{key} = {value(item)}" for key, item in data.items()))
    return path


def jsonl(folder: Path, *lines: str) -> dict[str, Any]:
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    return {"type": "file", "path": "tasks.jsonl"}


ROW = json.dumps({"prompt": "abcde", "answer": "edcba"})
LONG = json.dumps({"id": "long", "prompt": "abcde" * 20, "answer": "x"})


def wrong(folder: Path, case: str) -> tuple[dict[str, Any], str]:
    """(the run's data, what its error must say)."""
    data = small_data(folder, "run")
    if case == "misspelt key":
        data["trainer"]["learning_rte"] = 1e-4
        return data, "learning_rate"
    if case == "misspelt section":
        data["samplng"] = {"temperature": 1.0}
        return data, "sampling"
    if case == "missing task file":
        data["tasks"] = {"type": "file", "path": "taks.jsonl"}
        return data, "no such file"
    if case == "missing model":
        data["model"] = {"path": str(folder / "nothing")}
        return data, "nothing"
    if case == "task without answer":
        data["tasks"] = jsonl(folder, ROW, json.dumps({"prompt": "abcde"}))
        return data, "tasks.jsonl, line 2"
    if case == "line that is not JSON":
        data["tasks"] = jsonl(folder, ROW, ROW, "{'prompt': 'abcde'}", ROW)
        return data, "tasks.jsonl, line 3"
    if case == "prompt longer than the context":
        data["tasks"] = jsonl(folder, ROW, LONG)
        return data, "the prompt of task 'long' has"
    if case == "top-p without kept ids":
        data["sampling"]["top_p"] = 0.9
        data["engine"]["carry_kept_ids"] = False
        return data, "top_p = 0.9 with engine.carry_kept_ids = false"
    if case == "negative group size":
        data["rollout"]["group_size"] = -4
        return data, "rollout.group_size"
    if case == "group of one":
        data["rollout"] |= {"group_size": 1, "min_group_size": 1}
        return data, "compares the members of a group"
    if case == "option without effect":
        data["rollout"]["on_overage"] = "drop"
        return data, "rollout.on_overage has no effect"
    if case == "unknown reward":
        data["rewards"] = [{"type": "exakt"}]
        return data, "did you mean 'exact'"
    if case == "unknown preset":
        data["algorithm"] = {"preset": "grpoo"}
        return data, "grpo"
    assert case == "unknown environment"
    data["tasks"] = jsonl(folder, json.dumps({"prompt": "a", "answer": "a", "environment": "singel_turn"}))
    return data, "single_turn"


CASES = [
    "misspelt key",
    "misspelt section",
    "missing task file",
    "missing model",
    "task without answer",
    "line that is not JSON",
    "prompt longer than the context",
    "top-p without kept ids",
    "negative group size",
    "group of one",
    "option without effect",
    "unknown reward",
    "unknown preset",
    "unknown environment",
]


def assert_one_error(code: int, text: str, expected: str) -> None:
    assert code == 2, text
    assert text.startswith("headrace: error: ") and text.count("headrace: error:") == 1
    assert expected in text
    assert "Traceback" not in text and "and also" not in text


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_run_is_refused_before_any_work(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """I20 and its kin: exit code 2, one error that says what and where, and no folder is made."""
    data, expected = wrong(tmp_path, case)
    code = main(["train", str(write(tmp_path, data))])
    captured = capsys.readouterr()
    assert_one_error(code, captured.err, expected)
    assert not (tmp_path / "run").exists()


def test_a_missing_run_file_and_a_negative_override(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", str(tmp_path / "rum.toml")])
    assert_one_error(code, capsys.readouterr().err, "no such file")
    toml = write_toml(tmp_path / "run.toml", small_data(tmp_path, "run"))
    code = main(["train", str(toml), "--rollout.group_size", "-4"])
    assert_one_error(code, capsys.readouterr().err, "rollout.group_size")
    assert not (tmp_path / "run").exists()


def test_the_folder_of_another_run_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Failure: two runs in one folder. Nothing in it changes, and the message names the way out."""
    toml = write_toml(tmp_path / "run.toml", small_data(tmp_path, "run", trainer={"num_batches": 4}))
    status, output = run_to_end("train", str(toml), log=tmp_path / "log")
    assert status == 0, output
    before = {f: (f.stat().st_mtime_ns, f.stat().st_size) for f in sorted((tmp_path / "run").rglob("*"))}
    code = main(["train", str(toml)])
    assert_one_error(code, capsys.readouterr().err, "resume")
    assert {f: (f.stat().st_mtime_ns, f.stat().st_size) for f in sorted((tmp_path / "run").rglob("*"))} == before


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    toml = write_toml(tmp_path / "run.toml", small_data(tmp_path, "run"))
    code = main(["train", str(toml)])
    assert_one_error(code, capsys.readouterr().err, str(tmp_path / "run"))
    assert [f.name for f in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_resume_with_other_tasks_or_an_override_that_would_make_it_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I11: a resume must meet the tasks that the run was started with."""
    rows = [json.dumps({"prompt": w, "answer": w[::-1]}) for w in ("abcde", "bcdef", "cdefg", "defgh")]
    tasks = jsonl(tmp_path, *rows)
    short = {"num_batches": 2, "schedule": {"warmup_steps": 1}}
    data = small_data(tmp_path, "run", trainer=short, checkpoint={"every": 1})
    data["tasks"] = {**tasks, "path": str(tmp_path / "tasks.jsonl")}
    status, output = run_to_end("train", str(write(tmp_path, data)), log=tmp_path / "log")
    assert status == 0, output
    code = main(["resume", str(tmp_path / "run"), "--trainer.learning_rate", "1"])
    assert_one_error(code, capsys.readouterr().err, "--trainer.learning_rate cannot change when a run goes on")
    jsonl(tmp_path, *rows[:-1], json.dumps({"prompt": "efgha", "answer": "ahgfe"}))
    code = main(["resume", str(tmp_path / "run"), "--trainer.num_batches", "4"])
    assert_one_error(code, capsys.readouterr().err, "the tasks are not those that the run")
    code = main(["resume", str(tmp_path)])
    assert_one_error(code, capsys.readouterr().err, "is not a run's folder")


def test_the_command_as_the_shell_starts_it(tmp_path: Path) -> None:
    """The same through a process of its own, where nothing is imported yet."""
    data, expected = wrong(tmp_path, "misspelt key")
    done = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "train", str(write(tmp_path, data))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert_one_error(done.returncode, done.stderr, expected)
    assert done.stdout == "" and not (tmp_path / "run").exists()
