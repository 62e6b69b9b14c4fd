"""What an SGLang server must be like before a run builds on it: everything that can be asked, one clear error for all.

Asked twice: before any model is loaded (:func:`check_before_work`), so that a wrong address costs seconds, and by each
engine when it starts, since a server may have been restarted meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.engines.errors import EngineError
from headrace.engines.sglang.calls import SglangCalls
from headrace.engines.sglang.wire import CONTRACT_VERSION, SUPPORTED

PROBE_DEADLINE_S = 60.0
"""For one token of an idle server."""
MARGIN_TOKENS = 6
"""SGLang's ``max_req_input_len`` is so much below what prompt and reply may have together."""
_NAMES = {"float32": ("float32", "float"), "bfloat16": ("bfloat16",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the run knows of its own model."""

    dtype: str
    architectures: tuple[str, ...] = ()
    """As in the model's config.json; empty: not known."""
    model_type: str = ""
    max_context: int = 0
    """Prompt plus reply, in tokens; 0: not known yet."""


def check_before_work(make_calls: Callable[[], SglangCalls], expected: Expected, patience_s: float) -> None:
    """Blocks. Raises EngineError naming all that is wrong with the server."""

    async def check() -> None:
        calls = make_calls()
        try:
            await check_server(calls, expected, patience_s)
        finally:
            await calls.close()

    _run_apart(check)


def _run_apart(check: Callable[[], Awaitable[None]]) -> None:
    """In an event loop of its own: the caller may be inside of one."""

    async def main() -> None:
        await check()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-sglang-check") as pool:
        pool.submit(asyncio.run, main()).result()


async def check_server(calls: SglangCalls, expected: Expected, patience_s: float) -> None:
    """Leaves it running nothing and not paused: what a run that was killed has left there is ended."""
    model = await calls.model_info(patience_s=patience_s)
    server = await calls.server_info()
    problems = [*_version_problems(server), *_model_problems(model, expected), *_server_problems(server, expected)]
    if problems:
        raise EngineError(f"{calls.name} does not fit the run: " + "; ".join(problems))
    await calls.abort_all()
    await calls.resume()
    await _check_logprobs(calls)


def _version_problems(server: Mapping[str, Any]) -> Iterator[str]:
    version = str(server.get("version", ""))
    if not any(version == minor or version.startswith(f"{minor}.") for minor in SUPPORTED):
        yield (
            f"it says that it is SGLang {version or '(no version)'}, and headrace was held to the interface of "
            f"{CONTRACT_VERSION} (supported: {', '.join(SUPPORTED)}.x)"
        )


def _model_problems(model: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    if not model.get("is_generation", True):
        yield "its model does not generate (is_generation is false)"
    served = tuple(model.get("architectures") or ())
    if expected.architectures and served and served != expected.architectures:
        yield (
            f"it serves another model: {', '.join(served)} from {model.get('model_path')}, and the run trains "
            f"{', '.join(expected.architectures)}; start it with --model-path set to the run's model.path"
        )
    elif expected.model_type and model.get("model_type") not in (None, expected.model_type):
        yield (
            f"it serves another model: type {model['model_type']} from {model.get('model_path')}, and the run's is of "
            f"type {expected.model_type}"
        )


def _server_problems(server: Mapping[str, Any], expected: Expected) -> Iterator[str]:
    if server.get("enable_deterministic_inference") is not True:
        yield (
            "it ignores seeds, so that no reply could be drawn again (I18): start it with "
            "--enable-deterministic-inference"
        )
    dtype = str(server.get("dtype", "auto"))
    if dtype not in ("auto", *_NAMES[expected.dtype]):
        yield f"it computes in {dtype}, the trainer in {expected.dtype}: start it with --dtype {expected.dtype} (F9)"
    room = server.get("max_req_input_len")
    if expected.max_context and isinstance(room, int) and room + MARGIN_TOKENS < expected.max_context:
        yield (
            f"prompt and reply may have {room + MARGIN_TOKENS} tokens there, {expected.max_context} are needed: lower "
            "engine.max_context, or give it more room (--context-length, --mem-fraction-static)"
        )


async def _check_logprobs(calls: SglangCalls) -> None:
    """One token, with all that is read of a reply."""
    body = {
        "rid": "headrace-start",
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0, "ignore_eos": True},
        "return_logprob": True,
        "stream": False,
    }
    try:
        answer = await asyncio.wait_for(calls.generate(body), PROBE_DEADLINE_S)
    except TimeoutError as error:
        raise EngineError(
            f"{calls.name} did not sample one token within {PROBE_DEADLINE_S:g} s, though nothing else runs there"
        ) from error
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or not answer.get("output_ids"):
        raise EngineError(f"{calls.name} answered /generate with {str(answer)[:200]}: is it an SGLang server?")
    entries = meta.get("output_token_logprobs")
    if not entries or not isinstance(entries[0][0], float):
        raise EngineError(
            f"{calls.name} returns ids without log-probabilities (meta_info.output_token_logprobs), which every "
            "algorithm needs; does a gateway in front of it take them out?"
        )
    if "weight_version" not in meta:
        raise EngineError(f"{calls.name} does not say which weights sampled a token (meta_info.weight_version)")
