"""``headrace dpo``: direct preference optimisation, the baseline without rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from headrace.config.offline import DpoConfig, check_offline
from headrace.environments.preferences import Pair, read_pairs
from headrace.errors import ConfigError
from headrace.model.load import LoadedModel
from headrace.model.renderer import ChatRenderer
from headrace.model.replies import check_length, reply_ids, written_sample
from headrace.offline.pairs import pair_accuracy, pair_samples
from headrace.offline.run import Metrics, OfflineResult, Tell, say, train_offline
from headrace.trainer.export import export_model
from headrace.trainer.objectives import Dpo, reply_logprobs
from headrace.trainer.offline import OfflineTrainer
from headrace.types import AttemptKey, Sample


def train_dpo(config: DpoConfig, *, resume: bool = False, tell: Tell = say) -> OfflineResult:
    """Train as ``config`` says; the model is exported to ``<run>/export``."""
    check_offline(config)
    rows = read_pairs(config.data)
    with_margin = next((p for p in rows.train if p.margin), None)
    if with_margin is not None:
        raise ConfigError(f"{with_margin.where}: margin has no effect in DPO; leave it out, or train a reward model")

    def make(loaded: LoadedModel, renderer: ChatRenderer) -> DirectPreference:
        return DirectPreference(config, loaded, renderer, rows.train, rows.held_out[: config.evaluation.max_examples])

    return train_offline(config, make, kind="dpo", fingerprint=rows.fingerprint, resume=resume, tell=tell)


class DirectPreference:
    """The recipe: one example is a pair. The reference is the start, whose log-probabilities are computed once."""

    def __init__(
        self,
        config: DpoConfig,
        loaded: LoadedModel,
        renderer: ChatRenderer,
        train: Sequence[Pair],
        held_out: Sequence[Pair],
    ) -> None:
        self._loaded, self._held_out = loaded, held_out
        self._renderer = renderer
        self._max_logit_tokens = config.trainer.max_logit_tokens
        self.examples = pair_samples(train, self._sample)
        self._held_out_samples = pair_samples(held_out, self._sample, len(train))
        self._reference: dict[str, float] = {}
        self.objective = Dpo(
            loaded=loaded,
            reference=self._reference,
            beta=config.dpo.beta,
            label_smoothing=config.dpo.label_smoothing,
            max_logit_tokens=self._max_logit_tokens,
        )

    def _sample(self, pair: Pair, reply: str, row: int, name: str) -> Sample:
        prompt, ids = self._renderer.render(pair.messages), reply_ids(self._renderer, reply)
        mask = (0,) * len(prompt) + (1,) * len(ids)
        sample = written_sample((*prompt, *ids), mask, key=AttemptKey(row, 0), name=name, prefix_length=len(prompt))
        check_length([sample], self._loaded.max_context, pair.where)
        return sample

    def prepare(self, trainer: OfflineTrainer) -> None:
        """Log-probabilities of every reply under the start."""
        pairs = (*self.examples, *self._held_out_samples)
        self._reference.update(self._reply_logprobs(trainer, [s for pair in pairs for s in pair]))

    @torch.no_grad()
    def _reply_logprobs(self, trainer: OfflineTrainer, samples: Sequence[Sample]) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in trainer.rows(samples):
            values = reply_logprobs(self._loaded, row, self._max_logit_tokens).tolist()
            found.update(zip((s.id for s in row.samples), values, strict=True))
        return found

    def validate(self, trainer: OfflineTrainer) -> Metrics:
        """Share of held-out pairs whose implicit reward ranks them right, with its interval by prompt."""
        samples = [s for pair in self._held_out_samples for s in pair]
        now = self._reply_logprobs(trainer, samples)
        gained = {s.id: now[s.id] - self._reference[s.id] for s in samples}
        differences = [gained[chosen.id] - gained[rejected.id] for chosen, rejected in self._held_out_samples]
        accuracy = pair_accuracy(self._held_out, differences)
        measured = trainer.measure(samples, self.objective)
        return {
            "accuracy": accuracy.mean,
            "accuracy_low": accuracy.low,
            "accuracy_high": accuracy.high,
            "pair_loss": measured["pair_loss"],
            "margin": measured["margin"],
            "chosen_gain": sum(gained[chosen.id] for chosen, _ in self._held_out_samples) / len(self._held_out),
        }

    def export(self, path: Path) -> Metrics:
        export_model(self._loaded, path)
        return {}
