"""Peak memory as measured, beside the forecast of ``headrace plan``: for each process of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.schema import ParallelConfig
from headrace.model.load import LoadedModel
from headrace.model.parallel.check import ModelShape
from headrace.model.parallel.forecast import Pass, forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Of one process, in bytes. A text instead says why a figure is unknown."""

    peak: int | str
    """Growth of the peak since before the model was loaded."""
    forecast: int | str


class MemoryGauge:
    """Reads this process's use. Neither measuring nor forecasting raises: they must not end a run."""

    def __init__(
        self,
        loaded: LoadedModel,
        work: Pass,
        parallel: ParallelConfig,
        *,
        stage: int = 0,
        not_counted: str = "",
    ) -> None:
        """Make it before ``loaded`` is split. ``stage``: of the pipeline. ``not_counted``: a part of this training that
        the forecast knows nothing of, which makes it unknown."""
        self._memory = loaded.memory
        self._forecast: int | str = f"it does not count {not_counted}"
        if not_counted:
            return
        try:
            shape = ModelShape.of(loaded.model.config.to_dict())
            self._forecast = forecast(parallel, shape, work)[stage].peak_bytes
        except Exception as error:  # told instead of raised, whatever it is
            self._forecast = f"{type(error).__name__}: {error}"

    def read(self) -> MemoryUse:
        return MemoryUse(peak=self._memory.growth(), forecast=self._forecast)


def memory_text(uses: Sequence[MemoryUse], step: int, *, moments_are_new: bool) -> str:
    """For a person; ``uses`` in order of ranks. ``step``: optimizer steps done. ``moments_are_new``: no pass has held
    the optimizer's moments yet, which the forecast counts."""
    lines = [f"peak memory after optimizer step {step}, beside the forecast for full micro-batches:"]
    for rank, use in enumerate(uses):
        engine = " (the engine included)" if rank == 0 else ""
        lines.append(f"  rank {rank}{engine}: {_gib(use.peak)}, forecast {_gib(use.forecast)}")
    if moments_are_new:
        lines.append("  the optimizer's moments are new: from the next step on, a pass holds them too")
    return "\n".join(lines)


def memory_metrics(uses: Sequence[MemoryUse]) -> dict[str, Any]:
    """For metrics.jsonl: lists in order of ranks, null where unknown, and the reasons."""
    named = {"memory/peak_bytes": [u.peak for u in uses], "memory/forecast_bytes": [u.forecast for u in uses]}
    metrics: dict[str, Any] = {}
    unknown: list[str] = []
    for name, values in named.items():
        metrics[name] = [None if isinstance(value, str) else value for value in values]
        unknown += [f"{name} of rank {rank}: {v}" for rank, v in enumerate(values) if isinstance(v, str)]
    return metrics | ({"memory/unknown": unknown} if unknown else {})


def _gib(value: int | str) -> str:
    return f"unknown ({value})" if isinstance(value, str) else f"{value / 2**30:.2f} GiB"
