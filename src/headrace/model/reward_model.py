"""A reward model: a language model's backbone and a linear head that reads its last token, the end of the turn.

The score of a reply is w . h, with h the final hidden state (after the last norm) at the end-of-turn id that is put
behind the reply in training and in serving alike, found by its place and never by its value. Rows are packed without
padding, so there is none to read from (FAILURES 167).

A folder holds the backbone as a plain Hugging Face model, the head (safetensors) and a description (JSON); nothing in
it is ever unpickled.

Legend: D model, S replies of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.model.load import LoadedModel, load_model
from headrace.model.packing import PackedRow, packed_rows
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.model.replies import reply_ids, written_sample
from headrace.types import AttemptKey, Message, Sample

HEAD_NAME = "reward_head"
"""The head is a submodule of the model, so that optimizer and checkpoints see it as one of its weights."""
HEAD_FILE = "reward_head.safetensors"
DESCRIPTION_FILE = "reward_model.json"
SCHEMA_VERSION = 1
MAX_ROW_TOKENS = 8192


class RewardModelError(HeadraceError):
    """A folder that holds no reward model, or one that does not do what it did when it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt with two replies and the scores that they had when the model was written."""

    messages: tuple[Message, ...]
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What stands beside the weights. ``mean`` and ``std``: of the scores of the training replies."""

    mean: float = 0.0
    std: float = 1.0
    chat_template: str | None = None
    dtype: str = "float32"
    probes: tuple[Probe, ...] = ()
    training: dict[str, Any] | None = None
    """Where it comes from, for a person."""


class RewardModel:
    """Scores replies to messages.

    Example::

        model = load_reward_model(Path("runs/rm/export"))
        [score] = model.score([model.sample(messages, "a reply")])
    """

    def __init__(self, loaded: LoadedModel, renderer: ChatRenderer, description: Description) -> None:
        """Puts a head of zeros onto ``loaded.model``. The head is float32, and so its own master."""
        self.loaded = loaded
        self.renderer = renderer
        self.description = description
        size = int(loaded.model.config.get_text_config().hidden_size)
        embedding = next(loaded.model.parameters())
        dtype = torch.promote_types(embedding.dtype, torch.float32)
        self.head = torch.nn.Linear(size, 1, bias=False, dtype=dtype, device=embedding.device)
        torch.nn.init.zeros_(self.head.weight)
        loaded.model.add_module(HEAD_NAME, self.head)

    def sample(self, messages: Sequence[Message], reply: str, *, row: int = 0, name: str = "0") -> Sample:
        """The reply as a sample whose only trained place stands behind its end-of-turn id, which so is what predicts
        it. What stands there is never fed."""
        prompt = self.renderer.render(messages)
        ids = (*prompt, *reply_ids(self.renderer, reply), self.renderer.turn_end_id)
        mask = (0,) * (len(ids) - 1) + (1,)
        return written_sample(ids, mask, key=AttemptKey(row, 0), name=name, prefix_length=len(prompt))

    def score_row(self, row: PackedRow) -> Tensor:
        """[S]: scores of ``row.samples``, in their order, with gradient."""
        hidden_1TD = self.loaded.model.base_model(
            input_ids=row.ids_1T, position_ids=row.positions_1T, layout=row.layout, use_cache=False
        ).last_hidden_state
        hidden_SD = hidden_1TD[0].index_select(0, row.predictor_U[row.row_N])
        scores_S1: Tensor = self.head(hidden_SD.to(self.head.weight.dtype))
        return scores_S1[:, 0]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, share_prompts: bool = True) -> list[float]:
        """Raw scores, in the samples' order."""
        scores = [0.0] * len(samples)
        weight = next(self.loaded.model.parameters())
        rows = packed_rows(
            samples, MAX_ROW_TOKENS, share_prompts=share_prompts, dtype=weight.dtype, device=weight.device
        )
        for row in rows:
            for index, score in zip(row.indices, self.score_row(row).tolist(), strict=True):
                scores[index] = score
        return scores

    def score_texts(self, texts: Sequence[tuple[Sequence[Message], str]]) -> list[float]:
        """Raw scores of (messages, reply), each computed in a row of its own."""
        return [self.score([self.sample(messages, reply)])[0] for messages, reply in texts]

    def normalise(self, score: float) -> float:
        """In standard deviations of the training replies, around their mean."""
        return (score - self.description.mean) / self.description.std

    def save(self, path: Path, export: Callable[[LoadedModel, Path], None]) -> None:
        """Write the folder ``path``. ``export(loaded, path)`` writes the backbone: the trainer's room knows how."""
        del self.loaded.model._modules[HEAD_NAME]
        try:
            export(self.loaded, path)
        finally:
            self.loaded.model.add_module(HEAD_NAME, self.head)
        save_file({"weight": self.head.weight.detach().contiguous()}, path / HEAD_FILE)
        data = {"schema_version": SCHEMA_VERSION, **asdict(self.description)}
        (path / DESCRIPTION_FILE).write_text(json.dumps(data, indent=1), encoding="utf-8")


def read_description(path: Path) -> Description:
    """The description of the folder ``path``, without loading its model. Raises RewardModelError."""
    try:
        data = json.loads((path / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RewardModelError(
            f"{path} holds no reward model (no {DESCRIPTION_FILE}); train one with: headrace reward-model"
        ) from error
    except ValueError as error:
        raise RewardModelError(f"{path / DESCRIPTION_FILE} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("schema_version", None) != SCHEMA_VERSION:
        raise RewardModelError(f"{path / DESCRIPTION_FILE} is not of schema version {SCHEMA_VERSION}")
    probes = tuple(Probe(**{**p, "messages": tuple(p["messages"])}) for p in data.pop("probes"))
    return Description(probes=probes, **data)


def load_reward_model(path: Path) -> RewardModel:
    """Load what :meth:`RewardModel.save` wrote, frozen. Raises RewardModelError or ModelError."""
    description = read_description(path)
    loaded = load_model(path, description.dtype)
    renderer = ChatRenderer(loaded.tokenizer, description.chat_template, generation_eos_ids(path))
    model = RewardModel(loaded, renderer, description)
    try:
        weight = load_file(path / HEAD_FILE)["weight"]
    except (OSError, KeyError) as error:
        raise RewardModelError(f"{path / HEAD_FILE} cannot be read: {error}") from error
    if weight.shape != model.head.weight.shape:
        raise RewardModelError(
            f"{path / HEAD_FILE} has a head of shape {tuple(weight.shape)} for a model that needs "
            f"{tuple(model.head.weight.shape)}: the files do not belong together"
        )
    with torch.no_grad():
        model.head.weight.copy_(weight)
    loaded.model.requires_grad_(False)
    return model


def with_statistics(description: Description, scores: Sequence[float]) -> Description:
    """``description`` with mean and standard deviation of ``scores``."""
    values = torch.tensor(scores, dtype=torch.float64)
    std = float(values.std(unbiased=False))
    return replace(description, mean=float(values.mean()), std=std if std > 0 else 1.0)
