"""The section ``cluster``: what has no effect is refused (I20); bundles of resources; the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.journal import ActorJournal, read_journal
from headrace.cluster.layout import bundles, describe
from headrace.cluster.spec import ActorSpec
from headrace.config.checks import check_config
from headrace.config.load import restore_config
from headrace.errors import ConfigError

GPU = {"CPU": 2.0, "GPU": 0.5}
FLEET = {"fleet": {"num_engines": 2}, "engine": {"weights": "copy"}}


def check(cluster: dict[str, Any], **sections: Any) -> None:
    data = {
        "model": {"path": "m"},
        "tasks": {"type": "arithmetic"},
        "rewards": [{"type": "exact"}],
        "cluster": cluster,
        **sections,
    }
    check_config(restore_config(data, "the test"))


@pytest.mark.parametrize(
    ("cluster", "sections"),
    [
        ({"type": "in_process", "controller_restarts": 5}, {}),
        ({"type": "subprocess", "num_reward_workers": 2, "max_restarts": 1}, {}),
        ({"type": "subprocess"}, FLEET),
        ({"type": "ray", "num_environment_workers": 1, "environment": {"num_cpus": 2}}, {}),
        ({"type": "ray"}, {"parallel": {"dp_shard": 2}}),
        ({"type": "ray", "layout": "colocated"}, {"parallel": {"dp_shard": 2}, "fleet": {"num_engines": 1}}),
    ],
)
def test_what_has_an_effect_is_taken(cluster: dict[str, Any], sections: dict[str, Any]) -> None:
    check(cluster, **sections)


@pytest.mark.parametrize(
    ("cluster", "sections", "message"),
    [
        ({"type": "subprocess"}, {}, 'cluster.type = "subprocess" has no effect: there is no actor to carry'),
        ({"type": "ray"}, {}, r"set cluster\.num_environment_workers.*or an axis of \[parallel\]"),
        ({"type": "subprocess", "max_restarts": 2}, FLEET, "cluster.max_restarts has no effect"),
        ({"type": "ray", "num_reward_workers": 1, "engine": {"num_gpus": 1}}, {}, "cluster.engine has no effect"),
        ({"type": "ray", "num_reward_workers": 1, "trainer": {"num_gpus": 1}}, {}, "cluster.trainer has no effect"),
        ({"type": "ray", "layout": "colocated"}, FLEET, 'cluster.layout = "colocated" has no effect'),
        ({"type": "ray", "num_reward_workers": 1, "reward": {"num_gpus": 1.5}}, {}, "devices are counted whole"),
        ({"type": "ray", "num_reward_wrokers": 1}, {}, "num_reward_workers"),
        ({"type": "in_process", "num_reward_workers": 1}, {}, "num_reward_workers"),
    ],
)
def test_what_has_no_effect_is_refused(cluster: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    """I20."""
    with pytest.raises(ConfigError, match=message):
        check(cluster, **sections)


def test_disaggregated_actors_have_bundles_of_their_own() -> None:
    made = bundles({"engine": 2, "trainer": 1, "reward": 1}, {"engine": GPU, "trainer": GPU, "reward": {"CPU": 1.0}},
                   colocated=False)  # fmt: skip
    assert [b.actors for b in made] == [(("engine", 0),), (("engine", 1),), (("trainer", 1),), (("reward", 0),)]
    assert [b.resources for b in made] == [GPU, GPU, GPU, {"CPU": 1.0}]
    assert describe(made) == "4 bundles with CPU 7, GPU 1.5 in all, the largest with CPU 2, GPU 0.5"


def test_colocated_engines_share_a_bundle_with_their_rank() -> None:
    """Fractions of one device; what has no partner has a bundle of its own."""
    made = bundles({"engine": 3, "trainer": 2}, {"engine": GPU, "trainer": GPU}, colocated=True)
    assert [b.actors for b in made] == [
        (("trainer", 1), ("engine", 0)),
        (("trainer", 2), ("engine", 1)),
        (("engine", 2),),
    ]
    assert made[0].resources == {"CPU": 4.0, "GPU": 1.0}
    assert made[0].demand_of("engine") == GPU


def test_the_journal_waits_for_the_runs_folder_and_survives_a_cut(tmp_path: Path) -> None:
    journal = ActorJournal()
    spec = ActorSpec(role="engine", index=1, incarnation=2, factory="x:y")
    journal.started(spec, pid=7, node="n")
    assert not [*tmp_path.iterdir()], "nobody but the run writes into an empty folder"
    journal.open(tmp_path)
    journal.note("it died")
    with (tmp_path / "actors.jsonl").open("a") as file:
        file.write('{"time": 1, "ev')
    found = [*read_journal(tmp_path)]
    assert [line["event"] for line in found] == ["started", "note"]
    assert (found[0]["name"], found[0]["pid"], found[0]["incarnation"]) == ("engine-1.2", 7, 2)


def test_a_journal_that_cannot_be_written_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It explains a run; a full disk must not end one for its sake."""
    journal = ActorJournal()
    journal.open(tmp_path / "not there")
    journal.note("a")
    journal.note("b")
    assert capsys.readouterr().err.count("cannot be written") == 1
