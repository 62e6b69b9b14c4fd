"""Any server with OpenAI's chat completions, as an engine of text: for ``headrace eval``, and for whoever judges.

``protocols.ChatEngine``: messages in, text out. Requests wait for a free place here, are repeated while the server is
busy, broken or away (status 429, 5xx, a lost connection), and all that within one deadline each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace.config.engines import OpenAiEngineConfig
from headrace.engines.errors import EngineError, RequestError
from headrace.engines.http import NO_ANSWER, UNSENT, HttpClient, HttpError, Repeat, api_key
from headrace.protocols import ChatReply, ChatRequest
from headrace.types import FinishReason, PolicyVersion

BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_REASONS: Mapping[str, FinishReason] = {
    "stop": "stop",
    "length": "length",
    # By servers that kept names of their own:
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "end_turn": "stop",
    "max_tokens": "length",
}
_NUM_LISTED = 8


def make_client(config: OpenAiEngineConfig) -> HttpClient:
    """Raises ConfigError where the key that the configuration names is not there."""
    return HttpClient(
        config.url,
        name="the server",
        key=api_key(config.api_key_variable),
        key_variable=config.api_key_variable,
        use_proxies=True,
    )


class OpenAiEngine:
    """``protocols.ChatEngine``: ``model`` as ``client``'s server knows it."""

    def __init__(self, config: OpenAiEngineConfig, model: str, client: HttpClient) -> None:
        self._config = config
        self._model = model
        self._client = client
        self._slots = asyncio.Semaphore(config.max_concurrent)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(0, 0)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Raises RequestError where the server refuses the request, EngineError where it does not answer it."""
        deadline_s = self._config.request_deadline_s
        repeat = Repeat(statuses=BUSY | {NO_ANSWER, UNSENT}, patience_s=deadline_s)
        async with self._slots:
            try:
                answer = await self._client.call(
                    "POST", "/chat/completions", body=self._body(request), deadline_s=deadline_s, repeat=repeat
                )
            except HttpError as error:
                kind = RequestError if error.status in (400, 404, 413, 422) else EngineError
                raise kind(str(error)) from error
        return _reply(answer)

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [dict(message) for message in request.messages],
            "temperature": sampling.temperature,
            self._config.length_option: sampling.max_new_tokens,
        }
        if sampling.top_p < 1:
            body["top_p"] = sampling.top_p
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        if self._config.send_seed:
            body["seed"] = request.seed
        return body

    async def check(self) -> None:
        """One clear error where the address is dead, the key is refused, or the model is not served."""
        deadline_s = self._config.start_deadline_s
        repeat = Repeat(statuses=BUSY | {NO_ANSWER, UNSENT}, patience_s=deadline_s / 2)
        try:
            answer = await self._client.call("GET", "/models", deadline_s=deadline_s, repeat=repeat)
        except HttpError as error:
            if error.status in (404, 405, 501):  # a server without that list: the first request tells
                return
            raise
        rows = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            raise EngineError(
                f"{self._client.name} answered /models with {str(answer)[:200]!r}: is engine.url the address of an "
                "OpenAI-style server, up to and with its version (.../v1)?"
            )
        names = [str(row.get("id")) for row in rows if isinstance(row, dict)]
        if self._model in names or await self._is_known(deadline_s):
            return
        more = f" and {len(names) - _NUM_LISTED} more" if len(names) > _NUM_LISTED else ""
        listed = ", ".join(names[:_NUM_LISTED]) + more
        raise EngineError(f"{self._client.name} serves no model {self._model!r}; it lists {listed or 'none'}")

    async def _is_known(self, deadline_s: float) -> bool:
        """Names that a server takes and does not list, such as aliases of dated ones."""
        try:
            await self._client.call("GET", f"/models/{self._model}", deadline_s=deadline_s)
        except HttpError as error:
            if error.status in (400, 404, 405):
                return False
            raise
        return True

    async def close(self) -> None:
        await self._client.close()


def check_before_work(make_engine: Callable[[], OpenAiEngine]) -> None:
    """Blocks, in an event loop of its own: the caller may be inside of one. Raises EngineError."""

    async def check() -> None:
        engine = make_engine()
        try:
            await engine.check()
        finally:
            await engine.close()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="headrace-openai-check") as pool:
        pool.submit(asyncio.run, check()).result()


def _reply(answer: Any) -> ChatReply:
    """The first choice's text. An answer without one is an error, never an empty reply. No message names the request:
    an evaluation counts equal ones."""
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content, reason = message.get("content"), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(f"the answer has not the form of a chat completion: {str(answer)[:200]!r}") from error
    if reason == "content_filter":
        raise EngineError("the server withheld the reply (finish_reason content_filter)")
    finish_reason = _REASONS.get(str(reason))
    if finish_reason is None:
        raise EngineError(f"the server ended the reply for a reason not known here: {reason!r}")
    if content is None and finish_reason != "length":  # a reasoning model may use its whole length before it answers
        raise EngineError(f"the server returned no text: {str(message)[:200]}")
    if not isinstance(content, str | None):
        raise EngineError(f"the reply is no text but {type(content).__name__}")
    return ChatReply(text=content or "", finish_reason=finish_reason)
