"""What a killed controller had reserved on Ray is free again before the next one reserves (a scripted Ray)."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import headrace.cluster.ray_actor as ray_actor
import headrace.run as run
from headrace.cluster.actors import ActorDied
from headrace.cluster.journal import ActorJournal
from headrace.cluster.layout import bundles
from headrace.cluster.ray_actor import GROUP, RayCarrier
from headrace.config.load import restore_config
from headrace.errors import ConfigError
from headrace.trainer.crew import FollowerDied


class Groups:
    """Ray's placement groups. One that is removed goes only after ``num_polls`` more questions."""

    def __init__(self, num_polls: int) -> None:
        self.events: list[str] = []
        self.left: int | None = num_polls

    def get_placement_group(self, name: str) -> str:
        assert name == GROUP
        if self.left is None:
            raise ValueError("not there")
        return "old"

    def remove_placement_group(self, group: str) -> None:
        assert group == "old" and self.left is not None
        self.events.append("remove")
        self.left = self.left - 1 if self.left else None

    def placement_group(self, resources: list[dict[str, float]], strategy: str, name: str) -> Any:
        assert name == GROUP and resources == [{"CPU": 1.0}]
        self.events.append("reserve")
        group = ModuleType("group")
        group.wait = lambda timeout_seconds: True  # type: ignore[attr-defined]
        return group


def carrier(monkeypatch: pytest.MonkeyPatch, groups: Groups, deadline_s: float) -> RayCarrier:
    module = ModuleType("ray.util.placement_group")
    for name in ("get_placement_group", "remove_placement_group", "placement_group"):
        setattr(module, name, getattr(groups, name))
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", module)
    monkeypatch.setattr(ray_actor, "POLL_S", 0.0)
    made = bundles({"engine": 1}, {"engine": {"CPU": 1.0}}, colocated=False)
    return RayCarrier(None, ActorJournal(), made, start_deadline_s=deadline_s)


def test_what_was_left_is_gone_before_anything_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(num_polls=2)
    carrier(monkeypatch, groups, deadline_s=60.0).reserve("PACK")
    assert groups.events == ["remove", "remove", "remove", "reserve"]


def test_what_never_goes_is_told_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts as a part that is lost: the supervisor tries again."""
    groups = Groups(num_polls=10**9)
    with pytest.raises(ActorDied, match=r"not free after 0 s"):
        carrier(monkeypatch, groups, deadline_s=0.0).reserve("PACK")
    assert "reserve" not in groups.events


@pytest.mark.parametrize(("error", "is_lost"), [(FollowerDied("rank 1 died"), True), (ConfigError("wrong"), False)])
def test_a_part_that_dies_while_a_run_starts_is_lost(
    error: Exception, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor starts such a run again, and not one that somebody has to mend."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(run, "build_parts", fails)
    sections = {"model": {"path": "m"}, "tasks": {"type": "arithmetic"}, "rewards": [{"type": "last_number"}]}
    config = restore_config(sections, "the test")
    with pytest.raises(type(error) if not is_lost else run.RunFailed, match=str(error)) as caught:
        run.train(config)
    assert getattr(caught.value, "part_lost", False) is is_lost
