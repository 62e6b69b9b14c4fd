"""Checks a manifest against the OpenAPI schema of a custom resource definition, as a Kubernetes server would with
strict field validation: an unknown field is an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def shared_data() -> Path | None:
    """The folder with the operators' definitions, beside the checkout or above it; None where there is none."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / "data" / "kuberay").is_dir():
            return parent / "shared" / "data"
    return None


def schema(definition: Path, version: str) -> dict[str, Any]:
    found = yaml.load(definition.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return next(v["schema"]["openAPIV3Schema"] for v in found["spec"]["versions"] if v["name"] == version)


def violations(value: Any, of: dict[str, Any], path: str = "") -> Iterator[str]:
    """One line for each."""
    if of.get("x-kubernetes-int-or-string"):
        if not isinstance(value, (int, str)) or isinstance(value, bool):
            yield f"{path}: {value!r} is neither a number nor a text"
        return
    kind = of.get("type")
    if kind in _TYPES and (not isinstance(value, _TYPES[kind]) or (kind != "boolean" and isinstance(value, bool))):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in of and value not in of["enum"]:
        yield f"{path}: {value!r} is none of {of['enum']}"
    if "pattern" in of and not re.search(of["pattern"], value):
        yield f"{path}: {value!r} does not match {of['pattern']}"
    if "minimum" in of and value < of["minimum"]:
        yield f"{path}: {value!r} is below {of['minimum']}"
    if isinstance(value, dict):
        yield from _object(value, of, path)
    if isinstance(value, list) and "items" in of:
        for number, item in enumerate(value):
            yield from violations(item, of["items"], f"{path}[{number}]")


def _object(value: dict[str, Any], of: dict[str, Any], path: str) -> Iterator[str]:
    known = of.get("properties", {})
    for name in of.get("required", []):
        if name not in value:
            yield f"{path}.{name} is missing"
    for name, item in value.items():
        where = f"{path}.{name}"
        if name in known:
            yield from violations(item, known[name], where)
        elif isinstance(of.get("additionalProperties"), dict):
            yield from violations(item, of["additionalProperties"], where)
        elif known and not of.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{where} is unknown"
