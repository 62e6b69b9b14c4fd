"""``headrace reward`` as a user runs it."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from headrace.cli.reward import add_parser


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["reward", *arguments])
    status: int = args.handler(args)
    return status


def test_score_prints_one_score_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 2: one Score as JSON, exit status 0; a wrong answer is a score, too."""
    for reply, value in ((r"so \boxed{\frac{1}{2}}", 1.0), (r"\boxed{2}", 0.0)):
        assert run("score", "math", "--gold", "0.5", "--reply", reply) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["value"] == value
        assert printed["components"] == dict.fromkeys(("no_answer", "malformed", "unparsable", "unverifiable"), 0.0)


def test_score_prints_a_classed_error_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """I14: an error is not a reward; exit status 1, and no value anywhere."""
    assert run("score", "last_number", "--gold", "twelve", "--reply", "12") == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["error"]["error_class"] == "missing_answer" and "value" not in printed
    assert printed["error"]["reward"] == "last_number"


def test_options_are_read_as_json_or_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("score", "exact", "--gold", "A", "--reply", "a", "--option", "ignore_case=true") == 0
    assert json.loads(capsys.readouterr().out)["value"] == 1.0
    assert run("score", "format", "--reply", "x7", "--option", r"pattern=x\d") == 0
    assert json.loads(capsys.readouterr().out)["value"] == 1.0


def test_reply_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("12\n"))
    assert run("score", "exact", "--gold", "12", "--reply", "-") == 0
    assert json.loads(capsys.readouterr().out)["value"] == 1.0


def test_a_function_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def half(reply, task): return 0.5 if task.metadata['k'] == 3 else 0.0\n")
    assert run("score", f"{path}:half", "--reply", "x", "--metadata", '{"k": 3}') == 0
    assert json.loads(capsys.readouterr().out) == {"value": 0.5, "components": {}}
    assert run("check", f"{path}:half") == 0
    assert run("check", f"{path}:hlaf") == 1
    assert "did you mean 'half'" in capsys.readouterr().err


def test_what_the_user_must_mend_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (("score", "mth", "--reply", "1"), "did you mean 'math'"),
        (("score", "exact", "--reply", "1", "--option", "x"), "must be KEY=VALUE"),
        (("score", "exact", "--reply", "1", "--metadata", "{"), "--metadata is not JSON"),
        (("score", "exact", "--reply", "1", "--metadata", "[]"), "must be a JSON object"),
        (("score", "math", "--reply", "1", "--deadline", "0"), "must be above 0"),
        (("check", "format", "--option", "pattern=("), "not a regular expression"),
    ):
        assert run(*arguments) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_check_runs_the_self_test_and_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    """I15."""
    assert run("check", "math") == 0
    assert json.loads(capsys.readouterr().out) == {"reward": "math", "self_test": "passed"}
    assert run("list") == 0
    assert "last_number" in capsys.readouterr().out
