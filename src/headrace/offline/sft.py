"""``headrace sft``: supervised fine-tuning on conversations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.config.offline import SftConfig, check_offline
from headrace.environments.preferences import Conversation, read_conversations
from headrace.evaluation.statistics import accuracy_interval
from headrace.model.head import output_head
from headrace.model.load import LoadedModel
from headrace.model.logprobs import token_logprobs
from headrace.model.renderer import ChatRenderer
from headrace.model.replies import Weighted, check_length, conversation_samples
from headrace.offline.run import Metrics, OfflineResult, Tell, say, train_offline
from headrace.trainer.export import export_model
from headrace.trainer.objectives import CrossEntropy
from headrace.trainer.offline import OfflineTrainer
from headrace.types import Sample


def train_sft(config: SftConfig, *, resume: bool = False, tell: Tell = say) -> OfflineResult:
    """Fine-tune as ``config`` says; the model is exported to ``<run>/export``."""
    check_offline(config)
    rows = read_conversations(config.data)

    def make(loaded: LoadedModel, renderer: ChatRenderer) -> Supervised:
        return Supervised(config, loaded, renderer, rows.train, rows.held_out[: config.evaluation.max_examples])

    return train_offline(config, make, kind="sft", fingerprint=rows.fingerprint, resume=resume, tell=tell)


class Supervised:
    """The recipe: one example is a conversation, which is one sample or several."""

    def __init__(
        self,
        config: SftConfig,
        loaded: LoadedModel,
        renderer: ChatRenderer,
        train: Sequence[Conversation],
        held_out: Sequence[Conversation],
    ) -> None:
        self._loaded = loaded
        self._max_logit_tokens = config.trainer.max_logit_tokens
        self._weights: dict[str, Tensor] = {}
        self.examples = [self._samples(renderer, c, row) for row, c in enumerate(train)]
        self._held_out = [self._samples(renderer, c, len(train) + row) for row, c in enumerate(held_out)]
        self.objective = CrossEntropy(loaded=loaded, weights=self._weights, max_logit_tokens=self._max_logit_tokens)

    def _samples(self, renderer: ChatRenderer, conversation: Conversation, row: int) -> tuple[Sample, ...]:
        weighted: list[Weighted] = conversation_samples(renderer, conversation.messages, conversation.weights, row)
        samples = tuple(w.sample for w in weighted)
        check_length(samples, self._loaded.max_context, conversation.where)
        self._weights.update({w.sample.id: w.weight_T for w in weighted})
        return samples

    def prepare(self, trainer: OfflineTrainer) -> None:
        """Nothing: the loss needs no other model."""

    @torch.no_grad()
    def validate(self, trainer: OfflineTrainer) -> Metrics:
        """Nats a trained token on held-out conversations, whatever their weights, with an interval by conversation."""
        place = {s.id: i for i, samples in enumerate(self._held_out) for s in samples}
        losses: list[list[float]] = [[] for _ in self._held_out]
        head = output_head(self._loaded.model, self._loaded.vocab_size)
        for row in trainer.rows([s for samples in self._held_out for s in samples]):
            logprobs_N, _ = token_logprobs(self._loaded.model, head, row, max_logit_tokens=self._max_logit_tokens)
            for sample, part in zip(row.samples, torch.split(logprobs_N, list(row.num_N)), strict=True):
                losses[place[sample.id]] += (-part.double()).tolist()
        interval = accuracy_interval(losses, is_share=False)
        return {"nll": interval.mean, "nll_low": interval.low, "nll_high": interval.high}

    def export(self, path: Path) -> Metrics:
        export_model(self._loaded, path)
        return {}
