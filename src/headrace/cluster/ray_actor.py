"""The carrier for a cluster: actors on Ray, which places them, finds out that they died, and moves what they pass.

Ray is used as it is. A run reserves its resources as one placement group, a bundle for each actor (``layout.py`` says
which), so that it starts as a whole or says what is missing; a bundle whose node is lost is placed again by Ray. Ray's
own restarts of actors are off: whoever uses an actor must know that its state is gone, and restarts have a budget.

Every wait has a deadline and a name: calls are bounded by their callers, starts and placement here.

    who        waits for                  unblocked by                  deadline
    connect    the cluster's head         it, or nobody there           ``HEAD_DEADLINE_S``
    reserve    the end of a group that    Ray                           ``start_deadline_s``
               was left behind
               resources for every actor  other jobs' ends, new nodes   ``start_deadline_s``
    start      the actor's object         it, its death                 ``start_deadline_s``
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.cluster.actors import PING, ActorDied, ActorHandle, RemoteError, public_method
from headrace.cluster.journal import ActorJournal
from headrace.cluster.layout import Bundle, describe
from headrace.cluster.spec import ActorNotMade, ActorSpec, load_factory
from headrace.errors import ConfigError

HEAD_DEADLINE_S = 30.0
LISTEN_DEADLINE_S = 5.0
GROUP = "headrace"
"""Name of the placement group, one in a namespace."""
POLL_S = 0.1


def import_ray() -> Any:
    """Raises ConfigError where it is not installed."""
    try:
        import ray
    except ImportError:
        raise ConfigError(
            'cluster.type = "ray" needs the package ray in this Python: pip install "headrace[ray]" (in a checkout: '
            "make setup-ray, and run headrace from there)"
        ) from None
    return ray


def connect(address: str | None, namespace: str) -> Any:
    """Join the cluster that ``address`` or $RAY_ADDRESS names; returns the ray module. In an actor of it, already done.

    Names of Ray's are this process's own, and its actors'. ``namespace``: how theirs begins, for people who look.
    Raises ConfigError where nobody answers there.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    where = address or os.environ.get("RAY_ADDRESS")
    if not where:
        raise ConfigError(
            'cluster.type = "ray", but neither cluster.address nor the environment\'s RAY_ADDRESS says where the '
            "cluster is; start one with `ray start --head`, and give its address"
        )
    _check_listens(where)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    failure: list[BaseException] = []
    own_namespace = f"{namespace}-{uuid.uuid4().hex}"

    def join() -> None:
        try:
            ray.init(address=where, namespace=own_namespace, log_to_driver=False, configure_logging=False)
        except BaseException as error:  # told by the waiter
            failure.append(error)

    # ray.init tries for minutes where nobody listens; signals would need the main thread, which it does not ask for.
    thread = threading.Thread(target=join, name="headrace-ray-init", daemon=True)
    thread.start()
    thread.join(HEAD_DEADLINE_S)
    if thread.is_alive() or failure:
        why = f"{type(failure[0]).__name__}: {failure[0]}" if failure else f"no answer in {HEAD_DEADLINE_S:g} s"
        raise ConfigError(
            f"no Ray cluster could be joined at {where!r} ({why}); check `ray status --address {where}`, and that this "
            "Python has the cluster's version of Ray"
        )
    return ray


def _check_listens(address: str) -> None:
    """A dead address is told at once: ray.init would try it for long. Names without a port are Ray's to look up."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        return
    try:
        socket.create_connection((host, int(port)), timeout=LISTEN_DEADLINE_S).close()
    except OSError as error:
        raise ConfigError(
            f"nobody listens at the Ray cluster's address {address!r} ({error.strerror or error}); is its head up, and "
            "is this the address that `ray start --head` printed?"
        ) from error


class HostedActor:
    """What Ray runs for one actor: the object that a factory makes, and calls on it. Errors are answers, so that no
    exception of ours needs a class at the other side."""

    def __init__(self) -> None:
        self._target: Any = None

    async def make(
        self, factory: str, options: Mapping[str, Any], num_threads: int, working_folder: str
    ) -> tuple[str, Any]:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        if os.path.isdir(working_folder):  # paths in a configuration are relative to where it was started
            os.chdir(working_folder)
        try:
            target = load_factory(factory)(**options)
            self._target = await target if asyncio.iscoroutine(target) else target
        except Exception as error:
            return "error", (type(error).__name__, str(error))
        import ray

        return "value", (os.getpid(), ray.get_runtime_context().get_node_id())

    async def invoke(self, method: str, *args: Any) -> tuple[str, Any]:
        if method == PING:
            return "value", None
        try:
            result = public_method(self._target, method)(*args)
            return "value", await result if asyncio.iscoroutine(result) else result
        except Exception as error:
            return "error", (type(error).__name__, str(error))


def hosted(ray: Any, demand: Mapping[str, float], strategy: Any) -> Any:
    """A :class:`HostedActor` on Ray, without restarts of Ray's own."""
    return (
        ray.remote(HostedActor)
        .options(
            scheduling_strategy=strategy,
            num_cpus=demand.get("CPU", 0.0),
            num_gpus=demand.get("GPU", 0.0),
            resources={name: amount for name, amount in demand.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            max_task_retries=0,
        )
        .remote()
    )


def make(actor: Any, spec: ActorSpec) -> Any:
    """Ray's reference to the answer of :meth:`HostedActor.make`."""
    return actor.make.remote(spec.factory, dict(spec.options), spec.num_threads, os.getcwd())


class RayActor:
    """``ActorHandle`` over a Ray actor."""

    def __init__(self, ray: Any, spec: ActorSpec, actor: Any) -> None:
        self._ray, self._spec, self._actor = ray, spec, actor
        self._death: str | None = None

    async def call(self, method: str, *args: Any) -> Any:
        if self._death is not None:
            raise ActorDied(self._death)
        return await self._answered(self._actor.invoke.remote(method, *args))

    async def made(self) -> tuple[int, str]:
        """Let it make its object; returns (process id, node)."""
        pid, node = await self._answered(make(self._actor, self._spec))
        return pid, node

    async def _answered(self, reference: Any) -> Any:
        """What a reference comes to. A caller that gives up cancels the call."""
        exceptions = self._ray.exceptions
        try:
            kind, value = await reference
        except asyncio.CancelledError:
            self._ray.cancel(reference)
            raise
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.TaskCancelledError) as error:
            self._death = f"actor {self._spec.name} died: {_first_line(error)}"
            raise ActorDied(self._death) from error
        except exceptions.RayError as error:
            raise RemoteError(type(error).__name__, _first_line(error)) from error
        if kind == "error":
            raise RemoteError(*value)
        return value

    async def is_alive(self) -> bool:
        try:
            await self.call(PING)
        except ActorDied:
            return False
        return True

    async def close(self) -> None:
        """Ray ends the process at once: whoever wants a soft end asks the object first."""
        self._death = self._death or f"actor {self._spec.name} was closed"
        self._ray.kill(self._actor, no_restart=True)


class RayCarrier:
    """Starts actors in the bundles of one placement group."""

    def __init__(self, ray: Any, journal: ActorJournal, bundles: Sequence[Bundle], *, start_deadline_s: float) -> None:
        self.ray, self._journal, self._bundles = ray, journal, tuple(bundles)
        self.start_deadline_s = start_deadline_s
        self._group: Any = None
        self._place_of = {actor: index for index, bundle in enumerate(bundles) for actor in bundle.actors}

    def reserve(self, strategy: str) -> None:
        """Every actor's resources. Blocks until they are there; raises ConfigError naming what the cluster lacks."""
        from ray.util.placement_group import placement_group

        self._remove_what_was_left()
        resources = [dict(bundle.resources) for bundle in self._bundles]
        group = placement_group(resources, strategy=strategy, name=GROUP)
        self._group = group
        if not group.wait(timeout_seconds=self.start_deadline_s):
            total = self.ray.cluster_resources()
            raise ConfigError(
                f"the cluster did not have room for the run within {self.start_deadline_s:g} s: it needs "
                f"{describe(self._bundles)}, strategy {strategy}; its nodes have "
                f"{', '.join(f'{name} {total.get(name, 0):g}' for name in ('CPU', 'GPU'))} in all. Add nodes, or lower "
                "the resources in [cluster]"
            )

    def _remove_what_was_left(self) -> None:
        """A controller on Ray that was killed leaves its group: Ray keeps that as long as the supervisor lives."""
        from ray.util.placement_group import get_placement_group, remove_placement_group

        end_s = time.monotonic() + self.start_deadline_s
        while True:
            try:
                left = get_placement_group(GROUP)
            except ValueError:  # Ray's answer for a name that is not there
                return
            if time.monotonic() > end_s:
                raise ActorDied(
                    f"the resources of the controller before this one were not free after {self.start_deadline_s:g} s; "
                    "see `ray status`, or raise cluster.start_deadline_s"
                )
            remove_placement_group(left)
            time.sleep(POLL_S)

    def place(self, spec: ActorSpec) -> Any:
        """Ray's actor in its bundle; it may still be on its way there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        index = self._place_of[(spec.role, spec.index)]
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return hosted(self.ray, self._bundles[index].demand_of(spec.role), strategy)

    async def start(self, spec: ActorSpec) -> ActorHandle:
        actor = RayActor(self.ray, spec, self.place(spec))
        try:
            async with asyncio.timeout(self.start_deadline_s):
                pid, node = await actor.made()
        except TimeoutError:
            await actor.close()
            raise ActorDied(
                f"actor {spec.name} was not there after {self.start_deadline_s:g} s: no node had room for it, or it "
                "takes longer to start; see `ray status`, or raise cluster.start_deadline_s"
            ) from None
        except RemoteError as error:
            await actor.close()
            raise ActorNotMade(spec, str(error)) from error
        except BaseException:
            await actor.close()
            raise
        self._journal.started(spec, pid=pid, node=node)
        return actor

    async def close(self) -> None:
        """Give the resources back."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
            self._group = None


def _first_line(error: BaseException) -> str:
    """Ray's errors tell long stories; the first lines hold the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:6])[:600] if lines else type(error).__name__
