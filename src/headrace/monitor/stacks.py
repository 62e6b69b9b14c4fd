"""Where every thread and every asyncio task is, for the watchdog's report."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback

_NUM_FRAMES = 6
_NUM_TASKS = 20


def thread_stacks() -> str:
    """The innermost frames of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)[-_NUM_FRAMES:])}"
        for ident, frame in sys._current_frames().items()
    )


def task_stacks() -> str:
    """What the asyncio tasks of the running event loop wait in, by name; the first twenty, and how many more."""
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    lines = []
    for task in tasks[:_NUM_TASKS]:
        stack = task.get_stack(limit=1)
        where = f"{stack[-1].f_code.co_qualname}, line {stack[-1].f_lineno}" if stack else "not started"
        lines.append(f"{task.get_name()}: {where}")
    return "\n".join([*lines, *([f"and {len(tasks) - _NUM_TASKS} more"] if len(tasks) > _NUM_TASKS else [])])
