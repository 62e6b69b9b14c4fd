"""Engines of a fleet as actors: the fleet's factory where they do not run in the controller's process."""

from __future__ import annotations

from typing import Any

from headrace.cluster.boards import RayBoard, SharedMemoryBoard
from headrace.cluster.remote_engine import RemoteEngine
from headrace.cluster.spec import ActorSpec
from headrace.cluster.workers import Workers
from headrace.config.engines import TransformersEngineConfig
from headrace.config.load import resolved
from headrace.config.schema import RunConfig
from headrace.engines.fleet.supervisor import StartEngine
from headrace.protocols import Engine


def engine_starter(workers: Workers, config: RunConfig, num_threads: int) -> StartEngine:
    """``start(index, incarnation)``: a :class:`RemoteEngine` that answers, or ActorDied. It holds the weights of
    ``model.path`` and calls them no version: the fleet brings the published ones, which lie on one board for all
    engines. ``num_threads``: of each engine."""
    ray_carrier = workers.ray_carrier
    board: RayBoard | SharedMemoryBoard
    if ray_carrier is not None:
        board = RayBoard(ray_carrier.ray)
        carrier = workers.carrier()
    else:
        board = SharedMemoryBoard()
        carrier = workers.carrier({"engine": board.fd})
    data = _alone(config, num_threads)

    async def start(index: int, incarnation: int) -> Engine:
        spec = ActorSpec(
            role="engine",
            index=index,
            incarnation=incarnation,
            factory="headrace.actors:engine",
            options={"config": data},
            num_threads=num_threads,
        )
        handle = await carrier.start(spec)
        try:
            return await RemoteEngine.connect(handle, send_weights=board.send)
        except BaseException:
            await handle.close()
            raise

    return start


def _alone(config: RunConfig, num_threads: int) -> dict[str, Any]:
    """The configuration of one engine in a process of its own."""
    data: dict[str, Any] = resolved(config)
    data["engine"]["num_threads"] = num_threads
    if isinstance(config.engine, TransformersEngineConfig):
        data["engine"]["weights"] = "copy"  # the board brings new ones
        data["engine"].pop("carrier", None)
    for section in ("fleet", "cluster", "parallel"):
        data.pop(section, None)
    return data
