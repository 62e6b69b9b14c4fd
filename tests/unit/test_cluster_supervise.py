"""The supervisor: which ends are started again, how often, and from where (I11, F89)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.journal import read_journal
from headrace.config.cluster import RayCluster
from headrace.config.load import restore_config
from headrace.config.schema import RunConfig
from headrace.supervise import Ending, GaveUp, RayController, supervise

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


# --------------------------------------------------------------------------------------- an actor on Ray


class FakeRay:
    """References are names; ``done`` says what those that ended came to."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        self.done: dict[str, Any] = {}
        self.calls: list[str] = []
        self.killed = 0
        self.make = self.invoke = self

    def remote(self, *args: Any) -> str:
        name = "make" if args[0].startswith("headrace.") else args[0]
        self.calls.append(name)
        return name

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return [r for r in references if r in self.done], [r for r in references if r not in self.done]

    def get(self, reference: str, timeout: float) -> Any:
        found = self.done[reference]
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr("headrace.supervise.connect", lambda *_, **__: made)
    monkeypatch.setattr("headrace.supervise.hosted", lambda *_: made)
    return made


def controller(folder: Path) -> RayController:
    cluster = RayCluster(num_reward_workers=1, start_deadline_s=60.0)
    return RayController(config(folder), cluster, None, 0)


def test_a_controller_on_ray_runs_once_it_is_made_and_its_end_is_told(ray: FakeRay, tmp_path: Path) -> None:
    made = controller(tmp_path)
    assert made.poll() is None and ray.calls == ["make"]
    ray.done["make"] = ("value", (7, "node"))
    assert made.poll() is None and ray.calls == ["make", "run"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    assert made.poll() is None
    assert [line["pid"] for line in read_journal(tmp_path / "run")] == [7]
    ray.done["run"] = ("value", {"ended": "lost", "message": "trainer rank 1 died"})
    assert made.poll() == Ending("lost", "trainer rank 1 died") and ray.killed == 1


def test_a_controller_whose_actor_died_is_lost(ray: FakeRay, tmp_path: Path) -> None:
    made = controller(tmp_path)
    ray.done["make"] = ray.exceptions.RayError("The actor died\nits node is gone")
    assert made.poll() == Ending("lost", "the controller controller-0 died: The actor died its node is gone")


def test_a_controller_that_no_node_has_room_for_is_lost_in_time(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I19."""
    now = [0.0]
    monkeypatch.setattr("headrace.supervise.time.monotonic", lambda: now[0])
    made = controller(tmp_path)
    assert made.poll() is None
    now[0] = 61.0
    ending = made.poll()
    assert ending is not None and ending.kind == "lost" and "was not there after 60 s" in ending.message


def test_a_controller_that_does_not_answer_is_lost_in_time(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I19: whatever the run does, its process answers heartbeats."""
    now = [0.0]
    monkeypatch.setattr("headrace.supervise.time.monotonic", lambda: now[0])
    made = controller(tmp_path)
    ray.done["make"] = ("value", (7, "node"))
    assert made.poll() is None
    for now[0] in (6.0, 7.0):
        assert made.poll() is None
    assert ray.calls[-1] == "heartbeat"
    ray.done["heartbeat"] = ("value", 3)
    assert made.poll() is None
    del ray.done["heartbeat"]
    for now[0] in (12.0, 140.0):
        ending = made.poll()
    assert ending is not None and ending.kind == "lost" and "did not answer for 120 s" in ending.message


def test_ctrl_c_reaches_a_controller_on_ray_also_before_it_runs_and_the_second_ends_it(
    ray: FakeRay, tmp_path: Path
) -> None:
    made = controller(tmp_path)
    made.stop()
    ray.done["make"] = ("value", (7, "node"))
    assert made.poll() is None and ray.calls == ["make", "run", "stop"]
    made.stop()
    ending = made.poll()
    assert ending is not None and ending.kind == "stopped" and ray.killed == 1
