"""What a run says about itself after each rollout batch: metrics line, episodes, spans, health, progress, sinks.

Files are the truth and come first; sinks and the terminal get copies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch
from headrace.algorithms.values import explained_variance
from headrace.control.ledger import Ledger
from headrace.control.watchdog import Watchdog
from headrace.errors import HeadraceError
from headrace.monitor.batch_metrics import batch_metrics
from headrace.monitor.fanout import FanOut
from headrace.monitor.health import HealthMonitor
from headrace.monitor.progress import Progress
from headrace.protocols import Engine, EngineStats, Fleet, Reward
from headrace.record.episodes import EpisodeWriter, episode_record
from headrace.record.metrics import MetricsWriter, read_metrics
from headrace.record.spans import SpanWriter
from headrace.trainer.memory import MemoryUse, memory_metrics, memory_text
from headrace.types import AttemptKey, Episode, RolloutBatch, Sample, ScoreError

_TRAIN = frozenset({"loss", "grad_norm", "learning_rate", "num_skipped_samples", "num_empty_steps", "num_samples"})
_RENAMED = {
    "entropy": "policy/entropy_mean",
    "num_trained_tokens": "train/num_tokens",
    "policy/clipped_low": "policy/clip_low_share",
    "policy/clipped_high": "policy/clip_high_share",
    "policy/dual_clipped": "policy/dual_clip_share",
}


class HealthError(HeadraceError):
    """A health check says that going on would be worse than stopping."""


def named_train_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The trainer's and the algorithm's names, put into the namespaces of metrics.jsonl."""
    named: dict[str, float] = {}
    for name, value in metrics.items():
        if name in _RENAMED:
            named[_RENAMED[name]] = value
        elif "/" in name:
            named[name] = value
        else:
            named[f"{'train' if name in _TRAIN else 'policy'}/{name}"] = value
    return named


class TrainRecord:
    """What the optimizer steps of one rollout batch say: metrics over all of them, and per sample what the first
    pass over it computed."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.batch = batch
        self.advantages: dict[str, Tensor] = {}
        self.logprobs: dict[str, Tensor] = {}
        self._values: dict[str, list[float]] = {}
        self._critic: dict[str, tuple[Tensor, Tensor]] = {}
        """Per sample: values at behaviour time and value targets, of the trained tokens."""

    def add(self, minibatch: Minibatch, metrics: Mapping[str, float], logprobs: Mapping[str, Tensor]) -> None:
        for sample, advantages_T in zip(minibatch.samples, minibatch.advantages, strict=True):
            self.advantages.setdefault(sample.id, advantages_T)
        if minibatch.values is not None and minibatch.value_targets is not None:
            for sample, value_T, target_T in zip(
                minibatch.samples, minibatch.values, minibatch.value_targets, strict=True
            ):
                trained_T = torch.tensor(sample.mask, dtype=torch.bool) & (sample.stream == "rl")
                self._critic.setdefault(sample.id, (value_T[trained_T], target_T[trained_T]))
        self.logprobs = {**logprobs, **self.logprobs}
        self.add_step(metrics)

    def add_step(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def metrics(self) -> dict[str, float]:
        """Named for metrics.jsonl: counts are summed over the steps, of maxima and 99th percentiles the largest counts,
        the rest is averaged."""
        merged: dict[str, float] = {}
        for name, values in self._values.items():
            if name.rpartition("/")[2].startswith("num_"):
                merged[name] = sum(values)
            elif "max" in name or name.endswith("_p99"):
                merged[name] = max(values)
            else:
                merged[name] = fmean(values)
        largest = max((float(a.abs().max()) for a in self.advantages.values() if len(a)), default=0.0)
        return named_train_metrics(merged) | self._critic_metrics() | {"train/advantage_max_abs": largest}

    def _critic_metrics(self) -> dict[str, float]:
        """How well the values of behaviour time foretold the returns, over the whole batch."""
        values_N = torch.cat([value for value, _ in self._critic.values()]) if self._critic else torch.empty(0)
        if not len(values_N):
            return {}
        targets_N = torch.cat([target for _, target in self._critic.values()])
        named = {"critic/value_mean": float(values_N.mean()), "critic/return_mean": float(targets_N.mean())}
        explained = explained_variance(values_N, targets_N)
        return named if explained is None else named | {"critic/explained_variance": explained}


class Reporter:
    """Writes what is known about a batch. The loop's thread owns it."""

    def __init__(
        self,
        lineage: int,
        *,
        metrics: MetricsWriter,
        episodes: EpisodeWriter,
        spans: SpanWriter,
        sinks: FanOut,
        health: HealthMonitor,
        progress: Progress,
        engine: Engine,
        reward: Reward,
        watchdog: Watchdog,
    ) -> None:
        self._lineage = lineage
        self._metrics = metrics
        self._episodes = episodes
        self._spans = spans
        self._sinks = sinks
        self._health = health
        self._progress = progress
        self._engine = engine
        self._reward = reward
        self._watchdog = watchdog
        self._last_stats = engine.stats()
        self._memory: dict[str, Any] = {}
        """Goes into the next line."""

    def remember(self, run_path: Path, up_to_update: int) -> None:
        """Feed the health checks what a resumed run had recorded, so that their references reach back."""
        for line in read_metrics(run_path):
            if line["update"] <= up_to_update:
                self._health.update({**line, "step": line["update"]})

    def episode_ended(self, episode: Episode) -> None:
        """Put its generation and its environment on the timeline."""
        self._spans.add(
            "engine", "episode", episode.started_s, episode.ended_s, group=episode.key.group, member=episode.key.member
        )

    def not_trained(self, episodes: Sequence[Episode], status: str, update: int) -> None:
        """Record episodes that were dropped or failed; ``update`` is the one that was being gathered."""
        for episode in episodes:
            self._episodes.add(episode_record(episode, lineage=self._lineage, update=update, status=status))

    def trained(self, record: TrainRecord) -> None:
        """Record the episodes of a trained batch, token by token. A sample whose pass was skipped has no trainer
        log-probabilities."""
        batch = record.batch
        by_key: dict[AttemptKey, list[Sample]] = {}
        for sample in batch.samples:
            by_key.setdefault(sample.key, []).append(sample)
        for episode in batch.episodes:
            if not episode.is_scored:
                continue  # recorded when it failed
            samples = by_key.get(episode.key, [])
            is_scored = all(s.id in record.logprobs for s in samples)
            self._episodes.add(
                episode_record(
                    episode,
                    lineage=self._lineage,
                    update=batch.index + 1,
                    status="trained",
                    samples=samples,
                    advantages=[record.advantages[s.id].tolist() for s in samples],
                    trainer_logprobs=[record.logprobs[s.id].tolist() for s in samples] if is_scored else None,
                )
            )

    def memory(self, uses: Sequence[MemoryUse], step: int, *, moments_are_new: bool) -> None:
        """Tell what the processes have needed at their peaks: see ``memory_text``."""
        self._progress.note(memory_text(uses, step, moments_are_new=moments_are_new))
        self._memory = memory_metrics(uses)

    def batch(
        self,
        batch: RolloutBatch,
        attempted: Sequence[Episode],
        extra: Mapping[str, float],
        ledger: Ledger,
        optimizer_step: int,
    ) -> None:
        """Close the books on a batch: its metrics line, and what everybody makes of it. Raises HealthError where a
        check says stop."""
        update = batch.index + 1
        metrics: dict[str, Any] = {"time": time.time()}
        metrics |= batch_metrics(batch, attempted=attempted, success_threshold=self._reward.value_range[1])
        metrics |= extra
        metrics |= self._rates(extra)
        metrics |= self._waits()
        metrics |= self._memory
        self._memory = {}
        metrics |= {f"ledger/{name}": float(count) for name, count in ledger.summary().items()}
        alarms = self._health.update({**metrics, "step": update})
        metrics["health/alarms"] = [str(alarm) for alarm in alarms]
        metrics |= self._sinks.metrics()
        self._episodes.commit()
        self._spans.commit()
        self._metrics.log(update, optimizer_step, metrics)
        self._sinks.log(update, metrics)
        self._progress.update({**metrics, "step": update})
        for alarm in alarms:
            if alarm.level == "stop":
                raise HealthError(f"health check '{alarm.name}' stops the run at batch {update}: {alarm.message}")

    def _rates(self, times: Mapping[str, float]) -> dict[str, float]:
        """Tokens per second of each phase, over the seconds in which that phase computed."""
        before, now = self._last_stats, self._engine.stats()
        self._last_stats = now
        decode_s = _since(now, before, "decode_s") + _since(now, before, "prefill_s")
        generated = _since(now, before, "num_generated_tokens")
        rates = {"time/generation_s": decode_s, "rollout/num_generated_tokens": generated}
        if decode_s > 0:
            rates["rate/generated_tokens_per_s"] = generated / decode_s
        train_s = times.get("time/train_s", 0.0)
        if train_s > 0:
            num_tokens = times.get("train/num_tokens", 0.0) + times.get("supervised/num_tokens", 0.0)
            rates["rate/trained_tokens_per_s"] = num_tokens / train_s
        step_s = times.get("time/step_s", 0.0)
        if step_s > 0:
            rates["rate/samples_per_s"] = times.get("train/num_samples", 0.0) / step_s
            rates["idle/trainer_s"] = times.get("time/gather_s", 0.0)
            rates |= self._idle_engines(step_s, decode_s)
        return rates

    def _idle_engines(self, step_s: float, busy_s: float) -> dict[str, float]:
        """Seconds of the batch in which an engine computed nothing, for each of a fleet."""
        if not isinstance(self._engine, Fleet):
            return {"idle/engine_s": max(0.0, step_s - busy_s)}
        found = dict(self._engine.batch_metrics())
        busy = {name: found[name] for name in found if name.startswith("busy/")}
        idle = {name.replace("busy/", "idle/"): max(0.0, step_s - value) for name, value in busy.items()}
        return found | idle

    def _waits(self) -> dict[str, float]:
        """Who waited on whom since the last batch; what went on at the same time is added up."""
        waited_s = self._watchdog.take_waited_s().items()
        return {f"wait/{waiter}_on_{on.replace(' ', '_')}_s": seconds for (waiter, on), seconds in sorted(waited_s)}


def _since(now: EngineStats, before: EngineStats, name: str) -> float:
    return float(getattr(now, name) - getattr(before, name))


def failure_class(episode: Episode) -> str:
    """How the ledger names a failed attempt: its outcome, or the class of its reward's error."""
    if isinstance(episode.score, ScoreError):
        return f"score_{episode.score.error_class.value}"
    return episode.outcome.value
