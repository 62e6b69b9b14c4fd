"""An SGLang server without SGLang, built from the contract that was read out of its wheel (sglang_contract.py).

It refuses with status 422 what SGLang's request types do not have, or have with another type, and it answers with keys
that SGLang's source has, and no others. What its scheduler does on abort, pause and update follows what the source of
0.5.23 does: a running request that is aborted makes one more step and tells everything; one that waits in the queue
tells only what it had told its front end before, and no kept ids. ``fault`` says what goes wrong.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sglang_contract
from http_loopback import Answer, HangUp, Loopback, Request
from vllm_scripted_server import VOCAB, top_p

CONTRACT = sglang_contract.load()
TOLD_EVERY = 4
"""Tokens after which an unfinished request tells its front end; SGLang's default is 50."""
INTERNAL = ("http_worker_ipc",)


# ------------------------------------------------------------------------------------------------- types


def mismatch(value: Any, annotation: str, where: str) -> str | None:
    """Why ``value``, out of JSON, is not of the annotated type; None where it is."""
    return _mismatch(value, ast.parse(annotation.removesuffix(" = ..."), mode="eval").body, where)


def _mismatch(value: Any, node: ast.expr, where: str) -> str | None:
    if isinstance(node, ast.Constant) and node.value is None:
        return None if value is None else f"{where} is {value!r}, not None"
    if isinstance(node, ast.Name):
        return _named(value, node.id, where)
    assert isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name), ast.unparse(node)
    outer = node.value.id
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional" and value is None:
        return None
    if outer in ("Optional", "Union"):
        found = [_mismatch(value, option, where) for option in inner]
        return None if None in found else " and ".join(str(f) for f in found)
    if outer == "Annotated":
        if "Base64Bytes" in ast.unparse(node):
            return None if all(isinstance(v, str) for v in value) else f"{where} is not base64"
        return _mismatch(value, inner[0], where)
    if outer == "Literal":
        allowed = [ast.literal_eval(option) for option in inner]
        return None if value in allowed else f"{where} is {value!r}, not one of {allowed}"
    if outer == "List":
        if not isinstance(value, list):
            return f"{where} is {value!r}, not a list"
        return next((m for n, v in enumerate(value) if (m := _mismatch(v, inner[0], f"{where}[{n}]"))), None)
    assert outer == "Dict", outer
    return None if isinstance(value, dict) else f"{where} is {value!r}, not an object"


def _named(value: Any, name: str, where: str) -> str | None:
    plain = {"str": str, "int": int, "float": (int, float), "bool": bool}
    if name in plain:
        right = isinstance(value, plain[name]) and (name == "bool" or not isinstance(value, bool))
        return None if right else f"{where} is {value!r}, not of type {name}"
    if name == "Any":
        return None
    if name in CONTRACT["aliases"]:
        return mismatch(value, CONTRACT["aliases"][name], where)
    fields = CONTRACT["api"][name]
    if not isinstance(value, dict):
        return f"{where} is {value!r}, not an object"
    return next(iter(problems(value, fields, where)), None)


def problems(body: Mapping[str, Any], fields: Mapping[str, str], where: str) -> list[str]:
    found = [f"{where} has no field {name}" for name in body if name not in fields or name in INTERNAL]
    found += [
        f"{where} lacks {name}" for name, kind in fields.items() if not kind.endswith("= ...") and name not in body
    ]
    found += [m for name in body if name in fields and (m := mismatch(body[name], fields[name], f"{where}.{name}"))]
    return found


# ----------------------------------------------------------------------------------------------- drawing


def distribution(params: Mapping[str, Any], number: int, fault: str = "") -> tuple[dict[int, float], dict[int, float]]:
    """(id -> log-probability over all ids, id -> over the kept ones) of weights ``number``."""
    logits = {i: ((i * 7 + number) % VOCAB) / 8 for i in range(VOCAB)}
    temperature = params["temperature"] or 1.0
    scaled = {i: logit / temperature for i, logit in logits.items()}
    kept = sorted(scaled, key=scaled.__getitem__, reverse=True)
    top_k = 1 if params["temperature"] == 0 else params.get("top_k", -1)
    kept = kept[:top_k] if top_k > 0 else kept
    kept = top_p(kept, scaled, params.get("top_p", 1.0))
    meant = logits if fault == "raw-logprobs" else scaled
    total = math.log(sum(math.exp(logit) for logit in meant.values()))
    whole = {i: logit - total for i, logit in meant.items()}
    among = math.log(sum(math.exp(whole[i]) for i in kept))
    return whole, {i: whole[i] - among for i in kept}


@dataclass(eq=False)
class Row:
    """A request at the scheduler."""

    body: dict[str, Any]
    done: asyncio.Future[dict[str, Any]]
    ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    is_ending: bool = False


@dataclass
class ScriptedSglang:
    """The state of one server."""

    fault: str = ""
    key: str | None = None
    by_hand: bool = False
    """Decode when :meth:`step` is called, for a probe, and to end what was aborted."""
    step_s: float = 0.0
    """Between two steps."""
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    weight_version: str = "default"
    content: str = "as it started"
    running: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    is_gate_closed: bool = False
    is_paused: bool = False
    seen: list[str] = field(default_factory=list)
    """Routes in order, with what matters of their bodies."""
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    num_most: int = 0
    """Most requests that decoded in one step."""
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    _turn: asyncio.Event = field(default_factory=asyncio.Event)
    _gate: asyncio.Event = field(default_factory=asyncio.Event)

    # -------------------------------------------------------------------------------------------- HTTP

    async def handle(self, request: Request) -> Answer:
        if self.fault == "hangs-up" and request.path == "/generate" and not self._is_probe(request.body):
            raise HangUp
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return Answer({"error": "Unauthorized"}, 401)
        route = CONTRACT["routes"].get(request.path)
        if route is None:
            return Answer({"detail": "Not Found"}, 404)
        if request.method not in route["methods"]:
            return Answer({"detail": "Method Not Allowed"}, 405)
        found = self._problems(request, route)
        if found:
            return Answer({"object": "error", "message": "; ".join(found), "type": "BadRequest", "code": 422}, 422)
        body = request.body or {}
        detail = next((str(body[k]) for k in ("mode", "weight_version", "tags", "action") if k in body), "")
        self.seen.append(f"{request.path} {detail}".strip())
        self.bodies.append((request.path, body))
        answer: Answer = await getattr(self, request.path.strip("/"))(body)
        return answer

    def _problems(self, request: Request, route: Mapping[str, Any]) -> list[str]:
        if route["body"] is None:
            return [f"{request.path} takes no body"] if request.body else []
        body = request.body or {}
        found = problems(body, CONTRACT["bodies"][route["body"]], route["body"]) if request.path != "/generate" else []
        if request.path == "/generate":
            fields = CONTRACT["bodies"]["GenerateReqInput"]
            found = [f"GenerateReqInput has no field {name}" for name in body if name not in fields]
            found += problems(body, CONTRACT["api"]["GenerateRequest"], "GenerateRequest")
        return found

    # ------------------------------------------------------------------------------------------ routes

    async def model_info(self, body: Any) -> Answer:
        answer = {
            "model_path": "somewhere/model",
            "is_generation": True,
            "weight_version": "other" if self.fault == "names-another-version" else self.weight_version,
            "model_type": "llama",
            "architectures": list(self.architectures),
        }
        assert set(answer) <= set(CONTRACT["model_info"])
        return Answer(answer)

    async def server_info(self, body: Any) -> Answer:
        answer = {
            "version": "0.4.9" if self.fault == "old" else CONTRACT["version"],
            "enable_deterministic_inference": self.fault != "ignores-seeds",
            "dtype": "bfloat16" if self.fault == "bfloat16" else "float32",
            "max_req_input_len": 20 if self.fault == "small" else 250,
            "internal_states": [{}],
        }
        known = {*CONTRACT["api"]["GetServerInfoResponse"], *CONTRACT["server_args"], *CONTRACT["scheduler_info"]}
        assert set(answer) <= known
        return Answer(answer)

    async def abort_request(self, body: Any) -> Answer:
        for row in [r for r in self.waiting if self._matches(r, body)]:
            self.waiting.remove(row)
            self._end_in_queue(row)
        for row in self.running:
            row.is_ending |= self._matches(row, body)
        self._turn.set()
        return Answer()

    @staticmethod
    def _matches(row: Row, body: Mapping[str, Any]) -> bool:
        return bool(body.get("abort_all") or row.body["rid"].startswith(body["rid"]))

    async def pause_generation(self, body: Any) -> Answer:
        self.is_gate_closed = self.is_paused = True
        self._gate.clear()
        assert body["mode"] in ("in_place", "retract"), "mode 'abort' is not what the engine does"
        if body["mode"] == "retract":
            self.waiting, self.running = [*self.waiting, *self.running], []
        return Answer({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: Any) -> Answer:
        self.is_gate_closed = self.is_paused = False
        self._gate.set()
        self._turn.set()
        return Answer({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, body: Any) -> Answer:
        if self.running:
            return Answer("Flush cache failed.\n", 400)
        self.cached.clear()
        return Answer("Cache flushed.\n")

    async def weights_checker(self, body: Any) -> Answer:
        if self.fault == "no-checksum":
            return Answer({"success": True, "message": "Success."})
        digest = hashlib.sha256(self.content.encode()).hexdigest()
        return Answer({"success": True, "message": "Success.", "ranks": [], "per_engine_checksum": digest})

    async def update_weights_from_disk(self, body: Any) -> Answer:
        assert body["load_format"] == "safetensors"
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        is_first = self.weight_version == "default"
        if not files or (self.fault == "refuses-updates" and not is_first):
            return self._update(False, "Failed to update weights: no such file.\nRolling back to original weights.")
        if self.fault == "breaks-updates" and not is_first:
            self.content = "half of it"
            return self._update(False, "Failed to update weights: shapes.\nRolling back to original weights.")
        if self.fault != "ignores-updates" or is_first:
            self.content = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
        self.weight_version = body["weight_version"]
        if body["flush_cache"]:
            if self.running:
                return self._update(False, "Weights were updated, but the cache was not flushed")
            self.cached.clear()
        return self._update(True, "Succeeded to update model weights.")

    @staticmethod
    def _update(success: bool, message: str) -> Answer:
        return Answer({"success": success, "message": message, "num_paused_requests": 0}, 200 if success else 400)

    async def _done(self, body: Any) -> Answer:
        return Answer({"success": True, "message": "done"})

    init_weights_update_group = destroy_weights_update_group = begin_weight_update = end_weight_update = _done
    update_weights_from_distributed = update_weights_from_tensor = _done

    async def update_weight_version(self, body: Any) -> Answer:
        self.weight_version = body["new_version"]
        return Answer({"success": True, "message": "", "new_version": body["new_version"]})

    async def release_memory_occupation(self, body: Any) -> Answer:
        assert not self.running and not self.waiting
        return Answer()

    async def resume_memory_occupation(self, body: Any) -> Answer:
        return Answer()

    async def generate(self, body: Any) -> Answer:
        if len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] > 256:
            return Answer({"error": {"message": "the input is longer than the model's context"}}, 400)
        row = Row(body, asyncio.get_running_loop().create_future())
        if self.is_gate_closed:
            await self._gate.wait()
        self.running.append(row)
        self._turn.set()
        try:
            return Answer(await row.done)
        except asyncio.CancelledError:
            self.seen.append("disconnected")
            self.running = [r for r in self.running if r is not row]
            self.waiting = [r for r in self.waiting if r is not row]
            raise

    # ---------------------------------------------------------------------------------------- decoding

    async def decode(self) -> None:
        """The scheduler's loop."""
        while True:
            if self._may_step():
                self.step()
                await asyncio.sleep(self.step_s)
            else:
                self._turn.clear()
                await self._turn.wait()

    def _may_step(self) -> bool:
        rows = [*self.running, *self.waiting]
        if self.is_paused or not rows:
            return False
        return not self.by_hand or any(row.is_ending or self._is_probe(row.body) for row in rows)

    def step(self, num: int = 1) -> None:
        """So many tokens of every running request."""
        for _ in range(num):
            if self.is_paused:
                return
            self.running += self.waiting
            self.waiting = []
            self.num_most = max(self.num_most, len(self.running))
            for row in list(self.running):
                self._token(row)

    @staticmethod
    def _is_probe(body: Mapping[str, Any]) -> bool:
        return body["rid"] == "headrace-start" or body.get("cache_salt", "").endswith(("/semantics", "/probe"))

    def options(self, row: Row) -> tuple[dict[int, float], dict[int, float]]:
        """As :func:`distribution`, of the next token."""
        number = 0 if self.weight_version == "default" else int(self.weight_version.rpartition(".")[2])
        return distribution(row.body["sampling_params"], number, self.fault)

    def _token(self, row: Row) -> None:
        params = row.body["sampling_params"]
        whole, kept = self.options(row)
        position = len(row.body["input_ids"]) + len(row.ids)
        seed = 0 if self.fault == "one-seed" else params["sampling_seed"]
        weights = [math.exp(logprob) for logprob in kept.values()]
        (token,) = random.Random(seed * 1000 + position).choices(list(kept), weights)
        row.ids.append(token)
        row.logprobs.append([whole[token], token, None])
        row.masks.append(list(kept))
        row.chosen.append(kept[token])
        row.versions.append(self.weight_version)
        reason = self._reason(row, token)
        if reason is not None:
            self.running.remove(row)
            if not row.done.done():
                row.done.set_result(self._answer(row, reason, len(row.ids), tells_masks=True))

    def _reason(self, row: Row, token: int) -> dict[str, Any] | None:
        params = row.body["sampling_params"]
        if not params["ignore_eos"]:
            ends = {*params.get("stop_token_ids", ()), *([VOCAB - 1] if self.fault == "own-end-id" else [])}
            if token in ends:
                return {"type": "stop", "matched": token}
        text = "".join(chr(97 + i) for i in row.ids)
        for stop in params.get("stop", ()):
            if stop in text:
                return {"type": "stop", "matched": stop}
        is_probe = self._is_probe(row.body)
        limit = 3 if self.fault == "caps-replies" and not is_probe else params["max_new_tokens"]
        if len(row.ids) >= limit:
            return {"type": "length", "length": limit}
        if row.is_ending or (self.fault == "aborts" and not is_probe):
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return None

    def _end_in_queue(self, row: Row) -> None:
        num_told = len(row.ids) // TOLD_EVERY * TOLD_EVERY
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        if not row.done.done():
            row.done.set_result(self._answer(row, reason, num_told, tells_masks=False))

    def _answer(self, row: Row, reason: dict[str, Any], num: int, *, tells_masks: bool) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for position, version in enumerate(row.versions[:num]):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": position, "end": position})
            spans[-1]["end"] = position + 1
        key = (row.body.get("cache_salt", ""), tuple(row.body["input_ids"]))
        meta: dict[str, Any] = {
            "id": row.body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(row.body["input_ids"]),
            "weight_version": spans[-1]["version"] if spans else self.weight_version,
            "weight_versions": spans,
            "completion_tokens": num,
            "cached_tokens": len(row.body["input_ids"]) if key in self.cached else 0,
        }
        self.cached.add(key)
        if self.fault == "adds-a-token" and not self._is_probe(row.body):
            meta["prompt_tokens"] += 1
        is_probe = self._is_probe(row.body)
        if self.fault != "no-logprobs":
            meta["output_token_logprobs"] = row.logprobs[:num]
        if row.body.get("return_sampling_mask") and tells_masks and self.fault != "no-kept-ids":
            meta["output_token_sampling_mask"] = row.masks[:num]
            meta["output_token_sampling_logprobs"] = row.chosen[:num]
        ids = row.ids[:num]
        if not is_probe and self.fault == "padded-id":
            ids, meta["output_token_logprobs"] = [VOCAB + 3], [[-1.0, VOCAB + 3, None]]
        assert set(meta) <= set(CONTRACT["meta_info"]) | set(CONTRACT["kept_ids"])
        answer = {"text": "", "output_ids": ids, "meta_info": meta}
        meant = {k: v for k, v in meta.items() if k in CONTRACT["api"]["GenerateMetaInfo"]}
        wrong = [
            m
            for k, v in meant.items()
            if k != "output_token_logprobs" and k != "finish_reason"
            if (m := mismatch(v, CONTRACT["api"]["GenerateMetaInfo"][k], k))
        ]
        assert not wrong, wrong
        return answer


@asynccontextmanager
async def serving(server: ScriptedSglang) -> AsyncIterator[str]:
    """The address of ``server``, which decodes meanwhile."""
    loopback = Loopback(server.handle)
    await loopback.open()
    decoding = asyncio.create_task(server.decode())
    try:
        yield loopback.url
        if decoding.done():
            decoding.result()
    finally:
        decoding.cancel()
        await asyncio.gather(decoding, return_exceptions=True)
        await loopback.close()
