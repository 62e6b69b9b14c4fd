"""One request on its way through the embedded engine: what may be asked, and what has been drawn so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace.engines.errors import RequestError
from headrace.engines.sampling import uniform
from headrace.types import FinishReason, Generation, GenerationRequest, PolicyVersion, RoutingIds, VersionSpan


@dataclass(slots=True, eq=False)
class Running:
    """A submitted request. Belongs to the event loop; the compute thread never sees it."""

    request: GenerationRequest
    future: asyncio.Future[Generation]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[tuple[int, ...]] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    routing: list[Tensor] = field(default_factory=list)
    """The prompt's, then one token's for each further step, as the weights of that moment chose."""
    line: int = -1
    """Equal for requests whose prompt and tokens have all been the same, see ``Lane.part_lines``."""

    @property
    def num_stored(self) -> int:
        """Tokens whose keys and values lie in the row: all but the newest."""
        return len(self.request.prompt_ids) + len(self.ids) - 1

    @property
    def stored_ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids + tuple(self.ids[:-1])

    @property
    def next_uniform(self) -> float:
        return uniform(self.request.seed, self.request.first_draw + len(self.ids))

    def append(
        self,
        token_id: int,
        logprob: float,
        kept_ids: tuple[int, ...] | None,
        version: PolicyVersion,
        routing: Tensor | None = None,
    ) -> None:
        """A drawn token, and what the routers chose for the tokens that the step computed to draw it."""
        position = len(self.ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = self.spans[-1]._replace(end=position + 1)
        else:
            self.spans.append(VersionSpan(version, position, position + 1))
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        if kept_ids is not None:
            self.kept_ids.append(kept_ids)
        if routing is not None:
            self.routing.append(routing)

    def finish_reason(self, decode: Callable[[Sequence[int]], str] | None) -> FinishReason | None:
        """Why the newest token ends the reply; None where it does not.

        Stop strings are looked for in the text of the whole reply, so a string that begins inside one token and ends
        inside another is found; the token that completes it stays (F27).
        """
        sampling = self.request.sampling
        if self.ids[-1] in sampling.stop_ids:
            return "stop"
        if sampling.stop_strings:
            assert decode is not None, "check_request refuses stop strings without a decode callback"
            text = decode(self.ids)
            if any(stop in text for stop in sampling.stop_strings):
                return "stop"
        return "length" if len(self.ids) >= sampling.max_new_tokens else None

    def generation(self, reason: FinishReason, *, carry_kept_ids: bool) -> Generation:
        carries = carry_kept_ids and self.request.sampling.is_truncated
        return Generation(
            request_id=self.request.id,
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            version_spans=tuple(self.spans),
            finish_reason=reason,
            kept_ids=tuple(self.kept_ids) if carries else None,
            routing=self._routing_ids(),
        )

    def _routing_ids(self) -> RoutingIds | None:
        if not self.routing:
            return None
        prompt, *steps = self.routing  # the prompt's is shared with the other members of the group
        return RoutingIds((prompt, torch.cat(steps)) if steps else (prompt,))


def check_request(request: GenerationRequest, vocab_size: int, max_context: int, *, has_decode: bool) -> None:
    """Raises :class:`RequestError` naming everything that is wrong with ``request``."""
    sampling = request.sampling
    problems = []
    if not request.prompt_ids:
        problems.append("the prompt is empty; the model needs at least one id to start from")
    wrong = [i for i in request.prompt_ids if not 0 <= i < vocab_size]
    if wrong:
        problems.append(f"prompt ids {wrong[:5]} are not in the vocabulary of {vocab_size}")
    if sampling.max_new_tokens < 1:
        problems.append(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    num_needed = len(request.prompt_ids) + sampling.max_new_tokens
    if num_needed > max_context:
        problems.append(
            f"a prompt of {len(request.prompt_ids)} tokens plus max_new_tokens {sampling.max_new_tokens} is "
            f"{num_needed}, more than the context of {max_context}; shorten the prompt or lower max_new_tokens"
        )
    if not sampling.temperature >= 0:
        problems.append(f"temperature is {sampling.temperature}; it must be 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        problems.append(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
    if sampling.top_k < 0:
        problems.append(f"top_k is {sampling.top_k}; it must be 0 (off) or more")
    if "" in sampling.stop_strings:
        problems.append("a stop string is empty")
    if sampling.stop_strings and not has_decode:
        problems.append("stop strings were given, but this engine was built without decode=...")
    if problems:
        raise RequestError(f"request {request.id}: " + "; ".join(problems))
