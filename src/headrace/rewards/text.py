"""Rewards by plain comparison of text, in process: ``exact``, ``last_number``, ``boxed`` and ``format``.

Each runs in time linear in the reply, so that nothing needs to be killed. (``format`` with a pattern of the user's
can backtrack without end; it runs in a worker process: see ``build.py``.)
"""

from __future__ import annotations

from fractions import Fraction

from headrace.config.base import Section
from headrace.rewards.base import RewardBase, missing_answer
from headrace.rewards.extract import Extracted, Where, extract, number_value
from headrace.types import Episode, Score, ScoreResult


class ReasoningOptions(Section):
    """Where the reasoning ends and the answer begins."""

    think_tag: str = "think"
    """Name of the tag around the reasoning; the answer stands after its last closing tag."""
    require_think: bool = False
    """A reply without that closing tag has no answer."""


class ExactOptions(ReasoningOptions):
    extract: Where = "reply"
    ignore_case: bool = False


class FormatOptions(ReasoningOptions):
    pattern: str | None = None
    """A Python regular expression that the whole answer part must match; None asks for a complete ``\\boxed{}``."""
    dot_matches_newline: bool = True


def find(episode: Episode, where: Where, options: ReasoningOptions) -> Extracted:
    return extract(episode.reply, where, think_tag=options.think_tag, require_think=options.require_think)


def verdict(name: str, right: bool, found: Extracted) -> Score:
    """1 or 0, and which fault of the reply made it 0: components always have the same keys."""
    return Score(
        value=float(right),
        components={
            "no_answer": float(found.problem == "no_answer"),
            "malformed": float(found.problem == "malformed"),
        },
    )


class ExactReward(RewardBase):
    """1 where the answer is the reference, character by character; white space at the ends does not count."""

    def __init__(self, options: ExactOptions, name: str = "exact") -> None:
        super().__init__(name)
        self._options = options

    async def score(self, episode: Episode) -> ScoreResult:
        gold = gold_text(episode)
        if gold is None:
            return missing_answer(self.name, episode, "has no answer to compare with")
        found = find(episode, self._options.extract, self._options)
        right = found.text is not None and self._fold(found.text) == self._fold(gold)
        return verdict(self.name, right, found)

    def _fold(self, text: str) -> str:
        return text.casefold() if self._options.ignore_case else text


class LastNumberReward(RewardBase):
    """1 where the last number of the reply equals the reference, as exact numbers (``12.0`` is 12)."""

    def __init__(self, options: ReasoningOptions, name: str = "last_number") -> None:
        super().__init__(name)
        self._options = options

    async def score(self, episode: Episode) -> ScoreResult:
        gold = gold_text(episode)
        value = None if gold is None else number_value(gold)
        if value is None:
            return missing_answer(self.name, episode, f"has the answer {episode.task.answer!r}, which is not a number")
        found = find(episode, "last_number", self._options)
        return verdict(self.name, found.text is not None and number_value(found.text) == value, found)


class BoxedReward(RewardBase):
    """1 where the last box holds the reference: equal as text without spaces and dollar signs, or as numbers."""

    def __init__(self, options: ReasoningOptions, name: str = "boxed") -> None:
        super().__init__(name)
        self._options = options

    async def score(self, episode: Episode) -> ScoreResult:
        gold = gold_text(episode)
        if gold is None:
            return missing_answer(self.name, episode, "has no answer to compare with")
        found = find(episode, "boxed", self._options)
        right = found.text is not None and _comparable(found.text) == _comparable(gold)
        return verdict(self.name, right, found)


class BoxFormatReward(RewardBase):
    """1 where the reply's answer stands in a complete last box, whatever the answer."""

    def __init__(self, options: ReasoningOptions, name: str = "format") -> None:
        super().__init__(name)
        self._options = options

    async def score(self, episode: Episode) -> ScoreResult:
        found = find(episode, "boxed", self._options)
        return verdict(self.name, found.text is not None, found)


def gold_text(episode: Episode) -> str | None:
    """The task's answer as text; None where there is none."""
    answer = episode.task.answer
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return None
    return str(answer).strip()


def _comparable(text: str) -> str | Fraction:
    plain = "".join(text.replace("$", "").split())
    value = number_value(plain)
    return plain if value is None else value
