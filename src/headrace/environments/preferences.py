"""What training without rollouts reads: conversations to imitate, and pairs of replies of which one was preferred.

Both come from JSONL or Parquet, and every row is checked before any work starts. The held-out side is a file of its
own, or split off by a hash of the prompt's text, so that no prompt stands on both sides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from headrace.config.offline import DEFAULT_HELD_OUT, DataConfig
from headrace.config.problems import nearest
from headrace.config.schema import SupervisedDataConfig
from headrace.environments.tasks_file import checked_messages, held_out_keys, prompt_key, prompt_messages, read_rows
from headrace.errors import ConfigError
from headrace.protocols import TaskSource
from headrace.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of which the assistant's are imitated."""

    messages: tuple[Message, ...]
    weights: tuple[float, ...]
    """One for each message: what its tokens count in the loss; 0 for all but the assistant's."""
    where: str
    """File and line, for errors."""

    @property
    def prompt(self) -> tuple[Message, ...]:
        """What stands before the assistant's first message."""
        first = next(i for i, m in enumerate(self.messages) if m["role"] == "assistant")
        return self.messages[:first]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two replies to one prompt; the first was preferred."""

    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    margin: float = 0.0
    """By how much the chosen reply should win, in units of score."""
    where: str

    @property
    def prompt(self) -> tuple[Message, ...]:
        return self.messages


R = TypeVar("R", Conversation, Pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Generic[R]):
    """Both sides of a data set. ``fingerprint`` changes when any row does."""

    train: tuple[R, ...]
    held_out: tuple[R, ...]
    fingerprint: str


def read_conversations(config: DataConfig) -> Rows[Conversation]:
    """Rows ``{"messages": [{"role", "content", "weight"?}, ...]}``. Raises ConfigError naming file and line."""
    return _read(config, _conversation, ("messages",), "conversations")


def read_supervised(section: SupervisedDataConfig | None, held_out: TaskSource) -> Rows[Conversation] | None:
    """The same rows for a run with rollouts, all of them to train on; None without the section. Raises ConfigError
    naming file and line: also for too few rows, and for a prompt that the run's evaluations hold out."""
    if section is None:
        return None
    rows = _file(section.path, _conversation, ("messages",), "conversations")
    if len(rows) < section.conversations_per_batch:
        raise ConfigError(
            f"supervised_data.conversations_per_batch = {section.conversations_per_batch}, but {section.path} holds "
            f"{len(rows)}: a batch would imitate some of them twice; lower it, or add rows"
        )
    kept_out = {prompt_key(held_out[i].messages): held_out[i].id for i in range(len(held_out))}
    for row in rows:
        if (task := kept_out.get(prompt_key(row.prompt))) is not None:
            raise ConfigError(
                f"{row.where}: this prompt is that of the held-out task {task!r}, whose evaluation would measure what "
                "was imitated; remove the row"
            )
    return Rows(train=tuple(rows), held_out=(), fingerprint=_fingerprint(rows))


def read_pairs(config: DataConfig) -> Rows[Pair]:
    """Rows ``{"messages" or "prompt", "chosen", "rejected", "margin"?}``. Raises ConfigError naming file and line, for
    a missing side, equal sides (which can teach nothing), and values of the wrong type."""
    return _read(config, _pair, ("messages", "prompt", "chosen", "rejected", "margin"), "preference pairs")


def _read(config: DataConfig, make: Callable[[Mapping[str, Any], str], R], keys: Sequence[str], what: str) -> Rows[R]:
    rows = _file(config.path, make, keys, what)
    if config.held_out_path is not None:
        held_out = _file(config.held_out_path, make, keys, what)
        trained = {prompt_key(row.prompt): row.where for row in rows}
        both = next((row for row in held_out if prompt_key(row.prompt) in trained), None)
        if both is not None:
            raise ConfigError(
                f"{both.where}: this held-out prompt is also trained on ({trained[prompt_key(both.prompt)]}); remove "
                "it from one side"
            )
        return Rows(train=tuple(rows), held_out=tuple(held_out), fingerprint=_fingerprint(rows, held_out))
    row_keys = [prompt_key(row.prompt) for row in rows]
    fraction = config.held_out_fraction or DEFAULT_HELD_OUT
    if len(set(row_keys)) < 2:
        raise ConfigError(f"{config.path} has one prompt only, so that none can be held out; give data.held_out_path")
    chosen = held_out_keys(row_keys, fraction)
    train = [row for row, key in zip(rows, row_keys, strict=True) if key not in chosen]
    held_out = [row for row, key in zip(rows, row_keys, strict=True) if key in chosen]
    return Rows(train=tuple(train), held_out=tuple(held_out), fingerprint=_fingerprint(train, held_out))


def _file(path: Path, make: Callable[[Mapping[str, Any], str], R], keys: Sequence[str], what: str) -> list[R]:
    rows = [make(row, f"{path}, {place}") for place, row in read_rows(path, what, keys)]
    if not rows:
        raise ConfigError(f"{path} holds no {what}: it is empty")
    return rows


def _fingerprint(*sides: Sequence[Conversation | Pair]) -> str:
    digest = hashlib.sha256()
    for side in sides:
        for row in side:
            fields = [row.messages, row.weights] if isinstance(row, Conversation) else [
                row.messages, row.chosen, row.rejected, row.margin
            ]  # fmt: skip
            digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
        digest.update(b"|")
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------- rows


def _conversation(row: Mapping[str, Any], where: str) -> Conversation:
    if "messages" not in row:
        raise ConfigError(f"{where}: there is no 'messages'{_hint('messages', row)}; a row is {{messages: [...]}}")
    messages = checked_messages(row["messages"], where)
    weights = tuple(_weight(m, f"{where}: message {i}") for i, m in enumerate(messages, start=1))
    if not any(weights):
        raise ConfigError(
            f"{where}: no message of the assistant's has a weight above 0, so there is nothing to imitate"
        )
    if messages[0]["role"] == "assistant":
        raise ConfigError(f"{where}: the first message is the assistant's; it must answer something")
    for i, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and weights[i - 1] and not isinstance(message["content"], str):
            raise ConfigError(f"{where}: message {i} is the assistant's and must be text to be imitated")
    bare = tuple({k: v for k, v in m.items() if k != "weight"} for m in messages)
    return Conversation(messages=bare, weights=weights, where=where)


def _weight(message: Mapping[str, Any], where: str) -> float:
    weight = message.get("weight", 1.0 if message["role"] == "assistant" else 0.0)
    if not _is_number(weight) or weight < 0:
        raise ConfigError(f"{where} has the weight {weight!r}; it must be a number of at least 0")
    if weight and message["role"] != "assistant":
        raise ConfigError(f"{where} ({message['role']}) has the weight {weight!r}; only the assistant is imitated")
    return float(weight)


def _pair(row: Mapping[str, Any], where: str) -> Pair:
    messages = prompt_messages(row, where)
    sides = {name: _side(row, name, where) for name in ("chosen", "rejected")}
    if not sides["chosen"].strip():
        raise ConfigError(f"{where}: chosen is empty; nothing can be learned from preferring no reply")
    if sides["chosen"].strip() == sides["rejected"].strip():
        raise ConfigError(f"{where}: chosen and rejected are equal: such a pair prefers nothing; remove it")
    margin = row.get("margin")
    if margin is None:
        margin = 0.0
    if not _is_number(margin) or margin < 0:
        raise ConfigError(f"{where}: margin is {margin!r}; it must be a finite number of at least 0, or left out")
    return Pair(messages=messages, margin=float(margin), where=where, **sides)


def _side(row: Mapping[str, Any], name: str, where: str) -> str:
    if row.get(name) is None:
        other = _hint(name, row)
        raise ConfigError(f"{where}: there is no {name!r}{other}; a pair has the texts 'chosen' and 'rejected'")
    value = row[name]
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} is a {type(value).__name__}; it must be the text of a reply")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _hint(key: str, row: Mapping[str, Any]) -> str:
    match = nearest(key, [name for name in row if name != key], 0.7)
    return f" (is {match!r} meant?)" if match else ""
