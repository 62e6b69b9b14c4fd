"""The labelled equivalence set: every pair must get its label (FAILURES.md F118-F130, part 3 T01-T07)."""

from __future__ import annotations

import pytest

from headrace.rewards.math_compare import UnreadableGold, equivalent
from headrace.rewards.math_text import UnreadableMath

ACCEPT = [
    # Numbers
    ("9", "9.0"), ("1/3", r"\frac13"), ("0.5", "1/2"), ("0.1", r"\frac{1}{10}"), (r"\frac{3}{4}", "0.75"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\frac{1}{2}", r"\dfrac{2}{4}"), ("17", "17."), ("1/2", " 1/2 "),
    ("1234", "1,234"), ("1,234", "1234"), ("1234567", "1{,}234{,}567"), ("2^{10}", "1024"), ("5!", "120"),
    ("3/2", r"1\frac{1}{2}"), ("3/2", "1 1/2"), ("0", r"\sqrt{2}-\sqrt{2}"), ("0", r"\sin(\pi)"),
    # T03: a number with its base
    ("2102_3", "65"), ("2102_3", "2102_{3}"), ("1010_2", "10"), ("255", r"FF0_{16}/16"), ("10", r"(1010)_2"),
    # T05: ordinals
    ("21", r"21^{\text{st}}"), ("21", "21st"), ("2", r"2^{nd}"),
    # T07: scientific notation
    ("250000", "2.5e5"), ("1e-20", "10^{-20}"), ("6.02e23", r"6.02\times 10^{23}"), ("250000", "2.5E+5"),
    # F124: repeating decimals, other digits, other spellings
    (r"0.\overline{3}", "1/3"), ("1/6", r"0.1\overline{6}"), ("1/3", "0.(3)"), ("12", "\u0661\u0662"),
    ("-5", "\u22125"), ("1/2", "\u00bd"), ("x^2", "x\u00b2"), ("x^2", "x**2"), ("2x", "2*x"), ("2^{10}", "2^(10)"),
    (r"\sqrt{2}", "sqrt(2)"), (r"\sqrt{2}", "\u221a2"), (r"\pi", "\u03c0"),
    # Decimals of inexact values, relatively close
    ("1/3", "0.333333"), (r"\pi", "3.1415926"), (r"\sqrt{2}", "1.41421356"),
    # Percent, units, money, degrees
    ("0.5", r"50\%"), ("50", r"50\%"), (r"50\%", "0.5"), (r"50\%", "50"), ("3", r"3\text{ cm}"), ("90", r"90^\circ"),
    ("5", r"\$5"),
    # Algebra
    ("(x+1)^2", "x^2+2x+1"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"), (r"\sqrt{1/n}", r"\frac{1}{\sqrt{n}}"),
    ("2\\sqrt{3}", "\\sqrt{12}"), ("a+b", "b+a"), (r"\ln(4)", r"2\ln 2"), ("3+4i", "4i+3"), (r"\binom{5}{2}", "10"),
    (r"\sin^2 x + \cos^2 x", "1"), (r"\frac{x^2-1}{x-1}", "x+1"),
    # Assignments, relations
    ("x=5", "5"), ("5", "x=5"), ("x=5", r"x = \frac{10}{2}"), ("y=2x+1", "2x+1"), ("y=2x+1", "2x-y+1=0"),
    (r"x\ge 3", r"3 \le x"), ("1<x<2", "1<x<2"), ("x=1,2", r"x=1 \text{ or } x=2"),
    # Lists, sets, tuples, intervals, matrices
    ("1,2", "2, 1"), (r"\{1,2\}", "1,2"), (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", r"\left(1, 2\right)"), ("[1,2)", "[1,2)"),
    (r"\pm 2", "2,-2"), (r"\emptyset", r"\{\}"), ("1, 2, 3", "1, 2, and 3"), (r"(3,\frac{\pi}{2})", r"(3, \pi/2)"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"), (r"[1,2]", r"x \in [1,2]"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&\frac{8}{2}\end{bmatrix}"),
    # Words and choices
    (r"\text{(A)}", "A"), ("A", "(a)"), (r"\text{no}", "No"), ("Monday", r"\text{Monday}"),
]  # fmt: skip

REJECT = [
    # T01: tiny numbers are not all equal
    (r"1/(3\cdot 2^{60})", r"\frac{1}{3\cdot 2^{61}}"), ("1e-20", "2e-20"), ("0", "10^{-30}"),
    ("x", "x+10^{-40}"), (r"\sqrt{2}", r"\sqrt{2}+10^{-20}"), (r"(1, 10^{-30})", r"(1, 2\cdot 10^{-30})"),
    (r"\{0\}", r"\{10^{-25}\}"), ("x=10^{-30}", "x=2*10^{-30}"),
    # T03
    ("2102_3", "2102"), ("2102_3", "2102_4"), ("65", "2102_5"),
    # Close is not equal
    ("1/3", "0.333"), (r"\pi", "3.14"), ("12345678", "12345679.0"), ("4", "3.9999999"), ("1/2", "2"), ("10", "ten"),
    (r"5\%", r"50\%"), ("0.5", r"5\%"), ("50", "0.5"),
    # Algebra
    ("(x+1)^2", "x^2+2x+2"), (r"\sqrt{x^2}", "x"), ("x", "|x|"), ("3+4i", "3-4i"), ("x^2", "x"), ("2x", "2y"),
    ("1", "x"), (r"\sin x", r"\cos x"),
    # Assignments, relations
    ("x=5", "y=5"), (r"x\ge 3", "x>3"), (r"x\ge 3", r"x \le 3"), ("1<x<2", "1<x<3"),
    # Lists, sets, tuples, intervals, matrices
    ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("[1,2)", "(1,2]"), (r"\pm 2", "2"), ("1,2", "1,2,3"), ("1,1", "1,2"),
    (r"\{1,2\}", "(1,2)"), (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1]"), ("5", "5, 6"), ("1,2", "1"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("x>2", r"x>2\%"), ("5", r"[1,\infty)\%"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"(10.5,2)\%"),
    # Words and choices
    ("A", "B"), ("no", "yes"), ("Monday", "day Mon"),
    # Nothing to divide by
    ("1", r"\frac{1}{0}"), (r"\infty", r"-\infty"), ("1", r"\infty"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "answer"), ACCEPT)
def test_accepts(gold: str, answer: str) -> None:
    assert equivalent(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), REJECT)
def test_rejects(gold: str, answer: str) -> None:
    assert not equivalent(gold, answer)


@pytest.mark.parametrize("answer", [r"\frac{1}{", "2102_2", "", r"\frac{}{}", "((1)", "1,,"])
def test_an_answer_that_cannot_be_read_says_so(answer: str) -> None:
    """F123: never a number fished out of a formula that could not be parsed."""
    with pytest.raises(UnreadableMath):
        equivalent("1", answer)


@pytest.mark.parametrize("gold", [r"\frac{1}{", "2102_2", "((1)"])
def test_a_reference_that_cannot_be_read_is_a_defect_of_the_data(gold: str) -> None:
    """F174: it must not turn every answer into a 0."""
    with pytest.raises(UnreadableGold):
        equivalent(gold, "1")


def test_the_tolerance_is_relative_and_can_be_set() -> None:
    """F122: 1 % of a tiny number is still 1 %."""
    assert equivalent("1/3", "0.333", relative_tolerance=0.01)
    assert not equivalent("1e-20", "1.1e-20", relative_tolerance=0.01)
    assert equivalent("1e-20", "1.001e-20", relative_tolerance=0.01)
    assert not equivalent("1/3", "0.333333333", relative_tolerance=0)
