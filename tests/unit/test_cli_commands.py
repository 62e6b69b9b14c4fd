"""The command line: exit codes, messages without traceback, overrides, and what is imported when."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli.common import TOP_LEVEL_KEYS, split_overrides
from headrace.cli.main import main
from headrace.config.base import Section
from headrace.config.load import load_config, resolved
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.record.recorded_config import recorded_config
from headrace.record.redact import redact

RUN = """
name = "demo"
[model]
path = "smollm2-135m"
[tasks]
type = "arithmetic"
[[rewards]]
type = "last_number"
[trainer]
learning_rate = 2e-5
"""

Loop = list[tuple[RunConfig, Path | None]]


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    path = tmp_path / "run.toml"
    path.write_text(RUN, encoding="utf-8")
    return path


def result(config: RunConfig, *, stopped: bool = False) -> Any:
    """What ``train`` returns, as far as the command reads it."""
    return SimpleNamespace(
        run_dir=config.run_dir, report=config.run_dir / "report.html", num_updates=5, stopped=stopped
    )


class RunFailed(HeadraceError):
    """As ``headrace.run`` has it."""

    part_lost = False


def fake_loop(monkeypatch: pytest.MonkeyPatch, behaviour: Callable[[RunConfig], Any] = result) -> Loop:
    """Replaces ``headrace.run`` (and torch with it) by a record of how ``train`` was called."""
    calls: Loop = []

    def train(config: RunConfig, *, resume_from: Path | None = None) -> Any:
        calls.append((config, resume_from))
        return behaviour(config)

    monkeypatch.setitem(sys.modules, "headrace.run", SimpleNamespace(train=train, RunFailed=RunFailed))
    return calls


def record_run(run_dir: Path, config: RunConfig) -> None:
    run_dir.mkdir(parents=True)
    info = {
        "schema_version": 1,
        "name": config.name,
        "config": redact(resolved(config)),
        "packages": {"headrace": "0.1.0"},
        "created_unix_s": 0.0,
    }
    (run_dir / "run.json").write_text(json.dumps(info), encoding="utf-8")


# ---------------------------------------------------------------------------------------------- overrides


def test_overrides_are_taken_off_wherever_they_stand() -> None:
    rest, overrides = split_overrides(
        ["train", "--trainer.num_batches", "3", "run.toml", "--rollout.group_size=-4", "--seed", "7", "--dry-run"]
    )
    assert rest == ["train", "run.toml", "--dry-run"]
    assert overrides == [("trainer.num_batches", "3"), ("rollout.group_size", "-4"), ("seed", "7")]


def test_override_values_may_be_negative_empty_or_hold_an_equals_sign() -> None:
    arguments = ["--a.b", "-1", "--a.c=", "--a.d=x=y", "--rewards.0.options.text=two\nlines"]
    assert split_overrides(arguments) == (
        [],
        [("a.b", "-1"), ("a.c", ""), ("a.d", "x=y"), ("rewards.0.options.text", "two\nlines")],
    )


@pytest.mark.parametrize("arguments", [["--a.b"], ["--a.b", "--a.c", "3"]])
def test_override_without_value_is_an_error(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--a\.b needs a value"):
        split_overrides(arguments)


def test_top_level_keys_are_those_of_the_schema() -> None:
    """A new key outside sections must get its flag."""
    sections = {
        name
        for name, field in RunConfig.model_fields.items()
        if name
        in ("tasks", "rewards", "gold", "critic", "supervised_data", "teacher", "engine", "cluster", "fleet", "launch")
        or (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    }
    assert set(TOP_LEVEL_KEYS) == set(RunConfig.model_fields) - sections


# --------------------------------------------------------------------------------------- train and resume


def test_train_hands_the_configuration_with_overrides_to_the_loop(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fake_loop(monkeypatch)
    assert main(["train", "--trainer.num_batches", "3", str(run_toml), "--name=other"]) == 0
    ((config, resume_from),) = calls
    assert (config.trainer.num_batches, config.name, resume_from) == (3, "other", None)
    assert config.trainer.learning_rate == 2e-5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rollout.group_size", "-4"], "rollout.group_size = -4: must be greater than or equal to 1"),
        (["--trainer.learnig_rate", "1"], "did you mean trainer.learning_rate?"),
        (["--evaluation.greedy", "true"], "evaluation.greedy has no effect"),
        (["--tasks.type", "file", "--tasks.path", "absent.jsonl"], "no such file"),
    ],
)
def test_wrong_input_ends_in_one_message_before_any_work(
    run_toml: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    """I20 and end criterion 6 of issue 2: exit code 2, one clear error, no traceback, the loop is not reached."""
    calls = fake_loop(monkeypatch)
    assert main(["train", str(run_toml), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("headrace: error: ")
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert calls == []


def test_any_headrace_error_is_a_message_and_anything_else_keeps_its_traceback(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EngineDiedError(HeadraceError):
        pass

    def die(_: RunConfig) -> None:
        raise EngineDiedError("the engine died; look at its log")

    fake_loop(monkeypatch, die)
    assert main(["train", str(run_toml)]) == 2
    assert capsys.readouterr().err == "headrace: error: the engine died; look at its log\n"

    def defect(_: RunConfig) -> None:
        raise ZeroDivisionError

    fake_loop(monkeypatch, defect)
    with pytest.raises(ZeroDivisionError):
        main(["train", str(run_toml)])


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_ctrl_c_exits_130_and_says_how_to_resume(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_checkpoints: bool
) -> None:
    def interrupt(config: RunConfig) -> None:
        if has_checkpoints:
            (config.run_dir / "checkpoints").mkdir(parents=True)
        raise KeyboardInterrupt

    fake_loop(monkeypatch, interrupt)
    assert main(["train", str(run_toml)]) == 130
    message = capsys.readouterr().err
    assert ("headrace resume" in message) == has_checkpoints
    if has_checkpoints:
        assert message == "headrace: interrupted; go on with: headrace resume runs/demo\n"


def test_run_that_ctrl_c_stopped_at_a_safe_point_exits_130_too(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_loop(monkeypatch, lambda config: result(config, stopped=True))
    assert main(["train", str(run_toml)]) == 130
    out = capsys.readouterr().out
    assert "report: runs/demo/report.html" in out
    assert "stopped after 5 updates; go on with: headrace resume runs/demo" in out


def test_resume_restores_the_recorded_configuration_where_the_folder_lies_now(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved = tmp_path / "moved" / "elsewhere"
    record_run(moved, load_config(run_toml))
    calls = fake_loop(monkeypatch)
    assert main(["resume", "moved/elsewhere", "--trainer.num_batches", "200"]) == 0
    ((config, resume_from),) = calls
    assert config.run_dir == moved == resume_from
    assert (config.trainer.num_batches, config.trainer.learning_rate) == (200, 2e-5)


def test_resume_refuses_to_become_another_run(run_toml: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    record_run(run_dir, load_config(run_toml))
    with pytest.raises(ConfigError, match=r"--trainer\.learning_rate cannot change when a run goes on"):
        recorded_config(run_dir, [("trainer.learning_rate", "1")])
    assert recorded_config(run_dir, [("parallel.tp", "2")]).parallel.tp == 2, "the layout is not what makes a run"


def test_resume_asks_for_secrets_that_the_record_does_not_hold(run_toml: Path, tmp_path: Path) -> None:
    config = load_config(
        run_toml, [("monitor.sinks", '["wandb"]'), ("monitor.sink_options", '{wandb = {api_key = "sesame"}}')]
    )
    run_dir = tmp_path / "runs" / "demo"
    record_run(run_dir, config)
    with pytest.raises(ConfigError, match=r"give it again with --monitor\.sink_options\.wandb\.api_key VALUE"):
        recorded_config(run_dir)
    restored = recorded_config(run_dir, [("monitor.sink_options.wandb.api_key", "sesame")])
    assert restored.monitor.sink_options == {"wandb": {"api_key": "sesame"}}


def test_resume_of_no_run_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- dry run and inspect


def test_dry_run_prints_configuration_and_plan_and_starts_nothing(
    run_toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls = fake_loop(monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", str(run_toml), "--dry-run", "--rollout.group_size", "4", "--trainer.num_batches=10"]) == 0
    out = capsys.readouterr().out
    assert calls == [] and sorted(tmp_path.rglob("*")) == before
    toml, plan = out.split("# What would run")
    again = tmp_path / "again.toml"
    again.write_text(toml, encoding="utf-8")
    assert load_config(again).rollout.group_size == 4
    # 8 groups x 4 x 128 tokens; of the 36 unordered pairs of 2..9, 9 are held out, and 3 x 4 is another task than 4 x 3
    assert "8 groups x 4 = 32 episodes, at most 4,096 sampled tokens" in plan
    assert "10 rollout batches = 320 episodes" in plan
    assert "1 optimizer steps a batch, 10 in all; learning rate 2e-05, constant" in plan
    assert "synchronous" in plan and "metrics.jsonl" in plan and "every 10 batches and at the end" in plan
    assert "MISSING: model 'smollm2-135m'" in plan and "headrace model fetch smollm2-135m" in plan


def test_dry_run_hides_secrets_and_warns_of_a_taken_folder(
    run_toml: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record_run(tmp_path / "runs" / "demo", load_config(run_toml))
    options = ["--monitor.sinks", '["wandb"]', "--monitor.sink_options", '{wandb = {api_key = "sesame"}}']
    assert main(["train", str(run_toml), "--dry-run", *options]) == 0
    out = capsys.readouterr().out
    assert "sesame" not in out and "api_key" in out
    assert "ALREADY HOLDS A RUN" in out


def test_inspect_summarises_a_run(run_toml: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    record_run(run_dir, load_config(run_toml))
    lines = [
        {"update": 1, "step": 1, "lineage": 0, "reward/mean": 0.25, "eval/sampled_accuracy": 0.5},
        {"update": 2, "step": 2, "lineage": 0, "reward/mean": 0.75},
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert main(["inspect", str(run_dir)]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["progress"] == "2 of 100 rollout batches"
    assert shown["reward/mean"] == "0.75"
    assert shown["eval/sampled_accuracy"] == "0.5 (batch 1)"
    assert shown["checkpoints"] == "none"


def test_report_is_written_again_from_the_record(run_toml: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "demo"
    record_run(run_dir, load_config(run_toml))
    assert main(["report", str(run_dir)]) == 0
    assert "<html" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert (run_dir / "curve.png").stat().st_size > 0


# ------------------------------------------------------------------------------------------------- start-up


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """``headrace --help`` answers within 0.5 s of CPU time, whatever is installed."""
    code = (
        "import sys, time\n"
        "from headrace.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print('CPU', time.process_time())\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("train", "resume", "eval", "inspect", "report", "model", "reward"):
        assert f"\n    {command} " in done.stdout
    # CPU time, since the machine may be busy with other things; wall time bounds it from above where it is idle.
    assert float(done.stdout.rsplit("CPU ", 1)[1]) < 0.5 or time.monotonic() - started < 0.5


@pytest.mark.parametrize(
    "command", [["train"], ["resume"], ["eval"], ["inspect"], ["report"], ["model"], ["model", "fetch"]]
)
def test_each_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out) > 100


def test_unknown_flag_and_no_command_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["train"], ["train", "run.toml", "--dry"], ["nonsense"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert "usage:" in capsys.readouterr().err
