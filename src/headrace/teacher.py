"""On-policy distillation in a run: ``[teacher]``.

The teacher scores the ids that the policy sampled, at the temperature (and within the kept ids) that they were sampled
from, once per rollout batch; the algorithm's distillation term does the rest (algorithms/streams.py). It is a frozen
model of its own in the process that plans batches, and it is never served.

Legend: T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import RunConfig, TrainerConfig
from headrace.errors import ConfigError
from headrace.model.head import output_head
from headrace.model.load import LoadedModel, load_model
from headrace.model.logprobs import token_logprobs
from headrace.model.packing import packed_rows
from headrace.model.paths import resolve_model_path
from headrace.types import RolloutBatch, Sample


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A loaded teacher, and how a run uses it."""

    loaded: LoadedModel
    trainer: TrainerConfig
    alone: bool
    """The teacher trains the policy, and the rewards do not."""

    @staticmethod
    def load(config: RunConfig, policy: LoadedModel) -> Teacher | None:
        """None where the run has none. Raises ConfigError for a model that does not fit the policy's."""
        if config.teacher is None:
            return None
        path = resolve_model_path(config.teacher.path)
        loaded = load_model(path, config.teacher.dtype, device=config.model.device)
        _check_fit(loaded, policy, config)
        loaded.model.requires_grad_(False)
        return Teacher(loaded=loaded, trainer=config.trainer, alone=config.teacher.stream == "distillation")

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The teacher's log-probabilities: for each sample float32 [T], 0 where the mask is 0."""
        model, share = self.loaded.model, self.trainer.share_prompts
        head = output_head(model, self.loaded.vocab_size)
        weight = next(model.parameters())
        out = [torch.zeros(len(sample.ids)) for sample in samples]
        limit = self.trainer.max_microbatch_tokens
        for row in packed_rows(samples, limit, share_prompts=share, dtype=weight.dtype, device=weight.device):
            logprobs_N, _ = token_logprobs(model, head, row, max_logit_tokens=self.trainer.max_logit_tokens)
            for index, logprobs_T in zip(row.indices, row.scatter(logprobs_N), strict=True):
                out[index] = logprobs_T
        return out

    def mark(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch, each sample with what the teacher thinks of its ids."""
        scored = self.score(batch.samples)
        marked = (replace(s, teacher_logprobs=tuple(t.tolist())) for s, t in zip(batch.samples, scored, strict=True))
        return replace(batch, samples=tuple(marked))

    def assign(self, plan: Sequence[Minibatch]) -> list[Minibatch]:
        """The minibatches of a marked batch, moved to the distillation stream where the teacher is alone."""
        if not self.alone:
            return list(plan)
        moved = [(m, tuple(replace(s, stream="distillation") for s in m.samples)) for m in plan]
        return [replace(m, samples=s, totals=Totals.count(s, m.totals.max_length)) for m, s in moved]


def _check_fit(teacher: LoadedModel, policy: LoadedModel, config: RunConfig) -> None:
    if teacher.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ConfigError(
            "teacher.path: its tokenizer is not the policy's, so ids mean other text to it; choose a teacher of the "
            "same family (distillation across tokenizers is not supported)"
        )
    needed = config.engine.max_context or policy.max_context
    if teacher.max_context < needed:
        raise ConfigError(
            f"teacher.path: the model allows {teacher.max_context} tokens, but prompt and reply may have {needed}; "
            "choose a teacher with a longer context, or lower engine.max_context"
        )
