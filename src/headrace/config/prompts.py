"""Do the prompts leave room for their replies? Asked before any work."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.schema import RunConfig
from headrace.errors import ConfigError
from headrace.protocols import Renderer, TaskSource

MAX_PROMPTS_CHECKED = 20_000
"""Prompts rendered at start to find one that is too long; of more tasks, those with the longest text."""


def check_prompts(tasks: TaskSource, renderer: Renderer, config: RunConfig, max_context: int) -> None:
    """Refuse a prompt that leaves no room for its reply, before any work. Raises ConfigError naming the task."""
    indices: Sequence[int] = range(len(tasks))
    if len(tasks) > MAX_PROMPTS_CHECKED:
        indices = sorted(indices, key=lambda i: -len(str(tasks[i].messages)))[:MAX_PROMPTS_CHECKED]
    for i in indices:
        num_tokens = len(renderer.render(tasks[i].messages))
        if num_tokens + config.sampling.max_new_tokens > max_context:
            raise ConfigError(
                f"the prompt of task {tasks[i].id!r} has {num_tokens} tokens; with sampling.max_new_tokens = "
                f"{config.sampling.max_new_tokens} that exceeds the context of {max_context} tokens. Shorten or remove "
                "the task, or lower sampling.max_new_tokens: headrace never cuts a prompt"
            )
