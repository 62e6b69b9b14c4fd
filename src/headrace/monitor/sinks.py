"""The built-in sinks, each through its own package, which is imported when the sink starts and not before.

(By ``import_module``, so that type checking is the same whichever of them are installed.)
Options in ``monitor.sink_options.<name>`` go to the package's own start call, over the defaults given here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from headrace.protocols import Sink

PROMETHEUS_PORT = 9464
_MLFLOW_PARAMS_PER_CALL = 100
_MLFLOW_PARAM_LENGTH = 6000


class BuiltIn(NamedTuple):
    """A sink's package, which is also what its extra installs, and how to start it."""

    package: str
    factory: Callable[..., Sink]


class TensorBoardSink:
    """Event files in ``<run>/tensorboard`` (or option ``logdir``), flushed line by line."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any], **options: Any) -> None:
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer: Any = writer.EventFileWriter(**{"logdir": str(run_dir / "tensorboard")} | options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        event = self._event(wall_time=metrics.get("time", time.time()), step=step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases. Option ``mode = "offline"`` writes to the run folder only."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any], **options: Any) -> None:
        defaults = {"project": "headrace", "name": run_name, "dir": str(run_dir), "config": dict(config)}
        self._run: Any = import_module("wandb").init(**defaults | options)
        # W&B's own step must not fall, but a resumed run goes back to its checkpoint: ours is a metric of its own.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def close(self) -> None:
        self._run.finish()


class TrackioSink:
    """trackio: local by default, a Hugging Face Space with option ``space_id``."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any], **options: Any) -> None:
        defaults = {"project": "headrace", "name": run_name, "config": dict(config)}
        self._run: Any = import_module("trackio").init(**defaults | options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # trackio stamps the time itself, and warns about a metric of that name.
        self._run.log({name: value for name, value in metrics.items() if name != "time"}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """MLflow, through the client and not the fluent interface, whose active run belongs to a thread.

    Options: ``tracking_uri`` (else MLflow's own default or its environment variable), ``experiment_name``, ``tags``.
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        tracking_uri: str | None = None,
        experiment_name: str = "headrace",
        tags: Mapping[str, str] | None = None,
    ) -> None:
        entities = import_module("mlflow.entities")
        self._metric: Any = entities.Metric
        self._client: Any = import_module("mlflow.tracking").MlflowClient(tracking_uri=tracking_uri)
        experiment = self._client.get_experiment_by_name(experiment_name)
        experiment_id = (
            self._client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        )
        run = self._client.create_run(experiment_id, run_name=run_name, tags=dict(tags or {}))
        self._run_id = run.info.run_id
        params = [entities.Param(key, value[:_MLFLOW_PARAM_LENGTH]) for key, value in _flat(config)]
        for start in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _MLFLOW_PARAMS_PER_CALL])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        timestamp_ms = int(metrics.get("time", time.time()) * 1000)
        self._client.log_batch(
            self._run_id, metrics=[self._metric(name, value, timestamp_ms, step) for name, value in metrics.items()]
        )

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class PrometheusSink:
    """Gauges of the last values at http://127.0.0.1:9464/metrics, as ``headrace_reward_mean{run="..."}``.

    Options: ``port`` (0 takes a free one), ``addr`` (loopback unless set: the metrics have no password).
    """

    def __init__(
        self,
        run_dir: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        port: int = PROMETHEUS_PORT,
        addr: str = "127.0.0.1",
    ) -> None:
        prometheus = import_module("prometheus_client")
        self._gauge, self._run_name = prometheus.Gauge, run_name
        self._registry = prometheus.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = prometheus.start_http_server(port, addr=addr, registry=self._registry)
        self.port: int = self._server.server_port

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "step": float(step)}.items():
            safe = "headrace_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if safe not in self._gauges:
                self._gauges[safe] = self._gauge(safe, f"last value of {name}", ["run"], registry=self._registry)
            self._gauges[safe].labels(run=self._run_name).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


BUILT_IN: Mapping[str, BuiltIn] = {
    "tensorboard": BuiltIn("tensorboard", TensorBoardSink),
    "wandb": BuiltIn("wandb", WandbSink),
    "trackio": BuiltIn("trackio", TrackioSink),
    "mlflow": BuiltIn("mlflow", MlflowSink),
    "prometheus": BuiltIn("prometheus_client", PrometheusSink),
}
