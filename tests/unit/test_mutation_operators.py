"""The operators that `make mutation` applies: each changes one thing, and nothing that is left alone."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / "mutation" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mutation_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


operators = _load("mutants")


def bodies(line: str) -> list[str]:
    """What a function of this one line becomes."""
    found = []
    for mutant in operators.mutants(f"def f(x: int | None) -> int | None:\n    {line}\n"):
        (function,) = ast.parse(mutant.source).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.unparse(function.args) == "x: int | None" and function.returns is not None
        found.append(ast.unparse(function.body[0]))
    return found


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a * b", ["return a", "return b"]),
        ("return a / b", ["return a", "return 1.0 / b"]),
        ("return a + b", ["return a", "return b", "return a - b"]),
        ("return a - b", ["return a", "return -b", "return a + b"]),
        ("return a & ~b", ["return a", "return ~b", "return a & b"]),
        ("return a < b", ["return a >= b"]),
        ("return a if b else c", ["return a if not b else c"]),
        ("return a and b", ["return b", "return a"]),
        ("return a.detach().exp()", ["return a.detach()", "return a.exp()"]),
        ("return a.clamp(b, c)", ["return a.clamp(min=b)", "return a.clamp(max=c)"]),
        ("return a.clamp(max=b)", ["return a"]),
        ("return torch.where(a, b, c)", ["return b", "return c"]),
        ("return torch.maximum(a, b)", ["return a", "return b"]),
        ("return a.max()", []),
        ("a += b", ["pass"]),
        ("a.sort()", ["pass"]),
        ("return a[:b]", ["return a[:]"]),
        ("return [a for a in b if c]", ["return [a for a in b]", "return [a for a in b if not c]"]),
        ("return a.sort(descending=True)", ["return a.sort(descending=False)"]),
        ("raise ValueError(a + b)", []),
        ("return f'{a + b}'", []),
        ("assert a < b", []),
    ],
)
def test_operators(line: str, expected: list[str]) -> None:
    """Issue 3, criterion 1: deleting any one term."""
    assert bodies(line) == expected


def test_each_mutant_has_a_name_of_its_own() -> None:
    """The list of explained survivors is keyed by it."""
    source = "def f(a):\n    return (a < 0) & (a < 0)\n\n\ndef g(a):\n    return a < 0\n"
    names = [mutant.name for mutant in operators.mutants(source)]
    assert len(set(names)) == len(names)
    assert names[-3:] == ["f: a < 0 -> a >= 0", "f: a < 0 -> a >= 0 (2)", "g: a < 0 -> a >= 0"]
