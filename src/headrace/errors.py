"""Errors that a person can mend: the command prints their message alone, without a traceback, and exits with 2.

Everything else that is raised is a defect of ours and keeps its traceback. Rooms derive their own errors from
:class:`HeadraceError`; a message says what was wrong, where, and what to do.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors whose message is meant for the user."""


class EngineLost(HeadraceError):
    """An engine of a fleet is gone, or did not answer in time; the fleet has taken it out and goes on without it."""


class ConfigError(HeadraceError):
    """The run's configuration cannot be used. ``problems`` holds one complete sentence for each thing to mend."""

    def __init__(self, message: str, *, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems or (message,)


class PartLost(HeadraceError):
    """A process or a machine that the run needs is gone, or does not answer. Nothing is wrong with the run itself: what
    was in flight is in the books, and a resume goes on."""
