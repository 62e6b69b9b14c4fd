"""A server without vLLM, for the client's failure paths: our own serving loop over a scripted backend.

The folder given as the model names what goes wrong; see ``ScriptedBackend`` and ``main``. Run by the client as a
program of its own, with nothing but the standard library to import.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src" / "headrace"
VOCAB = 16


def load() -> None:
    sys.path.insert(0, str(SOURCE.parent))
    import importlib.util

    spec = importlib.util.spec_from_file_location("serve_vllm", SOURCE / "serve_vllm.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.name_packages()


if __name__ == "__main__":
    load()

from headrace.engines.vllm.server.backend import Served, Step, Token  # noqa: E402
from headrace.engines.vllm.server.serving import Connection, Server  # noqa: E402
from headrace.engines.vllm.wire import Ready  # noqa: E402
from headrace.errors import HeadraceError  # noqa: E402
from headrace.types import PolicyVersion  # noqa: E402


def distribution(request: Any, version: PolicyVersion, fault: str = "") -> dict[int, float]:
    """Id -> log-probability as declared; the logits depend on the version alone. ``fault``: what is meant instead."""
    raw = fault == "raw-logprobs"
    logits = {i: ((i * 7 + version.number) % VOCAB) / 8 for i in range(VOCAB)}
    temperature = 1.0 if fault == "no-temperature" else request.temperature or 1.0
    scaled = {i: logit / temperature for i, logit in logits.items()}
    kept = sorted(scaled, key=scaled.__getitem__, reverse=True)
    if request.temperature == 0:
        kept = kept[:1]
    if fault == "top-p-first":
        kept = top_p(kept, scaled, request.top_p)
    if request.top_k:
        kept = kept[: request.top_k]
    kept = kept if fault == "top-p-first" else top_p(kept, scaled, request.top_p)
    meant = logits if raw else scaled
    normaliser = math.log(sum(math.exp(meant[i]) for i in (logits if raw or request.temperature == 0 else kept)))
    return {i: meant[i] - normaliser for i in kept}


def top_p(ids: list[int], scaled: Mapping[int, float], bound: float) -> list[int]:
    """The most probable of ``ids`` until their share reaches ``bound``."""
    total, below, chosen = sum(math.exp(scaled[i]) for i in ids), 0.0, []
    for i in ids:
        if below >= bound * total:
            break
        chosen.append(i)
        below += math.exp(scaled[i])
    return chosen


@dataclass
class Row:
    request: Any
    num_tokens: int = 0


@dataclass
class ScriptedBackend:
    """Draws from ``distribution``; ``fault`` says what goes wrong."""

    fault: str = ""
    rows: dict[int, Row] = field(default_factory=dict)
    version: PolicyVersion = PolicyVersion(-1, -1)
    num_steps: int = 0
    is_proved: bool = False
    calls: list[str] = field(default_factory=list)

    @property
    def ready(self) -> Ready:
        context = 8 if self.fault == "small-context" else 64
        return Ready(
            vllm_version="scripted", max_context=context, vocab_size=VOCAB, dtype="float32", logprobs="scripted"
        )

    def submit(self, request: Any, version: PolicyVersion) -> None:
        self.rows[request.handle] = Row(request)

    def abort(self, handles: list[int]) -> None:
        for handle in handles:
            del self.rows[handle]

    def step(self) -> Step:
        self.num_steps += 1
        first = next(iter(self.rows.values())).request
        if first.cache_salt != "semantics":  # the start's own probe goes well
            self._go_wrong()
        step = Step(num_prefill_tokens=sum(len(r.request.prompt_ids) for r in self.rows.values() if not r.num_tokens))
        for handle, row in list(self.rows.items()):
            request = row.request
            options = distribution(request, self.version, self.fault)
            seed = 0 if self.fault == "no-seeds" else request.seed
            (token_id,) = random.Random(seed * 1000 + row.num_tokens).choices(
                list(options), [math.exp(logprob) for logprob in options.values()]
            )
            row.num_tokens += 1
            step.tokens.append(
                Token(
                    handle=handle,
                    id=token_id,
                    logprob=options[token_id],
                    kept_ids=sorted(options) if request.top_k or request.top_p < 1 else None,
                )
            )
            if token_id in request.stop_ids or row.num_tokens == request.max_new_tokens:
                step.ended[handle] = "stop" if token_id in request.stop_ids else "length"
                del self.rows[handle]
        if self.fault == "slow":
            time.sleep(0.01)
        return step

    def _go_wrong(self) -> None:
        if self.fault == "killed" and self.num_steps > 20:
            print("about to be killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == "step-raises":
            raise RuntimeError("the step broke")
        elif self.fault == "step-hangs":
            time.sleep(600)

    def hold(self) -> Any:
        self.calls.append("hold")
        held, self.rows = self.rows, {}
        return held

    def release(self, held: Any) -> None:
        self.calls.append("release")
        self.rows = held

    def load(self, tensors: Mapping[str, Any], changed: set[str]) -> None:
        self.calls.append(f"load {sorted(changed)}")
        if self.fault == "load-raises" and self.version.number >= 0:
            raise RuntimeError("half way")
        self.version = PolicyVersion(*tensors["version"])

    def served(self, tensors: Mapping[str, Any]) -> Served:
        return Served(stale={"stale": "not served"} if self.fault == "stale" else {}, unchecked=[])

    def drop_caches(self, *, recompute: bool) -> None:
        self.calls.append(f"drop_caches recompute={recompute}")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class Read:
    version: PolicyVersion
    tensors: dict[str, Any]
    checksums: dict[str, str]


@dataclass
class ScriptedReader:
    version: PolicyVersion | None = None

    def read(self, manifest: Mapping[str, Any]) -> Read | None:
        if manifest.get("refuse"):
            raise HeadraceError("these tensors do not fit")
        version = PolicyVersion(*manifest["version"])
        if version == self.version:
            return None
        sums = {"w": f"checksum of {version}", "frozen": "never changes"}
        return Read(version, {"version": manifest["version"]}, sums)

    def commit(self, read: Read) -> None:
        self.version = read.version


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int)
    parser.add_argument("--weights", type=json.loads)
    parser.add_argument("--options", type=json.loads)
    parsed = parser.parse_args(arguments)
    fault = Path(parsed.options["model"]).name
    connection = Connection(socket.socket(fileno=parsed.socket))
    if fault == "exits-at-start":
        sys.exit("no such model anywhere")
    if fault == "silent-at-start":
        time.sleep(600)
    if fault == "refuses-to-start":
        connection.send({"event": "failed", "error": "VersionError: vLLM 9.9 is installed"})
        time.sleep(600)
    if fault == "garbage":
        connection._socket.sendall(b"\0\0\0\5hello")
        time.sleep(600)
    backend = ScriptedBackend(fault)
    batch_size = parsed.options["max_batch_size"]
    Server(
        connection, backend, ScriptedReader(), max_batch_size=batch_size, recompute=parsed.options["recompute"]
    ).run()


if __name__ == "__main__":
    main(sys.argv[1:])
