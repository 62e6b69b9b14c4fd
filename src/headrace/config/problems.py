"""From pydantic's errors to sentences: which key, which value, what is allowed, and which key was meant."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

KeyPath = tuple[str | int, ...]

_MAX_VALUE_CHARS = 60


def describe(
    error: ValidationError, root: type[BaseModel], data: Mapping[str, Any], source: Callable[[KeyPath], str]
) -> list[str]:
    """One sentence for each wrong key of ``data``.

    ``source`` names where a key was set: the file, or the command line.
    """
    by_path: dict[KeyPath, list[Any]] = {}
    for entry in error.errors(include_url=False, include_context=True):
        by_path.setdefault(_data_path(entry["loc"], data, entry["type"]), []).append(entry)
    # pydantic counts a list entry with an error as absent, and then also calls the list too short.
    parents = {path[:depth] for path in by_path for depth in range(len(path))}
    return [
        f"{source(path)}: {_sentence(path, entries, root, data)}"
        for path, entries in by_path.items()
        if not (entries[0]["type"] == "too_short" and path in parents)
    ]


def dotted(path: Sequence[str | int]) -> str:
    return ".".join(str(key) for key in path)


def show(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."


def nearest(word: str, words: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The most similar of ``words``, or None where none is similar."""
    matches = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def _data_path(location: Sequence[str | int], data: Any, error_type: str) -> KeyPath:
    """pydantic's location without the tags of union members, which are no keys of the file."""
    path: list[str | int] = []
    node = data
    for depth, key in enumerate(location):
        if isinstance(node, Mapping) and key in node:
            node = node[str(key)]
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        elif not (error_type == "missing" and depth == len(location) - 1):
            continue
        path.append(key)
    return tuple(path)


def _sentence(path: KeyPath, entries: list[Any], root: type[BaseModel], data: Mapping[str, Any]) -> str:
    first = entries[0]
    name = dotted(path)
    if first["type"] == "extra_forbidden":
        return _unknown_key(path, root, data)
    if first["type"] == "missing":
        kind = "section" if _section_at(path, root, data) is not None else "key"
        return f"the {kind} {name} is missing"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_type(path, first, root, data)
    allowed = " or ".join(dict.fromkeys(_allowed(entry) for entry in entries))
    hint = ""
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        expected = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        match = nearest(first["input"], expected)
        hint = f"; did you mean '{match}'?" if match else ""
    elif first["type"] == "string_type" and isinstance(first["input"], (bool, int, float)):
        hint = f"; quote it: '\"{show(first['input'])}\"'"
    return f"{name} = {show(first['input'])}: {allowed}{hint}"


def _allowed(entry: Mapping[str, Any]) -> str:
    if entry["type"] == "too_short":
        return f"must have at least {entry['ctx']['min_length']}"
    if entry["type"] in ("model_type", "model_attributes_type"):
        return "must be a section with keys, not a single value"
    message = str(entry["msg"])
    return message.replace("Input should ", "must ").replace("a valid array", "a list")


def _wrong_type(path: KeyPath, entry: Mapping[str, Any], root: type[BaseModel], data: Mapping[str, Any]) -> str:
    members = {_tag(member): member for member in _sections(_annotation_at(path, root, data))}
    choices = ", ".join(members)
    if entry["type"] == "union_tag_not_found":
        return f"{dotted(path)}.type is missing; choose one of {choices}"
    tag = str(entry["ctx"]["tag"])
    match = nearest(tag, list(members))
    return f"{dotted(path)}.type = {show(tag)}: must be one of {choices}" + (
        f"; did you mean '{match}'?" if match else ""
    )


def _unknown_key(path: KeyPath, root: type[BaseModel], data: Mapping[str, Any]) -> str:
    key = str(path[-1])
    section = _section_at(path[:-1], root, data)
    own = [] if section is None else list(section.model_fields)
    everywhere = dict(_all_keys(root, ()))
    meant = (
        _under(path, nearest(key, own, 0.75))
        or next((name for name in everywhere if everywhere[name] == key), None)
        or _under(path, nearest(key, own))
    )
    if meant is None:
        match = nearest(key, list(everywhere.values()), 0.8)
        meant = next((name for name in everywhere if everywhere[name] == match), None)
    where = "at the top" if len(path) == 1 else f"in {dotted(path[:-1])}"
    advice = f"did you mean {meant}?" if meant else f"known {where}: {', '.join(own)}"
    return f"{dotted(path)} is not a known key; {advice}"


def _under(path: KeyPath, key: str | None) -> str | None:
    return None if key is None else dotted((*path[:-1], key))


# ------------------------------------------------------------------- walking the schema along the data


def _annotation_at(path: KeyPath, root: type[BaseModel], data: Any) -> Any:
    annotation: Any = root
    node = data
    for key in path:
        if isinstance(key, int):
            annotation = next((arg for arg in typing.get_args(annotation) if arg is not Ellipsis), None)
        else:
            section = _pick(annotation, node)
            field = section.model_fields.get(key) if section is not None else None
            annotation = field.annotation if field is not None else None
        node = _child(node, key)
    return annotation


def _section_at(path: KeyPath, root: type[BaseModel], data: Mapping[str, Any]) -> type[BaseModel] | None:
    node: Any = data
    for key in path:
        node = _child(node, key)
    return _pick(_annotation_at(path, root, data), node)


def _child(node: Any, key: str | int) -> Any:
    if isinstance(node, Mapping):
        return node.get(str(key))
    return node[key] if isinstance(node, list) and isinstance(key, int) else None


def _pick(annotation: Any, node: Any) -> type[BaseModel] | None:
    """The section that ``annotation`` stands for; of a union, the member that ``type`` in the data chooses."""
    members = list(_sections(annotation))
    if len(members) == 1:
        return members[0]
    tag = node.get("type") if isinstance(node, Mapping) else None
    if tag is None:
        return next((member for member in members if getattr(member, "is_default_type", False)), None)
    return next((member for member in members if _tag(member) == tag), None)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for member in typing.get_args(annotation):
            yield from _sections(member)


def _tag(section: type[BaseModel]) -> str:
    return str(typing.get_args(section.model_fields["type"].annotation)[0])


def _all_keys(section: type[BaseModel], prefix: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(dotted name, last part) of each key outside lists and unions."""
    for name, field in section.model_fields.items():
        yield dotted((*prefix, name)), name
        member = _pick(field.annotation, {})
        if member is not None:
            yield from _all_keys(member, (*prefix, name))
