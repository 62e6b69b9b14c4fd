"""Finding the answer in a reply: FAILURES.md T09, T11, T13, F126-F129."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.rewards.extract import MALFORMED, NO_ANSWER, Extracted, extract, last_box, number_value


@pytest.mark.parametrize(
    ("reply", "content"),
    [
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}"),  # T13
        (r"\boxed{\sqrt{\frac{a_{1}}{b}}}", r"\sqrt{\frac{a_{1}}{b}}"),  # T13
        (r"first \boxed{1}, then \boxed{2}.", "2"),  # F126: the last one
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{ 7 }", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{outer \boxed{inner}}", r"outer \boxed{inner}"),
    ],
)
def test_the_last_box_is_taken_whole(reply: str, content: str) -> None:
    assert last_box(reply) == Extracted(content)


@pytest.mark.parametrize(
    "reply",
    [
        r"\boxed{9} and then \boxed{",  # T11
        r"\boxed{9} and then \boxed{\frac{1}{2}",
        r"\boxed{9} and then \boxed",
        r"\boxed{}",
        r"\boxed{9} and \boxed 9",
    ],
)
def test_an_unfinished_last_box_is_malformed(reply: str) -> None:
    """T11, F129: an earlier box must not pay for a last one that was cut off."""
    assert last_box(reply) == MALFORMED


def test_without_a_box_there_is_no_answer() -> None:
    """T09, F128: a number mentioned anywhere must not pay."""
    assert extract("I tested 7, 8, 9 and stopped without a conclusion", "boxed") == NO_ANSWER


@given(
    st.recursive(st.sampled_from(["x", "1", r"\{", r"\}"]), lambda s: st.lists(s).map(lambda p: "{" + "".join(p) + "}"))
)
def test_any_balanced_content_comes_out_unchanged(content: str) -> None:
    """F127: the box ends at its own brace, however deep its content nests."""
    assert last_box(rf"so \boxed{{{content}}} it is") == Extracted(content)


@given(st.text())
def test_extraction_never_raises(reply: str) -> None:
    for where in ("reply", "boxed", "last_number", "last_line", "answer_tag"):
        found = extract(reply, where)
        assert (found.text is None) == (found.problem is not None)


# ---------------------------------------------------------------------------------------------- reasoning


def test_only_what_follows_the_reasoning_counts() -> None:
    """F129: an answer inside the reasoning part is not the answer."""
    assert extract(r"<think>maybe \boxed{9}</think> I do not know.", "boxed") == NO_ANSWER
    assert extract(r"<think>\boxed{8}</think>\boxed{9}", "boxed") == Extracted("9")
    assert extract(r"maybe \boxed{8}</think>\boxed{9}", "boxed") == Extracted("9")  # the prompt opened the tag
    assert extract(r"<think>a</think> \boxed{1} <think>b</think> \boxed{2}", "boxed") == Extracted("2")


def test_unfinished_reasoning_has_no_answer() -> None:
    """F129: a reply that was cut off while it still reasoned."""
    assert extract(r"<think>so \boxed{9}", "boxed") == NO_ANSWER
    assert extract(r"<think>a</think> \boxed{1} <think>wait, \boxed{2}", "boxed") == NO_ANSWER
    assert extract(r"so \boxed{9}", "boxed", require_think=True) == NO_ANSWER
    assert extract(r"so</reason> \boxed{9}", "boxed", think_tag="reason", require_think=True) == Extracted("9")


# ------------------------------------------------------------------------------------------ other places


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("7 * 8 = 56", "56"),
        ("It is 56.", "56"),
        ("-3", "-3"),
        ("x=-4", "-4"),
        ("3-4", "4"),
        ("1,234", "1,234"),
        ("1,2", "2"),
        ("about 2.50 units", "2.50"),
        ("2.5e5", "2.5e5"),
        (".5", ".5"),
        ("\u22125", "\u22125"),
        ("**12**", "12"),
        ("version v2", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(reply: str, number: str | None) -> None:
    assert extract(reply, "last_number").text == number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", Fraction(1234)),
        ("-2.50", Fraction(-5, 2)),
        ("2.5e5", Fraction(250000)),
        ("\u22125", Fraction(-5)),
        ("12 apples", None),
        ("nan", None),
        ("1_0", None),
        ("1e9999", None),
        ("9" * 5000, None),
    ],
)
def test_number_value_is_exact_or_nothing(text: str, value: Fraction | None) -> None:
    """F135: what float() would let pass (nan, 1_0) is no number here."""
    assert number_value(text) == value


def test_last_line_and_answer_tag() -> None:
    assert extract("a\n b \n\n", "last_line") == Extracted("b")
    assert extract(" \n", "last_line") == NO_ANSWER
    assert extract("<answer>1</answer> no: <answer> 2 </answer>", "answer_tag") == Extracted("2")
    assert extract("<answer>1</answer> no: <answer>2", "answer_tag") == MALFORMED
    assert extract("2", "answer_tag") == NO_ANSWER
