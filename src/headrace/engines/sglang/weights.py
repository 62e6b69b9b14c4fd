"""New weights for an SGLang server: written, announced, and then asked for: did they arrive?

SGLang answers an update with success, and that is not enough to build on. So afterwards the server must name the
version, and the checksum of all that it computes with (every rank, its own layout) must have changed exactly when the
tensors did. That the numbers are the policy's is the canary's business (I6).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.daemon_thread import DaemonThread
from headrace.engines.errors import EngineError
from headrace.engines.http import NO_ANSWER, HttpError
from headrace.engines.sglang.calls import SglangCalls
from headrace.engines.sglang.wire import Versions
from headrace.errors import HeadraceError
from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion


class WeightsLost(EngineError):
    """What the server holds is not known to be any version: nothing may be served by it."""


class WeightFolder(Protocol):
    """Where weights are written for the server to read; ``headrace.weights.model_folder`` has one."""

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Mapping[str, Any]:
        """Write them; returns ``path``, the folder, and ``tensors``, rows that begin with a name and end with its
        checksum. The same update again changes nothing. Blocks."""
        ...

    def close(self) -> None: ...


class ServerWeights:
    """What one server holds. ``version``: the last one that arrived."""

    def __init__(
        self,
        calls: SglangCalls,
        folder: WeightFolder,
        version: PolicyVersion,
        *,
        deadline_s: float,
        make_update_error: Callable[[str], HeadraceError],
    ) -> None:
        """``deadline_s``: for each of writing, loading and the server's checksum."""
        self.version = version
        self.names = Versions()
        self.checksums: dict[str, str] = {}
        """Of the tensors that it was given."""
        self.are_there = False
        self._calls = calls
        self._folder = folder
        self._deadline_s = deadline_s
        self._make_update_error = make_update_error
        self._thread = DaemonThread("headrace-weights")
        self._server_checksum: str | None = None

    async def update(self, update: WeightUpdate, *, is_first: bool, flush_cache: bool) -> None:
        """Raises what ``make_update_error`` makes where nothing was changed, WeightsLost where that is not known."""
        if update.version < self.version:
            raise self._make_update_error(
                f"weights {update.version} are older than the engine's {self.version}; an engine never goes back"
            )
        manifest = await self._thread.call(self._folder.send, update, None)
        checksums = {row[0]: row[-1] for row in manifest["tensors"]}
        is_same = checksums == self.checksums
        if update.version == self.version and self.are_there:
            if not is_same:
                raise self._make_update_error(f"the engine holds other weights under the same version {update.version}")
            return
        name, path = self.names.name(update.version), str(manifest["path"])
        try:
            await self._calls.update_from_disk(path, name, flush_cache=flush_cache, deadline_s=self._deadline_s)
        except EngineError as error:
            raise await self._refused(path, error) from error
        await self._check_arrival(name, must_change=not (is_first or is_same), must_stay=is_same and self.are_there)
        self.version, self.checksums, self.are_there = update.version, checksums, True

    async def _refused(self, path: str, error: EngineError) -> HeadraceError:
        """SGLang's way back after a failure reads the new folder once more, so only its checksum can tell that the old
        weights are whole."""
        now = None
        if self._server_checksum is not None and not (isinstance(error, HttpError) and error.status == NO_ANSWER):
            with contextlib.suppress(EngineError):
                now = await self._calls.weights_checksum(deadline_s=self._deadline_s)
        what = f"{error} (the server's machine must see the folder {path} under that name)"
        if now is not None and now == self._server_checksum:
            return self._make_update_error(f"{what}. Nothing was changed: it holds weights {self.version}")
        return WeightsLost(f"{what}. What it holds now is not known to be any version, so nothing is served by it")

    async def _check_arrival(self, name: str, *, must_change: bool, must_stay: bool) -> None:
        told = (await self._calls.model_info()).get("weight_version")
        before, now = self._server_checksum, await self._calls.weights_checksum(deadline_s=self._deadline_s)
        self._server_checksum = now
        problem = None
        if told != name:
            problem = f"it says that it serves weights {told!r}"
        elif now is None:
            problem = "it tells no checksum of what it holds (/weights_checker)"
        elif must_change and now == before:
            problem = "nothing that it computes with has changed, though tensors have"
        elif must_stay and now != before:
            problem = "what it computes with has changed, though no tensor has"
        if problem is not None:
            raise WeightsLost(f"{self._calls.name} accepted weights {name}, and then {problem}")

    def close(self) -> None:
        self._thread.stop()
        self._folder.close()
