"""The loop of training without rollouts: shuffled epochs, optimizer steps, validation, checkpoints, export.

Files of a run, in the folder of the same layout as a run of the loop::

    run.json        resolved configuration, data fingerprint, versions
    metrics.jsonl   one line for each optimizer step (``update`` = ``step``)
    ledger/         which lineage holds which steps, so that lines of a rolled-back one are not read
    checkpoints/    weights, optimizer, step
    export/         what came out, a Hugging Face folder; complete or not there
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from headrace.config.load import resolved
from headrace.config.offline import OfflineConfig
from headrace.control.ledger import Ledger
from headrace.errors import ConfigError
from headrace.model.load import LoadedModel, load_model
from headrace.model.memory import keep_large_buffers
from headrace.model.paths import resolve_model_path
from headrace.model.renderer import ChatRenderer, generation_eos_ids
from headrace.record.checkpoints import CheckpointStore
from headrace.record.files import fsync_folder
from headrace.record.ledger_store import LedgerStore
from headrace.record.metrics import MetricsWriter
from headrace.record.run_dir import RunDirectory, collect_run_info, read_run_info
from headrace.trainer.objectives import Objective
from headrace.trainer.offline import OfflineTrainer
from headrace.types import Sample

EXPORT_FOLDER = "export"
_MAY_CHANGE = ("checkpoint", "evaluation", "output_dir", "name")
"""Sections that a resumed run may state otherwise."""

Tell = Callable[[str], None]
Metrics = dict[str, float]


def say(text: str) -> None:
    """Print at once: a process that is killed takes along what waits in its buffer."""
    print(text, flush=True)


class Recipe(Protocol):
    """What one of the commands trains: built once its data was read and its model is there."""

    @property
    def examples(self) -> Sequence[tuple[Sample, ...]]:
        """Units of the optimizer steps: a conversation's samples, or both sides of a pair."""
        ...

    @property
    def objective(self) -> Objective: ...

    def prepare(self, trainer: OfflineTrainer) -> None:
        """What must be computed with the initial weights, before a checkpoint is restored."""
        ...

    def validate(self, trainer: OfflineTrainer) -> Metrics: ...

    def export(self, path: Path) -> Metrics:
        """Write what came out into the new folder ``path``; returns last metrics."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineResult:
    """What a run came to."""

    run_dir: Path
    export: Path
    num_steps: int
    stopped: bool
    """Ended by Ctrl-C or SIGTERM before its last step; nothing was exported."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last validation and the export."""
    first_metrics: Mapping[str, float] = field(default_factory=dict)
    """Of this process's first validation."""


def train_offline(
    config: OfflineConfig,
    make: Callable[[LoadedModel, ChatRenderer], Recipe],
    *,
    kind: str,
    fingerprint: str,
    resume: bool = False,
    tell: Tell = say,
) -> OfflineResult:
    """Train to the end, from the start or from the newest complete checkpoint. Everything that can be refused is
    refused before the run's folder is made. Raises HeadraceError and its kin for what the user can mend."""
    _check_folder(config, kind, fingerprint, resume)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.trainer.num_threads or cores)
    keep_large_buffers()
    path = resolve_model_path(config.model.path)
    loaded = load_model(path, config.model.dtype, lora=config.model.lora, seed=config.seed, device=config.model.device)
    renderer = ChatRenderer(loaded.tokenizer, config.model.chat_template, generation_eos_ids(path))
    recipe = make(loaded, renderer)
    per_epoch = -(-len(recipe.examples) // config.trainer.batch_size)
    num_steps = per_epoch * config.trainer.num_epochs
    if config.trainer.schedule.warmup_steps >= num_steps:
        raise ConfigError(
            f"trainer.schedule.warmup_steps = {config.trainer.schedule.warmup_steps}, but the run has {num_steps} "
            "optimizer steps: the full learning rate would never be reached"
        )
    trainer = OfflineTrainer(
        loaded,
        config.trainer,
        num_steps=num_steps,
        activation_checkpointing=config.model.activation_checkpointing,
        activation_budget_bytes=config.model.activation_budget_bytes,
    )
    run_dir = _open_folder(config, kind, fingerprint, resume)
    try:
        return _Run(config, run_dir, trainer, recipe, num_steps, tell).run()
    finally:
        run_dir.close()


class _Run:
    """One process's part of a run."""

    def __init__(
        self,
        config: OfflineConfig,
        run_dir: RunDirectory,
        trainer: OfflineTrainer,
        recipe: Recipe,
        num_steps: int,
        tell: Tell,
    ) -> None:
        self.config, self.run_dir, self.trainer, self.recipe = config, run_dir, trainer, recipe
        self.num_steps, self.tell = num_steps, tell
        recipe.prepare(trainer)
        self.checkpoints = CheckpointStore(run_dir.checkpoints_path, config.checkpoint.keep)
        latest = self.checkpoints.latest()
        if latest is not None:
            trainer.restore(latest.path)
        self.ledger = Ledger()
        self.ledger_store = LedgerStore(run_dir.ledger_path, self.ledger)
        lineage = self.ledger_store.open_lineage(trainer.step if self.ledger_store.num_replayed else None)
        self.metrics = MetricsWriter(run_dir.metrics_path, lineage)

    def run(self) -> OfflineResult:
        try:
            with _stop_on_signals() as stop:
                return self._run(stop)
        finally:
            self.metrics.close()
            self.ledger_store.close()

    def _run(self, stop: threading.Event) -> OfflineResult:
        trainer = self.trainer
        first = last = self._validate("at the start" if not trainer.step else f"resumed at step {trainer.step}")
        while trainer.step < self.num_steps and not stop.is_set():
            metrics = trainer.train_step(self._batch(trainer.step), self.recipe.objective)
            every = self.config.evaluation.every
            if trainer.step == self.num_steps or (every and trainer.step % every == 0):
                last = self._validate(f"step {trainer.step} of {self.num_steps}, loss {metrics['loss']:.4f}")
                metrics |= last
            self.metrics.log(trainer.step, trainer.step, {"time": time.time(), **metrics})
            if self.config.checkpoint.every and trainer.step % self.config.checkpoint.every == 0:
                self._checkpoint()
        trainer.check_finite()
        self._checkpoint()
        export = self.run_dir.path / EXPORT_FOLDER
        if trainer.step < self.num_steps:
            return OfflineResult(run_dir=self.run_dir.path, export=export, num_steps=trainer.step, stopped=True)
        last = last | self._export(export)
        return OfflineResult(
            run_dir=self.run_dir.path,
            export=export,
            num_steps=trainer.step,
            stopped=False,
            metrics=last,
            first_metrics=first,
        )

    def _batch(self, step: int) -> list[Sample]:
        """The samples of optimizer step ``step``: a function of seed and step alone, so that a resume goes on."""
        examples, size = self.recipe.examples, self.config.trainer.batch_size
        per_epoch = -(-len(examples) // size)
        epoch, place = divmod(step, per_epoch)
        order = list(range(len(examples)))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return [sample for i in order[place * size : (place + 1) * size] for sample in examples[i]]

    def _validate(self, what: str) -> Metrics:
        metrics = {f"eval/{name}": value for name, value in self.recipe.validate(self.trainer).items()}
        self.tell(f"{what}: " + ", ".join(f"{n.removeprefix('eval/')} {v:.4g}" for n, v in metrics.items()))
        return metrics

    def _checkpoint(self) -> None:
        step = self.trainer.step
        if self.ledger.committed_update == step:
            return
        self.ledger.cut(step)
        self.ledger_store.commit()
        with self.checkpoints.writing(step) as folder:
            self.trainer.save(folder)
            self.checkpoints.write_state(folder, {"step": step, "ledger": self.ledger_store.position})
        oldest = self.checkpoints.oldest()
        self.ledger.checkpoint(step, None if oldest is None else oldest.step)
        self.ledger_store.commit()

    def _export(self, path: Path) -> Metrics:
        """Aside, then renamed: an export is complete or not there."""
        aside = path.with_name(f"{path.name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        metrics = self.recipe.export(aside)
        if path.exists():
            shutil.rmtree(path)
        aside.rename(path)
        fsync_folder(path.parent)
        return metrics


# -------------------------------------------------------------------------------------------------- folder


def _check_folder(config: OfflineConfig, kind: str, fingerprint: str, resume: bool) -> None:
    """Whether the folder is free, or holds the very run that is to go on."""
    file = config.run_dir / "run.json"
    if not resume:
        if file.exists():
            raise ConfigError(
                f"{config.run_dir} holds a run already; go on with --resume, or choose another name or output_dir"
            )
        return
    recorded, now = read_run_info(config.run_dir), resolved(config)
    if recorded.get("kind") != kind:
        raise ConfigError(f"{config.run_dir} is no run of headrace {kind}, so it cannot go on as one")
    if recorded["dataset_fingerprints"] != {"rows": fingerprint}:
        raise ConfigError(
            f"the rows are not those that the run in {config.run_dir} was started with (fingerprints differ): bring "
            "the old ones back, or start a new run"
        )
    for key in sorted({*now, *recorded["config"]} - {*_MAY_CHANGE}):
        if now.get(key) != recorded["config"].get(key):
            raise ConfigError(
                f"{key} is {now.get(key)} here and {recorded['config'].get(key)} in the run in {config.run_dir}: what "
                "is trained cannot change when a run goes on"
            )


def _open_folder(config: OfflineConfig, kind: str, fingerprint: str, resume: bool) -> RunDirectory:
    if resume:
        return RunDirectory.open(config.run_dir)
    info = collect_run_info(
        name=config.name,
        config=resolved(config),
        seeds={"run": config.seed},
        dataset_fingerprints={"rows": fingerprint},
        extra={"kind": kind},
    )
    return RunDirectory.create(config.run_dir, info)


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """The first Ctrl-C or SIGTERM (a time limit's) lets the running step finish and checkpoints; the second is what it
    was before."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(number: int, _: Any) -> None:
        stop.set()
        text = f"{signal.Signals(number).name}: stopping after the step in progress; once more to leave at once\n"
        os.write(2, text.encode())  # print() fails where the signal came in the middle of another print()
        for each in numbers:
            signal.signal(each, before[each])

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, before[number])
