"""Tasks from a JSONL or Parquet file, one a row: ``messages`` (or ``prompt``), ``answer``, optional ``id``,
``environment``, ``metadata``. Every row is checked before any work starts; other columns are ignored.

The held-out set is a file of its own, or split off by a hash of each problem's text: a row's side depends on its
text alone, so that equal problems never straddle the split and new rows do not move old ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.load import missing_file
from headrace.config.problems import nearest
from headrace.config.schema import FileTasks
from headrace.environments.task_list import TaskList, TaskSplits
from headrace.errors import ConfigError
from headrace.types import Message, Task

_ROLES = ("system", "developer", "user", "assistant", "tool")
_KEYS = ("id", "messages", "prompt", "answer", "environment", "metadata")


def file_tasks(config: FileTasks) -> TaskSplits:
    """Read, check and split.

    Raises:
        ConfigError: naming the file and the line or row: not there, empty, not JSON, no answer, malformed messages,
            an id used twice, or a held-out problem that is also a training problem.
    """
    if config.held_out_path is not None and config.held_out_fraction is not None:
        raise ConfigError(
            "tasks.held_out_path and tasks.held_out_fraction are both set, and only one can say what is held out; "
            "remove one of them"
        )
    tasks = read_tasks(config.path, answer_required=config.answer_required)
    if config.held_out_path is not None:
        held_out = read_tasks(config.held_out_path, answer_required=config.answer_required)
        _check_disjoint(tasks, held_out, config)
        return TaskSplits(train=TaskList(tasks), held_out=TaskList(held_out))
    if config.held_out_fraction is None:
        return TaskSplits(train=TaskList(tasks), held_out=TaskList(()))
    train, held_out = _split(tasks, config.held_out_fraction, config.path)
    return TaskSplits(train=TaskList(train), held_out=TaskList(held_out))


def read_tasks(path: Path, *, answer_required: bool = True) -> list[Task]:
    """All tasks of one file, in its order; see :func:`file_tasks` for errors."""
    tasks: list[Task] = []
    places: dict[str, str] = {}
    for place, row in read_rows(path, "tasks", _KEYS):
        task = _task(row, f"{path}, {place}", f"{path.stem}:{place.split()[-1]}", answer_required)
        if task.id in places:
            raise ConfigError(
                f"{path}, {place}: the id {task.id!r} was used at {places[task.id]} already; ids must be unique, "
                "since replies are joined with their answers by id"
            )
        places[task.id] = place
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path} holds no task: it is empty")
    return tasks


def read_rows(path: Path, what: str, keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """('line 3' or 'row 3', its object) of a JSONL or Parquet file; of Parquet the columns ``keys`` only.

    Raises:
        ConfigError: naming file and line: not there, of another kind, not JSON, not an object.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is a folder; {what} are one file" if path.is_dir() else missing_file(path))
    if path.suffix not in (".jsonl", ".parquet"):
        kind = repr(path.suffix or "a bare name")
        raise ConfigError(f"{path}: {what} come from a .jsonl or a .parquet file, not {kind}")
    return _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path, keys)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"line {number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}, {place} is not UTF-8 text (byte {error.start} of the line)") from error
            if not line:
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                shown = line if len(line) <= 60 else line[:57] + "..."
                problem = f"{error.msg} at character {error.pos + 1}"
                raise ConfigError(f"{path}, {place} is not JSON: {problem}: {shown}") from error
            except RecursionError as error:
                raise ConfigError(f"{path}, {place} is JSON nested too deeply to read") from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise ConfigError(f"{path}, {place} is a JSON {kind}; each line must be one object {{...}}")
            yield place, row


def _parquet_rows(path: Path, keys: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in keys]
            number = 0
            for batch in file.iter_batches(columns=columns or None):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as Parquet: {error}") from error


def _task(row: Mapping[str, Any], where: str, default_id: str, answer_required: bool) -> Task:
    task_id = row.get("id")
    if task_id is None:
        task_id = default_id
    elif not isinstance(task_id, (str, int)) or isinstance(task_id, bool) or task_id == "":
        raise ConfigError(f"{where}: the id {task_id!r} must be text or a whole number")
    answer = row.get("answer")
    if answer_required and (answer is None or (isinstance(answer, str) and not answer.strip())):
        raise ConfigError(
            f"{where}: the task {str(task_id)!r} has no answer{_hint('answer', row)}; a reward needs one to compare "
            "with (tasks.answer_required = false, where no reward does)"
        )
    metadata = row.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise ConfigError(f"{where}: metadata is a {type(metadata).__name__}; it must be an object {{...}}")
    environment = row.get("environment") or "single_turn"
    if not isinstance(environment, str):
        raise ConfigError(f"{where}: environment is {environment!r}; it must be a name")
    return Task(
        id=str(task_id),
        messages=prompt_messages(row, where),
        answer=answer,
        environment=environment,
        metadata=metadata or {},
    )


def prompt_messages(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """The row's ``messages``, or its ``prompt`` as one; the last is not the assistant's."""
    messages, prompt = row.get("messages"), row.get("prompt")
    if messages is not None and prompt is not None:
        raise ConfigError(f"{where}: both messages and prompt are given; keep one")
    if messages is None:
        if prompt is None:
            hint = _hint("messages", row) or _hint("prompt", row)
            raise ConfigError(f"{where}: there is neither messages nor prompt{hint}")
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{where}: prompt is {prompt!r}; it must be text")
        return ({"role": "user", "content": prompt},)
    checked = checked_messages(messages, where)
    if checked[-1]["role"] == "assistant":
        raise ConfigError(f"{where}: the last message is the assistant's; a task ends where the policy is to reply")
    return checked


def checked_messages(messages: Any, where: str) -> tuple[dict[str, Any], ...]:
    """A list of messages, each with a known role and content."""
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is {_kind(messages)}; it must be a list of {{role, content}} objects")
    return tuple(_message(message, f"{where}: message {i}") for i, message in enumerate(messages, start=1))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ConfigError(f"{where} is {_kind(message)}; it must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        match = nearest(str(role), _ROLES)
        advice = f"did you mean {match!r}?" if match else f"known roles: {', '.join(_ROLES)}"
        raise ConfigError(f"{where} has the role {role!r}; {advice}")
    if not isinstance(content, str) and not (isinstance(content, list) and content):
        raise ConfigError(f"{where} ({role}) has the content {content!r}; it must be text or a list of parts")
    # Parquet gives every message the union of all keys, with None where a key was not set.
    return {key: value for key, value in message.items() if value is not None}


def _kind(value: Any) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"


def _hint(key: str, row: Mapping[str, Any]) -> str:
    match = nearest(key, [name for name in row if name not in _KEYS], 0.7)
    return f" (is {match!r} meant?)" if match else ""


# ------------------------------------------------------------------------------------------------- split


def _problem_key(task: Task) -> str:
    """Hash of the text of a problem, whatever its answer, id and white space."""
    return prompt_key(task.messages)


def prompt_key(messages: Sequence[Message]) -> str:
    """Hash of a prompt's text, whatever its white space."""
    text = json.dumps([_single_spaced(dict(message)) for message in messages], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _single_spaced(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return {key: _single_spaced(inner) for key, inner in value.items()}
    return [_single_spaced(inner) for inner in value] if isinstance(value, list) else value


def _split(tasks: list[Task], fraction: float, path: Path) -> tuple[list[Task], list[Task]]:
    """Held out: problems whose hash lies in the lowest ``fraction``; at least one problem on either side."""
    keys = [_problem_key(task) for task in tasks]
    if len(set(keys)) < 2:
        raise ConfigError(
            f"{path} poses one problem only; tasks.held_out_fraction = {fraction} cannot be held out of it"
        )
    chosen = held_out_keys(keys, fraction)
    train = [task for task, key in zip(tasks, keys, strict=True) if key not in chosen]
    return train, [task for task, key in zip(tasks, keys, strict=True) if key in chosen]


def held_out_keys(keys: Sequence[str], fraction: float) -> set[str]:
    """Those of two or more different hashes that lie in the lowest ``fraction``; at least one, and never all."""
    distinct = sorted(set(keys))
    bound = f"{int(fraction * 16**16):016x}"
    chosen = {key for key in distinct if key[:16] < bound} or {distinct[0]}
    if len(chosen) == len(distinct):
        chosen.discard(distinct[-1])
    return chosen


def _check_disjoint(train: list[Task], held_out: list[Task], config: FileTasks) -> None:
    trained = {_problem_key(task): task.id for task in train}
    shared = [task for task in held_out if _problem_key(task) in trained]
    if shared:
        first = shared[0]
        raise ConfigError(
            f"{len(shared)} of the {len(held_out)} held-out problems in {config.held_out_path} are also training "
            f"problems in {config.path} (the first: {first.id!r} is {trained[_problem_key(first)]!r} there); "
            "remove them from one side"
        )
    ids = {task.id for task in train}
    same = next((task.id for task in held_out if task.id in ids), None)
    if same is not None:
        raise ConfigError(f"the id {same!r} stands in {config.path} and in {config.held_out_path}; ids must be unique")
