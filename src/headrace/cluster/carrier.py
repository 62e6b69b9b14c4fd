"""Where actors run: in this process, as child processes of it, or on Ray. One interface: nothing else differs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from headrace.cluster.actors import ActorHandle, InProcessHandle
from headrace.cluster.journal import ActorJournal
from headrace.cluster.spec import ActorNotMade, ActorSpec, Role, load_factory
from headrace.cluster.subprocess_actor import SubprocessActor


class Carrier(Protocol):
    """Starts actors. What it starts is ended by its handle's ``close``; :meth:`close` ends what else it holds."""

    async def start(self, spec: ActorSpec) -> ActorHandle:
        """An actor whose object is made. Raises ActorDied where it does not come up in time, or cannot be placed,
        ActorNotMade where its factory raised."""
        ...

    async def close(self) -> None: ...


class InProcessCarrier:
    """Everything in this process: the reference that the others are tested against."""

    def __init__(self, journal: ActorJournal) -> None:
        self._journal = journal

    async def start(self, spec: ActorSpec) -> ActorHandle:
        try:
            target = load_factory(spec.factory)(**spec.options)
            if asyncio.iscoroutine(target):
                target = await target
        except Exception as error:
            raise ActorNotMade(spec, f"{type(error).__name__}: {error}") from error
        self._journal.started(spec, pid=os.getpid(), node="local")
        return InProcessHandle(spec.name, target)

    async def close(self) -> None:
        """Nothing is held."""


class SubprocessCarrier:
    """Child processes of this one. What they print lies in ``log_folder``, one file for each actor and incarnation."""

    def __init__(
        self,
        journal: ActorJournal,
        log_folder: Path,
        *,
        start_deadline_s: float,
        inherited_fds: Mapping[Role, int] | None = None,
    ) -> None:
        """``inherited_fds``: an open descriptor that every actor of the role gets."""
        self._journal, self._log_folder, self._start_deadline_s = journal, log_folder, start_deadline_s
        self._inherited_fds = dict(inherited_fds or {})

    async def start(self, spec: ActorSpec) -> ActorHandle:
        self._log_folder.mkdir(exist_ok=True)
        actor = await SubprocessActor.start(
            spec,
            log=self._log_folder / f"{spec.name}.log",
            deadline_s=self._start_deadline_s,
            inherited_fd=self._inherited_fds.get(spec.role),
        )
        self._journal.started(spec, pid=actor.pid, node="local")
        return actor

    async def close(self) -> None:
        """Nothing is held: each handle ends its own process."""
