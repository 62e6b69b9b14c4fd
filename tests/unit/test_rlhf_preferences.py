"""Rows of training without rollouts: what is wrong with one is one clear error, before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.offline import DataConfig
from headrace.environments.preferences import read_conversations, read_pairs
from headrace.errors import ConfigError

GOOD = {"prompt": "a?", "chosen": "yes", "rejected": "no"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "rejected": " yes "}, "line 2: chosen and rejected are equal"),
        ({"prompt": "b?", "chosen": "x"}, "line 2: there is no 'rejected'"),
        ({"prompt": "b?", "chosenn": "x", "rejected": "y"}, "line 2: there is no 'chosen' .is 'chosenn' meant"),
        ({**GOOD, "chosen": 3}, "line 2: chosen is a int; it must be the text of a reply"),
        ({**GOOD, "rejected": ["no"]}, "line 2: rejected is a list"),
        ({**GOOD, "chosen": "  "}, "line 2: chosen is empty"),
        ({**GOOD, "margin": -1}, "line 2: margin is -1"),
        ({**GOOD, "margin": "much"}, "line 2: margin is 'much'"),
        ({**GOOD, "margin": True}, "line 2: margin is True"),
        ({"chosen": "x", "rejected": "y"}, "line 2: there is neither messages nor prompt"),
        ({**GOOD, "messages": [{"role": "user", "content": "a"}]}, "line 2: both messages and prompt"),
        ("[1, 2]", "line 2 is a JSON list"),
        ("{", "line 2 is not JSON"),
    ],
)
def test_bad_pair_is_one_error_with_its_line(tmp_path: Path, row: Any, message: str) -> None:
    """Issue 3, end criterion 7: a preference pair with equal sides (and each other defect) before work starts."""
    path = write(tmp_path / "pairs.jsonl", GOOD, row)
    with pytest.raises(ConfigError, match=message):
        read_pairs(DataConfig(path=path))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}], "no message of the assistant"),
        ([{"role": "assistant", "content": "a"}], "the first message is the assistant's"),
        ([{"role": "user", "content": "a", "weight": 1}, {"role": "assistant", "content": "b"}], "only the assistant"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": -1}], "weight -1"),
        ([{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}], "did you mean 'assistant'"),
        ("text", "messages is a str"),
    ],
)
def test_bad_conversation_is_one_error_with_its_line(tmp_path: Path, messages: Any, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"messages": messages})
    with pytest.raises(ConfigError, match=f"line 1.*{message}"):
        read_conversations(DataConfig(path=path))


def test_a_row_without_messages_names_what_was_meant(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"mesages": []})
    with pytest.raises(ConfigError, match=r"no 'messages' .is 'mesages' meant"):
        read_conversations(DataConfig(path=path))


def test_held_out_prompts_are_not_trained_on(tmp_path: Path) -> None:
    """All rows of one prompt, whatever its white space, stand on one side; the split does not depend on row order."""
    rows = [{"prompt": f"p{i % 40}{' ' * (i // 40)}", "chosen": f"c{i}", "rejected": "r"} for i in range(120)]
    forwards = read_pairs(DataConfig(path=write(tmp_path / "a.jsonl", *rows), held_out_fraction=0.3))
    backwards = read_pairs(DataConfig(path=write(tmp_path / "b.jsonl", *rows[::-1]), held_out_fraction=0.3))
    trained = {p.messages[0]["content"].strip() for p in forwards.train}
    held_out = {p.messages[0]["content"].strip() for p in forwards.held_out}
    assert trained and held_out and not trained & held_out and len(forwards.train) + len(forwards.held_out) == 120
    assert {p.chosen for p in backwards.held_out} == {p.chosen for p in forwards.held_out}
    assert forwards.fingerprint != backwards.fingerprint  # the order of rows decides the order of training


def test_a_prompt_on_both_sides_is_refused(tmp_path: Path) -> None:
    config = DataConfig(
        path=write(tmp_path / "a.jsonl", GOOD, {**GOOD, "prompt": "b?"}),
        held_out_path=write(tmp_path / "b.jsonl", {**GOOD, "prompt": "a? "}),
    )
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1: this held-out prompt is also trained on"):
        read_pairs(config)


def test_one_prompt_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one prompt only"):
        read_pairs(DataConfig(path=write(tmp_path / "a.jsonl", GOOD, GOOD)))


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": "r", "margin": 0.5, "other": i} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_parquet = read_pairs(DataConfig(path=tmp_path / "a.parquet"))
    from_jsonl = read_pairs(DataConfig(path=write(tmp_path / "a.jsonl", *rows)))
    assert from_parquet.fingerprint == from_jsonl.fingerprint
    assert from_parquet.train[0].margin == 0.5


@pytest.mark.parametrize("read", [read_pairs, read_conversations])
def test_a_file_that_is_not_there_or_empty(tmp_path: Path, read: Callable[[DataConfig], Any]) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean .*rows\.jsonl"):
        read(DataConfig(path=tmp_path / "rowz.jsonl"))
    with pytest.raises(ConfigError, match="it is empty"):
        read(DataConfig(path=tmp_path / "rows.jsonl"))
