"""Conditions of the way from traces to samples that its other tests did not hold; found by ``make mutation``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_control_checks import TASK, environment, episode, policy, template

import headrace.control.samples as module
from headrace.control.checks import GuardError
from headrace.control.samples import checked_samples, samples_from_episode
from headrace.types import Episode, Group, Outcome, RoutingIds, Sample, Score, Trace, Turn

GOOD = episode(template(1, 2), policy(7, 8, parent=0))


def group(*episodes: Episode) -> Group:
    return Group(id=4, task=TASK, episodes=tuple(episodes))


def test_checked_samples_are_those_of_every_scored_episode() -> None:
    """The failed one trains nothing."""
    failed = episode(template(1, 2), score=None, outcome=Outcome.TIMEOUT, member=2)
    other = replace(GOOD, key=GOOD.key._replace(member=1))
    samples = checked_samples([group(GOOD, other, failed)], 1.0, 3)
    assert [s.id for s in samples] == ["g4m0/0", "g4m1/0"]
    assert {s.prefix_key for s in samples} == {"group-4"}


def test_every_check_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """I1, I2, D9: of a token of a version that is not published; of a prompt that is not the group's; of an id that was
    sampled and is trained by nothing; of a reply that no ids are known of."""
    with pytest.raises(GuardError, match="the newest published is 2"):
        checked_samples([group(GOOD)], 1.0, 2)
    other_prompt = episode(template(1, 3), policy(7, 8, parent=0), member=1)
    with pytest.raises(GuardError, match="differ in their prompts"):
        checked_samples([group(GOOD, other_prompt)], 1.0, 3)
    for trace in (Trace(), Trace(segments=(template(1, 2),))):
        text_only = replace(GOOD, turns=(Turn(reply="x"),), trace=trace)
        with pytest.raises(GuardError, match="an engine of text played it"):
            checked_samples([group(text_only)], 1.0, 3)

    def forgetful(*arguments: object) -> Sequence[Sample]:
        return [replace(s, mask=(0,) * len(s.mask)) for s in samples_from_episode(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(module, "samples_from_episode", forgetful)
    with pytest.raises(GuardError):
        checked_samples([group(GOOD)], 1.0, 3)


def test_an_episode_with_turns_needs_sampled_ids_and_one_without_does_not() -> None:
    played = replace(GOOD, turns=(Turn(reply="x"),))
    assert len(checked_samples([group(played)], 1.0, 3)) == 1
    assert checked_samples([group(replace(GOOD, trace=Trace()))], 1.0, 3) == []


def test_an_empty_prompt_is_no_context() -> None:
    """I2: the first id of all was sampled from nothing, whatever empty segment stands before it."""
    with pytest.raises(GuardError, match="without any context"):
        samples_from_episode(episode(template(), policy(7, parent=0)), "g", 1.0)


def test_what_is_beside_the_ids_is_as_long_as_they_are() -> None:
    """Kept ids and rewards of turns with observations of several ids, and of a reply that two branches share."""
    kept = ((7, 3), (2,))
    subject = episode(
        template(1, 2),
        policy(7, 2, parent=0, kept=kept),
        environment(5, 6, 4, parent=1),
        policy(8, 2, parent=2, kept=((8,), (2, 9))),
        template(6, 6, parent=1),
        policy(9, 2, parent=4, kept=((9,), (2,))),
        score=Score(value=1.0, value_T=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)),
    )
    first, second = samples_from_episode(subject, "g", 1.0)
    assert first.kept_ids == (None, None, *kept, None, None, None, (8,), (2, 9))
    assert first.reward_T == (0, 0, 0.1, 0.2, 0, 0, 0, 0.3, 0.4)
    assert second.kept_ids == (None, None, None, None, None, None, (9,), (2,))
    assert second.reward_T == (0, 0, 0, 0, 0, 0, 0.5, 0.6)


def test_routing_is_that_of_the_turn_that_came_to_a_token_first() -> None:
    first, second = policy(7, 2, parent=0), policy(8, 2, parent=2)
    subject = episode(
        template(1, 2),
        replace(first, routing=RoutingIds((["a1", "a2", "a7"],))),
        environment(5, parent=1),
        replace(second, routing=RoutingIds((["b1", "b2", "b7", "b2'", "b5", "b8"],))),
    )
    (sample,) = samples_from_episode(subject, "g", 1.0)
    assert sample.routing is not None
    assert [i for part in sample.routing.parts for i in part] == ["a1", "a2", "a7", "b2'", "b5", "b8"]
    (plain,) = samples_from_episode(GOOD, "g", 1.0)
    assert plain.routing is None
