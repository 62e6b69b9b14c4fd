"""Trainer ranks on Ray: the same processes as ``trainer.crew.Followers``, on the nodes that their bundles lie on.

What they say to each other goes through ``torch.distributed`` as everywhere; Ray places them, and tells who is gone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from headrace.cluster.journal import ActorJournal
from headrace.cluster.ray_actor import RayCarrier, make
from headrace.cluster.spec import ActorSpec
from headrace.trainer.crew import FollowerDied, explained

_PASSED_ON = ("GLOO_SOCKET_IFNAME", "NCCL_")
"""Beginnings of environment variables that decide how ranks reach each other."""
END_GRACE_S = 40.0
"""From a failed verb to Ray's word that a rank is gone: at once for a process, heartbeats for a node."""


class RayFollowers:
    """Ranks 1 to ``num_ranks - 1``. Started before the leader joins the group. Called from any thread."""

    def __init__(self, carrier: RayCarrier, journal: ActorJournal, config: Mapping[str, Any], num_ranks: int) -> None:
        """``config``: the run's, resolved. Raises FollowerDied where one does not come up within the carrier's
        ``start_deadline_s``."""
        self._ray = carrier.ray
        self.address = f"{self._ray.util.get_node_ip_address()}:{_free_port()}"
        passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        specs = {
            rank: ActorSpec(
                role="trainer",
                index=rank,
                incarnation=0,
                factory="headrace.actors:trainer_rank",
                options={"config": config, "rank": rank, "address": self.address, "environment": passed},
            )
            for rank in range(1, num_ranks)
        }
        self._actors = {rank: carrier.place(spec) for rank, spec in specs.items()}
        made = {rank: make(actor, specs[rank]) for rank, actor in self._actors.items()}
        self._runs: dict[int, Any] = {}
        try:
            self._wait_for(list(made.values()), carrier.start_deadline_s)
            for rank, spec in specs.items():
                pid, node = self._value(rank, made[rank])
                journal.started(spec, pid=pid, node=node)
        except BaseException:
            self.stop()
            raise
        self._runs = {rank: actor.invoke.remote("run") for rank, actor in self._actors.items()}

    def explained(self) -> AbstractContextManager[None]:
        return explained(self.ends, grace_s=END_GRACE_S)

    def ends(self) -> list[str]:
        """How those ended that have ended."""
        if not self._runs:
            return []
        ended, _ = self._ray.wait(list(self._runs.values()), num_returns=len(self._runs), timeout=0)
        rank_of = {reference: rank for rank, reference in self._runs.items()}
        texts = []
        for reference in ended:
            rank = rank_of[reference]
            try:
                self._value(rank, reference)
                texts.append(f"trainer rank {rank} left its run")
            except FollowerDied as death:
                texts.append(str(death))
        return texts

    def stop(self) -> None:
        """End them. They hold nothing that is not on disk already."""
        self._runs = {}
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)

    def _wait_for(self, references: list[Any], deadline_s: float) -> None:
        _, missing = self._ray.wait(references, num_returns=len(references), timeout=deadline_s)
        if missing:
            raise FollowerDied(
                f"{len(missing)} of {len(references)} trainer ranks were not there after {deadline_s:g} s: no node had "
                "room for them, or they take longer to start; see `ray status`, or raise cluster.start_deadline_s"
            )

    def _value(self, rank: int, reference: Any) -> Any:
        """What a finished call came to."""
        try:
            kind, value = self._ray.get(reference, timeout=10.0)
        except self._ray.exceptions.RayError as error:
            first = " ".join(line.strip() for line in str(error).splitlines()[:4] if line.strip())
            raise FollowerDied(f"trainer rank {rank} died: {first}") from error
        if kind == "error":
            raise FollowerDied(f"trainer rank {rank} failed: {value[0]}: {value[1]}")
        return value


def _free_port() -> int:
    """Of this machine, a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
