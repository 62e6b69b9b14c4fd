"""Mutants of the algorithms room that no test can or should kill, each with the reason. See algorithms.py."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
"""``module.function: before -> after`` -> why it survives."""
