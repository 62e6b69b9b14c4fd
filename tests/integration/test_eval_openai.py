"""``headrace eval`` of models that somebody else serves, end to end over loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from http_loopback import Answer, in_thread
from openai_scripted_server import ScriptedOpenAi, serving

from headrace.cli.main import main

RUN = """
[model]
path = "not-used"
[engine]
type = "openai"
url = "{url}"
start_deadline_s = 1.0
{engine}
[tasks]
type = "arithmetic"
[[rewards]]
type = "last_number"
[sampling]
max_new_tokens = 16
[evaluation]
num_tasks = 8
num_samples = 2
"""


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def tasks_file(folder: Path, url: str, engine: str = "") -> str:
    path = folder / "run.toml"
    path.write_text(RUN.format(url=url, engine=engine))
    return str(path)


def test_a_served_model_is_evaluated_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scores, counts and the paired comparison as for any model; no policy version, for none is known."""
    server = ScriptedOpenAi()
    with in_thread(lambda: serving(server)) as url:
        output = tmp_path / "result.json"
        file = tasks_file(tmp_path, url)
        assert main(["eval", "large", "--tasks", file, "--output", str(output)]) == 0
        assert main(["eval", "small", "--tasks", file, "--against", "large"]) == 0
    result = json.loads(output.read_text())
    scores = [attempt["score"] for task in result["tasks"] for attempt in task["sampled"]]
    assert scores == [1.0] * 16 and result["versions"] == []
    printed = capsys.readouterr().out
    assert "24/24" in printed and "large minus small" in printed
    first = server.bodies[:24]
    assert len({body["seed"] for body in first if body["temperature"] == 1.0}) == 16
    assert sum(body["temperature"] == 0.0 for body in first) == 8


def test_a_server_that_fails_leaves_holes_that_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error is not a reward: replies that never came are counted as missing, and the result is invalid."""

    def script(body: object, number: int) -> Answer | None:
        return Answer({"error": "no capacity"}, 400) if number % 4 == 0 else None

    with in_thread(lambda: serving(ScriptedOpenAi(script=script))) as url:
        main(["eval", "large", "--tasks", tasks_file(tmp_path, url)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "18/24" in printed and "INVALID large: 6 of 24" in printed and "no capacity" in printed


@pytest.mark.parametrize(
    ("name", "engine", "message"),
    [
        ("larg", "", "serves no model 'larg'; it lists small, large"),
        ("large", 'api_key_variable = "HEADRACE_NO_SUCH_KEY"', "HEADRACE_NO_SUCH_KEY, which is not set"),
        ("large", 'api_key_variable = "HEADRACE_WRONG_KEY"', "refused the key in $HEADRACE_WRONG_KEY"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_work(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    engine: str,
    message: str,
) -> None:
    monkeypatch.setenv("HEADRACE_WRONG_KEY", "sk-thewrongkey123")
    server = ScriptedOpenAi(key="right" if "WRONG" in engine else None)
    with in_thread(lambda: serving(server)) as url:
        assert main(["eval", name, "--tasks", tasks_file(tmp_path, url, engine)]) != 0
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert "sk-thewrongkey123" not in printed.err + printed.out
    assert not server.bodies


def test_a_checkpoint_is_not_on_somebody_elses_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a dead address is told with the address."""
    assert main(["eval", "large", "--tasks", tasks_file(tmp_path, "http://127.0.0.1:1/v1")]) != 0
    assert "nothing answers at http://127.0.0.1:1/v1/models" in capsys.readouterr().err


def test_the_same_file_cannot_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", tasks_file(tmp_path, "http://127.0.0.1:1/v1")]) != 0
    assert "cannot train: such a server takes and returns text" in capsys.readouterr().err
