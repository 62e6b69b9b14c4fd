"""Can the prompts be put, and do they leave room for their replies? Asked before any work."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.protocols import Renderer, TaskSource
from headrace.types import Task

MAX_PROMPTS_CHECKED = 20_000
"""Prompts rendered at start to find one that is too long; of more tasks, those with the longest text."""


def check_prompts(tasks: TaskSource, renderer: Renderer, config: RunConfig, max_context: int) -> None:
    """Refuse a prompt that is not text, or leaves no room for its reply. Raises ConfigError naming the task."""
    indices: Sequence[int] = range(len(tasks))
    if len(tasks) > MAX_PROMPTS_CHECKED:
        indices = sorted(indices, key=lambda i: -len(str(tasks[i].messages)))[:MAX_PROMPTS_CHECKED]
    for i in indices:
        _refuse_media(tasks[i])
        num_tokens = len(renderer.render(tasks[i].messages))
        if num_tokens + config.sampling.max_new_tokens > max_context:
            raise ConfigError(
                f"the prompt of task {tasks[i].id!r} has {num_tokens} tokens; with sampling.max_new_tokens = "
                f"{config.sampling.max_new_tokens} that exceeds the context of {max_context} tokens. Shorten or remove "
                "the task, or lower sampling.max_new_tokens: headrace never cuts a prompt"
            )


def _refuse_media(task: Task) -> None:
    """A chat template leaves out, or puts a placeholder for, what no engine here would look at."""
    for message in task.messages:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        kinds = [part.get("type") for part in parts if isinstance(part, dict) and part.get("type", "text") != "text"]
        if kinds:
            raise ConfigError(
                f"a message of task {task.id!r} has a part of type {kinds[0]!r}: prompts are text so far, no engine "
                "takes images or other media; remove the task"
            )
