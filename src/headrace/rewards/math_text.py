"""From the text of an answer to its structure: a scalar, a list, a set, a tuple, an interval, a union.

Here stands what off-the-shelf parsers get wrong: numbers with a base as subscript, ordinals, scientific notation,
repeating decimals, other scripts' digits. Elements stay text; ``math_compare`` parses them.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_CHARS = 5000
MAX_DEPTH = 12
"""Of nested brackets. The LaTeX parser's time grows without measure with both; no reference comes near them."""

Kind = Literal["scalar", "list", "set", "tuple", "interval", "union"]


class UnreadableMath(ValueError):
    """The text is no mathematics that could be compared."""


@dataclass(frozen=True, slots=True)
class Structure:
    """``items`` are texts for all kinds but ``union``, whose parts stand in ``parts``."""

    kind: Kind
    items: tuple[str, ...] = ()
    brackets: str = ""
    """Of a tuple or interval: its opening and closing bracket, such as ``[)``."""
    parts: tuple[Structure, ...] = ()


# ------------------------------------------------------------------------------------------ normalisation

_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u2044": "/",
    "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ",
    "\u00b1": r"\pm ", "\u222a": r"\cup ", "\u2208": r"\in ", "\u00b0": r"^{\circ}", "\u00a0": " ",
    "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\u2153": r"\frac{1}{3}",
    "\u2154": r"\frac{2}{3}",
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_SUPERSCRIPT_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_UNICODE_ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|(\w+))")

_REPLACEMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|big|Big|bigg|Bigg|bigl|bigr|Bigl|Bigr|displaystyle|textstyle)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\{,\}", ","),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\\$|\$|\\\(|\\\)|\\\[|\\\]", ""),
        (r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|operatorname)\s*\{\s*(?:and|or)\s*\}", ","),
        (r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
        (r"\\leq(?![a-zA-Z])", r"\\le "),
        (r"\\geq(?![a-zA-Z])", r"\\ge "),
        (r"\*\*", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{(\1)}"),
        (r"\^\s*(-\s*\d+)", r"^{\1}"),
        (r"\\dots|\\ldots|\\cdots", "..."),
        (r"\s+", " "),
    )
)

_ORDINAL = re.compile(
    r"(?<![\w.])(\d+)\s*\^?\s*\{?\s*(?:\\(?:text|mathrm|textrm|rm)\s*\{?)?\s*(st|nd|rd|th)\s*\}{0,2}(?![a-zA-Z])"
)
_SCIENTIFIC = re.compile(r"(?<![\w\\.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")
_BASE_NUMBER = re.compile(
    r"(?<![\w\\.])\(?(?:\\(?:text|mathrm)\{)?([0-9][0-9A-Z]*|[A-Z][0-9A-Z]*[0-9][0-9A-Z]*)\}?\)?\s*"
    r"_\s*(?:(\d)|\{\s*(?:\\text\s*\{)?\s*(\d{1,2})\s*\}{1,2})(?!\w)"
)
_REPEATING = re.compile(
    r"(?<![\w.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overset\{\\cdot\})\s*\{?\s*(\d+)\s*\}?|\((\d+)\))"
)
_MIXED = re.compile(r"(?<![\w.{}/^])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])(?!\s*,)")


def normalise(text: str) -> str:
    """One spelling for what means the same; ordinals, bases, repeating and scientific decimals become plain numbers.

    Raises:
        UnreadableMath: for a number whose digits do not exist in its base.
    """
    if len(text) > MAX_CHARS:
        raise UnreadableMath(f"{len(text)} characters are no answer (at most {MAX_CHARS})")
    text = "".join(_plain_character(char) for char in text)
    text = _SUPERSCRIPT_RUN.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _UNICODE_ROOT.sub(lambda m: rf"\sqrt{{{m.group(1) or m.group(2)}}}", text)
    # A box or bold face around the whole, and the full stop of the sentence.
    text = re.sub(r"^\s*\\(?:boxed|mathbf|textbf|bf)\s*\{(.*)\}\s*$", r"\1", text.strip(), flags=re.DOTALL)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".").strip() if not text.rstrip().endswith("...") else text.strip()
    text = _ORDINAL.sub(r"\1", text)
    text = _REPEATING.sub(_repeating_value, text)
    text = _SCIENTIFIC.sub(_scientific_value, text)
    text = _BASE_NUMBER.sub(_base_value, text)
    return _MIXED.sub(r"(\1+\2/\3)", text)


def _plain_character(char: str) -> str:
    if char.isascii():
        return char
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    digit = unicodedata.decimal(char, None)
    return char if digit is None else str(digit)


def _base_value(match: re.Match[str]) -> str:
    """``2102_3`` is 65: a number with a subscript is written in that base (a digit cannot be indexed)."""
    digits, base = match.group(1), int(match.group(2) or match.group(3))
    if not 2 <= base <= 36:
        raise UnreadableMath(f"{match.group()}: {base} is no base of a number")
    try:
        return str(int(digits, base))
    except ValueError:
        raise UnreadableMath(f"{match.group()}: a digit of {digits} does not exist in base {base}") from None


def _repeating_value(match: re.Match[str]) -> str:
    r"""``0.1\overline{6}`` is 1/6: (all digits - the fixed ones) / (as many nines as repeat, then zeros)."""
    whole, fixed, period = match.group(1) or "0", match.group(2), match.group(3) or match.group(4)
    numerator = int(whole + fixed + period) - int(whole + fixed)
    return _fraction_text(Fraction(numerator, (10 ** len(period) - 1) * 10 ** len(fixed)))


def _scientific_value(match: re.Match[str]) -> str:
    """``2.5e5`` keeps its decimal point, which tells that it may be rounded."""
    return rf"({match.group(1)} \cdot 10^{{{int(match.group(2))}}})"


def _fraction_text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# ---------------------------------------------------------------------------------------------- structure

_OPEN, _CLOSE = "([{", ")]}"
_ASSIGNMENT = re.compile(r"^\s*([a-zA-Z]|\\[a-z]+|[a-zA-Z]_\{?\w+\}?|[a-zA-Z]\(\s*[a-zA-Z]\s*\)|[a-zA-Z]+)\s*=(?!=)\s*")
_MEMBER = re.compile(r"^\s*[a-zA-Z](?:_\{?\w+\}?)?\s*\\in(?![a-zA-Z])\s*")
_RELATION = re.compile(r"\\(?:le|ge|ne|lt|gt)(?![a-zA-Z])|[<>]")


def structure(text: str) -> Structure:
    """The structure of a normalised answer.

    Raises:
        UnreadableMath: for brackets that do not match, or an empty element.
    """
    text = _MEMBER.sub("", text.strip())
    _check_balance(text)
    pieces = _split_top(text, r"\cup")
    if len(pieces) > 1:
        return Structure("union", parts=tuple(structure(piece) for piece in pieces))
    if _RELATION.search(text) or r"\begin" in text:
        return Structure("scalar", (text,))
    if (inner := _inside(text, r"\{", r"\}")) is not None:
        return Structure("set", _items(inner)) if inner.strip() else Structure("set")
    if len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _matching(text) == len(text) - 1:
        items = _items(text[1:-1], one_is_enough=True)
        if len(items) > 1:
            mixed = text[0] + text[-1] not in ("()", "[]")
            return Structure("interval" if mixed and len(items) == 2 else "tuple", items, text[0] + text[-1])
    if _THOUSANDS.fullmatch(text.strip().lstrip("-").split(".")[0].strip()):
        return Structure("scalar", (text.replace(",", ""),))
    items = _items(text, one_is_enough=True)
    if len(items) > 1:
        return Structure("list", items)
    return _expand_signs(text)


def split_assignment(text: str) -> tuple[str | None, str]:
    """(left side, right side) of ``x = 5``; (None, text) where nothing is assigned, or the sides are equations."""
    match = _ASSIGNMENT.match(text)
    if match is None or "=" in text[match.end() :] or _RELATION.search(text):
        return None, text
    return match.group(1).replace(" ", ""), text[match.end() :]


def _expand_signs(text: str) -> Structure:
    r"""``3 \pm 2`` means two numbers."""
    if text.count(r"\pm") == 1 and r"\mp" not in text:
        left, right = text.split(r"\pm")
        prefix, left = (left[: left.index("=") + 1], left[left.index("=") + 1 :]) if "=" in left else ("", left)
        return Structure("list", tuple(f"{prefix}{left.strip()}{sign}{right.strip()}" for sign in "+-"))
    return Structure("scalar", (text,))


def _items(text: str, *, one_is_enough: bool = False) -> tuple[str, ...]:
    items = tuple(item.strip() for item in _split_top(text, ","))
    if len(items) > 1 and items[-1] == "":
        items = items[:-1]
    # "1, 2, and 3" has lost its "and" to a comma.
    items = tuple(item for index, item in enumerate(items) if item or index == 0)
    if any(not item for item in items):
        if one_is_enough and len(items) == 1:
            return items
        raise UnreadableMath(f"an element of {text!r} is empty")
    return tuple(_THOUSANDS.sub(lambda m: m.group().replace(",", ""), item) for item in items)


def _tokens(text: str) -> list[tuple[int, str, int]]:
    """(index, token, depth before it); a command such as ``\\{`` or ``\\cup`` is one token."""
    result: list[tuple[int, str, int]] = []
    depth = index = 0
    while index < len(text):
        match = re.compile(r"\\(?:[a-zA-Z]+|.)|.", re.DOTALL).match(text, index)
        token = match.group() if match else text[index]
        if token in (")", "]", "}", r"\}"):
            depth -= 1
        result.append((index, token, depth))
        if token in ("(", "[", "{", r"\{"):
            depth += 1
        index += len(token)
    return result


def _split_top(text: str, separator: str) -> list[str]:
    """Split where ``separator`` stands outside of all brackets."""
    pieces, start = [], 0
    for index, token, depth in _tokens(text):
        if token == separator and depth == 0:
            pieces.append(text[start:index])
            start = index + len(token)
    return [*pieces, text[start:]]


def _check_balance(text: str) -> None:
    tokens = _tokens(text)
    final = sum(t in ("(", "[", "{", r"\{") for _, t, _ in tokens) - sum(
        t in (")", "]", "}", r"\}") for _, t, _ in tokens
    )
    if any(depth > MAX_DEPTH for _, _, depth in tokens):
        raise UnreadableMath(f"brackets are nested more than {MAX_DEPTH} deep")
    if final or any(depth < 0 for _, _, depth in tokens):
        raise UnreadableMath(f"the brackets of {text!r} do not match")


def _matching(text: str) -> int:
    """Index of the bracket that closes the first one; round and square ones may close each other (intervals)."""
    for index, token, depth in _tokens(text)[1:]:
        if depth == 0 and token in (")", "]"):
            return index
    return -1


def _inside(text: str, opening: str, closing: str) -> str | None:
    if text.startswith(opening) and text.endswith(closing):
        tokens = _tokens(text)
        if all(depth > 0 for _, _, depth in tokens[1:-1]):
            return text[len(opening) : -len(closing)]
    return None
