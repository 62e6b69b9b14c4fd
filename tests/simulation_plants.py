"""Faults of the control plane that the simulation must find: each function plants one."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.control.admission import Admission
from headrace.control.cursor import TaskCursor
from headrace.loop import Loop
from headrace.weights.catch_up import TrainerCatchUp


def double_consume(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that was trained is still owed in the checkpoint of its update (FAILURES 109)."""

    def settle(self: TaskCursor, group: int) -> None:
        assert group in self._outstanding

    monkeypatch.setattr(TaskCursor, "settle", settle)


def stale_after_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume counts one batch too few as taken, so that everything after it may be one version too old."""

    def restore(self: Admission, version: int) -> None:
        self._running, self._accepted = 0, (version - 1) * self._groups_per_batch

    monkeypatch.setattr(Admission, "restore", restore)


def restarted_engine_serves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of a fleet that was started again takes work before the canary has seen it (FAILURES 88)."""

    async def believed(self: TrainerCatchUp, *_: object) -> bool:
        return True

    monkeypatch.setattr(TrainerCatchUp, "prove", believed)


def resumed_engine_serves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of a resumed run serves before anybody has proved what it serves (FAILURES 88, 111)."""
    prove = Loop._prove

    async def skipped_after_restore(self: Loop) -> dict[str, Any]:
        return (
            {} if self.parts.restored and self.parts.trainer.version.number == self.batch_index else await prove(self)
        )

    monkeypatch.setattr(Loop, "_prove", skipped_after_restore)


PLANTS = (double_consume, stale_after_restore, restarted_engine_serves_early, resumed_engine_serves_early)
