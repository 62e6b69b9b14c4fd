"""What travels to an SGLang server and back: every field that is sent or read, by SGLang's own names.

Held to SGLang 0.5.23: tests/data/sglang_contract.json is read out of its wheel, and the contract test asserts that each
field named here exists there, with its type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engines.errors import EngineError
from headrace.types import GenerationRequest, PolicyVersion, VersionSpan

SUPPORTED = ("0.5",)
"""Minor versions of SGLang; the contract was read out of CONTRACT_VERSION."""
CONTRACT_VERSION = "0.5.23"

# Route -> fields of its body.
SENT: Mapping[str, frozenset[str]] = {
    "/generate": frozenset(
        {"rid", "input_ids", "sampling_params", "return_logprob", "return_sampling_mask", "stream", "cache_salt"}
    ),
    "/abort_request": frozenset({"rid", "abort_all"}),
    "/pause_generation": frozenset({"mode"}),
    "/continue_generation": frozenset({"torch_empty_cache"}),
    "/update_weights_from_disk": frozenset({"model_path", "load_format", "weight_version", "flush_cache"}),
    "/init_weights_update_group": frozenset(
        {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
    ),
    "/destroy_weights_update_group": frozenset({"group_name"}),
    "/begin_weight_update": frozenset({"selector"}),
    "/update_weights_from_distributed": frozenset(
        {"names", "dtypes", "shapes", "group_name", "flush_cache", "weight_version"}
    ),
    "/update_weights_from_tensor": frozenset({"serialized_named_tensors", "flush_cache", "weight_version"}),
    "/end_weight_update": frozenset(),
    "/update_weight_version": frozenset({"new_version", "abort_all_requests"}),
    "/flush_cache": frozenset(),
    "/weights_checker": frozenset({"action"}),
    "/release_memory_occupation": frozenset({"tags"}),
    "/resume_memory_occupation": frozenset({"tags"}),
    "/model_info": frozenset(),
    "/server_info": frozenset(),
}
SENT_SAMPLING = frozenset(
    {
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "sampling_seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "no_stop_trim",
        "skip_special_tokens",
    }
)
READ_META_INFO = frozenset(
    {
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "finish_reason",
        "weight_version",
        "weight_versions",
        "output_token_logprobs",
        "output_token_sampling_mask",
        "output_token_sampling_logprobs",
    }
)
READ_MODEL_INFO = frozenset({"is_generation", "weight_version", "model_type", "architectures", "model_path"})
READ_SERVER_INFO = frozenset({"version", "enable_deterministic_inference", "max_req_input_len", "dtype"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one call to /generate brought: a whole reply, or as much of it as there was when it was aborted."""

    reason: str
    """``stop``, ``length`` or ``abort``."""
    message: str = ""
    """Why it was aborted."""
    matched: int | str | None = None
    """What stopped it."""
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    spans: tuple[VersionSpan, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(slots=True)
class Versions:
    """The names that this run has given to weights, so that nobody else's are taken for its own."""

    known: dict[str, PolicyVersion] = field(default_factory=dict)

    def name(self, version: PolicyVersion) -> str:
        self.known[str(version)] = version
        return str(version)

    def version(self, name: Any, where: str) -> PolicyVersion:
        if name not in self.known:
            raise EngineError(
                f"{where}: its tokens are of weights {name!r}, which this run never published: somebody else updates "
                "the server, or it was restarted. One server belongs to one run"
            )
        return self.known[name]


def generate_body(
    request: GenerationRequest, rid: str, sampled: Sequence[int], version_name: str, max_new_tokens: int
) -> dict[str, Any]:
    """The body of /generate for what is left of a request, of which ``sampled`` ids are there already. SGLang draws
    each id by the request's seed and the id's position, so the parts of a reply are those of the whole."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p if sampling.is_truncated else 1.0,
        "top_k": (sampling.top_k or -1) if sampling.is_truncated else -1,
        "sampling_seed": request.seed,
        # It ends replies at its model's own end ids unless told not to, and then at no id at all.
        "ignore_eos": not sampling.stop_ids,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.stop_ids:
        params["stop_token_ids"] = sorted(sampling.stop_ids)
    if sampling.stop_strings:
        params["stop"] = list(sampling.stop_strings)
    return {
        "rid": rid,
        "input_ids": [*request.prompt_ids, *sampled],
        "sampling_params": params,
        "return_logprob": True,
        # Without it, log-probabilities under top-k or top-p are those of the whole vocabulary.
        "return_sampling_mask": sampling.is_truncated,
        "stream": False,
        # The prefix cache belongs to the weights that filled it.
        "cache_salt": f"{version_name}/{request.cache_salt or ''}",
    }


def read_part(answer: Any, request: GenerationRequest, num_sent: int, versions: Versions, vocab_size: int) -> Part:
    """What came, checked: an id without its log-probability, kept ids or version is an error, never a guess.

    Raises EngineError saying what is missing.
    """
    where = f"request {request.id}"
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        reason = finish["type"]
        ids = tuple(int(i) for i in answer["output_ids"])
        num_prompt_tokens = int(meta.get("prompt_tokens", num_sent))
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{where}: the answer has not the form of SGLang's ({type(error).__name__}: {error}): {str(answer)[:200]}"
        ) from error
    if num_prompt_tokens != num_sent:
        raise EngineError(f"{where}: {num_sent} prompt ids were sent, the server computed {num_prompt_tokens} (F18)")
    matched, message = finish.get("matched"), str(finish.get("message", ""))
    if reason == "abort" and request.sampling.is_truncated and ids and not meta.get("output_token_sampling_mask"):
        # Aborted while it waited in the server's queue: there, SGLang tells the ids without what they were drawn from.
        return Part(reason=reason, message=message)
    wrong = [i for i in ids if not 0 <= i < vocab_size]
    if wrong:
        raise EngineError(
            f"{where}: the server sampled id {wrong[0]}, and the tokenizer has {vocab_size} ids (F14): its model's "
            "padded rows have gained mass"
        )
    logprobs, kept_ids = _logprobs(meta, ids, where, is_truncated=request.sampling.is_truncated)
    return Part(
        reason=reason,
        message=message,
        matched=matched,
        ids=ids,
        logprobs=logprobs,
        kept_ids=kept_ids,
        spans=_spans(meta, len(ids), versions, where),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=int(meta.get("cached_tokens", 0)),
    )


def _logprobs(
    meta: Mapping[str, Any], ids: tuple[int, ...], where: str, *, is_truncated: bool
) -> tuple[tuple[float, ...], tuple[tuple[int, ...], ...] | None]:
    """(log-probability of each id, kept ids of each where ids were cut off)."""
    if not ids:
        return (), () if is_truncated else None
    entries = meta.get("output_token_logprobs")
    if not entries:
        raise EngineError(
            f"{where}: the server returned {len(ids)} ids without log-probabilities (meta_info.output_token_logprobs), "
            "which every algorithm needs; is it an SGLang server, and does nothing in front of it take them out?"
        )
    named = tuple(int(entry[1]) for entry in entries)
    if named != ids:
        raise EngineError(f"{where}: the log-probabilities are of ids {named[:8]}..., the reply is {ids[:8]}... (F13)")
    if not is_truncated:
        return _finite([entry[0] for entry in entries], where), None
    masks, chosen = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    if masks is None or chosen is None or len(masks) != len(ids) or len(chosen) != len(ids):
        raise EngineError(
            f"{where}: top-k or top-p is on, and the server did not tell the kept ids of each of {len(ids)} ids "
            "(meta_info.output_token_sampling_mask), without which the trainer would score another distribution"
        )
    # In mode "selected" each entry is the sampled id's, bare or in a list of one.
    values = [entry[0] if isinstance(entry, list) else entry for entry in chosen]
    kept = tuple(tuple(sorted(int(i) for i in mask)) for mask in masks)
    lost = next((i for i, mask in zip(ids, kept, strict=True) if i not in mask), None)
    if lost is not None:
        raise EngineError(f"{where}: id {lost} was sampled, and is not among the ids that the server says it kept")
    return _finite(values, where), kept


def _finite(values: Sequence[Any], where: str) -> tuple[float, ...]:
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        wrong = next(v for v in values if not (isinstance(v, (int, float)) and math.isfinite(v)))
        raise EngineError(f"{where}: a log-probability is {wrong!r}, not a finite number")
    return tuple(float(value) for value in values)


def _spans(meta: Mapping[str, Any], num_tokens: int, versions: Versions, where: str) -> tuple[VersionSpan, ...]:
    """From the server's own record of its updates: the weights that sampled each id."""
    if not num_tokens:
        return ()
    told = meta.get("weight_versions")
    if not told:
        told = [{"version": meta.get("weight_version"), "start": 0, "end": num_tokens}]
    spans = [VersionSpan(versions.version(s["version"], where), int(s["start"]), int(s["end"])) for s in told]
    return tuple(span for span in spans if span.end > span.start)
