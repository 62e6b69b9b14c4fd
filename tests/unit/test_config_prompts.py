"""Prompts that cannot be put, or leave no room, are refused before any work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.prompts import check_prompts
from headrace.errors import ConfigError
from headrace.types import Task

CONFIG: Any = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=4))
RENDERER: Any = SimpleNamespace(render=lambda messages: (1,) * len(str(messages[0]["content"])))


def tasks(*contents: Any) -> Any:
    return [Task(id=f"t{n}", messages=({"role": "user", "content": c},)) for n, c in enumerate(contents)]


def test_a_prompt_without_room_is_named() -> None:
    """Nothing is cut: the task is named, with its length and the context's."""
    check_prompts(tasks("a" * 6, "b"), RENDERER, CONFIG, 10)
    with pytest.raises(ConfigError, match=r"the prompt of task 't1' has 7 tokens.*the context of 10 tokens"):
        check_prompts(tasks("a", "b" * 7), RENDERER, CONFIG, 10)


def test_images_are_refused() -> None:
    """No engine takes them yet, and a chat template would leave them out without a word. Text in parts is text."""
    text = {"type": "text", "text": "what is this?"}
    check_prompts(tasks([text]), RENDERER, CONFIG, 1000)
    with pytest.raises(ConfigError, match="task 't0' has a part of type 'image': prompts are text so far"):
        check_prompts(tasks([text, {"type": "image", "url": "x"}]), RENDERER, CONFIG, 1000)
