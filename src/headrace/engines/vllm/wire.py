"""What travels between the client and the server: frames of JSON over one socket, and never a pickle.

A frame is a length (4 bytes, big endian) and as many bytes of JSON. Client to server (``call`` asks for an answer)::

    {"op": "submit", "requests": [request, ...]}         {"op": "abort", "handles": [int, ...]}
    {"op": "pause" | "resume" | "health", "call": int}   {"op": "probe", "call": int, "requests": [request, ...]}
    {"op": "update" | "frozen", "call": int, "manifest": {...}}

Server to client::

    {"event": "ready", ...Ready}                         {"event": "failed", "error": str}
    {"event": "step", "version": [lineage, number], "tokens": [[handle, id, logprob, kept ids or null], ...],
     "ended": [[handle, "stop" | "length"], ...], "counters": {...}}
    {"call": int, "result": {...}}                       {"call": int, "error": str, "kind": "update" | "engine"}

Log-probabilities are Python floats in JSON, so they arrive bit for bit. Tensors do not come this way.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

from headrace.types import GenerationRequest, PolicyVersion, Sampling

MAX_FRAME_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size

Message = dict[str, Any]


class WireError(Exception):
    """What came is not a frame of this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a server says of itself once it can work."""

    vllm_version: str
    max_context: int
    """Prompt plus reply, in tokens."""
    vocab_size: int
    """Ids that the model can score; the tokenizer may have fewer."""
    dtype: str
    logprobs: str
    """vLLM's name of the log-probabilities that it returns; ``processed_logprobs`` is what the client wants."""
    kv_total_tokens: int = 0
    """Room of the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """One request as the server sees it."""

    handle: int
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_ids: list[int]
    seed: int
    cache_salt: str


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """Raises WireError for a length that no frame has."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame claims {length} bytes, above the limit of {MAX_FRAME_BYTES}")
    return int(length)


def decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise WireError(f"a frame is no JSON: {error}; it begins with {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise WireError(f"a frame holds a {type(message).__name__}, not an object: {body[:80]!r}")
    return message


def to_wire(request: GenerationRequest, handle: int) -> Message:
    """Stop strings stay behind: the client looks for them, with the run's own decoder."""
    sampling: Sampling = request.sampling
    return asdict(
        ServerRequest(
            handle=handle,
            prompt_ids=list(request.prompt_ids),
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.is_truncated else 1.0,
            top_k=sampling.top_k if sampling.is_truncated else 0,
            stop_ids=list(sampling.stop_ids),
            seed=_seed(request),
            cache_salt=request.cache_salt or "",
        )
    )


def _seed(request: GenerationRequest) -> int:
    """A reply that another engine has begun goes on with draws of its own: vLLM cannot skip those made before, and the
    same ones again would tie the later tokens to the first."""
    if not request.first_draw:
        return request.seed
    text = f"{request.seed}/{request.first_draw}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def from_wire(message: Message) -> ServerRequest:
    try:
        return ServerRequest(**message)
    except TypeError as error:
        raise WireError(f"a request has other fields than expected: {error}") from error


def version_from_wire(value: Any) -> PolicyVersion:
    lineage, number = value
    return PolicyVersion(int(lineage), int(number))
