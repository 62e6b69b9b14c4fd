"""One method for each route of an SGLang server. Bodies hold the fields of ``wire.SENT`` and no others.

A route that updates weights is called once: whether an unanswered update arrived cannot be known. The others can be
repeated where nothing answered, since doing them twice is doing them once.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from headrace.engines.errors import EngineError
from headrace.engines.http import CONNECT_ONLY, NO_ANSWER, UNSENT, HttpClient, Repeat

CALL_DEADLINE_S = 60.0
"""For what should be answered at once: the longest step of a decoding batch, and much."""
LOAD_FORMAT = "safetensors"
"""Said with each update: a server that was started with dummy weights would load dummy weights again."""
AGAIN = Repeat(statuses=frozenset({NO_ANSWER, UNSENT}), patience_s=3.0)

Mode = Literal["abort", "in_place", "retract"]
Tag = Literal["weights", "kv_cache"]


class SglangCalls:
    """The server behind ``client``."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.name = client.name

    async def model_info(self, *, patience_s: float = 3.0) -> dict[str, Any]:
        """``patience_s``: to wait for a server that is being started."""
        repeat = Repeat(statuses=frozenset({NO_ANSWER, UNSENT, 503}), patience_s=patience_s)
        return self._object(await self._get("/model_info", patience_s + CALL_DEADLINE_S, repeat), "/model_info")

    async def server_info(self, *, deadline_s: float = CALL_DEADLINE_S) -> dict[str, Any]:
        """Asks the scheduler too, and needs no forward pass: it answers while generation is paused."""
        return self._object(await self._get("/server_info", deadline_s, AGAIN), "/server_info")

    async def generate(self, body: Mapping[str, Any]) -> Any:
        """Bounded by the caller alone: how long a reply takes is not known here."""
        return await self.client.call("POST", "/generate", body=body, deadline_s=None, repeat=CONNECT_ONLY)

    async def abort(self, rid: str) -> None:
        """SGLang aborts every request whose id begins with ``rid``; none does nothing."""
        await self._post("/abort_request", {"rid": rid}, repeat=AGAIN)

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"abort_all": True}, repeat=AGAIN)

    async def pause(self, mode: Mode) -> None:
        """``in_place`` holds running requests with their keys and values, ``retract`` puts them back into the queue
        without, ``abort`` ends them."""
        await self._post("/pause_generation", {"mode": mode}, repeat=AGAIN)

    async def resume(self) -> None:
        await self._post("/continue_generation", {"torch_empty_cache": False}, repeat=AGAIN)

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Refused (HttpError 400) while requests run."""
        await self._post("/flush_cache", {}, repeat=AGAIN)

    async def weights_checksum(self, *, deadline_s: float) -> str | None:
        """Of everything that the server computes with, all ranks; None where it tells none."""
        answer = await self._post("/weights_checker", {"action": "checksum"}, deadline_s=deadline_s, repeat=AGAIN)
        checksum = self._object(answer, "/weights_checker").get("per_engine_checksum")
        return None if checksum is None else str(checksum)

    async def set_weight_version(self, name: str) -> None:
        """Rename what is served; ends no request."""
        body = {"new_version": name, "abort_all_requests": False}
        self._check_success(await self._post("/update_weight_version", body, repeat=AGAIN), "/update_weight_version")

    async def release_memory(self, tags: Sequence[Tag]) -> None:
        await self._post("/release_memory_occupation", {"tags": list(tags)}, repeat=AGAIN)

    async def resume_memory(self, tags: Sequence[Tag]) -> None:
        """Memory is back, its content is not: publish weights before anything is served."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)}, repeat=AGAIN)

    # ------------------------------------------------------------------------------------------- weights

    async def update_from_disk(self, path: str, version: str, *, flush_cache: bool, deadline_s: float) -> None:
        """Load every safetensors file in the folder ``path``, which the server's machine must see under that name."""
        body = {"model_path": path, "load_format": LOAD_FORMAT, "weight_version": version, "flush_cache": flush_cache}
        route = "/update_weights_from_disk"
        self._check_success(await self._post(route, body, deadline_s=deadline_s), route)

    async def join_group(
        self, address: str, port: int, *, rank_offset: int, world_size: int, group: str, backend: str, deadline_s: float
    ) -> None:
        """The server's ranks join a process group of torch; the trainer must join it meanwhile."""
        body = {"master_address": address, "master_port": port, "rank_offset": rank_offset, "world_size": world_size}
        body |= {"group_name": group, "backend": backend}
        route = "/init_weights_update_group"
        self._check_success(await self._post(route, body, deadline_s=deadline_s), route)

    async def leave_group(self, group: str) -> None:
        route = "/destroy_weights_update_group"
        self._check_success(await self._post(route, {"group_name": group}), route)

    async def begin_update(self) -> None:
        """Before the first bucket of :meth:`update_from_group` or :meth:`update_from_tensors`."""
        self._check_success(await self._post("/begin_weight_update", {"selector": "all"}), "/begin_weight_update")

    async def end_update(self) -> None:
        self._check_success(await self._post("/end_weight_update", {}), "/end_weight_update")

    async def update_from_group(
        self, specs: Sequence[tuple[str, str, Sequence[int]]], version: str, *, group: str, deadline_s: float
    ) -> None:
        """``specs``: (name, torch's name of the dtype, shape) of the tensors that rank 0 of ``group`` broadcasts
        meanwhile, in that order. The cache is flushed with the last bucket's version, by the caller."""
        body = {
            "names": [name for name, _, _ in specs],
            "dtypes": [dtype for _, dtype, _ in specs],
            "shapes": [list(shape) for _, _, shape in specs],
            "group_name": group,
            "flush_cache": False,
            "weight_version": version,
        }
        route = "/update_weights_from_distributed"
        self._check_success(await self._post(route, body, deadline_s=deadline_s), route)

    async def update_from_tensors(self, serialized: Sequence[bytes], version: str, *, deadline_s: float) -> None:
        """``serialized``: for each tensor-parallel rank, named tensors as SGLang's own serializer writes them."""
        body = {
            "serialized_named_tensors": [base64.b64encode(data).decode() for data in serialized],
            "flush_cache": False,
            "weight_version": version,
        }
        route = "/update_weights_from_tensor"
        self._check_success(await self._post(route, body, deadline_s=deadline_s), route)

    async def close(self) -> None:
        await self.client.close()

    # --------------------------------------------------------------------------------------------- calls

    async def _get(self, path: str, deadline_s: float, repeat: Repeat) -> Any:
        return await self.client.call("GET", path, deadline_s=deadline_s, repeat=repeat)

    async def _post(
        self, path: str, body: Mapping[str, Any], *, deadline_s: float = CALL_DEADLINE_S, repeat: Repeat = CONNECT_ONLY
    ) -> Any:
        return await self.client.call("POST", path, body=body, deadline_s=deadline_s, repeat=repeat)

    def _object(self, answer: Any, path: str) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise EngineError(f"{self.name} answered {path} with {str(answer)[:200]!r}: is it an SGLang server?")
        return answer

    def _check_success(self, answer: Any, path: str) -> None:
        """Refusals come with status 400, which has raised already; this is for servers that say so with 200."""
        if self._object(answer, path).get("success") is not True:
            raise EngineError(f"{self.name} did not do {path}: {str(answer)[:300]}")
