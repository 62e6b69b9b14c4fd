"""``headrace sft``, ``reward-model`` and ``dpo`` on the command line: errors before work, dry runs, resume."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headrace.cli.main import main
from headrace.config.load import restore_as
from headrace.config.offline import DpoConfig, RewardModelConfig, SftConfig
from headrace.errors import ConfigError
from headrace.model.load import ModelError, load_model
from headrace.offline import run as offline_run
from headrace.offline.dpo import train_dpo
from headrace.offline.reward_model import train_reward_model
from headrace.offline.sft import train_sft
from headrace.record.metrics import read_metrics
from headrace.testing import SMALL_ALPHABET, save_tiny

TRAIN = {
    "sft": (SftConfig, train_sft),
    "reward-model": (RewardModelConfig, train_reward_model),
    "dpo": (DpoConfig, train_dpo),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return save_tiny(path, alphabet=SMALL_ALPHABET, hidden_size=16, num_layers=1, num_heads=2, max_context=64)


def rows(path: Path, command: str, *more: dict[str, Any]) -> Path:
    pairs = [{"prompt": f"p{i}", "chosen": "ab" * (i % 3 + 1), "rejected": "c"} for i in range(40)]
    conversations = [
        {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["chosen"]}]}
        for p in pairs
    ]
    written = [*(conversations if command == "sft" else pairs), *more]
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


def data(tmp_path: Path, model: Path, command: str, name: str = "run", **sections: Any) -> dict[str, Any]:
    return {
        "name": name,
        "output_dir": str(tmp_path),
        "model": {"path": str(model)},
        "data": {"path": str(rows(tmp_path / f"{command}.jsonl", command))},
        "trainer": {"batch_size": 8, "num_epochs": 2, "learning_rate": 1e-3, "num_threads": 1},
        "checkpoint": {"every": 3},
        **sections,
    }


def toml(tmp_path: Path, model: Path, file: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(f'output_dir = "{tmp_path}"\n[model]\npath = "{model}"\n[data]\npath = "{file}"\n')
    return path


def test_equal_sides_are_one_error_and_nothing_is_made(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 3, end criterion 7."""
    file = rows(tmp_path / "pairs.jsonl", "dpo", {"prompt": "x", "chosen": "same", "rejected": "same"})
    for command in ("reward-model", "dpo"):
        assert main([command, str(toml(tmp_path, model, file)), "--name", "made"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "pairs.jsonl, line 41: chosen and rejected are equal" in error
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.lerning_rate", "1e-3"], "did you mean trainer.learning_rate"),
        (["--trainer.batch_size", "0"], "trainer.batch_size"),
        (["--trainer.schedule.final_fraction", "0.1"], "final_fraction has no effect"),
        (["--trainer.schedule.warmup_steps", "99"], "the full learning rate would never be reached"),
        (["--data.path", "nowhere.jsonl"], "no such file"),
        (["--dpo.beta", "1"], "dpo"),
    ],
)
def test_wrong_options_are_errors(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    """I20."""
    file = rows(tmp_path / "rows.jsonl", "sft")
    assert main(["sft", str(toml(tmp_path, model, file)), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "offline").exists()


@pytest.mark.parametrize("command", list(TRAIN))
def test_dry_run_reads_the_rows_and_writes_nothing(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = rows(tmp_path / "rows.jsonl", command)
    assert main([command, str(toml(tmp_path, model, file)), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "[trainer]" in out and "rows to train on" in out
    assert not (tmp_path / "offline").exists()


def test_margin_has_no_effect_in_dpo(tmp_path: Path, model: Path) -> None:
    config = data(tmp_path, model, "dpo", name="x")
    rows(tmp_path / "dpo.jsonl", "dpo", *({"prompt": f"q{i}", "chosen": "a", "rejected": "b", "margin": 1.0}
                                           for i in range(9)))  # fmt: skip
    with pytest.raises(ConfigError, match="margin has no effect in DPO"):
        train_dpo(restore_as(DpoConfig, config, "x"))


@pytest.mark.parametrize("command", list(TRAIN))
def test_resume_equals_the_uninterrupted_run(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """I11, I12: killed after a step that no checkpoint holds, then resumed: the same weights, bit for bit, and one
    metrics line for each step."""
    schema, train = TRAIN[command]
    whole = train(restore_as(schema, data(tmp_path, model, command, "whole"), "x"), tell=lambda text: None)
    config = restore_as(schema, data(tmp_path, model, command, "killed"), "x")
    plain = offline_run.OfflineTrainer.train_step

    def dies(self: Any, *args: Any) -> dict[str, float]:
        if self.step == 5:
            raise KeyboardInterrupt
        return plain(self, *args)

    monkeypatch.setattr(offline_run.OfflineTrainer, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        train(config, tell=lambda text: None)
    monkeypatch.undo()
    assert not (tmp_path / "killed" / "export").exists()
    with pytest.raises(ConfigError, match="go on with --resume"):
        train(config, tell=lambda text: None)
    other = config.model_copy(update={"seed": 7})
    with pytest.raises(ConfigError, match="seed is 7 here and 0 in the run"):
        train(other, resume=True, tell=lambda text: None)
    resumed = train(config, resume=True, tell=lambda text: None)
    assert resumed.num_steps == whole.num_steps == 10
    assert [line["update"] for line in read_metrics(tmp_path / "killed")] == list(range(1, 11))
    for file in ("model.safetensors", "reward_head.safetensors"):
        if (whole.export / file).exists():
            first, second = load_file(whole.export / file), load_file(resumed.export / file)
            assert all(bool((first[name] == second[name]).all()) for name in first)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_at_a_checkpoint(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    """A time limit's SIGTERM is told, costs no finished step, and the handlers are as before; so is Ctrl-C."""
    config = restore_as(SftConfig, data(tmp_path, model, "sft"), "x")
    plain, handler = offline_run.OfflineTrainer.train_step, signal.getsignal(number)

    def interrupted(self: Any, *args: Any) -> dict[str, float]:
        if self.step == 4:
            os.kill(os.getpid(), number)
        return plain(self, *args)

    monkeypatch.setattr(offline_run.OfflineTrainer, "train_step", interrupted)
    stopped = train_sft(config, tell=lambda text: None)
    monkeypatch.undo()
    assert stopped.stopped and stopped.num_steps == 5 and not stopped.export.exists()
    assert f"{signal.Signals(number).name}: stopping after the step" in capfd.readouterr().err
    assert signal.getsignal(number) is handler
    assert train_sft(config, resume=True, tell=lambda text: None).num_steps == 10


def test_an_interrupted_command_says_how_to_go_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its overrides: without them it would be another run's folder."""
    plain = offline_run.OfflineTrainer.train_step

    def interrupted(self: Any, *args: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)

    monkeypatch.setattr(offline_run.OfflineTrainer, "train_step", interrupted)
    file = toml(tmp_path, model, rows(tmp_path / "rows.jsonl", "sft"))
    assert main(["sft", str(file), "--name", "mine", "--trainer.num_threads", "1"]) == 130
    monkeypatch.undo()
    out = capsys.readouterr().out
    assert out.endswith(f"go on with: headrace sft {file} --name mine --trainer.num_threads 1 --resume\n")
    arguments = out.rpartition("headrace ")[2].split()
    assert main(arguments) == 0 and (tmp_path / "mine" / "export").is_dir()


def test_what_a_killed_process_has_said_is_not_lost(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a pipe or a file the text is buffered; it must be written before the next step begins."""
    written = io.BytesIO()
    with io.TextIOWrapper(io.BufferedWriter(written), write_through=False) as out:  # type: ignore[arg-type]
        monkeypatch.setattr(sys, "stdout", out)
        offline_run.say("at the start: nll 4")
        monkeypatch.undo()
        assert written.getvalue() == b"at the start: nll 4\n"


def test_changed_rows_cannot_be_resumed(tmp_path: Path, model: Path) -> None:
    config = restore_as(SftConfig, data(tmp_path, model, "sft"), "x")
    train_sft(config, tell=lambda text: None)
    extra = {"messages": [{"role": "user", "content": "new"}, {"role": "assistant", "content": "row"}]}
    rows(tmp_path / "sft.jsonl", "sft", extra)
    with pytest.raises(ConfigError, match="the rows are not those"):
        train_sft(config, resume=True, tell=lambda text: None)


def test_another_kind_of_run_cannot_be_resumed(tmp_path: Path, model: Path) -> None:
    train_sft(restore_as(SftConfig, data(tmp_path, model, "sft"), "x"), tell=lambda text: None)
    with pytest.raises(ConfigError, match="no run of headrace dpo"):
        train_dpo(restore_as(DpoConfig, data(tmp_path, model, "dpo"), "x"), resume=True)


def test_sft_exports_a_plain_model(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command; what it exports loads, LoRA merged, and differs from the start."""
    file = rows(tmp_path / "rows.jsonl", "sft")
    flags = ["--trainer.num_threads", "1", "--trainer.learning_rate", "1e-2", "--trainer.batch_size", "8"]
    assert main(["sft", str(toml(tmp_path, model, file)), *flags, "--model.lora.rank", "2"]) == 0
    assert f"exported: {tmp_path / 'offline' / 'export'}" in capsys.readouterr().out
    before, after = load_model(model), load_model(tmp_path / "offline" / "export")
    changed = [
        name
        for (name, a), (_, b) in zip(before.model.named_parameters(), after.model.named_parameters(), strict=True)
        if not bool((a == b).all())
    ]
    assert changed and all("proj" in name for name in changed)


@pytest.mark.parametrize("command", list(TRAIN))
@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["full", "lora"])
def test_model_export_writes_what_the_run_exported(
    tmp_path: Path, model: Path, command: str, lora: dict[str, int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """``headrace model export`` of the run gives its own export again, file by file; of a checkpoint an earlier one."""
    schema, train = TRAIN[command]
    config = data(tmp_path, model, command, checkpoint={"every": 5, "keep": 9})
    config["model"] |= {"lora": lora} if lora else {}
    own = train(restore_as(schema, config, "x"), tell=lambda text: None).export
    again, early = tmp_path / "out" / "again", tmp_path / "out" / "early"
    assert main(["model", "export", str(tmp_path / "run"), str(again)]) == 0
    assert main(["model", "export", str(tmp_path / "run" / "checkpoints" / "step-5"), str(early)]) == 0
    names = {file.name for file in own.iterdir()} - {"calibration.png"}
    assert names == {file.name for file in again.iterdir()} - {"calibration.png"} and "model.safetensors" in names
    assert ("reward_head.safetensors" in names) == (command == "reward-model")
    assert [name for name in sorted(names) if (own / name).read_bytes() != (again / name).read_bytes()] == []
    assert (own / "model.safetensors").read_bytes() != (early / "model.safetensors").read_bytes()
    assert main(["model", "export", str(tmp_path / "run"), str(again)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_reward_model_is_not_exported_with_other_pairs(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scale and probes would be of another data set."""
    config = data(tmp_path, model, "reward-model")
    train_reward_model(restore_as(RewardModelConfig, config, "x"), tell=lambda text: None)
    rows(tmp_path / "reward-model.jsonl", "reward-model", {"prompt": "x", "chosen": "a", "rejected": "b"})
    assert main(["model", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "fingerprints differ" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_conversation_beyond_the_context_is_refused(tmp_path: Path, model: Path) -> None:
    config = data(tmp_path, model, "sft", name="long")
    long = {"messages": [{"role": "user", "content": "a" * 70}, {"role": "assistant", "content": "b"}]}
    rows(tmp_path / "sft.jsonl", "sft", *[long] * 9)
    with pytest.raises(ConfigError, match=r"sft\.jsonl, line 41: the example has 7\d tokens.*context of 64"):
        train_sft(restore_as(SftConfig, config, "x"))
    assert not (tmp_path / "long").exists()


EXAMPLE = Path(__file__).parents[2] / "examples" / "rlhf"


def test_example_files_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the documentation tells a newcomer to run loads, and every option in it has an effect (I20)."""
    from headrace.config.checks import check_config
    from headrace.config.load import load_as, load_config
    from headrace.config.offline import check_offline

    data = tmp_path / "runs" / "rlhf"
    for folder in ("start", "sft/export", "reward-model/export"):
        (data / folder).mkdir(parents=True)
    rows(data / "conversations.jsonl", "sft")
    rows(data / "pairs.jsonl", "dpo")
    monkeypatch.chdir(tmp_path)
    for name, schema in (("sft", SftConfig), ("reward_model", RewardModelConfig), ("dpo", DpoConfig)):
        check_offline(load_as(schema, EXAMPLE / f"{name}.toml"))
    for name in ("policy", "gold"):
        check_config(load_config(EXAMPLE / f"{name}.toml"))


def test_other_commands_on_a_run_without_rollouts(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``inspect`` summarises it; ``resume`` and ``eval`` say what to do instead."""
    config = data(tmp_path, model, "sft")
    train_sft(restore_as(SftConfig, config, "x"), tell=lambda text: None)
    run = str(tmp_path / "run")
    assert main(["inspect", run]) == 0
    out = capsys.readouterr().out
    assert "headrace sft" in out and "10 optimizer steps" in out and "eval/nll" in out and f"{run}/export" in out
    assert main(["resume", run]) == 2
    assert "headrace sft FILE.TOML --resume" in capsys.readouterr().err
    assert main(["eval", run, "--tasks", config["data"]["path"]]) == 2
    assert f"{run}/export" in capsys.readouterr().err


def test_the_device_is_the_models(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I20: model.device acts here as in a run of the loop."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    chosen = data(tmp_path, model, "sft")
    chosen["model"]["device"] = "cuda"
    config = restore_as(SftConfig, chosen, "the test")
    with pytest.raises(ModelError, match=r'model\.device is "cuda"'):
        train_sft(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("end", "status", "expected"),
    [
        ("kill -9 $$", 2, "the stage 'headrace sft' was killed by SIGKILL (signal 9): most likely the system was out "
         "of memory; lower trainer.max_microbatch_tokens or trainer.batch_size in its file"),
        ("kill -15 $$", 2, "the stage 'headrace sft' was killed by SIGTERM (signal 15)"),
        ("exit 2", 2, "the stage 'headrace sft' exited with status 2, with the message above"),
        ("exit 130", 130, "the stage 'headrace sft' was interrupted"),
    ],
)  # fmt: skip
def test_the_example_says_how_a_stage_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: int, expected: str
) -> None:
    """A stage that is killed says nothing; its driver names the signal, what to do, and the command by itself."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    example = runpy.run_path(str(EXAMPLE / "run.py"))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{end}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(example["StageFailed"]) as failed:
        example["run_stage"]("sft", "a file.toml", "--seed", "1")
    assert str(failed.value).startswith(expected) and failed.value.exit_code == status
    assert "headrace sft 'a file.toml' --seed 1" in str(failed.value)
