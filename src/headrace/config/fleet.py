"""Several engines behind one: how many, who gets what, and what happens when one of them dies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headrace.config.base import Section


class FleetConfig(Section):
    """Several engines of the kind that ``engine`` describes. Absent: one engine, whose death ends the run."""

    num_engines: int = Field(2, ge=1)
    routing: Literal["affinity", "least_loaded"] = "affinity"
    """``affinity``: prefer the engine that has computed the longest part of a prompt before."""
    max_imbalance: int = Field(16, ge=0)
    """Requests that an engine may have more than the least loaded one before affinity gives way."""
    max_kv_pressure: float = Field(0.9, gt=0, le=1)
    """Share of an engine's KV cache, as it measures it, up to which it is given work."""
    max_engine_lag: int = Field(0, ge=0, le=1)
    """Versions that a serving engine may be behind. 0: all engines change weights together, while none of them decodes.
    1: one after the other during a publish, each proved before it goes on, so that the others decode meanwhile."""
    max_restarts: int = Field(3, ge=0)
    """Starts of one engine after its deaths within ``restart_window_s``; beyond, it is given up. The run ends where no
    engine is left."""
    restart_window_s: float = Field(3600.0, gt=0)
    restart_backoff_s: float = Field(1.0, gt=0)
    """Before the first restart of a window; doubles with each further one, up to a minute."""
    start_deadline_s: float = Field(600.0, gt=0)
    """For an engine to start."""
    sync_deadline_s: float = Field(120.0, gt=0)
    """For one engine to pause, to take new weights, to answer a probe, to go on: one that takes longer is taken out."""
    health_every_s: float = Field(10.0, gt=0)
    """Between two questions whether an engine lives."""
    health_deadline_s: float = Field(30.0, gt=0)
    """For the answer."""
    drain_deadline_s: float = Field(600.0, gt=0)
    """For an engine that leaves to end what it has; the rest goes on elsewhere."""
