"""From an episode's Trace to Samples: one for each branch, every sampled id trained once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.control.checks import GuardError, check_prefixes, check_sample, check_trained_once
from headrace.types import Episode, Group, Outcome, PolicyVersion, RoutingIds, Sample, Segment, Source

_TRUNCATED = frozenset({Outcome.TRUNCATED, Outcome.CONTEXT_LIMIT})


def checked_samples(groups: Sequence[Group], temperature: float, current_version: int) -> list[Sample]:
    """The samples of all scored episodes, group by group, each compared id by id with the trace it came from (I1, I2);
    ``current_version`` is the number of the newest published version. Raises GuardError."""
    samples: list[Sample] = []
    for group in groups:
        for episode in group.scored:
            _check_has_trace(episode)
            own = samples_from_episode(episode, f"group-{group.id}", temperature)
            check_trained_once(own, episode)
            for sample in own:
                check_sample(sample, episode, current_version)
            samples += own
    check_prefixes(samples)
    return samples


def _check_has_trace(episode: Episode) -> None:
    """A reply of an engine of text is known by no ids: it would train nothing and still count in its group."""
    if episode.turns and not any(segment.source is Source.POLICY for segment in episode.trace.segments):
        raise GuardError(
            "I2",
            f"episode {episode.key}",
            f"it has {len(episode.turns)} turns and no sampled ids: an engine of text played it",
            "such episodes can be evaluated, never trained; use an engine that returns ids and log-probabilities",
        )


def samples_from_episode(episode: Episode, group_prefix_key: str, temperature: float) -> list[Sample]:
    """One Sample for each root-to-leaf branch that trains anything, in the order of the leaves.

    Mask 1 on every id that the engine sampled, the end-of-turn id included (I2); a policy segment that several branches
    share is trained in the first of them and is context in the others, so that no id is trained twice.
    ``prefix_length`` counts the leading template ids of an episode of one branch; with more branches it is 0, since
    their prompts differ. Raises GuardError where a branch starts with a sampled id.
    """
    branches = list(episode.trace.branches())
    reward_T = _token_rewards(episode)
    trained: set[int] = set()
    samples = []
    for number, branch in enumerate(branches):
        fresh = {i for i in branch if episode.trace.segments[i].source is Source.POLICY} - trained
        if not any(episode.trace.segments[i].ids for i in fresh):
            continue
        trained |= fresh
        prefix_key = group_prefix_key if len(branches) == 1 else ""
        samples.append(_sample(episode, number, branch, fresh, reward_T, prefix_key, temperature))
    return samples


def _sample(
    episode: Episode,
    number: int,
    branch: tuple[int, ...],
    fresh: set[int],
    reward_T: dict[int, tuple[float, ...]] | None,
    prefix_key: str,
    temperature: float,
) -> Sample:
    sample_id = f"{episode.key}/{number}"
    segments = [episode.trace.segments[i] for i in branch]
    first = next((s for s in segments if s.ids), None)
    if first is not None and first.source is Source.POLICY:
        raise GuardError(
            "I2",
            f"sample {sample_id}",
            "its first id was sampled by the engine without any context",
            "an environment or renderer must give the policy at least one prompt id",
        )
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[PolicyVersion | None] = []
    kept_ids: list[tuple[int, ...] | None] = []
    rewards: list[float] = []
    routing: tuple[Any, ...] = ()
    for index, segment in zip(branch, segments, strict=True):
        is_trained = index in fresh
        length = len(segment.ids)
        ids += segment.ids
        mask += [int(is_trained)] * length
        logprobs += segment.logprobs if is_trained else [0.0] * length
        versions += _token_versions(segment) if is_trained else [None] * length
        kept_ids += segment.kept_ids if is_trained and segment.kept_ids is not None else [None] * length
        routing += _new_routing(segment, sum(map(len, routing)))
        rewards += reward_T[index] if is_trained and reward_T is not None else [0.0] * length
    return Sample(
        id=sample_id,
        key=episode.key,
        ids=tuple(ids),
        mask=tuple(mask),
        prefix_length=_num_leading_template_ids(segments) if prefix_key else 0,
        prefix_key=prefix_key,
        behaviour_logprobs=tuple(logprobs),
        versions=tuple(versions),
        kept_ids=tuple(kept_ids) if any(k is not None for k in kept_ids) else None,
        num_versions=len(episode.trace.versions),
        temperature=temperature,
        reward=episode.reward,
        reward_T=tuple(rewards) if reward_T is not None else None,
        truncated=episode.outcome in _TRUNCATED,
        routing=RoutingIds(routing) if routing else None,
    )


def _new_routing(segment: Segment, num_known: int) -> tuple[Any, ...]:
    """Of a segment's record what follows the first ``num_known`` tokens: a later turn computes what stands before it
    anew, but the routing that a token was sampled with is that of the turn which came to it first."""
    return () if segment.routing is None else segment.routing.span(num_known, segment.routing.num_tokens).parts


def _token_versions(segment: Segment) -> list[PolicyVersion]:
    return [span.version for span in segment.version_spans for _ in range(span.start, span.end)]


def _num_leading_template_ids(segments: list[Segment]) -> int:
    count = 0
    for segment in segments:
        if segment.source is not Source.TEMPLATE:
            break
        count += len(segment.ids)
    return count


def _token_rewards(episode: Episode) -> dict[int, tuple[float, ...]] | None:
    """``Score.value_T`` cut into the policy segments it belongs to: segment index -> rewards of its ids."""
    value_T = getattr(episode.score, "value_T", None)
    if value_T is None:
        return None
    if len(value_T) != episode.trace.num_policy_tokens:
        raise GuardError(
            "I14",
            f"episode {episode.key}",
            f"its score has {len(value_T)} per-token rewards for {episode.trace.num_policy_tokens} sampled ids",
            "a reward's value_T must have one entry for each policy token of the episode, in trace order",
        )
    rewards: dict[int, tuple[float, ...]] = {}
    position = 0
    for index, segment in enumerate(episode.trace.segments):
        if segment.source is Source.POLICY:
            rewards[index] = value_T[position : position + len(segment.ids)]
            position += len(segment.ids)
    return rewards
