"""Guards on every batch: pure checks that what is about to be trained is what was sampled and judged.

Token identity and mask provenance (I1, I2; doctor checks D4, D5), join integrity (D12), scores (I14, D19) and
versions (D9). Each failure is a GuardError that says what was wrong, where, and what to do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from headrace.errors import HeadraceError
from headrace.types import Episode, ErrorClass, Group, Sample, Score, ScoreError, ScoreResult, Source

LOGPROB_TOLERANCE = 1e-4
"""A log-probability may exceed 0 by the rounding of a float32 log-softmax, not by more."""


class GuardError(HeadraceError):
    """A run-time check failed. ``invariant`` names it as DESIGN.md does."""

    def __init__(self, invariant: str, where: str, what: str, advice: str) -> None:
        self.invariant, self.where, self.what, self.advice = invariant, where, what, advice
        super().__init__(f"{invariant}: {where}: {what}. {advice[:1].upper()}{advice[1:]}.")


def check_sample(sample: Sample, episode: Episode, current_version: int | None = None) -> None:
    """The sample is a branch of the episode's trace, id by id; mask 1 only on sampled ids, log-probabilities and
    versions are the engine's (I1, I2). ``current_version``: number of the newest published version (D9). A token may be
    masked out by a named rule (overage, overlong filtering), so mask 0 on a sampled id passes here;
    :func:`check_trained_once` is the check that none was forgotten."""
    where = f"sample {sample.id} of task {episode.task.id}"
    if sample.key != episode.key:
        raise GuardError("D12", where, f"it was joined with episode {episode.key}", "join by attempt key, not by order")
    branch = _branch_of(sample, episode, where)
    position = 0
    for index in branch:
        segment = episode.trace.segments[index]
        end = position + len(segment.ids)
        if sample.ids[position:end] != segment.ids:
            raise GuardError(
                "I1",
                where,
                f"ids {position} to {end} are not those of trace segment {index} ({segment.source})",
                "train the recorded ids; text must not be tokenised again",
            )
        engine = (segment.logprobs, [v for s in segment.version_spans for v in [s.version] * (s.end - s.start)])
        for offset in range(len(segment.ids)):
            t = position + offset
            if not sample.mask[t]:
                continue
            if segment.source is not Source.POLICY:
                raise GuardError(
                    "I2",
                    where,
                    f"mask is 1 on id {t}, which came from the {segment.source}",
                    "only ids that the engine sampled may be trained in the rl stream",
                )
            if _differ(sample.behaviour_logprobs[t], engine[0][offset]) or sample.versions[t] != engine[1][offset]:
                raise GuardError(
                    "D4",
                    where,
                    f"log-probability or version of id {t} is not the engine's",
                    "an index slipped between trace and sample: report it",
                )
        position = end
    _check_numbers(sample, where, current_version)


def check_trained_once(samples: Sequence[Sample], episode: Episode) -> None:
    """Over the samples of one episode, every id that the engine sampled has mask 1 exactly once (I2, D5). Call it
    before rules that mask tokens by name."""
    times: Counter[int] = Counter()
    for sample in samples:
        position = 0
        for index in _branch_of(sample, episode, f"sample {sample.id}"):
            length = len(episode.trace.segments[index].ids)
            times[index] += sum(sample.mask[position : position + length])
            position += length
    for index, segment in enumerate(episode.trace.segments):
        expected = len(segment.ids) if segment.source is Source.POLICY else 0
        if times[index] != expected:
            raise GuardError(
                "D5",
                f"episode {episode.key} of task {episode.task.id}",
                f"segment {index} ({segment.source}) has {len(segment.ids)} ids and {times[index]} trained places, "
                f"{expected} are due",
                "every sampled id, the end-of-turn id included, is trained once over an episode's samples",
            )


def check_group(group: Group, group_size: int, min_group_size: int) -> None:
    """One task, distinct members within the planned size, scored members enough, no failure with a score (D12, I14)."""
    where = f"group {group.id} of task {group.task.id}"
    members = [e.key.member for e in group.episodes]
    if len(set(members)) != len(members) or not all(0 <= m < group_size for m in members):
        raise GuardError("D12", where, f"members {members} for a size of {group_size}", "join by attempt key")
    num_scored = len(group.scored)
    if num_scored < min_group_size:
        raise GuardError(
            "D12",
            where,
            f"{num_scored} scored members, fewer than rollout.min_group_size = {min_group_size}",
            "such a group is discarded, not trained",
        )
    for episode in group.scored:
        if episode.outcome.is_failure:
            raise GuardError(
                "I14",
                f"episode {episode.key}",
                f"it ended '{episode.outcome}' and has a score",
                "a failure of the machinery is never a reward",
            )


def check_prefixes(samples: Iterable[Sample]) -> None:
    """Samples with one ``prefix_key`` have the same shared prompt, id by id."""
    prefixes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for sample in samples:
        if not sample.prefix_key:
            continue
        prefix = sample.ids[: sample.prefix_length]
        first_id, first = prefixes.setdefault(sample.prefix_key, (sample.id, prefix))
        if first != prefix:
            raise GuardError(
                "I1",
                f"samples {first_id} and {sample.id}",
                f"they share prefix key {sample.prefix_key!r} and differ in their prompts",
                "the renderer must give one task one prompt",
            )


def check_score(result: object, value_range: tuple[float, float], reward: str = "") -> ScoreResult:
    """A Score in its declared range, bounds included, or a ScoreError; anything else becomes
    ``ScoreError(INVALID_SCORE)``. Nothing is clamped: an out-of-range value is an error, not a bound (I14)."""
    if isinstance(result, ScoreError):
        return result
    low, high = value_range
    if not isinstance(result, Score):
        message = f"the reward returned {type(result).__name__} {result!r:.80}, not a Score or a ScoreError"
    elif not low <= result.value <= high:
        message = f"the value {result.value!r} is outside the declared range [{low}, {high}]"
    else:
        return result
    return ScoreError(error_class=ErrorClass.INVALID_SCORE, message=message, reward=reward)


def check_error_share(episodes: Sequence[Episode], max_error_share: float) -> float:
    """Share of judged or failed episodes without a score; raises GuardError above ``max_error_share`` (D19)."""
    if not episodes:
        return 0.0
    classes = Counter(_error_name(e) for e in episodes if not e.is_scored)
    share = sum(classes.values()) / len(episodes)
    if share > max_error_share:
        listed = ", ".join(f"{count} {name}" for name, count in classes.most_common())
        raise GuardError(
            "I14",
            f"{len(episodes)} episodes",
            f"{share:.0%} have no score ({listed}), more than guards.max_error_share = {max_error_share:.0%}",
            "repair the reward, environment or engine; what is left would train on a biased rest",
        )
    return share


def _error_name(episode: Episode) -> str:
    return f"score:{episode.score.error_class}" if isinstance(episode.score, ScoreError) else str(episode.outcome)


def _branch_of(sample: Sample, episode: Episode, where: str) -> tuple[int, ...]:
    branches = list(episode.trace.branches())
    number = sample.id.rpartition("/")[2]
    if not number.isdigit() or int(number) >= len(branches):
        raise GuardError("I1", where, f"the trace has {len(branches)} branches", "a sample's id is <attempt>/<branch>")
    branch = branches[int(number)]
    num_ids = sum(len(episode.trace.segments[i].ids) for i in branch)
    if num_ids != len(sample.ids):
        raise GuardError(
            "I1", where, f"it has {len(sample.ids)} ids, its branch {num_ids}", "train the recorded ids, all of them"
        )
    return branch


def _differ(a: float, b: float) -> bool:
    """A NaN that was carried faithfully is no slip; it is refused for what it is."""
    return a != b and not (math.isnan(a) and math.isnan(b))


def _check_numbers(sample: Sample, where: str, current_version: int | None) -> None:
    for t, trained in enumerate(sample.mask):
        if not trained:
            continue
        logprob, version = sample.behaviour_logprobs[t], sample.versions[t]
        if not math.isfinite(logprob) or logprob > LOGPROB_TOLERANCE:
            raise GuardError(
                "I2",
                where,
                f"the engine's log-probability of id {t} is {logprob}",
                "it must be finite and at most 0; look at the engine's log-probability mode",
            )
        if version is None or (current_version is not None and version.number > current_version):
            raise GuardError(
                "D9",
                where,
                f"id {t} carries version {version}, the newest published is {current_version}",
                "the engine stamps each token with the version that sampled it",
            )


def check_first_ratio(metrics: Mapping[str, float], bound: float, batch_index: int) -> None:
    """Before the first optimizer step of a batch, tokens that the current weights sampled have ratio 1 (I5, D2).
    ``metrics``: of the gradient pass; without fresh tokens they hold no ``max_ratio_error``, and nothing is checked."""
    error = metrics.get("max_ratio_error", 0.0)
    if not error <= bound:
        raise GuardError(
            "I5",
            f"batch {batch_index}, before its first optimizer step",
            f"max |ratio - 1| is {error:.2e} on tokens that the current weights sampled; {bound:.0e} is allowed",
            "trainer and engine score different distributions: compare temperature, template, dtype and attention",
        )
