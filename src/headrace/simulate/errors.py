"""How a simulated life can end, besides well."""

from __future__ import annotations

from headrace.errors import HeadraceError


class PlannedFault(HeadraceError):
    """A fault that the seed asked for: the run may end by it, and goes on in its next life."""


class Killed(SystemExit):
    """kill -9 of the controller. It is a SystemExit so that asyncio lets it out at once, past every handler."""


class InvariantBroken(SystemExit):
    """What must always hold did not; ``invariant`` names it as DESIGN.md does. Nothing may catch it on its way out."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant
