"""Guards on samples, groups and scores (I1, I2, I14; D4, D5, D9, D12, D19; failures 17, 28, 34-38, 45, 50, 51, 132,
135), and the way from a trace to samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headrace.control.checks import (
    GuardError,
    check_error_share,
    check_group,
    check_prefixes,
    check_sample,
    check_score,
    check_trained_once,
)
from headrace.control.samples import samples_from_episode
from headrace.types import (
    AttemptKey,
    Episode,
    ErrorClass,
    Group,
    Outcome,
    PolicyVersion,
    Sample,
    Score,
    ScoreError,
    Segment,
    Source,
    Task,
    Trace,
    VersionSpan,
)

TASK = Task(id="t", messages=())
V = PolicyVersion(0, 3)
SCORE = Score(value=1.0)


def template(*ids: int, parent: int = -1) -> Segment:
    return Segment(source=Source.TEMPLATE, ids=ids, parent=parent)


def policy(*ids: int, parent: int, kept: tuple[tuple[int, ...], ...] | None = None) -> Segment:
    return Segment(
        source=Source.POLICY,
        ids=ids,
        parent=parent,
        logprobs=tuple(-0.1 * i for i in ids),
        version_spans=(VersionSpan(V, 0, len(ids)),) if ids else (),
        kept_ids=kept,
    )


def environment(*ids: int, parent: int) -> Segment:
    return Segment(source=Source.ENVIRONMENT, ids=ids, parent=parent)


def episode(*segments: Segment, score: Any = SCORE, outcome: Outcome = Outcome.DONE, member: int = 0) -> Episode:
    return Episode(
        key=AttemptKey(4, member), task=TASK, turns=(), trace=Trace(segments=segments), outcome=outcome, score=score
    )


SINGLE = episode(template(1, 2, 3), policy(7, 8, 2, parent=0))
TURNS = episode(template(1, 2), policy(7, 2, parent=0), environment(5, 6, parent=1), policy(9, 2, parent=2))
FORKED = episode(  # history rewritten after the first reply: two training sequences share it
    template(1, 2),
    policy(7, 2, parent=0),
    environment(5, parent=1),
    policy(8, 2, parent=2),
    template(6, parent=1),
    policy(9, 2, parent=4),
)


def samples_of(subject: Episode) -> list[Sample]:
    return samples_from_episode(subject, "g4", temperature=0.7)


def test_single_turn_becomes_one_sample() -> None:
    """I1, I2: ids are prompt and reply, mask 1 on every sampled id with the end-of-turn id, engine values beside
    them."""
    (sample,) = samples_of(SINGLE)
    assert sample.ids == (1, 2, 3, 7, 8, 2)
    assert sample.mask == (0, 0, 0, 1, 1, 1)
    assert sample.behaviour_logprobs == pytest.approx((0, 0, 0, -0.7, -0.8, -0.2))
    assert sample.versions == (None, None, None, V, V, V)
    assert (sample.prefix_length, sample.prefix_key, sample.id) == (3, "g4", "g4m0/0")
    assert (sample.temperature, sample.reward, sample.truncated, sample.kept_ids) == (0.7, 1.0, False, None)


def test_multi_turn_trains_every_reply_and_no_observation() -> None:
    """Failures 34, 35, 37: observation ids have mask 0, all turns have mask 1."""
    (sample,) = samples_of(TURNS)
    assert sample.ids == (1, 2, 7, 2, 5, 6, 9, 2)
    assert sample.mask == (0, 0, 1, 1, 0, 0, 1, 1)
    assert sample.prefix_length == 2


def test_forked_history_trains_the_shared_reply_once() -> None:
    """I1: a rewritten prefix starts a new sample; the shared reply is trained in the first one and context in the
    other."""
    first, second = samples_of(FORKED)
    assert (first.ids, first.mask) == ((1, 2, 7, 2, 5, 8, 2), (0, 0, 1, 1, 0, 1, 1))
    assert (second.ids, second.mask) == ((1, 2, 7, 2, 6, 9, 2), (0, 0, 0, 0, 0, 1, 1))
    assert second.versions[2] is None and second.behaviour_logprobs[2] == 0.0
    assert [s.id for s in (first, second)] == ["g4m0/0", "g4m0/1"]
    assert [s.prefix_length for s in (first, second)] == [0, 0]
    check_trained_once([first, second], FORKED)
    for sample in (first, second):
        check_sample(sample, FORKED, current_version=3)


def test_branch_that_trains_nothing_makes_no_sample() -> None:
    """An episode cut off before its reply, and a branch that only repeats what is trained elsewhere."""
    assert samples_of(episode(template(1, 2))) == []
    repeated = episode(template(1), policy(7, parent=0), environment(5, parent=1), environment(6, parent=1))
    assert [s.id for s in samples_of(repeated)] == ["g4m0/0"]


def test_token_rewards_kept_ids_and_truncation_travel() -> None:
    """Per-token rewards land on the sampled ids; kept-id sets stay beside their ids; the token limit is marked."""
    subject = episode(
        template(1),
        policy(7, 8, parent=0, kept=((7, 3), (8,))),
        environment(5, parent=1),
        policy(9, parent=2, kept=((9, 1),)),
        score=Score(value=1.0, value_T=(0.25, 0.5, 0.25)),
        outcome=Outcome.TRUNCATED,
    )
    (sample,) = samples_of(subject)
    assert sample.reward_T == (0.0, 0.25, 0.5, 0.0, 0.25)
    assert sample.kept_ids == (None, (7, 3), (8,), None, (9, 1))
    assert sample.truncated
    wrong = replace(subject, score=Score(value=1.0, value_T=(1.0,)))
    with pytest.raises(GuardError, match="1 per-token rewards for 3 sampled ids"):
        samples_of(wrong)


def test_sampled_id_without_context_is_refused() -> None:
    """I2: the first id of a sequence has no context, so nothing can have sampled it from one."""
    with pytest.raises(GuardError, match="without any context"):
        samples_of(episode(policy(7, parent=-1)))


def changed(field: str, position: int, value: Any) -> Callable[[Sample], Sample]:
    def change(sample: Sample) -> Sample:
        values = list(getattr(sample, field))
        values[position] = value
        return replace(sample, **{field: tuple(values)})

    return change


WRONG: list[tuple[str, Callable[[Sample], Sample], str]] = [
    ("another id in a reply (17)", changed("ids", 3, 99), r"I1: .*segment 1 \(policy\)"),
    ("another id in an observation (17)", changed("ids", 4, 99), r"I1: .*segment 2 \(environment\)"),
    ("ids missing at the end (27)", lambda s: replace(
        s, ids=s.ids[:-1], mask=s.mask[:-1], behaviour_logprobs=s.behaviour_logprobs[:-1], versions=s.versions[:-1]
    ), "I1: .*7 ids, its branch 8"),
    ("mask on an observation (34)", changed("mask", 4, 1), "I2: .*came from the environment"),
    ("log-probability of a neighbour (39)", changed("behaviour_logprobs", 2, -0.2), "D4: .*not the engine's"),
    ("version of another token (101)", changed("versions", 2, PolicyVersion(0, 2)), "D4: .*not the engine's"),
    ("joined with another attempt (51)", lambda s: replace(s, key=AttemptKey(4, 1)), "D12: .*joined with"),
    ("a branch that is not there", lambda s: replace(s, id="g4m0/1"), "I1: .*1 branches"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[name for name, _, _ in WRONG])
def test_wrong_sample_is_refused(name: str, change: Callable[[Sample], Sample], message: str) -> None:
    """I1, I2, D4, D5, D12: each failure says what, where and what to do."""
    (sample,) = samples_of(TURNS)
    check_sample(sample, TURNS, current_version=3)
    with pytest.raises(GuardError, match=message):
        check_sample(change(sample), TURNS, current_version=3)


@pytest.mark.parametrize("logprob", [0.5, math.nan, -math.inf, math.inf])
def test_impossible_log_probabilities_are_refused(logprob: float) -> None:
    """Failure 13: a log-probability is finite and at most 0."""
    segment = Segment(
        source=Source.POLICY, ids=(7,), parent=0, logprobs=(logprob,), version_spans=(VersionSpan(V, 0, 1),)
    )
    subject = episode(template(1), segment)
    (sample,) = samples_of(subject)
    with pytest.raises(GuardError, match=r"log-probability"):
        check_sample(sample, subject)


def test_rounding_of_a_certain_token_is_allowed() -> None:
    """A float32 log-softmax may give 1e-7 for a certain token."""
    segment = Segment(source=Source.POLICY, ids=(7,), parent=0, logprobs=(1e-7,), version_spans=(VersionSpan(V, 0, 1),))
    subject = episode(template(1), segment)
    check_sample(samples_of(subject)[0], subject)


def test_version_from_the_future_is_refused() -> None:
    """D9, failure 101: stamps are at most the newest published version."""
    with pytest.raises(GuardError, match=r"D9: .*carries version 0\.3, the newest published is 2"):
        check_sample(samples_of(SINGLE)[0], SINGLE, current_version=2)


def test_forgotten_and_doubled_ids_are_found() -> None:
    """D5, failures 28, 36: the end-of-turn id is trained too; no id twice."""
    (sample,) = samples_of(SINGLE)
    check_trained_once([sample], SINGLE)
    with pytest.raises(GuardError, match=r"3 ids and 2 trained places"):
        check_trained_once([changed("mask", 5, 0)(sample)], SINGLE)
    first, second = samples_of(FORKED)
    with pytest.raises(GuardError, match=r"2 ids and 4 trained places"):
        check_trained_once([first, changed("mask", 3, 1)(changed("mask", 2, 1)(second))], FORKED)


def test_group_size_members_and_failures() -> None:
    """D12, I14: distinct members, enough scored ones, no failure with a score."""
    one, two = episode(template(1)), episode(template(1), member=1)
    check_group(Group(id=4, task=TASK, episodes=(one, two)), 2, 2)
    with pytest.raises(GuardError, match=r"members \[0, 0\]"):
        check_group(Group(id=4, task=TASK, episodes=(one, one)), 2, 1)
    with pytest.raises(GuardError, match=r"members \[0, 1\] for a size of 1"):
        check_group(Group(id=4, task=TASK, episodes=(one, two)), 1, 1)
    with pytest.raises(GuardError, match="1 scored members"):
        check_group(Group(id=4, task=TASK, episodes=(one, replace(two, score=None))), 2, 2)
    with pytest.raises(GuardError, match="ended 'timeout' and has a score"):
        check_group(Group(id=4, task=TASK, episodes=(one, replace(two, outcome=Outcome.TIMEOUT))), 2, 2)


def test_one_prefix_key_means_one_prompt() -> None:
    """Sharing a prompt's computation under a wrong key would train on another context."""
    one, other = samples_of(SINGLE)[0], samples_of(episode(template(1, 2, 4), policy(7, parent=0), member=1))[0]
    check_prefixes([one, one, replace(other, prefix_key="", prefix_length=0)])
    with pytest.raises(GuardError, match="differ in their prompts"):
        check_prefixes([one, other])


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_score_in_its_range_passes(value: float) -> None:
    """I14: bounds included."""
    score = Score(value=value)
    assert check_score(score, (0.0, 1.0)) is score


@pytest.mark.parametrize("result", [Score(value=1.5), Score(value=-0.1), 1.0, None, "1", math.nan, True])
def test_anything_else_is_a_classed_error_and_never_clamped(result: object) -> None:
    """I14, failure 135: out of range, not a Score: INVALID_SCORE with the reward's name."""
    checked = check_score(result, (0.0, 1.0), reward="exact")
    assert isinstance(checked, ScoreError)
    assert (checked.error_class, checked.reward) == (ErrorClass.INVALID_SCORE, "exact")


def test_score_error_keeps_its_class() -> None:
    """I14: an error carries its class."""
    error = ScoreError(error_class=ErrorClass.TIMEOUT, message="slow")
    assert check_score(error, (0.0, 1.0)) is error


def test_error_share_is_watched_by_class() -> None:
    """I14, D19, failure 132: above the share the run stops and says which errors they were."""
    slow = ScoreError(error_class=ErrorClass.TIMEOUT, message="slow")
    good = episode(template(1))
    bad = [replace(good, score=slow), replace(good, score=None, outcome=Outcome.INFRASTRUCTURE_ERROR)]
    assert check_error_share([], 0.1) == 0.0
    assert check_error_share([good, good, *bad], 0.5) == 0.5
    with pytest.raises(GuardError, match=r"67% have no score \(1 score:timeout, 1 infrastructure_error\)"):
        check_error_share([good, *bad], 0.5)
