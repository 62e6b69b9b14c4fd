"""Values of headrace as bytes and back, for calls between our own processes: JSON, and never a pickle.

Plain JSON stands for itself. Everything else is an object with one key that no plain value may have::

    {"$tuple": [...]}   {"$map": [[key, value], ...]}   {"$bytes": base64}   {"$array": [dtype, shape, base64]}
    {"$is": ["PolicyVersion", field, ...]}              a class of _CLASSES; its fields in their order
    {"$enum": ["Outcome", value]}

Floats arrive bit for bit, NaN and infinities too. Only the classes named here can be made by what comes in.
"""

from __future__ import annotations

import base64
import json
from dataclasses import fields
from enum import Enum
from typing import Any

import numpy as np

from headrace import protocols, types
from headrace.cluster.remote_engine import Answer, Snapshot


class WireError(Exception):
    """A value that does not travel, or bytes that are none of ours."""


_RECORDS = (
    types.Task, types.Sampling, types.GenerationRequest, types.RoutingIds, types.Generation, types.Segment, types.Trace,
    types.Turn, types.Score, types.ScoreError, types.Episode, types.Group, types.Sample, types.RolloutBatch,
    protocols.EngineCapabilities, protocols.EngineStats, protocols.WeightUpdate, protocols.Observation,
    Answer, Snapshot,
)  # fmt: skip
_TUPLES = (types.PolicyVersion, types.VersionSpan, types.AttemptKey)
_ENUMS = (types.Outcome, types.Source, types.ErrorClass)
_CLASSES: dict[str, type] = {c.__name__: c for c in (*_RECORDS, *_TUPLES)}
_ENUM_CLASSES: dict[str, type[Enum]] = {c.__name__: c for c in _ENUMS}
_FIELDS = {c.__name__: tuple(f.name for f in fields(c)) for c in _RECORDS}
_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> bytes:
    """Raises WireError for a value that has no form here (a tensor, a function, a class of somebody else)."""
    return json.dumps(_to_json(value), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Raises WireError for what :func:`encode` did not make."""
    try:
        return _from_json(json.loads(data))
    except (ValueError, TypeError, KeyError) as error:
        raise WireError(
            f"{len(data)} bytes are no value of headrace: {error}; they begin with {data[:80]!r}"
        ) from error


def _to_json(value: Any) -> Any:
    if isinstance(value, _PLAIN) and not isinstance(value, Enum):
        return value
    if isinstance(value, list):
        return [_to_json(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _to_json(v) for k, v in value.items()}
        return {"$map": [[_to_json(k), _to_json(v)] for k, v in value.items()]}
    name = type(value).__name__
    if isinstance(value, Enum) and _ENUM_CLASSES.get(name) is type(value):
        return {"$enum": [name, value.value]}
    if _CLASSES.get(name) is type(value):
        return {"$is": [name, *map(_to_json, _field_values(name, value))]}
    if type(value) is tuple:
        return {"$tuple": [_to_json(v) for v in value]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {"$array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise WireError(f"a {type(value).__module__}.{name} cannot travel between processes: {value!r:.80}")


def _field_values(name: str, value: Any) -> Any:
    """Of a dataclass, or of a named tuple, which is its own values."""
    return (getattr(value, field) for field in _FIELDS[name]) if name in _FIELDS else value


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {k: _from_json(v) for k, v in value.items()}
    ((tag, body),) = value.items()
    if tag == "$tuple":
        return tuple(_from_json(v) for v in body)
    if tag == "$is":
        return _made(body[0], [_from_json(v) for v in body[1:]])
    if tag == "$enum":
        return _ENUM_CLASSES[body[0]](body[1])
    if tag == "$map":
        return {_from_json(k): _from_json(v) for k, v in body}
    if tag == "$bytes":
        return base64.b64decode(body)
    if tag == "$array":
        return np.frombuffer(base64.b64decode(body[2]), dtype=np.dtype(body[0])).reshape(body[1])
    raise ValueError(f"unknown tag {tag!r}")


def _made(name: str, values: list[Any]) -> Any:
    names = _FIELDS.get(name)
    return _CLASSES[name](*values) if names is None else _CLASSES[name](**dict(zip(names, values, strict=True)))
