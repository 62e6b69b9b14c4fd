"""Algorithms: how scores become advantages and a loss. An algorithm is a composition of small pure functions on
tensors, advantage x ratio level x objective x correction x aggregation x KL, each chosen by name from a table; a preset
is one row of such names (``presets.py``, ``docs/algorithms.md``). Rewards are not algorithms, and the trainer does not
know which algorithm runs."""

from headrace.algorithms.composed import ComposedAlgorithm
from headrace.algorithms.presets import PRESETS
from headrace.algorithms.registry import build_algorithm
from headrace.algorithms.resolve import ResolvedAlgorithm, resolve

__all__ = ["PRESETS", "ComposedAlgorithm", "ResolvedAlgorithm", "build_algorithm", "resolve"]
