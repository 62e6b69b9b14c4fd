"""Read a run's TOML file, apply overrides, resolve paths and validate: one file in, one ``RunConfig`` out.

Relative paths (``tasks.path``, ``tasks.held_out_path``, ``model.path``, ``critic.path`` and ``model.chat_template``
where they are files, and ``file.py:function`` references) are looked up beside the TOML file first and then in the
current folder; a path given on the command line the other way round. They are absolute afterwards. ``output_dir`` alone
stays as it is written, relative to the current folder, as a user expects of a tool's output.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from headrace.config.overrides import Overrides, apply_overrides
from headrace.config.problems import KeyPath, describe, dotted, nearest
from headrace.config.schema import RunConfig
from headrace.errors import ConfigError

S = TypeVar("S", bound=BaseModel)

_MODEL_PATHS = (("model", "path"), ("critic", "path"))
"""What is no local path there may be a model's name."""


def load_config(path: Path | str, overrides: Overrides = ()) -> RunConfig:
    """The run that ``path`` (TOML) describes, with ``overrides`` applied. Raises ConfigError as :func:`load_as`."""
    return load_as(RunConfig, path, overrides)


def load_as(schema: type[S], path: Path | str, overrides: Overrides = ()) -> S:
    """What ``path`` (TOML) describes as a ``schema``, with ``overrides`` applied.

    Raises:
        ConfigError: naming file, dotted key, value and what is allowed; all problems are in ``problems``.
    """
    path = Path(path)
    data = _read_toml(path)
    apply_overrides(data, overrides)
    overridden = tuple(tuple(key.split(".")) for key, _ in overrides)

    def source(key_path: KeyPath) -> str:
        names = tuple(str(key) for key in key_path)
        set_here = any(names[: len(key)] == key or key[: len(names)] == names for key in overridden)
        return "command line" if set_here else str(path)

    infinite = [f"{source(key)}: {dotted(key)} must be a finite number" for key in _non_finite(data, ())]
    if infinite:
        raise config_error(infinite)
    problems = [f"{source(key)}: {message}" for key, message in _resolve_paths(data, path.parent, source)]
    config: S | None = None
    try:
        config = _validate(schema, data)
    except ValidationError as error:
        # Keys first: a misspelt section would otherwise hide behind a path problem that it caused.
        problems = describe(error, schema, data, source) + problems
    if problems or config is None:
        raise config_error(problems)
    return config


def restore_config(data: Mapping[str, Any], where: str) -> RunConfig:
    """The configuration of a recorded run of the loop; see :func:`restore_as`."""
    return restore_as(RunConfig, data, where)


def restore_as(schema: type[S], data: Mapping[str, Any], where: str) -> S:
    """The configuration of a recorded run, from its resolved form (``where`` names the record in errors).

    A resolved configuration states every key. Those that hold their default count as not set by the user, so that
    I20 ("set, but without effect") judges a resumed run as it judged the first start.
    """
    try:
        full = _validate(schema, dict(data))
        return _validate(schema, _without_defaults(full))
    except ValidationError as error:
        raise config_error(describe(error, schema, data, lambda _: where)) from error


def resolved(config: BaseModel) -> dict[str, Any]:
    """Every key of ``config`` as JSON values, defaults included: what a run records. Secrets are still in it."""
    return config.model_dump(mode="json")


def config_error(problems: list[str]) -> ConfigError:
    """One error for all ``problems``: the first alone on the first line, the others below it."""
    message = problems[0]
    if len(problems) > 1:
        message += "\nand also:" + "".join(f"\n  {problem}" for problem in problems[1:])
    return ConfigError(message, problems=tuple(problems))


def missing_file(path: Path) -> str:
    """'no such file: ...', with the nearest name in the same folder where there is one."""
    if path.parent.is_dir():
        match = nearest(path.name, sorted(entry.name for entry in path.parent.iterdir()))
        hint = f"; did you mean {path.parent / match}?" if match else ""
    else:
        hint = f"; the folder {path.parent} does not exist either"
    return f"no such file: {path}{hint}"


def _read_toml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the run's TOML file, for example {path / 'run.toml'}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(missing_file(path)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); a run is a TOML file") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _validate(schema: type[S], data: Mapping[str, Any]) -> S:
    """Strict, by way of JSON: there, lists may be tuples and text may be a path, but ``true`` is not 1."""
    return schema.model_validate_json(json.dumps(data, default=str), strict=True)


def _non_finite(node: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(node, float) and not math.isfinite(node):
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _non_finite(child, (*path, key))


def _without_defaults(section: BaseModel) -> dict[str, Any]:
    """The keys of ``section`` that differ from their defaults; ``type`` stays, since it chooses the union member."""
    kept: dict[str, Any] = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name != "type" and not field.is_required() and value == field.get_default(call_default_factory=True):
            continue
        if isinstance(value, BaseModel):
            kept[name] = _without_defaults(value)
        elif isinstance(value, tuple):
            kept[name] = [_without_defaults(item) if isinstance(item, BaseModel) else item for item in value]
        else:
            kept[name] = value
    return kept


# ------------------------------------------------------------------------------------------------- paths


def _resolve_paths(
    data: dict[str, Any], folder: Path, source: Callable[[KeyPath], str]
) -> Iterator[tuple[KeyPath, str]]:
    """Make the paths in ``data`` absolute, in place; yields (key, message) for each that is not there."""

    def look_up(key: KeyPath, text: str) -> tuple[Path, list[Path]]:
        bases = [folder, Path.cwd()] if source(key) != "command line" else [Path.cwd(), folder]
        tried = list(dict.fromkeys((base / Path(text).expanduser()).absolute() for base in bases))
        return next((path for path in tried if path.exists()), tried[0]), tried

    for key, holder, name in _path_keys(data):
        text, function = holder[name], ""
        if key[-1] in ("factory", "type"):
            text, function = text.split(":", 1)
            function = f":{function}"
        found, tried = look_up(key, text)
        if found.exists():
            holder[name] = str(found) + function
        elif key not in _MODEL_PATHS:
            also = "".join(f" (nor at {other})" for other in tried[1:])
            yield key, f"{dotted(key)} = {json.dumps(text)}: {missing_file(tried[0])}{also}"
        elif text.startswith((".", "/", "~")):
            yield key, f"{dotted(key)} = {json.dumps(text)}: no such folder: {tried[0]}"
    if isinstance(data.get("output_dir"), str):
        data["output_dir"] = str(Path(data["output_dir"]).expanduser())


def _path_keys(data: dict[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any], str]]:
    """(key, the section that holds it, its name) of each value in ``data`` that is a path."""
    tasks, model = data.get("tasks"), data.get("model")
    if isinstance(tasks, dict):
        if tasks.get("type") == "file":
            yield from ((("tasks", n), tasks, n) for n in ("path", "held_out_path") if isinstance(tasks.get(n), str))
        if _is_file_reference(tasks.get("factory")):
            yield ("tasks", "factory"), tasks, "factory"
    if isinstance(model, dict):
        if isinstance(model.get("path"), str):
            yield ("model", "path"), model, "path"
        if isinstance(model.get("chat_template"), str) and model["chat_template"] != "chatml":
            yield ("model", "chat_template"), model, "chat_template"
    critic = data.get("critic")
    if isinstance(critic, dict) and isinstance(critic.get("path"), str):
        yield ("critic", "path"), critic, "path"
    yield from _reward_path_keys(data, ())
    if isinstance(data.get("gold"), dict):
        yield from _reward_path_keys(data["gold"], ("gold",))
    rows = data.get("data")  # of training without rollouts
    if isinstance(rows, dict):
        yield from ((("data", n), rows, n) for n in ("path", "held_out_path") if isinstance(rows.get(n), str))


def _reward_path_keys(section: dict[str, Any], parent: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any], str]]:
    rewards = section.get("rewards")
    for index, reward in enumerate(rewards if isinstance(rewards, list) else ()):
        if not isinstance(reward, dict):
            continue
        if _is_file_reference(reward.get("type")):
            yield (*parent, "rewards", index, "type"), reward, "type"
        options = reward.get("options")
        if reward.get("type") == "reward_model" and isinstance(options, dict) and isinstance(options.get("path"), str):
            yield (*parent, "rewards", index, "options", "path"), options, "path"


def _is_file_reference(value: Any) -> bool:
    """``file.py:function``, as against ``package.module:function``, which Python's own path resolves."""
    return isinstance(value, str) and ":" in value and value.split(":", 1)[0].endswith(".py")
