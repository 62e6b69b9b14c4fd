"""The supervisor: which ends are started again, how often, and from where (I11, F89)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from headrace.config.load import restore_config
from headrace.config.schema import RunConfig
from headrace.supervise import Ending, GaveUp, supervise

LOST = Ending("lost", "the controller was killed by SIGKILL")
DONE = Ending("done", "the controller exited with status 0")


def config(folder: Path, restarts: int = 2) -> RunConfig:
    data = {
        "output_dir": str(folder),
        "model": {"path": "m"},
        "tasks": {"type": "arithmetic"},
        "rewards": [{"type": "exact"}],
        "cluster": {"controller_restarts": restarts},
    }
    return restore_config(data, "the test")


class Script:
    """Controllers that end as scripted; before it ends, each makes the checkpoint that ``makes`` says."""

    def __init__(self, run_dir: Path, endings: list[Ending], makes: list[int] | None = None) -> None:
        self.run_dir, self.endings = run_dir, endings
        self.makes = makes or [0] * len(endings)
        self.resumed_from: list[Path | None] = []
        self.stops = 0

    def start(self, resume_from: Path | None, number: int) -> Script:
        assert number == len(self.resumed_from)
        self.resumed_from.append(resume_from)
        self.polls = 0
        return self

    def poll(self) -> Ending | None:
        self.polls += 1
        if self.polls < 3:
            return None
        number = len(self.resumed_from) - 1
        self.run_dir.mkdir(exist_ok=True)
        (self.run_dir / "run.json").write_text("{}")
        if self.makes[number]:
            folder = self.run_dir / "checkpoints" / f"step-{self.makes[number]}"
            folder.mkdir(parents=True)
            (folder / "COMPLETE").touch()
        return self.endings[number]

    def stop(self) -> None:
        self.stops += 1


def supervised(script: Script, made: RunConfig) -> tuple[Ending, list[str], list[float]]:
    notes: list[str] = []
    slept: list[float] = []
    return supervise(made, script.start, note=notes.append, sleep=slept.append), notes, slept


def test_a_lost_controller_is_started_again_from_the_runs_folder(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", [LOST, LOST, DONE])
    ending, notes, _ = supervised(script, config(tmp_path))
    assert ending == DONE and script.resumed_from == [None, tmp_path / "run", tmp_path / "run"]
    assert len(notes) == 2 and "1 of 2 without a new checkpoint" in notes[0] and "SIGKILL" in notes[0]


@pytest.mark.parametrize("kind", ["done", "stopped", "failed"])
def test_every_other_end_is_the_end(kind: str, tmp_path: Path) -> None:
    """A mistake in the file, or a guard, is not mended by starting again."""
    ending = Ending(kind, "why")
    script = Script(tmp_path / "run", [ending])
    assert supervised(script, config(tmp_path))[0] == ending and len(script.resumed_from) == 1


def test_the_budget_ends_with_what_to_do(tmp_path: Path) -> None:
    """F89: not for ever; and restarts back off."""
    script = Script(tmp_path / "run", [LOST] * 3)
    slept: list[float] = []
    with pytest.raises(GaveUp) as caught:
        supervise(config(tmp_path), script.start, note=lambda _: None, sleep=slept.append)
    message = str(caught.value)
    assert "lost 3 times without a new checkpoint" in message and "cluster.controller_restarts = 2" in message
    assert f"headrace resume {tmp_path / 'run'}" in message and "SIGKILL" in message
    assert [s for s in slept if s != 0.2] == [0.0, 1.0]


def test_a_new_checkpoint_gives_the_budget_back(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", [LOST] * 6 + [DONE], [0, 0, 2, 0, 4, 0, 0])
    assert supervised(script, config(tmp_path))[0] == DONE


def test_no_restart_at_all_where_none_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(GaveUp):
        supervised(Script(tmp_path / "run", [LOST]), config(tmp_path, restarts=0))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_to_the_controller(number: signal.Signals, tmp_path: Path) -> None:
    """It ends at a safe point; the supervisor waits for that."""
    script = Script(tmp_path / "run", [Ending("stopped", "stopped after 3 updates")])
    sent = []

    def sleep(_: float) -> None:
        if not sent:
            sent.append(os.kill(os.getpid(), number))

    before = signal.getsignal(number)
    ending = supervise(config(tmp_path), script.start, note=lambda _: None, sleep=sleep)
    assert ending.kind == "stopped" and script.stops == 1
    assert signal.getsignal(number) is before
