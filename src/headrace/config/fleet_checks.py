"""I20 for the section ``[fleet]``: options without effect, and what contradicts the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.base import Section
from headrace.config.engines import SglangEngineConfig, TransformersEngineConfig
from headrace.config.schema import RunConfig


def fleet_problems(config: RunConfig) -> Iterator[str]:
    """One sentence for each."""
    fleet = config.fleet
    if fleet is None:
        return
    if config.engine.shares_weights and config.parallel.world_size == 1:
        yield (
            '[fleet] with engine.weights = "shared": engines that share the trainer\'s storage cannot be told apart, '
            'started again or be at two versions; set engine.weights = "copy"'
        )
    engine = config.engine
    if isinstance(engine, TransformersEngineConfig) and engine.carrier.type != "memory":
        yield (
            "engine.carrier has no effect: embedded engines of a fleet copy the trainer's weights in memory; remove it"
        )
    if isinstance(engine, SglangEngineConfig) and len(engine.urls) < fleet.num_engines:
        yield (
            f"fleet.num_engines = {fleet.num_engines}, but engine.urls names {len(engine.urls)} servers; name one for "
            "each engine"
        )
    if fleet.num_engines == 1:
        for name in _set(fleet, "routing", "max_imbalance"):
            yield f"fleet.{name} has no effect: fleet.num_engines is 1, so there is no choice; remove it"
    elif fleet.routing == "least_loaded":
        for name in _set(fleet, "max_imbalance"):
            yield f'fleet.{name} has no effect: fleet.routing is "least_loaded"; remove it or use "affinity"'
    if not fleet.max_restarts:
        for name in _set(fleet, "restart_window_s", "restart_backoff_s"):
            yield f"fleet.{name} has no effect: fleet.max_restarts is 0, so no engine starts again; remove it"
    if fleet.max_engine_lag and not config.rollout.max_staleness:
        yield (
            f"fleet.max_engine_lag = {fleet.max_engine_lag} has no effect: rollout.max_staleness is 0, so no engine "
            "decodes during a publish; remove it or raise rollout.max_staleness"
        )
    if fleet.sync_deadline_s >= config.waits.publish_s:
        yield (
            f"fleet.sync_deadline_s = {fleet.sync_deadline_s:g} is not below waits.publish_s = "
            f"{config.waits.publish_s:g}: an engine that hangs would end the run before it is taken out; lower it"
        )


def _set(section: Section, *names: str) -> Iterator[str]:
    """Those of ``names`` that the user set."""
    return (name for name in names if name in section.model_fields_set)
