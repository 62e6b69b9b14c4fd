"""Reading a run's TOML file: every wrong input ends in one clear error that names key, value and remedy (I20)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.config.dump import dump_toml
from headrace.config.load import load_config, resolved, restore_config
from headrace.config.overrides import parse_value
from headrace.config.schema import FileTasks, RunConfig
from headrace.errors import ConfigError

BASE = """
name = "demo"
[model]
path = "smollm2-135m"
[tasks]
type = "arithmetic"
[[rewards]]
type = "last_number"
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes run.toml (the minimal run plus the text given) into a folder that is not the current one."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def _write(more: str = "", base: str = BASE) -> Path:
        path = tmp_path / "conf" / "run.toml"
        path.write_text(base + more, encoding="utf-8")
        return path

    return _write


def problem(path: Path, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_minimal_file_takes_defaults(write) -> None:
    config = load_config(write())
    assert config.name == "demo"
    assert config.rollout.group_size == 8
    assert config.trainer.model_fields_set == frozenset()


def test_values_are_read_into_their_sections(write) -> None:
    config = load_config(write('[trainer]\nlearning_rate = 1e-5\n[trainer.schedule]\ntype = "cosine"\n'))
    assert config.trainer.learning_rate == 1e-5
    assert config.trainer.schedule.type == "cosine"
    assert config.trainer.model_fields_set == {"learning_rate", "schedule"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("[trainer]\nlearnig_rate = 1", "trainer.learnig_rate is not a known key; did you mean trainer.learning_rate?"),
        ("[trainr]\nseed = 1", "trainr is not a known key; did you mean trainer?"),
        # a right key in the wrong section
        ("[trainer]\ngroup_size = 4", "trainer.group_size is not a known key; did you mean rollout.group_size?"),
        ("[sampling]\nzzz = 4", "sampling.zzz is not a known key; known in sampling: max_new_tokens, temperature"),
        ("[trainer.schedule]\nwarmup = 4", "did you mean trainer.schedule.warmup_steps?"),
        ("wait = 1", "rewards.0.wait is not a known key; did you mean rewards.0.weight?"),
    ],
)
def test_unknown_key_names_the_nearest_right_key(write, more: str, expected: str) -> None:
    """I20: an unknown option is an error at start that says which key was meant."""
    path = write(more)
    assert problem(path).startswith(f"{path}: ")
    assert expected in problem(path)


def test_unknown_key_of_a_union_is_compared_with_the_chosen_member_only(write) -> None:
    """``dataset`` is a key of reasoning_gym tasks; for arithmetic ones the nearest keys are arithmetic's own."""
    path = write(base=BASE.replace('type = "arithmetic"', 'type = "arithmetic"\noperaton = "add"'))
    assert "tasks.operaton is not a known key; did you mean tasks.operation?" in problem(path)
    assert "did you mean tasks.dataset?" in problem(write(), ("tasks.type", "reasoning_gym"), ("tasks.datset", "x"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rollout.group_size", "-4", "rollout.group_size = -4: must be greater than or equal to 1"),
        ("rollout.max_staleness", "true", "rollout.max_staleness = true: must be a valid integer"),
        ("rollout.group_size", '"8"', 'rollout.group_size = "8": must be a valid integer'),
        ("rollout", "3", "rollout = 3: must be a section with keys"),
        ("trainer.schedule.type", "cosin", "must be 'constant', 'linear' or 'cosine'; did you mean 'cosine'?"),
        ("tasks.type", "fil", "must be one of arithmetic, file, reasoning_gym, python; did you mean 'file'?"),
        ("trainer.learning_rate", "nan", "trainer.learning_rate must be a finite number"),
        ("trainer.learning_rate", "inf", "trainer.learning_rate must be a finite number"),
        ("name", "3", "name = 3: must be a valid string; quote it"),
        ("name", "a/b", 'name = "a/b": '),
        ("rewards", "[]", "rewards = []: must have at least 1"),
        ("model.lora.target_modules", "3", "must be a list or must be 'all-linear'"),
        ("sampling.top_p", "1.5", "sampling.top_p = 1.5: must be less than or equal to 1"),
    ],
)
def test_wrong_value_names_key_value_and_what_is_allowed(write, key: str, value: str, expected: str) -> None:
    """Issue 2, end criterion 6: a negative group size and its like end in one clear error."""
    message = problem(write(), (key, value))
    assert expected in message
    assert message.startswith("command line: ")
    assert "\n" not in message


def test_missing_section_key_and_type(write) -> None:
    assert "the section model is missing" in problem(write(base=BASE.replace('[model]\npath = "smollm2-135m"', "")))
    assert "the key model.path is missing" in problem(write(base=BASE.replace('path = "smollm2-135m"', "")))
    assert "tasks.type is missing; choose one of arithmetic" in problem(
        write(base=BASE.replace('type = "arithmetic"', ""))
    )
    assert "the key tasks.path is missing" in problem(write(), ("tasks.type", "file"))


def test_all_problems_are_listed_and_the_first_stands_alone(write) -> None:
    path = write("[trainer]\nlearnig_rate = 1\n[rollout]\ngroup_size = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.problems) == 2
    first, _, rest = str(caught.value).partition("\n")
    assert "learnig_rate" in first and "group_size" not in first
    assert "rollout.group_size = 0" in rest


def test_file_that_cannot_be_read(write, tmp_path: Path) -> None:
    path = write()
    assert problem(path.with_name("rum.toml")) == f"no such file: {path.with_name('rum.toml')}; did you mean {path}?"
    assert "is a folder" in problem(tmp_path)
    assert "the folder" in problem(tmp_path / "nowhere" / "run.toml")
    path.write_text("name = = 3\n", encoding="utf-8")
    assert "is not valid TOML" in problem(path) and "line 1" in problem(path)
    path.write_bytes(b"\xff\xfe")
    assert "not UTF-8" in problem(path)


# ---------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("3", 3),
        ("1e-5", 1e-5),
        ("true", True),
        ("grpo", "grpo"),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("module:function", "module:function"),
        ("2026-01-01", "2026-01-01"),
        ("1\nother = 2", "1\nother = 2"),
        ("", ""),
    ],
)
def test_override_values_are_toml_or_text(raw: str, value: object) -> None:
    parsed = parse_value(raw)
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides_apply_in_order_and_into_lists(write) -> None:
    config = load_config(
        write(),
        [("trainer.num_batches", "3"), ("trainer.num_batches", "4"), ("rewards.0.weight", "2.5"), ("seed", "7")],
    )
    assert config.trainer.num_batches == 4
    assert config.rewards[0].weight == 2.5
    assert config.seed == 7
    assert "num_batches" in config.trainer.model_fields_set


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("rewards.1.weight", "rewards is a list of 1, so '1' must be a number from 0 to 0"),
        ("rewards.first", "'first' must be a number"),
        ("name.first", "name is 'demo' and has no keys"),
        ("name.first.second", "has no keys"),
        ("trainer..x", "is not a dotted key"),
    ],
)
def test_override_that_leads_nowhere(write, key: str, expected: str) -> None:
    assert expected in problem(write(), (key, "1"))


# -------------------------------------------------------------------------------------------------- paths

FILE_TASKS = BASE.replace('type = "arithmetic"', 'type = "file"\npath = "tasks.jsonl"')


def test_task_file_beside_the_toml_comes_before_the_current_folder(write, tmp_path: Path) -> None:
    path = write(base=FILE_TASKS)
    here = tmp_path / "elsewhere" / "tasks.jsonl"
    here.touch()
    assert _task_path(load_config(path)) == here
    beside = tmp_path / "conf" / "tasks.jsonl"
    beside.touch()
    assert _task_path(load_config(path)) == beside
    # what is typed on the command line is meant from where one stands
    assert _task_path(load_config(path, [("tasks.path", "tasks.jsonl")])) == here


def _task_path(config: RunConfig) -> Path:
    assert isinstance(config.tasks, FileTasks)
    return config.tasks.path


def test_missing_task_file_names_the_nearest(write, tmp_path: Path) -> None:
    """Issue 2, end criterion 6: a missing file ends before any work starts."""
    (tmp_path / "conf" / "task.jsonl").touch()
    message = problem(write(base=FILE_TASKS))
    assert 'tasks.path = "tasks.jsonl": no such file' in message
    assert f"did you mean {tmp_path / 'conf' / 'task.jsonl'}?" in message


def test_model_path_may_be_a_folder_a_name_or_a_hub_id(write, tmp_path: Path) -> None:
    (tmp_path / "conf" / "mine").mkdir()
    assert load_config(write(), [("model.path", "mine")]).model.path == str(tmp_path / "conf" / "mine")
    assert load_config(write(), [("model.path", "org/model")]).model.path == "org/model"
    assert "no such folder" in problem(write(), ("model.path", "./absent"))


def test_references_to_python_files_become_absolute(write, tmp_path: Path) -> None:
    (tmp_path / "conf" / "mine.py").touch()
    config = load_config(write(base=BASE.replace('"last_number"', '"mine.py:score"')))
    assert config.rewards[0].type == f"{tmp_path / 'conf' / 'mine.py'}:score"
    assert load_config(write(base=BASE.replace('"last_number"', '"pkg.mod:score"'))).rewards[0].type == "pkg.mod:score"
    assert "rewards.0.type" in problem(write(base=BASE.replace('"last_number"', '"absent.py:score"')))


def test_output_folder_is_relative_to_the_current_folder(write, tmp_path: Path) -> None:
    config = load_config(write(), [("output_dir", "out")])
    assert config.run_dir == Path("out/demo")
    assert config.run_dir.absolute() == tmp_path / "elsewhere" / "out" / "demo"


# ------------------------------------------------------------------------------------- dump and restore

RICH = """
options = {a = 1, "b c" = [true, "x\\ty"]}
[model.lora]
rank = 4
[sampling]
stop_strings = ["\\n", "ü"]
[trainer]
learning_rate = 2e-6
[rollout]
max_staleness = 2
on_overage = "wait"
[monitor]
sinks = ["wandb"]
sink_options = {wandb = {project = "p"}}
"""


def test_dumped_toml_reads_back_with_the_same_keys_set(write, tmp_path: Path) -> None:
    config = load_config(write(RICH))
    again = tmp_path / "again.toml"
    again.write_text(dump_toml(config), encoding="utf-8")
    read = load_config(again)
    assert resolved(read) == resolved(config)
    assert read.rollout.model_fields_set == {"max_staleness", "on_overage"}
    assert "# group_size = 8" in dump_toml(config)


def test_recorded_configuration_restores_through_json(write) -> None:
    """A resumed run has the configuration of its record; defaults count as not set, so that I20 still holds."""
    config = load_config(write(RICH))
    restored = restore_config(json.loads(json.dumps(resolved(config))), "run.json")
    assert restored == config
    assert restored.trainer.model_fields_set == {"learning_rate"}
    assert restored.rewards[0].options == {"a": 1, "b c": [True, "x\ty"]}


def test_damaged_record_names_the_record() -> None:
    with pytest.raises(ConfigError, match=r"^run\.json: the section model is missing"):
        restore_config({"tasks": {"type": "arithmetic"}, "rewards": [{"type": "x"}]}, "run.json")
