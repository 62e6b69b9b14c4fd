"""A reply that several engines sample, one after the other: each goes on where the one before it died."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.types import FinishReason, Generation, GenerationRequest, RoutingIds, VersionSpan


def rest_of(request: GenerationRequest, parts: Sequence[Generation]) -> GenerationRequest:
    """What is still to be sampled: the tokens of ``parts`` stand at the end of the prompt, and the seed's random stream
    goes on behind the draws that made them. Its prompt is no longer the group's."""
    ids = tuple(i for part in parts for i in part.ids)
    if not ids:
        return request
    return replace(
        request,
        prompt_ids=request.prompt_ids + ids,
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - len(ids)),
        prefix_key=None,
        first_draw=request.first_draw + len(ids),
    )


def can_continue(request: GenerationRequest, parts: Sequence[Generation], new: Generation) -> bool:
    """False where the request must start again: a stop string may have begun in the tokens that are known, and an
    engine sees its own alone; or what came is no partial reply."""
    num_known = sum(len(part.ids) for part in parts) + len(new.ids)
    return not request.sampling.stop_strings and num_known < request.sampling.max_new_tokens


def joined(request: GenerationRequest, parts: Sequence[Generation], finish_reason: FinishReason) -> Generation:
    """``parts`` as one reply: each token keeps its log-probability, its version and its kept ids."""
    parts = [part for part in parts if part.ids]
    kept: list[tuple[int, ...]] | None = [] if parts else None
    for part in parts:
        kept = None if kept is None or part.kept_ids is None else kept + list(part.kept_ids)
    return Generation(
        request_id=request.id,
        ids=tuple(i for part in parts for i in part.ids),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        version_spans=_joined_spans(parts),
        finish_reason=finish_reason,
        kept_ids=None if kept is None else tuple(kept),
        routing=_joined_routing(request, parts),
    )


def _joined_spans(parts: Sequence[Generation]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for version, start, end in part.version_spans:
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1]._replace(end=offset + end)
            else:
                spans.append(VersionSpan(version, offset + start, offset + end))
        offset += len(part.ids)
    return tuple(spans)


def _joined_routing(request: GenerationRequest, parts: Sequence[Generation]) -> RoutingIds | None:
    """Each engine records every token that it computed, those of the engines before it too, as its own weights chose;
    what counts is the choice of the engine that sampled with it."""
    whole: tuple[object, ...] = ()
    num_known = 0
    for part in parts:
        if part.routing is None:
            return None
        whole += part.routing.span(num_known, part.routing.num_tokens).parts
        num_known = part.routing.num_tokens
    return RoutingIds(whole) if parts else None
