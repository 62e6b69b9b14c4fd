"""``headrace reward-model``: a reward model from preference pairs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.config.offline import RewardModelConfig, check_offline
from headrace.environments.preferences import Pair, read_pairs
from headrace.model.load import LoadedModel
from headrace.model.renderer import ChatRenderer
from headrace.model.replies import check_length
from headrace.model.reward_model import Description, Probe, RewardModel, with_statistics
from headrace.offline.calibration import calibrate, write_calibration
from headrace.offline.pairs import content_free_pairs, pair_accuracy, pair_samples
from headrace.offline.run import Metrics, OfflineResult, Tell, say, train_offline
from headrace.trainer.export import export_model
from headrace.trainer.objectives import BradleyTerry
from headrace.trainer.offline import OfflineTrainer
from headrace.types import Sample

NUM_PROBES = 16
NUM_FOR_STATISTICS = 1024
"""Training pairs whose scores give mean and standard deviation."""


def train_reward_model(config: RewardModelConfig, *, resume: bool = False, tell: Tell = say) -> OfflineResult:
    """Train as ``config`` says; the reward model is exported to ``<run>/export``, its calibration beside it."""
    check_offline(config)
    rows = read_pairs(config.data)

    def make(loaded: LoadedModel, renderer: ChatRenderer) -> Preferences:
        return Preferences(config, loaded, renderer, rows.train, rows.held_out[: config.evaluation.max_examples])

    return train_offline(config, make, kind="reward-model", fingerprint=rows.fingerprint, resume=resume, tell=tell)


class Preferences:
    """The recipe: one example is a pair."""

    def __init__(
        self,
        config: RewardModelConfig,
        loaded: LoadedModel,
        renderer: ChatRenderer,
        train: Sequence[Pair],
        held_out: Sequence[Pair],
    ) -> None:
        self._config, self._train, self._held_out = config, train, held_out
        description = Description(chat_template=config.model.chat_template, dtype=config.model.dtype)
        self.model = RewardModel(loaded, renderer, description)
        extra = content_free_pairs(train, config.bradley_terry.content_free_share, config.seed)
        pairs = [*train, *extra]
        self.examples = pair_samples(pairs, self._sample)
        self._held_out_samples = pair_samples(held_out, self._sample, len(pairs))
        every = [*zip(pairs, self.examples, strict=True), *zip(held_out, self._held_out_samples, strict=True)]
        self.objective = BradleyTerry(
            model=self.model,
            margins={samples[0].key: pair.margin for pair, samples in every},
            centre_coefficient=config.bradley_terry.centre_coefficient,
        )

    def _sample(self, pair: Pair, reply: str, row: int, name: str) -> Sample:
        sample = self.model.sample(pair.messages, reply, row=row, name=name)
        check_length([sample], self.model.loaded.max_context, pair.where)
        return sample

    def prepare(self, trainer: OfflineTrainer) -> None:
        """Nothing: the loss needs no other model."""

    def _differences(self) -> list[float]:
        scores = self.model.score([s for pair in self._held_out_samples for s in pair])
        return [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]

    def validate(self, trainer: OfflineTrainer) -> Metrics:
        """Accuracy on held-out pairs with its interval by prompt, loss, and calibration error."""
        differences = self._differences()
        accuracy = pair_accuracy(self._held_out, differences)
        measured = trainer.measure([s for pair in self._held_out_samples for s in pair], self.objective)
        return {
            "accuracy": accuracy.mean,
            "accuracy_low": accuracy.low,
            "accuracy_high": accuracy.high,
            "pair_loss": measured["pair_loss"],
            "ece": calibrate(differences).ece,
        }

    def export(self, path: Path) -> Metrics:
        """The folder that reward type ``reward_model`` loads."""
        calibration = calibrate(self._differences())
        accuracy = pair_accuracy(self._held_out, self._differences())
        drawn = self.examples[: len(self._train)]
        if len(drawn) > NUM_FOR_STATISTICS:
            drawn = random.Random(f"statistics/{self._config.seed}").sample(drawn, NUM_FOR_STATISTICS)
        scores = self.model.score([s for pair in drawn for s in pair])
        training = {
            "base": self._config.model.path,
            "num_pairs": len(self._train),
            "held_out_accuracy": [accuracy.mean, accuracy.low, accuracy.high],
            "ece": calibration.ece,
        }
        description = with_statistics(replace(self.model.description, training=training), scores)
        self.model.description = replace(description, probes=self._probes())
        self.model.save(path, export_model)
        write_calibration(calibration, path)
        return {"score_mean": description.mean, "score_std": description.std}

    def _probes(self) -> tuple[Probe, ...]:
        """Held-out pairs with their scores, each computed alone, as a serving process will."""
        pairs = self._held_out[:NUM_PROBES]
        chosen = self.model.score_texts([(p.messages, p.chosen) for p in pairs])
        rejected = self.model.score_texts([(p.messages, p.rejected) for p in pairs])
        return tuple(
            Probe(messages=p.messages, chosen=p.chosen, rejected=p.rejected, chosen_score=c, rejected_score=r)
            for p, c, r in zip(pairs, chosen, rejected, strict=True)
        )
