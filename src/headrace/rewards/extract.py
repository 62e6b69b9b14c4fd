"""Find the answer in a reply. One set of extractors for every reward, for training and evaluation alike.

An answer that is not there is None, never a guess: a number mentioned anywhere must not pay (F128).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Problem = Literal["no_answer", "malformed"]
Where = Literal["reply", "boxed", "last_number", "last_line", "answer_tag"]


@dataclass(frozen=True, slots=True)
class Extracted:
    """The answer, or why there is none: ``no_answer`` (none was given) or ``malformed`` (begun and not finished)."""

    text: str | None
    problem: Problem | None = None


NO_ANSWER = Extracted(None, "no_answer")
MALFORMED = Extracted(None, "malformed")


def extract(reply: str, where: Where, *, think_tag: str = "think", require_think: bool = False) -> Extracted:
    """The answer in the part of ``reply`` that follows the reasoning.

    Args:
        where: ``reply`` (all of it), ``boxed`` (last ``\\boxed{...}``), ``last_number``, ``last_line``, or
            ``answer_tag`` (last ``<answer>...</answer>``).
        think_tag: name of the tag around the reasoning; the answer stands after its last closing tag (F129).
        require_think: a reply without that closing tag has no answer.
    """
    final = after_reasoning(reply, think_tag=think_tag, required=require_think)
    return NO_ANSWER if final is None else _EXTRACTORS[where](final)


def after_reasoning(reply: str, *, think_tag: str = "think", required: bool = False) -> str | None:
    """What follows the last closing tag; None where the reasoning was begun and not finished.

    A reply without either tag is all answer, unless the tag is ``required`` (templates that open the tag in the
    prompt leave only the closing one in the reply)."""
    opening, closing = f"<{think_tag}>", f"</{think_tag}>"
    _, found, final = reply.rpartition(closing)
    if opening in final or (not found and required):
        return None
    return final


# -------------------------------------------------------------------------------------------------- boxes

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")


def last_box(text: str) -> Extracted:
    """Content of the last ``\\boxed{...}``, braces balanced. A last box that is cut off is malformed, even where an
    earlier one is whole: the policy had not finished. ``\\boxed 9`` without braces is malformed too."""
    matches = list(_BOX.finditer(text))
    if not matches:
        return NO_ANSWER
    # The last box that does not stand inside another one.
    last = Extracted(None, "no_answer")
    end = 0
    for match in matches:
        if match.start() < end:
            continue
        if match.group(1) is None:
            last, end = MALFORMED, match.end()
            continue
        close = _closing_brace(text, match.end())
        if close is None:
            return MALFORMED
        last, end = Extracted(text[match.end() : close].strip()), close
    return Extracted(None, "malformed") if last.text == "" else last


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one just before ``start``; escaped braces do not count."""
    depth = 1
    index = start
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return None


# ------------------------------------------------------------------------------------------------ numbers

_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?![\w]))?|(?<![\w.])[-+\u2212]?\.\d+"
)
_MAX_DIGITS = 1000
"""A longer run of digits is no number that anybody asked for, and would make exact arithmetic slow."""


def last_number(text: str) -> Extracted:
    """The last number as it is written. A sign counts where it does not follow a digit (``3-4`` ends with 4)."""
    numbers = _NUMBER.findall(text)
    return Extracted(numbers[-1]) if numbers else NO_ANSWER


def number_value(text: str) -> Fraction | None:
    """The exact value of one written number (``1,234``, ``-2.50``, ``2.5e5``); None where it is anything else."""
    text = text.strip().replace("\u2212", "-")
    if not _NUMBER.fullmatch(text) or len(text) > _MAX_DIGITS:
        return None
    return Fraction(text.replace(",", ""))


# -------------------------------------------------------------------------------------------- other places


def last_line(text: str) -> Extracted:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Extracted(lines[-1]) if lines else NO_ANSWER


def answer_tag(text: str) -> Extracted:
    """Content of the last ``<answer>...</answer>``; one that is begun and not closed is malformed."""
    _, opening, content = text.rpartition("<answer>")
    if not opening:
        return NO_ANSWER
    inner, closing, _ = content.partition("</answer>")
    return Extracted(inner.strip()) if closing and inner.strip() else MALFORMED


def _whole(text: str) -> Extracted:
    return Extracted(text.strip()) if text.strip() else NO_ANSWER


_EXTRACTORS: dict[str, Callable[[str], Extracted]] = {
    "reply": _whole,
    "boxed": last_box,
    "last_number": last_number,
    "last_line": last_line,
    "answer_tag": answer_tag,
}
