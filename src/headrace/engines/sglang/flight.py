"""One request on its way: the parts of its reply so far, wherever its last part was cut off.

SGLang cannot hold a request back while a probe runs, so a pause takes requests off the server with what they have
sampled, and afterwards the rest is asked for with prompt and reply so far as the prompt. The reply that comes out of
the parts has one log-probability, kept-id set and version for each token, as if it had been whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.engines.errors import EngineError
from headrace.engines.sglang.wire import Part
from headrace.types import FinishReason, Generation, GenerationRequest, VersionSpan

Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class Flight:
    """Belongs to the event loop."""

    request: GenerationRequest
    is_probe: bool = False
    is_aborted: bool = False
    """Its caller asked for the end of it."""
    is_taken_off: bool = False
    """The engine asked the server to abort its part."""
    rid: str | None = None
    """The server's name of the part that runs there; None: none does."""
    call: asyncio.Task[Any] | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    returned: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no part runs on the server."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[tuple[int, ...]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.sampling.max_new_tokens - len(self.ids)

    def add(self, part: Part, decode: Decode | None) -> FinishReason | None:
        """Append a part; returns why the reply ended, or None where it goes on. Raises EngineError where the server
        ended it for a reason that the request does not know."""
        start = len(self.ids)
        self.ids += part.ids
        self.logprobs += part.logprobs
        self.kept_ids += part.kept_ids or ()
        for span in part.spans:
            self._add_span(VersionSpan(span.version, start + span.start, start + span.end))
        reason = self._own_reason(start, part, decode)
        if reason is not None:
            return reason
        name = f"request {self.request.id}"
        if part.reason == "stop":
            raise EngineError(
                f"{name}: the server ended the reply at {part.matched!r}, which is none of the request's stop ids "
                f"{list(self.request.sampling.stop_ids)}: its model's configuration names end ids that the run's "
                "tokenizer and generation config do not (F30)"
            )
        if part.reason == "length":
            raise EngineError(
                f"{name}: the server ended the reply after {len(self.ids)} of {self.request.sampling.max_new_tokens} "
                "tokens: it has less room for prompt and reply than it said, or a limit of its own "
                "(SGLANG_MAX_NEW_TOKENS_LIMIT)"
            )
        if not (self.is_taken_off or self.is_aborted):
            raise EngineError(f"{name}: the server aborted it by itself: {part.message or 'it does not say why'}")
        return None

    def _own_reason(self, start: int, part: Part, decode: Decode | None) -> FinishReason | None:
        """By the request's own rules, whatever the server calls it: an abort may fall on the last token."""
        sampling = self.request.sampling
        if sampling.stop_strings and part.ids and decode is not None:
            # The server looks at its own part only; a stop string may have begun in the part before.
            end = self._stop_end(start, decode)
            if end is not None:
                self._cut(end)
                return "stop"
        if self.ids and self.ids[-1] in sampling.stop_ids:
            return "stop"
        if part.reason == "stop" and isinstance(part.matched, str) and part.matched in sampling.stop_strings:
            return "stop"
        return "length" if self.num_left <= 0 else None

    def _stop_end(self, start: int, decode: Decode) -> int | None:
        """Tokens up to and with the one that completes a stop string; None where none is complete."""
        stops = self.request.sampling.stop_strings
        if not any(stop in decode(self.ids) for stop in stops):
            return None
        ends = range(start + 1, len(self.ids) + 1)
        return next((end for end in ends if any(stop in decode(self.ids[:end]) for stop in stops)), len(self.ids))

    def _cut(self, end: int) -> None:
        self.ids, self.logprobs, self.kept_ids = self.ids[:end], self.logprobs[:end], self.kept_ids[:end]
        self.spans = [s._replace(end=min(s.end, end)) for s in self.spans if s.start < end]

    def _add_span(self, span: VersionSpan) -> None:
        if self.spans and self.spans[-1].version == span.version:
            self.spans[-1] = self.spans[-1]._replace(end=span.end)
        else:
            self.spans.append(span)

    def generation(self, reason: FinishReason) -> Generation:
        """Raises EngineError where the server's version spans leave a token out."""
        try:
            return Generation(
                request_id=self.request.id,
                ids=tuple(self.ids),
                logprobs=tuple(self.logprobs),
                version_spans=tuple(self.spans),
                finish_reason=reason,
                kept_ids=tuple(self.kept_ids) if self.request.sampling.is_truncated else None,
            )
        except ValueError as error:
            raise EngineError(f"the server's record of a reply does not fit together: {error}") from error
