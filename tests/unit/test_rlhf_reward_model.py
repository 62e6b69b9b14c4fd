"""The reward model: where its head reads, what a folder holds, and that neighbours do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.model.load import load_model
from headrace.model.packing import pack
from headrace.model.renderer import ChatRenderer
from headrace.model.reward_model import Description, Probe, RewardModel, RewardModelError, load_reward_model
from headrace.testing import SMALL_ALPHABET, save_tiny
from headrace.trainer.export import export_model
from headrace.types import Message

PROMPT: list[Message] = [{"role": "user", "content": "say something"}]


def make(path: Path, seed: int = 0) -> RewardModel:
    """A reward model with a random head."""
    save_tiny(path, alphabet=SMALL_ALPHABET, hidden_size=16, num_layers=2, num_heads=2, initializer_range=0.3)
    loaded = load_model(path)
    model = RewardModel(loaded, ChatRenderer(loaded.tokenizer), Description())
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)))
    return model


@pytest.fixture
def model(tmp_path: Path) -> RewardModel:
    return make(tmp_path / "base")


def test_head_reads_the_end_of_turn(model: RewardModel) -> None:
    """FAILURES 167: the score is w . h at the end-of-turn id, as transformers' own forward pass gives it, whatever
    stands to its right, an end-of-turn id in the prompt notwithstanding."""
    messages: list[Message] = [*PROMPT, {"role": "assistant", "content": "what"}, {"role": "user", "content": "so"}]
    sample = model.sample(messages, "a reply")
    end = model.renderer.turn_end_id
    place = len(sample.ids) - 2
    assert sample.ids[place] == end and sample.ids[: sample.prefix_length].count(end) == 3
    [score] = model.score([sample])
    model.loaded.model.set_attn_implementation("sdpa")
    for padding in ([], [0, 0, 0], [end] * 5, [7, 8]):
        ids = torch.tensor([[*sample.ids[: place + 1], *padding]])
        with torch.no_grad():
            hidden = model.loaded.model.base_model(input_ids=ids).last_hidden_state[0, place]
        assert float(model.head(hidden).detach()) == pytest.approx(score, abs=1e-5)


def test_what_is_never_fed_does_not_matter(model: RewardModel) -> None:
    """The place behind the end-of-turn id only marks who predicts it."""
    from dataclasses import replace

    sample = model.sample(PROMPT, "a reply")
    assert model.score([replace(sample, ids=(*sample.ids[:-1], 3))]) == model.score([sample])
    row = pack([(0, sample)], share_prompts=True, dtype=torch.float32, device=torch.device("cpu"))
    assert row.num_tokens == len(sample.ids) - 1


def test_neighbours_do_not_matter(model: RewardModel) -> None:
    """F167, I4: alone, packed, in another order, with a shared prompt: the same score."""
    replies = ["", "a", "ab", "quite a long reply of the policy", "a"]
    samples = [model.sample(PROMPT, reply, row=i // 3, name=str(i)) for i, reply in enumerate(replies)]
    alone = [model.score([s])[0] for s in samples]
    assert len({round(score, 4) for score in alone}) == 4  # equal replies score equally, others differ
    for share in (True, False):
        assert model.score(samples, share_prompts=share) == pytest.approx(alone, abs=1e-5)
        assert model.score(samples[::-1], share_prompts=share)[::-1] == pytest.approx(alone, abs=1e-5)
    assert alone[1] == alone[4]


def test_folder_round_trip_without_pickle(model: RewardModel, tmp_path: Path) -> None:
    """A folder is safetensors and JSON; its backbone is a plain model that anybody loads."""
    probe = Probe(messages=tuple(PROMPT), chosen="yes", rejected="no", chosen_score=1.0, rejected_score=-1.0)
    model.description = Description(mean=0.5, std=2.0, probes=(probe,), training={"num_pairs": 3})
    model.save(tmp_path / "rm", export_model)
    assert {f.suffix for f in (tmp_path / "rm").iterdir()} <= {".json", ".safetensors", ".jinja"}
    loaded = load_reward_model(tmp_path / "rm")
    assert loaded.description == model.description
    samples = [model.sample(PROMPT, reply) for reply in ("one", "another")]
    assert loaded.score(samples) == model.score(samples)
    assert loaded.normalise(2.5) == 1.0
    assert not any(p.requires_grad for p in loaded.loaded.model.parameters())
    plain = load_model(tmp_path / "rm")
    assert not any("reward_head" in name for name, _ in plain.model.named_parameters())
    assert hasattr(model.loaded.model, "reward_head")  # saving put it back


def test_bad_folders_say_what_is_wrong(model: RewardModel, tmp_path: Path) -> None:
    with pytest.raises(RewardModelError, match="holds no reward model"):
        load_reward_model(tmp_path / "base")
    model.save(tmp_path / "rm", export_model)
    (tmp_path / "rm" / "reward_head.safetensors").unlink()
    with pytest.raises(RewardModelError, match="cannot be read"):
        load_reward_model(tmp_path / "rm")
    (tmp_path / "rm" / "reward_model.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(RewardModelError, match="not of schema version 1"):
        load_reward_model(tmp_path / "rm")
    (tmp_path / "rm" / "reward_model.json").write_text("{")
    with pytest.raises(RewardModelError, match="is not JSON"):
        load_reward_model(tmp_path / "rm")


def test_head_of_another_size_is_refused(model: RewardModel, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model.save(tmp_path / "rm", export_model)
    save_file({"weight": torch.zeros(1, 3)}, tmp_path / "rm" / "reward_head.safetensors")
    with pytest.raises(RewardModelError, match="do not belong together"):
        load_reward_model(tmp_path / "rm")
