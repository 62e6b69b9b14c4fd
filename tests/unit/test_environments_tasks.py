"""Tasks: arithmetic splits, files with every kind of bad row, a third party's factory, fingerprints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.schema import ArithmeticTasks, EntryPointTasks, FileTasks
from headrace.environments.tasks import TaskList, build_tasks
from headrace.environments.tasks_file import read_tasks
from headrace.errors import ConfigError
from headrace.types import Task


def operands(task: Task) -> frozenset[str]:
    return frozenset(task.id.split("-")[1:])


# --------------------------------------------------------------------------------------------- arithmetic


@settings(max_examples=40, deadline=None)
@given(
    low=st.integers(0, 5),
    span=st.integers(1, 8),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 10),
    operation=st.sampled_from(["multiply", "add"]),
)
def test_no_commuted_twin_crosses_the_split(low: int, span: int, fraction: float, seed: int, operation: Any) -> None:
    """Issue 2: held-out problems are new facts; 4 * 3 held out means that 3 * 4 is not trained."""
    config = ArithmeticTasks(
        operation=operation, min_operand=low, max_operand=low + span, held_out_fraction=fraction, seed=seed
    )
    splits = build_tasks(config)
    train = {operands(splits.train[i]) for i in range(len(splits.train))}
    held_out = {operands(splits.held_out[i]) for i in range(len(splits.held_out))}
    assert train and held_out
    assert not train & held_out
    # Nothing is lost: every ordered pair stands on one of the two sides.
    assert len(splits.train) + len(splits.held_out) == (span + 1) ** 2


def test_arithmetic_default_is_one_digit_multiplication_in_both_orders() -> None:
    splits = build_tasks(ArithmeticTasks())
    tasks = {
        task.id: task
        for source in (splits.train, splits.held_out)
        for task in map(source.__getitem__, range(len(source)))
    }
    assert tasks["multiply-3-4"].messages == ({"role": "user", "content": "What is 3 * 4?"},)
    assert (tasks["multiply-3-4"].answer, tasks["multiply-4-3"].answer) == ("12", "12")
    assert len(tasks) == 64


def test_arithmetic_split_moves_with_its_own_seed_only() -> None:
    """The same configuration gives the same tasks in the same order (I18); another seed another split."""
    first, again, other = (build_tasks(ArithmeticTasks(seed=seed)) for seed in (0, 0, 1))
    assert first.train.fingerprint == again.train.fingerprint
    assert first.train.fingerprint != other.train.fingerprint


@pytest.mark.parametrize(("low", "high", "said"), [(9, 2, "no problem"), (3, 3, "single problem")])
def test_arithmetic_range_without_a_split_is_refused(low: int, high: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_tasks(ArithmeticTasks(min_operand=low, max_operand=high))


# -------------------------------------------------------------------------------------------------- files


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


GOOD = {"prompt": "2 + 2?", "answer": "4"}


def test_jsonl_rows_become_tasks(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 3?"}]
    path = jsonl(
        tmp_path / "tasks.jsonl", GOOD, "", {"id": 7, "messages": messages, "answer": 6, "metadata": {"level": 1}}
    )
    first, second = read_tasks(path)
    assert first.messages == ({"role": "user", "content": "2 + 2?"},)
    assert (first.id, first.answer) == ("tasks:1", "4")
    assert (second.id, second.answer, second.metadata) == ("7", 6, {"level": 1})
    assert second.messages == tuple(messages)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "a", "answer": ', r"line 2 is not JSON.*character"),
        ("[1, 2]", r"line 2 is a JSON list"),
        ({"prompt": "a"}, r"line 2: the task 'tasks:2' has no answer"),
        ({"prompt": "a", "answer": "  "}, r"line 2: .* has no answer"),
        ({"prompt": "a", "anwser": "4"}, r"has no answer \(is 'anwser' meant\?\)"),
        ({"answer": "4"}, r"line 2: there is neither messages nor prompt"),
        ({"promt": "a", "answer": "4"}, r"is 'promt' meant\?"),
        ({"prompt": "", "answer": "4"}, r"prompt is ''"),
        ({"prompt": "a", "messages": [], "answer": "4"}, r"both messages and prompt"),
        ({"messages": [], "answer": "4"}, r"messages is an empty list"),
        ({"messages": "hi", "answer": "4"}, r"messages is a str"),
        ({"messages": ["hi"], "answer": "4"}, r"message 1 is a str"),
        ({"messages": [{"role": "usr", "content": "a"}], "answer": "4"}, r"role 'usr'; did you mean 'user'"),
        ({"messages": [{"role": "user"}], "answer": "4"}, r"message 1 \(user\) has the content None"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "4"},
            r"last message is the assistant's",
        ),
        ({"prompt": "a", "answer": "4", "id": ["x"]}, r"id \['x'\] must be text"),
        ({"prompt": "a", "answer": "4", "metadata": 3}, r"metadata is a int"),
        ({"prompt": "a", "answer": "4", "environment": 3}, r"environment is 3"),
    ],
)
def test_a_bad_row_is_one_error_with_its_line(tmp_path: Path, row: Any, said: str) -> None:
    """Issue 2, done when 6: bad data ends before any work starts, with the line that is wrong."""
    path = jsonl(tmp_path / "tasks.jsonl", GOOD, row)
    with pytest.raises(ConfigError, match=said) as error:
        read_tasks(path)
    assert "line 2" in str(error.value)


def test_duplicate_ids_are_refused_with_both_places(tmp_path: Path) -> None:
    """F131: a reply must never be graded against another question's answer."""
    path = jsonl(tmp_path / "t.jsonl", {**GOOD, "id": "a"}, GOOD, {**GOOD, "id": "a"})
    with pytest.raises(ConfigError, match=r"line 3: the id 'a' was used at line 1"):
        read_tasks(path)


def test_an_explicit_id_cannot_collide_with_a_given_one(tmp_path: Path) -> None:
    """F131 again: ids that were made from the line number count, too."""
    path = jsonl(tmp_path / "t.jsonl", {**GOOD, "id": "t:2"}, GOOD)
    with pytest.raises(ConfigError, match=r"line 2: the id 't:2' was used at line 1"):
        read_tasks(path)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    jsonl(tmp_path / "tasks.jsonl", GOOD)
    with pytest.raises(ConfigError, match=r"no such file: .*task\.jsonl; did you mean .*tasks\.jsonl"):
        read_tasks(tmp_path / "task.jsonl")


def test_files_that_are_no_task_files(tmp_path: Path) -> None:
    empty = jsonl(tmp_path / "empty.jsonl")
    csv = jsonl(tmp_path / "tasks.csv", "a,b")
    broken = jsonl(tmp_path / "tasks.parquet", "not parquet")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'{"prompt": "a", "answer": "4"}\n\xff\xfe\n')
    for path, said in (
        (empty, "holds no task: it is empty"),
        (csv, "not '.csv'"),
        (broken, "cannot be read as Parquet"),
        (binary, "line 2 is not UTF-8"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_tasks(path)


def test_answers_can_be_optional(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", {"prompt": "Write a poem."})
    splits = build_tasks(FileTasks(path=path, answer_required=False))
    assert splits.train[0].answer is None
    assert len(splits.held_out) == 0


def test_parquet_rows_become_tasks_and_bad_ones_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n), "source": "x"} for n in range(3)
    ]
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    pq.write_table(pa.Table.from_pylist(rows), good)
    rows[2] = {"messages": rows[2]["messages"], "answer": None, "source": "x"}
    pq.write_table(pa.Table.from_pylist(rows), bad)
    tasks = read_tasks(good)
    assert [task.answer for task in tasks] == ["0", "1", "2"]
    assert tasks[0].messages == ({"role": "user", "content": "0?"},)
    with pytest.raises(ConfigError, match=r"bad.parquet, row 3: .* has no answer"):
        read_tasks(bad)


# ----------------------------------------------------------------------------------------- split of files


@settings(max_examples=30, deadline=None)
@given(
    questions=st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=30),
    fraction=st.floats(0.05, 0.95),
)
def test_equal_problems_never_straddle_the_split(
    tmp_path_factory: pytest.TempPathFactory, questions: list[str], fraction: float
) -> None:
    """A duplicate of a held-out problem in the training set would be contamination."""
    folder = tmp_path_factory.mktemp("split")
    doubled = [q for question in questions for q in (question, f" {question}  ")]
    if len({" ".join(q.split()) for q in doubled}) < 2:
        return
    path = jsonl(folder / "t.jsonl", *({"prompt": q, "answer": str(i)} for i, q in enumerate(doubled)))
    splits = build_tasks(FileTasks(path=path, held_out_fraction=fraction))
    texts = [
        {" ".join(source[i].messages[0]["content"].split()) for i in range(len(source))}
        for source in (splits.train, splits.held_out)
    ]
    assert all(texts)
    assert not texts[0] & texts[1]
    assert len(splits.train) + len(splits.held_out) == len(doubled)


def test_split_is_stable_when_the_file_grows(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "answer": "x", "id": str(i)} for i in range(60)]

    def held_out(num_rows: int) -> set[str]:
        source = build_tasks(
            FileTasks(path=jsonl(tmp_path / "t.jsonl", *rows[:num_rows]), held_out_fraction=0.3)
        ).held_out
        return {source[i].id for i in range(len(source))}

    before, after = held_out(40), held_out(60)
    assert 4 <= len(before) <= 20
    assert before == {name for name in after if int(name) < 40}


def test_held_out_file_must_not_repeat_training_problems(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", GOOD, {"prompt": "3 + 3?", "answer": "6"})
    test = jsonl(tmp_path / "test.jsonl", {"prompt": "9 + 9?", "answer": "18"}, {"prompt": " 2 + 2? ", "answer": "4"})
    with pytest.raises(ConfigError, match=r"1 of the 2 held-out problems .* are also training problems"):
        build_tasks(FileTasks(path=train, held_out_path=test))
    clean = jsonl(tmp_path / "clean.jsonl", {"prompt": "9 + 9?", "answer": "18"})
    splits = build_tasks(FileTasks(path=train, held_out_path=clean))
    assert (len(splits.train), len(splits.held_out)) == (2, 1)


def test_two_ways_to_hold_out_are_one_too_many(tmp_path: Path) -> None:
    """I20: one of the two options would have no effect."""
    path = jsonl(tmp_path / "t.jsonl", GOOD)
    with pytest.raises(ConfigError, match="both set"):
        build_tasks(FileTasks(path=path, held_out_path=path, held_out_fraction=0.5))


def test_one_problem_cannot_be_split(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", GOOD, {**GOOD, "id": "again"})
    with pytest.raises(ConfigError, match="one problem only"):
        build_tasks(FileTasks(path=path, held_out_fraction=0.5))


# ------------------------------------------------------------------------------------ fingerprint, factory


def test_fingerprint_changes_with_any_content_id_and_order() -> None:
    """F114: a data set that was swapped before a resume must be noticed."""
    a = Task(id="a", messages=({"role": "user", "content": "1?"},), answer="1")
    b = Task(id="b", messages=({"role": "user", "content": "2?"},), answer="2")
    changed = [
        [a, Task(id="b", messages=b.messages, answer="3")],
        [a, Task(id="c", messages=b.messages, answer="2")],
        [a, Task(id="b", messages=({"role": "user", "content": "2 ?"},), answer="2")],
        [a, Task(id="b", messages=b.messages, answer="2", metadata={"k": 1})],
        [b, a],
        [a],
    ]
    fingerprints = {TaskList(tasks).fingerprint for tasks in changed}
    assert len(fingerprints) == len(changed)
    assert TaskList([a, b]).fingerprint not in fingerprints
    assert TaskList([a, b]).fingerprint == TaskList([a, b]).fingerprint


FACTORY = """
from headrace.types import Task
def task(i): return Task(id=str(i), messages=({"role": "user", "content": str(i)},), answer=str(i))
def good(n): return [task(i) for i in range(n)], [task(i) for i in range(n, n + 2)]
def empty(): return [], []
def single(): return [task(0)]
def wrong(): return [1], []
def twice(): return [task(0), task(0)], []
def fails(): raise RuntimeError("boom")
number = 3
"""


def test_factory_of_a_third_party(tmp_path: Path) -> None:
    path = tmp_path / "my_tasks.py"
    path.write_text(FACTORY)
    splits = build_tasks(EntryPointTasks(factory=f"{path}:good", options={"n": 3}))
    assert [splits.train[i].answer for i in range(3)] == ["0", "1", "2"]
    assert len(splits.held_out) == 2 and splits.held_out.fingerprint
    for name, said in (
        ("empty", "no training task"),
        ("single", "must return a pair"),
        ("wrong", "item 0 is a int"),
        ("twice", "'0' occurs twice"),
        ("fails", "RuntimeError: boom"),
        ("number", "is a int, not a function"),
        ("god", "defines no 'god'; did you mean 'good'"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_tasks(EntryPointTasks(factory=f"{path}:{name}"))
    for factory, said in (("nowhere.py:f", "no file"), ("no_such_package:f", "No module named"), ("x", "must be")):
        with pytest.raises(ConfigError, match=said):
            build_tasks(EntryPointTasks(factory=factory))
