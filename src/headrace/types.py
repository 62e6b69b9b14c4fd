"""The vocabulary: one word for each thing, as frozen dataclasses. No torch here.

Suffixes of ragged lists: ``_G`` group member, ``_T`` token. Times end in ``_s``. Log-probabilities are
natural logarithms of the distribution that was actually sampled from (temperature, top-p and top-k applied).

The data goes round one way::

    Task -> Episode -> Score -> Group -> Sample -> RolloutBatch -> PolicyVersion -> engine
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

Message = Mapping[str, Any]
"""One chat message: ``{"role": "user", "content": "..."}``."""

Stream = Literal["rl", "supervised", "distillation"]


class PolicyVersion(NamedTuple):
    """Which weights: ``number`` grows by 1 for each published update; each resume opens a new ``lineage``."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"


NO_VERSION = PolicyVersion(-1, 0)
"""Of weights that were never published: older than every version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem for the policy.

    Example::

        Task(id="mul-3x4", messages=({"role": "user", "content": "3 * 4 ="},), answer="12")
    """

    id: str
    messages: tuple[Message, ...]
    answer: Any = None
    """Checker data: what the reward compares with. Never shown to the policy."""
    environment: str = "single_turn"
    seed: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything else that a reward or an environment of this task reads (JSON values)."""

    @property
    def content_hash(self) -> str:
        """SHA-256 (16 hex digits) over everything that defines the problem; the id is not part of it."""
        body = [[dict(m) for m in self.messages], self.answer, self.environment, self.seed, dict(self.metadata)]
        return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def is_same(self, other: Task) -> bool:
        """The same problem; without hashing where it is the same object, as it is within a process."""
        return self is other or self.content_hash == other.content_hash


class Outcome(StrEnum):
    """How an episode ended."""

    DONE = "done"
    """The environment, or the end-of-turn id of a single turn, ended it."""
    TRUNCATED = "truncated"
    """The reply ran into ``max_new_tokens``."""
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    PARSE_ERROR = "parse_error"
    """The policy's own output could not be read as an action."""
    TIMEOUT = "timeout"
    ENVIRONMENT_ERROR = "environment_error"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    """An engine, a worker or a carrier failed. Never the policy's fault, never scored."""
    CANCELLED = "cancelled"

    @property
    def is_failure(self) -> bool:
        """True where the machinery failed, not the policy: such an episode never enters a baseline."""
        return self in _FAILURES


_FAILURES = frozenset({Outcome.TIMEOUT, Outcome.ENVIRONMENT_ERROR, Outcome.INFRASTRUCTURE_ERROR, Outcome.CANCELLED})

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The declared distribution: softmax(logits / temperature), then top-k, then top-p,
    renormalised over the ids that were kept."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 means greedy; log-probabilities are then those at temperature 1."""
    top_p: float = 1.0
    """1 means off."""
    top_k: int = 0
    """0 means off."""
    stop_ids: tuple[int, ...] = ()
    """Generation ends with any of these ids; the id is kept in the reply."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends with the token that completes any of these strings; no token is trimmed."""

    @property
    def is_truncated(self) -> bool:
        """True where some ids cannot be sampled, so that the kept ids must travel with the reply."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)


class VersionSpan(NamedTuple):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) of a reply were sampled by ``version``."""

    version: PolicyVersion
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Ids in. ``seed`` alone decides the random stream, whatever else runs in the batch."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    prefix_key: str | None = None
    """Requests with one key share their prompt's prefill (the members of a group)."""
    cache_salt: str | None = None
    """A prefix-cache namespace: a fresh salt forces a cold cache (the canary of I6)."""
    first_draw: int = 0
    """Draws of the seed's random stream that were made before: the end of ``prompt_ids`` is a reply that another
    engine has begun."""
    version: PolicyVersion | None = None
    """The only version that may answer (an evaluation's); None: whichever serves."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingIds:
    """The experts that an engine's routers chose for the first tokens of a sequence (mixture-of-experts models).

    Held by reference only: it goes from the engine to the trainer with what holds it, is dropped with that, and is
    written into no record. ``parts`` follow one another; each is a small-integer array [tokens, routers, experts of a
    token], and a prompt's may be that of many requests.
    """

    parts: tuple[Any, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(part) for part in self.parts)

    def span(self, start: int, end: int) -> RoutingIds:
        """Of the tokens ``start`` (inclusive) to ``end`` (exclusive). Copies nothing."""
        parts, offset = [], 0
        for part in self.parts:
            piece = part[max(0, start - offset) : max(0, end - offset)]
            parts += [piece] if len(piece) else []
            offset += len(part)
        return RoutingIds(tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Ids out. ``ids``, ``logprobs`` and, where sent, ``kept_ids`` have one entry per sampled token."""

    request_id: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    """For truncated sampling: the ids that could have been sampled at each position, else None."""
    routing: RoutingIds | None = field(default=None, repr=False, compare=False)
    """Of every token that the engine has computed, prompt included: all but the last one of the reply."""

    def __post_init__(self) -> None:
        num_tokens = len(self.ids)
        if len(self.logprobs) != num_tokens:
            raise ValueError(
                f"generation {self.request_id}: {num_tokens} ids but {len(self.logprobs)} log-probabilities; "
                "an engine must return one for each id"
            )
        _check_spans(self.version_spans, num_tokens, f"generation {self.request_id}")
        if self.kept_ids is not None and len(self.kept_ids) != num_tokens:
            raise ValueError(f"generation {self.request_id}: {len(self.kept_ids)} kept-id sets for {num_tokens} ids")


def _check_spans(spans: tuple[VersionSpan, ...], num_tokens: int, what: str) -> None:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise ValueError(f"{what}: version spans {spans} do not tile {num_tokens} tokens")
        position = span.end
    if position != num_tokens:
        raise ValueError(f"{what}: version spans {spans} do not tile {num_tokens} tokens")


class Source(StrEnum):
    """Where a token id came from."""

    TEMPLATE = "template"
    POLICY = "policy"
    ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of ids of one source inside a Trace; policy segments carry what the engine said about them."""

    source: Source
    ids: tuple[int, ...]
    parent: int = -1
    """Index of the segment that this one continues; -1 for a root. Rewritten history forks the tree."""
    logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    kept_ids: tuple[tuple[int, ...], ...] | None = None
    routing: RoutingIds | None = field(default=None, repr=False, compare=False)
    """As in the Generation: from the root of the branch to the last but one id of this segment."""

    def __post_init__(self) -> None:
        if self.source is Source.POLICY:
            if len(self.logprobs) != len(self.ids):
                raise ValueError(
                    f"a policy segment has {len(self.ids)} ids but {len(self.logprobs)} log-probabilities: "
                    "only ids that the engine sampled may be of source 'policy' (I2)"
                )
            _check_spans(self.version_spans, len(self.ids), "policy segment")
        elif self.logprobs or self.version_spans or self.kept_ids or self.routing is not None:
            raise ValueError(f"a segment of source '{self.source}' cannot carry log-probabilities or versions (I2)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The token-level record of an episode: a tree of segments, parents before children.

    Example, a single turn::

        Trace(segments=(
            Segment(source=Source.TEMPLATE, ids=(1, 5, 9)),
            Segment(source=Source.POLICY, ids=(7, 2), parent=0, logprobs=(-0.1, -0.3), version_spans=(...)),
        ))
    """

    segments: tuple[Segment, ...] = ()

    def __post_init__(self) -> None:
        for index, segment in enumerate(self.segments):
            if not -1 <= segment.parent < index:
                raise ValueError(f"segment {index} has parent {segment.parent}; parents must come before children")

    def branches(self) -> Iterator[tuple[int, ...]]:
        """Root-to-leaf paths as segment indices, one for each training sequence, in order of their leaves."""
        parents = {segment.parent for segment in self.segments}
        for leaf in range(len(self.segments)):
            if leaf in parents:
                continue
            path: list[int] = []
            node = leaf
            while node != -1:
                path.append(node)
                node = self.segments[node].parent
            yield tuple(reversed(path))

    def without_routing(self) -> Trace:
        """For where it travels: routing ids are large, and nobody but the trainer reads them."""
        if all(segment.routing is None for segment in self.segments):
            return self
        return Trace(segments=tuple(replace(segment, routing=None) for segment in self.segments))

    @property
    def num_policy_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments if s.source is Source.POLICY)

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """The versions that sampled any token of this trace, oldest first."""
        return tuple(sorted({span.version for s in self.segments for span in s.version_spans}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation by the policy (``reply``) and what the environment answered (``observation``)."""

    reply: str
    observation: tuple[Message, ...] = ()
    finish_reason: FinishReason = "stop"
    generation_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A finite value with named components. What a reward returns when it could judge."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts before weighting, for example ``{"exact": 1.0, "format": 0.0}``."""
    value_T: tuple[float, ...] | None = None
    """Optional per-token rewards over the policy tokens of the episode; their sum is part of ``value``."""

    def __post_init__(self) -> None:
        for name, value in (("value", self.value), *self.components.items()):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"score {name} is {value!r}; a score must be a finite number (I14)")
        if self.value_T is not None and not all(math.isfinite(v) for v in self.value_T):
            raise ValueError("a per-token score is not finite (I14)")


class ErrorClass(StrEnum):
    """Why there is no score. An error is never a reward: 'unverifiable' alone may be mapped to a value, by name."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    MEMORY = "memory"
    INFRASTRUCTURE = "infrastructure"
    INVALID_SCORE = "invalid_score"
    """The reward returned something that is not a finite number in its declared range."""
    MISSING_ANSWER = "missing_answer"
    EXCEPTION = "exception"
    """The reward's own code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreError:
    """A reward that could not judge, and why."""

    error_class: ErrorClass
    message: str
    reward: str = ""


ScoreResult = Score | ScoreError


class AttemptKey(NamedTuple):
    """Which attempt: member ``member`` of the ``group``-th group of the run, tried for the ``retry``-th time.

    Seeds derive from it, so that a re-issued attempt draws the same tokens from the same weights."""

    group: int
    member: int
    retry: int = 0

    def __str__(self) -> str:
        return f"g{self.group}m{self.member}" + (f"r{self.retry}" if self.retry else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt of the policy at a task, from reset to its end."""

    key: AttemptKey
    task: Task
    turns: tuple[Turn, ...]
    trace: Trace
    outcome: Outcome
    score: ScoreResult | None = None
    """None until it was judged."""
    error: str | None = None
    """For a failed outcome: what happened, for a person."""
    issued_version: PolicyVersion = PolicyVersion(0, 0)
    started_s: float = 0.0
    ended_s: float = 0.0
    policy_seed: int = 0

    @property
    def reply(self) -> str:
        """The policy's last words."""
        return self.turns[-1].reply if self.turns else ""

    @property
    def reward(self) -> float | None:
        """The score's value; None where there is no score, whatever the reason."""
        return self.score.value if isinstance(self.score, Score) else None

    @property
    def is_scored(self) -> bool:
        return isinstance(self.score, Score)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The episodes of one task that are compared with each other. Baselines use scored members only."""

    id: int
    task: Task
    episodes: tuple[Episode, ...]
    baseline: Episode | None = None
    """One scored greedy reply of the same policy, where the algorithm asked for it: compared with, never trained."""

    def __post_init__(self) -> None:
        for episode in (*self.episodes, *((self.baseline,) if self.baseline is not None else ())):
            if episode.key.group != self.id or not episode.task.is_same(self.task):
                raise ValueError(
                    f"episode {episode.key} of task {episode.task.id} was put into group {self.id} of task "
                    f"{self.task.id}: groups are joined by id, never by position"
                )

    @property
    def scored(self) -> tuple[Episode, ...]:
        return tuple(e for e in self.episodes if e.is_scored)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(e.score.value for e in self.episodes if isinstance(e.score, Score))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence ready for training. Every per-token field has ``len(ids)`` entries; entry t belongs to
    ``ids[t]``, and says nothing where ``mask[t]`` is 0 (there, log-probabilities are 0 and versions None)."""

    id: str
    """Immutable: ``<attempt>/<branch>``. Everything is joined by it."""
    key: AttemptKey
    ids: tuple[int, ...]
    mask: tuple[int, ...]
    """1 where the token is trained in this sample's stream."""
    stream: Stream = "rl"
    prefix_length: int = 0
    """The first ``prefix_length`` ids are the prompt, equal for all samples with one ``prefix_key``."""
    prefix_key: str = ""
    weight: float = 1.0
    weight_T: tuple[float, ...] | None = None
    """Weights of the tokens, on top of ``weight``; None: all 1."""
    behaviour_logprobs: tuple[float, ...] = ()
    versions: tuple[PolicyVersion | None, ...] = ()
    kept_ids: tuple[tuple[int, ...] | None, ...] | None = None
    num_versions: int = 1
    """Policy versions that sampled any token of its episode. With more than one, the later tokens may stand on keys
    and values of older weights, so that their ratio is not 1 even under the weights that sampled them."""
    temperature: float = 1.0
    """The temperature that the behaviour policy sampled with; the trainer scores with the same (I5)."""
    reward: float | None = None
    reward_T: tuple[float, ...] | None = None
    teacher_logprobs: tuple[float, ...] | None = None
    """Of these ids under a teacher at the same temperature: the sample's tokens are distilled, in the rl stream
    besides everything else."""
    truncated: bool = False
    """The episode ran into its token limit (overlong filtering and shaping read this)."""
    media_refs: tuple[str, ...] = ()
    routing: RoutingIds | None = field(default=None, repr=False, compare=False)
    """Of the first tokens of ``ids``, at least up to the one that predicts the last trained token."""

    def __post_init__(self) -> None:
        length = len(self.ids)
        for name in ("mask", "behaviour_logprobs", "versions"):
            if len(getattr(self, name)) != length:
                num_entries = len(getattr(self, name))
                raise ValueError(f"sample {self.id}: {name} has {num_entries} entries for {length} ids (I2)")
        for name in ("weight_T", "teacher_logprobs"):
            values = getattr(self, name)
            if values is not None and len(values) != length:
                raise ValueError(f"sample {self.id}: {name} has {len(values)} entries for {length} ids")
        if (self.stream == "supervised" and self.teacher_logprobs is not None) or (
            self.stream == "distillation" and self.teacher_logprobs is None
        ):
            raise ValueError(
                f"sample {self.id} of stream '{self.stream}' has {'a' if self.teacher_logprobs else 'no'} teacher: "
                "supervised samples take none, distillation samples need one"
            )
        if self.routing is not None:
            needed = max((t for t, trained in enumerate(self.mask) if trained), default=0)
            if not needed <= self.routing.num_tokens <= length:
                raise ValueError(
                    f"sample {self.id}: routing ids of {self.routing.num_tokens} tokens for {length} ids, of which the "
                    f"first {needed} are fed to a training pass: the engine's record is out of step with its ids"
                )
        if length and self.mask[0]:
            raise ValueError(f"sample {self.id}: the first id has no context and cannot be trained")
        if any(self.mask[: self.prefix_length]):
            raise ValueError(f"sample {self.id}: the shared prompt has trained ids (I2)")

    @property
    def num_trained(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The samples gathered for one publish. ``groups`` keeps the episodes behind them."""

    index: int
    """0 for the first batch of the run; the batch that leads to policy number index + 1."""
    groups: tuple[Group, ...]
    samples: tuple[Sample, ...]
    version: PolicyVersion
    """The version that the trainer held when the batch was closed."""

    @property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(e for g in self.groups for e in g.episodes)
