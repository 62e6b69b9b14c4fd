"""The fan-out: a sink may refuse, fail, hang or lag, and training neither waits nor stops."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.config.schema import MonitorConfig
from headrace.monitor import sinks
from headrace.monitor.fanout import FanOut, SinkError, build_sinks

DEADLINE_S = 10.0


class Recorder:
    """A sink that keeps what it was given; ``fail`` decides which calls raise."""

    def __init__(self, fail: Callable[[int], bool] = lambda step: False) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.threads: set[str] = set()
        self.num_closed = 0
        self._fail = fail

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.threads.add(threading.current_thread().name)
        if self._fail(step):
            raise ConnectionError("tracker is down")
        self.lines.append((step, dict(metrics)))

    def close(self) -> None:
        self.num_closed += 1


class Hanging(Recorder):
    """Blocks in ``log`` until released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.release = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        super().log(step, metrics)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    sink = Hanging()
    yield sink
    sink.release.set()


def test_every_sink_gets_the_numbers_of_every_line_on_its_own_thread() -> None:
    """Lists and texts of a metrics line are not numbers; close writes what is queued first."""
    a, b = Recorder(), Recorder()
    fan_out = FanOut({"a": lambda: a, "b": lambda: b})
    for step in range(1, 4):
        fan_out.log(step, {"step": step, "reward/mean": 0.5, "ok": True, "health/alarms": ["x"]})
    assert [h.state for h in fan_out.close()] == ["closed", "closed"]
    assert a.lines == b.lines == [(s, {"reward/mean": 0.5, "ok": 1.0}) for s in (1, 2, 3)]
    assert (a.threads, b.threads) == ({"sink a"}, {"sink b"})
    assert all(h.is_ok and h.num_logged == 3 for h in fan_out.health())
    fan_out.close()
    assert (a.num_closed, b.num_closed) == (1, 1)


def test_a_sink_that_fails_later_is_counted_and_goes_on() -> None:
    """STYLE 11: monitors may not kill training; a single failure is shown, and the next lines still arrive."""
    flaky, good = Recorder(fail=lambda step: step == 2), Recorder()
    fan_out = FanOut({"flaky": lambda: flaky, "good": lambda: good})
    for step in range(1, 5):
        fan_out.log(step, {"x": 1.0})
    health = fan_out.close()[0]
    assert (health.num_logged, health.num_failed, health.num_dropped) == (3, 1, 0)
    assert not health.is_ok and "1 failed (last: ConnectionError: tracker is down)" in str(health)
    assert len(good.lines) == 4
    assert fan_out.metrics() == {"sinks/failed": 1.0, "sinks/dropped": 0.0, "sinks/disabled": 0.0}


def test_a_sink_that_keeps_failing_is_disabled_and_closed() -> None:
    """After MAX_FAILURES in a row it is left alone; the lines after that count as dropped."""
    dead = Recorder(fail=lambda step: True)
    fan_out = FanOut({"dead": lambda: dead}, max_failures=3)
    for step in range(10):
        fan_out.log(step, {"x": 1.0})
    health = fan_out.close()[0]
    assert (health.state, health.num_failed, health.num_dropped) == ("disabled", 3, 7)
    assert dead.num_closed == 1


def test_a_hanging_sink_blocks_nothing_and_its_drops_are_shown(hanging: Hanging) -> None:
    """I19: log returns at once, the other sink is served, the stall and the drops are visible, close has a deadline."""
    now_s = [0.0]
    good = Recorder()
    fan_out = FanOut({"hanging": lambda: hanging, "good": lambda: good}, queue_size=4, clock=lambda: now_s[0])
    fan_out.log(0, {"x": 0.0})
    assert hanging.entered.wait(DEADLINE_S)
    for step in range(1, 8):
        fan_out.log(step, {"x": 0.0})
    assert fan_out.health()[0].state == "ok"
    now_s[0] = 61.0
    stalled = fan_out.health()[0]
    assert (stalled.state, stalled.num_dropped) == ("stalled", 3)
    after_close = fan_out.close(deadline_s=0.05)
    assert (after_close[0].state, after_close[0].num_dropped) == ("stalled", 7)
    assert "7 dropped" in str(after_close[0])


def test_a_sink_that_cannot_start_fails_at_start_and_closes_the_others() -> None:
    """A tracker that was asked for and is not there must not be found out a day later."""
    good = Recorder()

    def refuse() -> Recorder:
        raise ConnectionError("no such host")

    with pytest.raises(ConnectionError, match="no such host"):
        FanOut({"good": lambda: good, "bad": refuse})
    assert good.num_closed == 1


def test_a_sink_that_hangs_at_start_has_a_deadline() -> None:
    """I19: the wait for the start is named and bounded."""
    release = threading.Event()

    def never() -> Recorder:
        assert release.wait(DEADLINE_S)
        return Recorder()

    with pytest.raises(SinkError, match=r"the sink 'slow' did not start within 0\.05 s"):
        FanOut({"slow": never}, start_deadline_s=0.05)
    release.set()


def start(tmp_path: Path, *names: str, **options: dict[str, Any]) -> FanOut:
    config = MonitorConfig(sinks=names, sink_options=options)
    return build_sinks(config, tmp_path, "run-1", {"trainer": {"learning_rate": 1e-5}, "seed": 0})


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("tensorbord",), {}, "no sink 'tensorbord'; did you mean 'tensorboard'"),
        (("xyz",), {}, "known are tensorboard, wandb"),
        (("wandb", "wandb"), {}, "names 'wandb' twice"),
        ((), {"wandb": {"mode": "offline"}}, r"sink_options.wandb has no effect.*which is empty.*I20"),
        (("tensorboard",), {"tensorboard": {"no_such": 1}}, "the sink 'tensorboard' could not start: TypeError"),
    ],
)
def test_a_wrong_sink_configuration_is_one_clear_error(
    tmp_path: Path, names: tuple[str, ...], options: dict[str, dict[str, Any]], message: str
) -> None:
    """I20: unknown names, and options without effect, end before any work."""
    with pytest.raises(SinkError, match=message):
        start(tmp_path, *names, **options)


@pytest.mark.parametrize("name", sorted(sinks.BUILT_IN))
def test_a_missing_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each built-in sink says which extra brings its package."""
    package = sinks.BUILT_IN[name].package
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)

    class Blocker:
        def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
            if fullname.split(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    with pytest.raises(SinkError, match=rf"needs the package {package}.*pip install 'headrace\[{name}\]'"):
        start(tmp_path, name)


def test_third_parties_add_sinks_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group is headrace.sinks; the callable gets the run and the user's options."""
    recorder = Recorder()
    calls: list[tuple[Any, ...]] = []

    def factory(run_dir: Path, run_name: str, config: Mapping[str, Any], *, colour: str) -> Recorder:
        calls.append((run_dir, run_name, config["seed"], colour))
        return recorder

    module = ModuleType("fake_sink_package")
    module.factory = factory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_sink_package", module)
    points = metadata.EntryPoints([metadata.EntryPoint("mine", "fake_sink_package:factory", "headrace.sinks")])
    monkeypatch.setattr(metadata, "entry_points", lambda **select: points.select(**select))
    fan_out = start(tmp_path, "mine", mine={"colour": "red"})
    fan_out.log(1, {"x": 2.0})
    fan_out.close()
    assert calls == [(tmp_path, "run-1", 0, "red")]
    assert recorder.lines == [(1, {"x": 2.0})]


def test_wandb_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake of wandb.init and Run: our step is a metric, since a resumed run's step goes back and W&B's may not."""
    calls: list[tuple[Any, ...]] = []
    run = SimpleNamespace(
        define_metric=lambda name, **kw: calls.append(("define", name, kw)),
        log=lambda data: calls.append(("log", data)),
        finish=lambda: calls.append(("finish",)),
    )
    module = ModuleType("wandb")
    module.init = lambda **kw: calls.append(("init", kw)) or run  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", module)
    fan_out = start(tmp_path, "wandb", wandb={"mode": "offline", "project": "mine"})
    fan_out.log(7, {"reward/mean": 0.5})
    fan_out.close()
    assert calls[0][1] == {
        "project": "mine",
        "name": "run-1",
        "dir": str(tmp_path),
        "config": {"trainer": {"learning_rate": 1e-5}, "seed": 0},
        "mode": "offline",
    }
    assert calls[1:] == [
        ("define", "step", {}),
        ("define", "*", {"step_metric": "step"}),
        ("log", {"reward/mean": 0.5, "step": 7}),
        ("finish",),
    ]


def test_mlflow_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake of MlflowClient: experiment made once, configuration as flat params, metrics by step, run terminated."""
    calls: list[tuple[Any, ...]] = []

    class Client:
        def __init__(self, tracking_uri: str | None) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
            calls.append(("run", experiment_id, run_name, tags))
            return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        def log_batch(self, run_id: str, **parts: Any) -> None:
            calls.append(("batch", run_id, parts))

        def set_terminated(self, run_id: str) -> None:
            calls.append(("end", run_id))

    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric = lambda *a: a  # type: ignore[attr-defined]
    entities.Param = lambda *a: a  # type: ignore[attr-defined]
    tracking.MlflowClient = Client  # type: ignore[attr-defined]
    for module in (ModuleType("mlflow"), entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    fan_out = start(tmp_path, "mlflow", mlflow={"tracking_uri": "file:///x"})
    fan_out.log(3, {"time": 12.5, "reward/mean": 0.5})
    fan_out.close()
    assert calls == [
        ("client", "file:///x"),
        ("run", "id of headrace", "run-1", {}),
        ("batch", "r1", {"params": [("trainer.learning_rate", "1e-05"), ("seed", "0")]}),
        ("batch", "r1", {"metrics": [("time", 12.5, 12500, 3), ("reward/mean", 0.5, 12500, 3)]}),
        ("end", "r1"),
    ]
