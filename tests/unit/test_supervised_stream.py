"""[supervised_data]: what a rollout batch imitates, how it is dealt out, what is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.algorithms.fields import Minibatch, Totals
from headrace.cli.main import main
from headrace.config.checks import check_config
from headrace.config.load import restore_config
from headrace.config.schema import RunConfig, SupervisedDataConfig
from headrace.environments.preferences import read_supervised
from headrace.environments.task_list import TaskList
from headrace.errors import ConfigError
from headrace.model.renderer import ChatRenderer
from headrace.supervised import SupervisedStream, counted_apart
from headrace.testing import SMALL_ALPHABET, make_sample, tiny_tokenizer
from headrace.types import Task

NO_TASKS = TaskList([])


def rows_file(path: Path, num: int = 5) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"p{i}"}, {"role": "assistant", "content": "ab", "weight": 0.5}]}
        for i in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_data(**sections: Any) -> dict[str, Any]:
    return {"model": {"path": "x"}, "tasks": {"type": "arithmetic"}, "rewards": [{"type": "exact"}], **sections}


def config(path: Path, num_per_batch: int = 2, **sections: Any) -> RunConfig:
    section = {"path": str(path), "conversations_per_batch": num_per_batch}
    return restore_config(run_data(supervised_data=section, **sections), "x")


def stream(path: Path, num_per_batch: int = 2, seed: int = 0) -> SupervisedStream:
    made = config(path, num_per_batch, seed=seed)
    rows = read_supervised(made.supervised_data, NO_TASKS)
    renderer = ChatRenderer(tiny_tokenizer(SMALL_ALPHABET))
    found = SupervisedStream.build(rows, made, renderer, max_context=64)
    assert found is not None
    return found


def test_each_pass_imitates_every_conversation_once(tmp_path: Path) -> None:
    """Over 2 x 5 places all 5 conversations come twice, in two orders; batch i is the same whoever asks, and when."""
    made = stream(rows_file(tmp_path / "rows.jsonl"))
    drawn = [samples[0].ids for index in range(5) for samples in made.of_batch(index)]
    first, second = drawn[:5], drawn[5:]
    assert Counter(first) == Counter(second) and len(set(first)) == 5 and first != second
    assert made.of_batch(3) == stream(tmp_path / "rows.jsonl").of_batch(3)
    others = [samples[0].ids for samples in stream(tmp_path / "rows.jsonl", seed=1).of_batch(0)]
    assert [samples[0].ids for samples in made.of_batch(0)] != others
    keys = [samples[0].key for index in range(5) for samples in made.of_batch(index)]
    assert len(set(keys)) == 10 and all(key.group < 0 for key in keys)


def test_mixing_leaves_the_rl_stream_alone(tmp_path: Path) -> None:
    """I17: rl counts and advantages stay, the supervised stream has its own; each conversation is in one minibatch,
    with its weights, as the stream that it is."""
    plan = []
    for number in range(2):
        samples = tuple(make_sample([1, 2], [3, 4], group=number, member=m) for m in range(2))
        plan.append(
            Minibatch(
                samples=samples,
                advantages=[torch.full((4,), 0.5) for _ in samples],
                proximal_logprobs=None,
                reference_logprobs=[torch.full((4,), -1.0) for _ in samples],
                totals=Totals.count(samples, 7),
            )
        )
    made = stream(rows_file(tmp_path / "rows.jsonl"), num_per_batch=3)
    mixed = made.mix(plan, 4)
    assert [[s.id for s in m.samples[2:]] for m in mixed] == [
        ["supervised-12/0", "supervised-14/0"],
        ["supervised-13/0"],
    ]
    for before, after in zip(plan, mixed, strict=True):
        assert after.samples[:2] == before.samples and after.proximal_logprobs is None
        assert (after.totals.num_tokens, after.totals.num_episodes, after.totals.max_length) == (4, 2, 7)
        added = after.samples[2:]
        assert after.totals.supervised.num_episodes == len(added)
        assert after.totals.supervised.num_tokens == 3 * len(added)  # a, b, end of turn
        assert all(s.stream == "supervised" and s.weight_T is not None for s in added)
        assert {w for s in added for w, m in zip(s.weight_T or (), s.mask, strict=True) if m} == {0.5}
        assert after.reference_logprobs is not None
        assert [len(t) for t in after.advantages] == [len(t) for t in after.reference_logprobs] == [
            len(s.ids) for s in after.samples
        ]  # fmt: skip
        assert not any(bool(t.any()) for t in after.advantages[2:])
    counted = counted_apart({"num_samples": 4.0, "num_trained_tokens": 10.0, "loss": 1.0}, mixed[0])
    assert counted == {
        "num_samples": 2.0,
        "num_trained_tokens": 4.0,
        "supervised/num_samples": 2.0,
        "supervised/num_tokens": 6.0,
        "loss": 1.0,
    }


def test_options_without_effect_are_refused(tmp_path: Path) -> None:
    """I20, both ways round."""
    path = rows_file(tmp_path / "rows.jsonl")
    check_config(config(path))
    check_config(config(path, algorithm={"supervised": {"coefficient": 0.5}}))
    with pytest.raises(ConfigError, match=r"supervised_data has no effect: algorithm\.supervised\.coefficient is 0"):
        check_config(config(path, algorithm={"supervised": {"coefficient": 0.0}}))
    with pytest.raises(ConfigError, match=r"algorithm\.supervised has no effect.*supervised_data\.path"):
        check_config(restore_config(run_data(algorithm={"supervised": {"coefficient": 0.5}}), "x"))


def test_bad_rows_are_one_error(tmp_path: Path) -> None:
    """File and line; too few rows; a prompt that is held out."""
    path = rows_file(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"conversations_per_batch = 6, but .*rows\.jsonl holds 5"):
        read_supervised(SupervisedDataConfig(path=path, conversations_per_batch=6), NO_TASKS)
    held_out = TaskList([Task(id="seven", messages=({"role": "user", "content": " p2 "},))])
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 3: this prompt is that of the held-out task 'seven'"):
        read_supervised(SupervisedDataConfig(path=path, conversations_per_batch=2), held_out)
    with pytest.raises(ConfigError, match=r"line 4: the example has \d+ tokens, more than the model's context of 12"):
        made = config(rows_file(path, 3))
        path.write_text(path.read_text() + path.read_text().splitlines()[0].replace('"ab"', '"abababab"') + "\n")
        rows = read_supervised(made.supervised_data, NO_TASKS)
        SupervisedStream.build(rows, made, ChatRenderer(tiny_tokenizer(SMALL_ALPHABET)), max_context=12)
    path.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 1: no message of the assistant's"):
        read_supervised(SupervisedDataConfig(path=path), NO_TASKS)


def test_dry_run_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[model]\npath = "smollm2-135m"\n[tasks]\ntype = "arithmetic"\n[[rewards]]\ntype = "exact"\n'
        f'[trainer]\nnum_batches = 10\n[supervised_data]\npath = "{rows_file(tmp_path / "rows.jsonl")}"\n'
        "conversations_per_batch = 4\n"
    )
    assert main(["train", str(toml), "--dry-run"]) == 0
    assert "4 of 5 conversations a batch, 8.0 passes" in capsys.readouterr().out
