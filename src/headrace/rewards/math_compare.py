"""Are two answers the same mathematics? Runs inside a worker process only: sympy may hang or eat memory.

math-verify parses, and compares relations and unusual sets. Scalars, lists, tuples and intervals are compared here,
where its rules accept what is wrong: all tiny numbers are equal to it (an absolute tolerance), and so on. The rules:

* Exact values are compared exactly. Where a side is written with a decimal point and the reference is not an
  integer, a RELATIVE tolerance applies (default 1e-6).
* Expressions with variables must be equal as functions: symbolically, or at all test points where both are real.
* ``50\\%`` equals both ``0.5`` and ``50``; ``x = 5`` equals ``5``; ``x = 5`` is not ``y = 5``.
* Lists and sets are compared without order, tuples with it; an interval is its ends and its brackets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify

from headrace.rewards.math_text import Structure, UnreadableMath, normalise, split_assignment, structure

_DECIMAL = re.compile(r"\d\.\d|(?<!\d)\.\d|\d\.(?!\d)")
_PERCENT = re.compile(r"\\?%\s*$")
_WRAPPED_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm|textit|operatorname)\s*\{([^{}]*)\}")
_DIGITS = 50
"""Significant digits of numeric comparison of irrational constants."""
_POINT_DIGITS = 40


def equivalent(gold: str, answer: str, *, relative_tolerance: float = 1e-6) -> bool:
    """True where ``answer`` is the same mathematics as ``gold``. The order matters: ``gold`` sets the form.

    Raises:
        UnreadableGold: where the reference cannot be read, unless both are the same text.
        UnreadableMath: where the answer cannot be read.
    """
    if _as_text(gold) == _as_text(answer) != "":
        return True
    try:
        gold_structure = structure(normalise(gold))
        _check_readable(gold_structure)
    except UnreadableMath as error:
        raise UnreadableGold(str(error)) from error
    answer_structure = structure(normalise(answer))
    return _Comparison(relative_tolerance).structures(gold_structure, answer_structure)


class UnreadableGold(ValueError):
    """The reference answer is no mathematics that could be compared: a defect of the data."""


def _as_text(text: str) -> str:
    """For answers in words and letters: without text commands, white space, case and a single letter's brackets."""
    plain = _WRAPPED_TEXT.sub(r"\1", text).replace("$", "")
    plain = re.sub(r"\\[!,;:> ]|\s+", "", plain).rstrip(".").casefold()
    match = re.fullmatch(r"\(([a-z])\)|([a-z])\)", plain)
    return plain if match is None else (match.group(1) or match.group(2))


def _check_readable(part: Structure) -> None:
    for item in part.items:
        if not _is_word(item):
            parse_scalar(split_assignment(item)[1])
    for inner in part.parts:
        _check_readable(inner)


def _is_word(text: str) -> bool:
    """Words (yes, Monday, north-east) are compared as text, not as products of letters."""
    return bool(re.fullmatch(r"[^\W\d_]{2,}(?:[ -][^\W\d_]+)*", _WRAPPED_TEXT.sub(r"\1", text).strip()))


def parse_scalar(text: str) -> Any:
    """A sympy object for one formula; never a number fished out of a formula that could not be parsed (F123).

    Raises:
        UnreadableMath: where it is no formula.
    """
    text = _PERCENT.sub("", text.strip())
    if not text:
        raise UnreadableMath("there is nothing to compare")
    parsed = parse(
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", extraction_mode="first_match",
        parsing_timeout=None, raise_on_error=True,
    )  # fmt: skip
    if not parsed or isinstance(parsed[0], str):
        raise UnreadableMath(f"{text!r} cannot be read as mathematics")
    return parsed[0]


class _Comparison:
    def __init__(self, relative_tolerance: float) -> None:
        self.tolerance = sympy.Rational(str(relative_tolerance))

    # ------------------------------------------------------------------------------------- structures

    def structures(self, gold: Structure, answer: Structure) -> bool:
        kinds = (gold.kind, answer.kind)
        if kinds == ("scalar", "scalar"):
            return self.scalars(gold.items[0], answer.items[0])
        if kinds == ("union", "union"):
            return self._unordered(gold.parts, answer.parts, self.structures)
        if set(kinds) <= {"list", "set"}:
            return self._unordered(_share_left_side(gold.items), _share_left_side(answer.items), self.scalars)
        if set(kinds) <= {"tuple", "interval"}:
            loose = len(gold.items) > 2 and set(kinds) == {"tuple"}
            return (loose or gold.brackets == answer.brackets) and self._in_order(gold.items, answer.items)
        if kinds in (("tuple", "list"), ("list", "tuple")):
            return self._in_order(gold.items, answer.items)
        if "scalar" in kinds and "union" not in kinds:
            one, other = (gold, answer) if gold.kind == "scalar" else (answer, gold)
            if other.kind in ("set", "list") and len(other.items) == 1:
                return self.scalars(gold.items[0], answer.items[0])
            return other.kind == "set" and not other.items and _is_empty_set(one.items[0])
        return False

    def _in_order(self, gold: Sequence[str], answer: Sequence[str]) -> bool:
        return len(gold) == len(answer) and all(map(self.scalars, gold, answer))

    @staticmethod
    def _unordered(gold: Sequence[Any], answer: Sequence[Any], equal: Any) -> bool:
        left = list(answer)
        if len(gold) != len(left):
            return False
        for item in gold:
            match = next((i for i, other in enumerate(left) if equal(item, other)), None)
            if match is None:
                return False
            del left[match]
        return True

    # ---------------------------------------------------------------------------------------- scalars

    def scalars(self, gold: str, answer: str) -> bool:
        if _as_text(gold) == _as_text(answer):
            return True
        if _is_word(gold):
            return False
        gold_left, gold_right = split_assignment(gold)
        answer_left, answer_right = split_assignment(answer)
        if gold_left and answer_left and gold_left != answer_left:
            return self._relations(gold, answer)
        if _equation(gold_right) or _equation(answer_right):
            return self._relations(gold, answer)
        if _has_tuple(gold_right) or _has_tuple(answer_right):
            return self.structures(structure(gold_right), structure(answer_right))
        if self._percent(gold_right, answer_right):
            return True
        decimal = bool(_DECIMAL.search(gold_right) or _DECIMAL.search(answer_right))
        if self.values(parse_scalar(gold_right), parse_scalar(answer_right), decimal):
            return True
        # y = 2x + 1 against 2x - y = -1: the same relation, written otherwise.
        return bool(gold_left) != bool(answer_left) and "=" in gold and "=" in answer and self._relations(gold, answer)

    def _percent(self, gold: str, answer: str) -> bool:
        """One side with a percent sign: its number, or a hundredth of it. Both with one: the numbers decide."""
        if bool(_PERCENT.search(gold)) == bool(_PERCENT.search(answer)):
            return False
        gold_value, answer_value = parse_scalar(gold), parse_scalar(answer)
        if not (isinstance(gold_value, sympy.Expr) and isinstance(answer_value, sympy.Expr)):
            return False
        hundredth = sympy.Rational(1, 100)
        if _PERCENT.search(gold):
            return self.values(gold_value * hundredth, answer_value, True)
        return self.values(gold_value, answer_value * hundredth, True)

    def values(self, gold: Any, answer: Any, decimal: bool) -> bool:
        """Two parsed objects. ``decimal``: one of them was written with a decimal point."""
        if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
            return (
                isinstance(gold, sympy.MatrixBase)
                and isinstance(answer, sympy.MatrixBase)
                and gold.shape == answer.shape
                and all(self.values(g, a, decimal) for g, a in zip(gold.flat(), answer.flat(), strict=True))
            )
        if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
            return bool(verify(gold, answer, timeout_seconds=None))
        gold, answer = _exact(gold).doit(), _exact(answer).doit()
        if gold.has(sympy.nan, sympy.zoo) or answer.has(sympy.nan, sympy.zoo):
            return False
        if gold.free_symbols or answer.free_symbols:
            return _same_function(gold, answer)
        return self._constants(gold, answer, decimal)

    def _constants(self, gold: Any, answer: Any, decimal: bool) -> bool:
        if gold == answer:
            return True
        if gold.is_infinite or answer.is_infinite:
            return False
        if decimal and not gold.is_integer and self._close(gold, answer):
            return True
        if gold.is_Rational and answer.is_Rational:
            return False
        if not _agree(gold, answer, _DIGITS):
            return False
        # Equal to 50 digits: the difference is 0 unless sympy proves that it is not.
        return (gold - answer).equals(0) is not False

    def _close(self, gold: Any, answer: Any) -> bool:
        difference = abs(gold - answer)
        bound = self.tolerance * abs(gold)
        if difference.is_Rational and bound.is_Rational:
            return bool(difference <= bound)
        return bool(difference.evalf(30) <= bound.evalf(30))

    def _relations(self, gold: str, answer: str) -> bool:
        if bool(_PERCENT.search(gold)) != bool(_PERCENT.search(answer)):
            return False
        return bool(verify(parse_scalar(gold), parse_scalar(answer), timeout_seconds=None))


# ------------------------------------------------------------------------------------------------ helpers


def _share_left_side(items: Sequence[str]) -> list[str]:
    """``x = 1, 2`` means x = 1, x = 2."""
    left, _ = split_assignment(items[0]) if items else (None, "")
    if left is None:
        return list(items)
    return [item if split_assignment(item)[0] else f"{left}={item}" for item in items]


def _equation(text: str) -> bool:
    return bool(re.search(r"(?<![<>!\\])=|[<>]|\\(?:le|ge|ne|lt|gt)(?![a-zA-Z])", text))


def _has_tuple(text: str) -> bool:
    try:
        return structure(text).kind != "scalar"
    except UnreadableMath:
        return False


def _is_empty_set(text: str) -> bool:
    return text.strip() in (r"\emptyset", r"\varnothing", "\u2205")


def _exact(expression: Any) -> Any:
    """Written decimals as the fractions that they are: 3.9999999 is not 4."""
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def _agree(gold: Any, answer: Any, digits: int) -> bool:
    """Relative agreement to ``digits - 10`` digits; a zero agrees with what is 0 to as many digits."""
    a, b = gold.evalf(digits), answer.evalf(digits)
    if not (a.is_number and b.is_number) or a.has(sympy.nan) or b.has(sympy.nan):
        return False
    scale = max(abs(a), abs(b))
    if scale == 0:
        return True
    if 0 in (gold, answer):
        return bool(scale < sympy.Float(10) ** (10 - digits))
    return bool(abs(a - b) <= scale * sympy.Float(10, digits) ** (10 - digits))


def _same_function(gold: Any, answer: Any) -> bool:
    """Equal as real functions: by simplification, or at every test point where both are real (at least 4).

    A point where one side is real and the other is not tells them apart: ``sqrt(x^2)`` is not ``x``. Points come
    from a fixed seed, so that a verdict can be repeated."""
    if gold == answer:
        return True
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=lambda s: s.name)
    if {s.name for s in gold.free_symbols} != {s.name for s in answer.free_symbols}:
        return bool(sympy.simplify(gold - answer) == 0)
    agreed = _agreeing_points(gold, answer, symbols)
    if agreed is None:
        return False
    difference = sympy.simplify(gold - answer)
    if not difference.free_symbols:
        return bool(difference == 0 or (difference.is_number and difference.equals(0)))
    return agreed >= 4


def _agreeing_points(gold: Any, answer: Any, symbols: Sequence[Any]) -> int | None:
    """At how many of the test points both sides are real and equal; None as soon as a point tells them apart."""
    rng = random.Random(0)
    agreed = 0
    for attempt in range(12):
        sign = 1 if attempt % 2 else -1
        point = {s: sympy.Rational(sign * rng.randint(1, 4000) if i == 0 else rng.randint(-4000, 4000), 997)
                 for i, s in enumerate(symbols)}  # fmt: skip
        a, b = (side.subs(point).evalf(_POINT_DIGITS) for side in (gold, answer))
        if not (a.is_number and b.is_number) or a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
            continue
        if a.is_real is not b.is_real:
            return None
        if not a.is_real:
            continue
        if not _agree(a, b, _POINT_DIGITS):
            return None
        agreed += 1
    return agreed
