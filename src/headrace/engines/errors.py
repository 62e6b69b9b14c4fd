"""What an engine raises. The message is for the user; the cause, where there is one, is chained."""

from __future__ import annotations

from headrace.errors import HeadraceError


class EngineError(HeadraceError):
    """The engine cannot go on: a step raised, it was closed, or a call came in the wrong state."""


class RequestError(EngineError):
    """One request cannot be served as asked; the engine itself is well and others go on."""
