"""One wrong version of a source file after the other: a term left out, a comparison or a sign turned around.

Only the syntax tree is touched. Left alone: annotations and unions of types, decorators, messages of errors,
assertions, docstrings.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ELEMENTWISE = {"detach", "abs", "square", "sqrt", "exp", "log", "expm1", "sigmoid", "sign"}
"""Methods without arguments that are taken away."""
CHOICES = {"where": 1, "maximum": 0, "minimum": 0, "max": 0, "min": 0}
"""Function -> its first argument that can stand for the result."""
SKIPPED = {
    (ast.arg, "annotation"),
    (ast.AnnAssign, "annotation"),
    (ast.FunctionDef, "returns"),
    (ast.FunctionDef, "decorator_list"),
    (ast.ClassDef, "decorator_list"),
    (ast.Raise, "exc"),
}


@dataclass(frozen=True)
class Mutant:
    name: str
    """``function: before -> after``, with ``(2)`` behind it for the second of that name."""
    line: int
    source: str


def mutants(source: str) -> Iterator[Mutant]:
    """Every mutant of a module's source, in the order of the source."""
    tree = ast.parse(source)
    seen: dict[str, int] = {}
    for place, (node, function) in enumerate(_nodes(tree)):
        for replacement in _replacements(node):
            if _text(replacement) == _text(node):
                continue
            changed = copy.deepcopy(tree)
            target = next(n for k, (n, _) in enumerate(_nodes(changed)) if k == place)
            changed = ast.fix_missing_locations(_Swap(target, replacement).visit(changed))
            name = f"{function}: {_text(node)} -> {_text(replacement)}"
            seen[name] = seen.get(name, 0) + 1
            suffix = f" ({seen[name]})" if seen[name] > 1 else ""
            line = getattr(node.target if isinstance(node, ast.comprehension) else node, "lineno", 0)
            yield Mutant(name + suffix, line, ast.unparse(changed))


class _Swap(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        return self.replacement if node is self.target else self.generic_visit(node)


def _nodes(tree: ast.AST, function: str = "module") -> Iterator[tuple[ast.AST, str]]:
    """(node, function that it is in), in a fixed order, without what is left alone."""
    for name, value in ast.iter_fields(tree):
        if (type(tree), name) in SKIPPED:
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert):
                continue
            inside = child.name if isinstance(child, ast.FunctionDef | ast.ClassDef) else function
            yield child, inside
            yield from _nodes(child, inside)


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}"
    if isinstance(node, ast.comprehension):
        return " ".join(f"if {ast.unparse(test)}" for test in node.ifs) or "no filter"
    return " ".join(ast.unparse(node).split())


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    """The operators. The nodes that they give may be part of the original tree."""
    if isinstance(node, ast.BinOp):
        yield from _of_operation(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield node.operand
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        for k in range(len(node.values)):
            rest = node.values[:k] + node.values[k + 1 :]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.If | ast.IfExp) and _is_plain(node.test):
        negated = copy.copy(node)
        negated.test = ast.UnaryOp(ast.Not(), node.test)
        yield negated
    elif isinstance(node, ast.comprehension):
        yield from _of_comprehension(node)
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()
    elif isinstance(node, ast.Slice):
        yield from _of_slice(node)
    elif isinstance(node, ast.keyword) and node.arg in ("descending", "reverse") and _is_true(node.value):
        yield ast.keyword(node.arg, ast.Constant(False))


def _is_plain(test: ast.expr) -> bool:
    """No operator that another rule turns around already."""
    return not isinstance(test, ast.Compare | ast.UnaryOp)


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def _of_operation(node: ast.BinOp) -> Iterator[ast.AST]:
    """Either operand left out; the sign of the second turned around."""
    if _is_type(node):
        return
    if isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
        yield node.left
        yield node.right
    if isinstance(node.op, ast.Sub):
        yield node.left
        yield ast.UnaryOp(ast.USub(), node.right)
    if isinstance(node.op, ast.Div):
        yield node.left
        yield ast.BinOp(ast.Constant(1.0), ast.Div(), node.right)
    if isinstance(node.op, ast.Add | ast.Sub):
        yield ast.BinOp(node.left, ast.Sub() if isinstance(node.op, ast.Add) else ast.Add(), node.right)


def _is_type(node: ast.expr) -> bool:
    """A class by its name, None, or a union of such."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.BitOr) and _is_type(node.left) and _is_type(node.right)
    return (isinstance(node, ast.Name) and node.id[:1].isupper()) or (
        isinstance(node, ast.Constant) and node.value is None
    )


def _of_call(node: ast.Call) -> Iterator[ast.AST]:
    """A function of one value left out; a choice between two made always in one way; a bound left out."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if isinstance(function, ast.Attribute) and name in ELEMENTWISE and not node.args:
        yield function.value
    if isinstance(function, ast.Attribute) and name == "clamp":
        bounds = [ast.keyword(k, a) for k, a in zip(("min", "max"), node.args, strict=False)] + node.keywords
        if len(bounds) == 1:
            yield function.value
        else:
            yield from (ast.Call(function, [], [kept]) for kept in bounds)
    if name in CHOICES and len(node.args) - CHOICES[name] >= 2 and not node.keywords:
        yield from node.args[CHOICES[name] :]


def _of_comprehension(node: ast.comprehension) -> Iterator[ast.AST]:
    for k, test in enumerate(node.ifs):
        changed = copy.copy(node)
        changed.ifs = node.ifs[:k] + node.ifs[k + 1 :]
        yield changed
        if _is_plain(test):
            changed = copy.copy(node)
            changed.ifs = [*node.ifs[:k], ast.UnaryOp(ast.Not(), test), *node.ifs[k + 1 :]]
            yield changed


def _of_slice(node: ast.Slice) -> Iterator[ast.AST]:
    for part in ("lower", "upper", "step"):
        if getattr(node, part) is not None:
            changed = copy.copy(node)
            setattr(changed, part, None)
            yield changed
