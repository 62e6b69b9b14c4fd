"""headrace: the whole reinforcement-learning post-training loop for language models and agents.

import headrace

@headrace.reward
def exact(reply: str, task: headrace.Task) -> float:
    return float(reply.strip() == task.answer)
"""

from __future__ import annotations

from headrace.protocols import Environment, Observation
from headrace.rewards.base import reward
from headrace.types import Episode, Score, ScoreError, Task

__version__ = "0.1.0"

__all__ = ["Environment", "Episode", "Observation", "Score", "ScoreError", "Task", "__version__", "reward"]
