"""Reward type ``reward_model``: self-test, values, deadlines, errors that are never scores."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.config.schema import RewardConfig
from headrace.errors import ConfigError
from headrace.model.load import load_model
from headrace.model.renderer import ChatRenderer
from headrace.model.reward_model import Description, Probe, RewardModel
from headrace.rewards.build import build_rewards
from headrace.rewards.reward_model import RewardModelReward, conversation
from headrace.rewards.worker_pool import RewardStartError
from headrace.testing import SMALL_ALPHABET, save_tiny
from headrace.trainer.export import export_model
from headrace.types import AttemptKey, Episode, ErrorClass, Outcome, Score, ScoreError, Task, Trace, Turn

MESSAGES = ({"role": "user", "content": "hi"},)


def episode(reply: str, *earlier: Turn) -> Episode:
    task = Task(id="t", messages=MESSAGES)
    turns = (*earlier, Turn(reply=reply))
    return Episode(key=AttemptKey(0, 0), task=task, turns=turns, trace=Trace(), outcome=Outcome.DONE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose head is made so that 'good' beats content-free replies, and these beat 'bad'."""
    path = tmp_path_factory.mktemp("rm")
    save_tiny(path / "base", alphabet=SMALL_ALPHABET, hidden_size=16, num_layers=1, num_heads=2, initializer_range=0.3)
    loaded = load_model(path / "base")
    model = RewardModel(loaded, ChatRenderer(loaded.tokenizer), Description())
    wanted = {"good": 4.0, "": 1.0, ".": 0.5, ":": 0.5, "bad": -3.0}
    hidden = torch.stack([hidden_state(model, text) for text in wanted])
    with torch.no_grad():
        model.head.weight.copy_((torch.linalg.pinv(hidden) @ torch.tensor(list(wanted.values())))[None])
    good, bad = model.score_texts([(MESSAGES, "good"), (MESSAGES, "bad")])
    probe = Probe(messages=MESSAGES, chosen="good", rejected="bad", chosen_score=good, rejected_score=bad)
    model.description = Description(mean=1.0, std=2.0, probes=(probe,))
    model.save(path / "rm", export_model)
    return path / "rm"


def hidden_state(model: RewardModel, reply: str) -> torch.Tensor:
    """Of the last token, read through a head of unit vectors."""
    state = torch.zeros(16)
    with torch.no_grad():
        for i in range(16):
            model.head.weight.zero_()
            model.head.weight[0, i] = 1.0
            state[i] = model.score_texts([(MESSAGES, reply)])[0]
    return state


def reward(folder: Path, deadline_s: float = 10.0, **options: Any) -> RewardModelReward:
    config = RewardConfig(type="reward_model", deadline_s=deadline_s, options={"path": str(folder), **options})
    built = build_rewards([config]).parts[0].reward
    assert isinstance(built, RewardModelReward)
    return built


def edited(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy with another description."""
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "reward_model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path / "copy"


async def scores(judge: RewardModelReward, replies: Sequence[str]) -> list[Any]:
    try:
        return list(await asyncio.gather(*(judge.score(episode(r)) for r in replies)))
    finally:
        await judge.close()


def test_values_are_normalised_and_cut(folder: Path, tmp_path: Path) -> None:
    """I14: a declared range that holds; where it cuts, a component says so."""
    probe = json.loads((folder / "reward_model.json").read_text())["probes"][0]
    [good, bad] = asyncio.run(scores(reward(folder), ["good", "bad"]))
    assert good.value == pytest.approx((probe["chosen_score"] - 1.0) / 2.0, abs=1e-5)
    assert bad.value == pytest.approx((probe["rejected_score"] - 1.0) / 2.0, abs=1e-5)
    assert good.components == {"clipped": 0.0}
    narrow = reward(folder, bound=0.01)
    assert narrow.value_range == (-0.01, 0.01)
    [cut] = asyncio.run(scores(narrow, ["good"]))
    assert abs(cut.value) == 0.01 and cut.components == {"clipped": 1.0}


def test_batches_score_what_single_passes_score(folder: Path) -> None:
    replies = ["good", "bad", "", "goood", "some other reply"]
    single = asyncio.run(scores(reward(folder), replies))
    batched = asyncio.run(scores(reward(folder, max_batch_size=4), replies))
    assert [s.value for s in batched] == pytest.approx([s.value for s in single], abs=1e-5)


def test_single_passes_do_not_depend_on_who_waits(folder: Path) -> None:
    """I18: by default a score is bit-equal whatever else is judged at the same time."""
    [alone] = asyncio.run(scores(reward(folder), ["good"]))
    crowd = asyncio.run(scores(reward(folder), ["a", "bad", "good", "x" * 40]))
    assert crowd[2].value == alone.value


def test_the_conversation_before_the_last_reply_is_scored() -> None:
    turn = Turn(reply="first", observation=({"role": "user", "content": "go on"},))
    messages = conversation(episode("last", turn))
    assert [m["content"] for m in messages] == ["hi", "first", "go on"]
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]


def test_a_probe_that_scores_otherwise_is_refused(folder: Path, tmp_path: Path) -> None:
    """F167: other weights, template or tokenizer than in training are found before work starts."""
    [probe] = json.loads((folder / "reward_model.json").read_text())["probes"]
    copy = edited(folder, tmp_path, probes=[{**probe, "chosen_score": probe["chosen_score"] + 0.1}])
    with pytest.raises(RewardStartError, match="weights, tokenizer or template changed"):
        asyncio.run(reward(copy).start())


def test_content_free_replies_that_win_are_refused(folder: Path, tmp_path: Path) -> None:
    """FAILURES 162, I15: canary negatives at start; turning them off is a choice."""
    [probe] = json.loads((folder / "reward_model.json").read_text())["probes"]
    swapped = {**probe, "chosen": "bad", "rejected": "good"}
    swapped |= {"chosen_score": probe["rejected_score"], "rejected_score": probe["chosen_score"]}
    copy = edited(folder, tmp_path, probes=[swapped])
    with pytest.raises(RewardStartError, match="the policy would learn to say nothing"):
        asyncio.run(reward(copy).start())
    [score] = asyncio.run(scores(reward(copy, canaries="off"), ["bad"]))
    assert isinstance(score, Score)


def test_no_probes_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardStartError, match="holds no probes"):
        asyncio.run(reward(edited(folder, tmp_path, probes=[])).start())


def test_errors_of_the_model_are_classed_errors(folder: Path) -> None:
    """I14: what the model raises, and what is not finite, is never a score."""

    async def run() -> list[Any]:
        judge = reward(folder)
        await judge.start()
        assert judge._model is not None
        judge._model.description = replace(judge._model.description, mean=float("nan"))
        found = [await judge.score(episode("good"))]
        judge._model.score = lambda samples: 1 / 0  # type: ignore[assignment,method-assign]
        found.append(await judge.score(episode("good")))
        await judge.close()
        return found

    not_finite, raised = asyncio.run(run())
    assert isinstance(not_finite, ScoreError) and not_finite.error_class is ErrorClass.INVALID_SCORE
    assert isinstance(raised, ScoreError) and raised.error_class is ErrorClass.EXCEPTION
    assert "ZeroDivisionError" in raised.message


def test_a_hanging_pass_ends_at_its_deadline(folder: Path) -> None:
    """I19: and later scores are refused at once, since a thread cannot be killed."""

    async def run(release: threading.Event) -> list[Any]:
        judge = reward(folder, deadline_s=0.05)
        await judge.start()
        assert judge._model is not None
        judge._model.score = lambda samples: release.wait(30)  # type: ignore[assignment,method-assign]
        found = [await judge.score(episode("good")), await judge.score(episode("good"))]
        await judge.close()
        return found

    release = threading.Event()
    first, second = asyncio.run(run(release))
    release.set()
    assert first.error_class is ErrorClass.TIMEOUT and "deadline_s" in first.message
    assert second.error_class is ErrorClass.INFRASTRUCTURE


def test_close_answers_those_who_wait(folder: Path) -> None:
    async def run(release: threading.Event) -> list[Any]:
        judge = reward(folder)
        await judge.start()
        assert judge._model is not None
        judge._model.score = lambda samples: release.wait(30)  # type: ignore[assignment,method-assign]
        waiting = [asyncio.create_task(judge.score(episode(r))) for r in ("a", "b", "c")]
        while len(judge._waiting) != 2:
            await asyncio.sleep(0)
        await judge.close()
        release.set()
        return [await asyncio.wait_for(w, 5) for w in waiting]

    results = asyncio.run(run(threading.Event()))
    assert [r.error_class for r in results] == [ErrorClass.INFRASTRUCTURE] * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"path": "/nowhere"}}, "holds no reward model"),
        ({"options": {}}, "path"),
        ({"options": {"path": "/nowhere", "bond": 3}}, "did you mean 'bound'"),
        ({"options": {"path": "/nowhere"}, "num_workers": 2}, "num_workers has no effect"),
    ],
)
def test_wrong_options_are_errors_before_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_rewards([RewardConfig(type="reward_model", **fields)])
