"""What an engine raises. The message is for the user; the cause, where there is one, is chained."""

from __future__ import annotations

from headrace.errors import HeadraceError
from headrace.types import Generation


class EngineError(HeadraceError):
    """The engine cannot go on: a step raised, it was closed, or a call came in the wrong state.

    ``partial``: the tokens of the request that had been sampled by then, so that another engine can go on with them.
    """

    partial: Generation | None = None


class RequestError(EngineError):
    """One request cannot be served as asked; the engine itself is well and others go on."""
