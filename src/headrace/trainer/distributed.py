"""The trainer of several processes: the verbs of ``PolicyTrainer``, called by every process with the same arguments.

What each process does alone is its data rank's share of the rows (``balance.py``) through its part of the model
(``model/parallel``). What comes back is global and alike everywhere: metrics, log-probabilities, norm, errors.
Denominators are the minibatch's totals, so gradients are summed, never averaged (F54).

Legend: T tokens of a sample, N trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.algorithms.fields import LossOutput, Minibatch
from headrace.config.schema import TrainerConfig
from headrace.model.load import DTYPES, LoadedModel
from headrace.model.packing import PackedRow, empty_row, fitted, pack
from headrace.model.parallel.apply import parallelize, parallelize_frozen
from headrace.model.parallel.forecast import Pass
from headrace.model.parallel.mesh import ParallelMesh
from headrace.model.parallel.stage import PolicyStage
from headrace.model.parallel.state import whole_tensors
from headrace.model.routing import RouterLoad
from headrace.protocols import Algorithm, WeightUpdate
from headrace.trainer.balance import check_same_samples, microbatches, share_out
from headrace.trainer.memory import MemoryGauge, MemoryUse
from headrace.trainer.metrics import MinibatchMetrics
from headrace.trainer.passes import kept_gradients, score_rows, train_rows
from headrace.trainer.recompute import recompute_activations
from headrace.trainer.routers import Routers
from headrace.trainer.schedule import learning_rate
from headrace.trainer.sharded_checkpoint import load_shards, save_shards
from headrace.trainer.shards import ShardedWeights
from headrace.trainer.trainer import _add_token_metrics, _fields, _select, _skipped
from headrace.trainer.weights import NonFiniteError, read_state, write_state
from headrace.types import PolicyVersion, Sample


class ParallelTrainer:
    """Implements ``protocols.Trainer`` over several processes.

    Every process builds it with the same model and calls the same verbs in the same order.

    Example::

        join_processes(rank=rank, num_processes=4, address="localhost:29500", deadline_s=600)
        mesh = ParallelMesh.create(config.parallel)
        trainer = ParallelTrainer(loaded, config.trainer, mesh, num_steps=100)
        trainer.forward_backward(minibatch, algorithm)      # the whole minibatch
        trainer.optim_step()
        version = trainer.publish().version
        for tensors in trainer.publish_buckets():           # full weights, never all of them at once
            send(tensors)
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: TrainerConfig,
        mesh: ParallelMesh,
        *,
        num_steps: int,
        with_reference: bool = False,
        activation_checkpointing: bool = False,
        activation_budget_bytes: int | None = None,
        lineage: int = 0,
        beside: str = "",
    ) -> None:
        """See ``PolicyTrainer``. ``loaded`` is split in place: its model is of no other use afterwards."""
        self._config = config
        self._mesh = mesh
        self._num_steps = num_steps
        self._dtype = DTYPES[loaded.dtype]
        self._routers = Routers.of(loaded.model, config)  # before a stage keeps its own only
        limit = config.max_logit_tokens
        work = Pass(
            num_tokens=config.max_microbatch_tokens,
            max_logit_tokens=limit,
            dtype=loaded.dtype,
            activation_checkpointing=activation_checkpointing,
            activation_budget_bytes=activation_budget_bytes,
            with_reference=with_reference,
            num_rows=max(2, mesh.config.pp),
        )
        self._gauge = MemoryGauge(loaded, work, mesh.config, stage=mesh.rank("pp"), not_counted=beside)
        self._reference = parallelize_frozen(loaded, mesh, max_logit_tokens=limit) if with_reference else None
        model = parallelize(loaded, mesh, max_logit_tokens=limit)
        recompute_activations(model.stage.model, work, mesh.config, mesh.rank("pp"))
        self._stage = model.stage
        self._weights = ShardedWeights(model, config, mesh)
        self._version = PolicyVersion(lineage, 0)
        self._step = 0
        self._num_steps_since_publish = 0
        self._last_logprobs: dict[str, Tensor] = {}

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def holds_published_weights(self) -> bool:
        """No optimizer step was made since the last publish."""
        return self._num_steps_since_publish == 0

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    @property
    def config(self) -> TrainerConfig:
        return self._config

    def set_lineage(self, lineage: int) -> None:
        """Open a new lineage after a resume; the version number stays."""
        self._version = PolicyVersion(lineage, self._version.number)

    def last_logprobs(self) -> dict[str, Tensor]:
        """As ``PolicyTrainer.last_logprobs``: of all processes' samples, on every process."""
        return dict(self._last_logprobs)

    def memory(self) -> list[MemoryUse]:
        """What each process has needed at its peak, beside its forecast, in order of ranks. Collective."""
        own = self._gauge.read()
        gathered = [own] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        return gathered

    # ------------------------------------------------------------------------------------------ passes

    def forward(
        self, samples: Sequence[Sample], model: Literal["policy", "reference", "critic"] = "policy"
    ) -> list[Tensor]:
        """Log-probabilities of all ``samples``, each float32 [T] on the CPU, 0 where the mask is 0. Collective."""
        if model == "critic":
            raise ValueError("a trainer of several processes has no critic")
        stage: PolicyStage | None = self._stage if model == "policy" else self._reference
        if stage is None:
            raise ValueError("this trainer was built without a reference model (with_reference=True)")
        check_same_samples(samples, "forward")
        rows = self._rows(samples)
        routing_of = self._routers.new_pass if self._routers is not None and model == "policy" else None
        scores = score_rows(stage, self._mesh, rows, routing_of)
        own = {
            index: logprobs_T
            for i, scores_2N in scores.items()
            for index, logprobs_T in zip(rows[i].indices, _scatter(rows[i], scores_2N[0]), strict=True)
        }
        return self._gather(samples, own)

    def forward_backward(self, minibatch: Minibatch, algorithm: Algorithm) -> dict[str, float]:
        """Add the gradient of one minibatch and return its metrics. Collective.

        Raises NonFiniteError on every process, the gradient dropped, where any micro-batch's loss is not finite.
        """
        check_same_samples(minibatch.samples, "forward_backward")
        skipped = _skipped(minibatch, algorithm, self._config)
        kept = _select(minibatch, [i for i in range(len(minibatch.samples)) if i not in skipped])
        rows = self._rows(kept.samples)
        metrics = MinibatchMetrics()
        logprobs: dict[int, Tensor] = {}
        broken: list[str] = []

        def loss_of(number: int, scores_2N: Tensor) -> Tensor:
            row = rows[number]
            if not row.samples:
                return 0 * scores_2N.sum()  # the row that fills up: same collectives, no gradient
            loss = self._row_loss(kept, row, scores_2N, algorithm, metrics)
            if not math.isfinite(float(loss.detach())):
                broken.append(f"{loss.detach():g} in the micro-batch of {', '.join(s.id for s in row.samples[:4])}")
            values = _scatter(row, scores_2N[0].detach())
            logprobs.update(zip(row.indices, values, strict=True))
            return loss if loss.requires_grad else loss + 0 * scores_2N.sum()

        routers = self._routers
        slope_LE = None if routers is None else self._balance_slope(routers, kept.samples, rows)
        routing_of = None if routers is None else partial(routers.new_pass, slope_LE=slope_LE)
        entropy = algorithm.needs.entropy
        with kept_gradients(self._stage):
            train_rows(self._stage, self._mesh, rows, loss_of, needs_entropy=entropy, routing_of=routing_of)
            self._weights.finish_gradients()
        router_metrics = {} if routers is None else routers.metrics(self._router_load(routers))
        self._raise_together(broken)
        found = self._gather(kept.samples, logprobs)
        self._last_logprobs = {sample.id: found[i] for i, sample in enumerate(kept.samples) if sample.num_trained}
        return (
            self._merge(metrics).result()
            | router_metrics
            | {
                "num_trained_tokens": float(sum(sample.num_trained for sample in kept.samples)),
                "num_samples": float(len(minibatch.samples)),
                "num_skipped_samples": float(len(minibatch.samples) - len(kept.samples)),
            }
        )

    def _balance_slope(self, routers: Routers, samples: Sequence[Sample], rows: Sequence[PackedRow]) -> Tensor | None:
        """As ``PolicyTrainer``'s, of the minibatch of all processes. Collective."""
        routers.check_recorded(samples)
        if not routers.coefficient:
            return None
        score_rows(self._stage, self._mesh, rows, routers.new_pass)
        return self._router_load(routers).slope(routers.coefficient)

    def _router_load(self, routers: Routers) -> RouterLoad:
        """Of the last pass, over all processes. Collective."""
        load = routers.new_load()
        if self._mesh.rank("tp") == 0:  # the ranks of a tp group route the same tokens
            for routing in self._stage.routings:
                load.add(routing)
        dist.all_reduce(load.sums_LX)
        return load

    def _row_loss(
        self, minibatch: Minibatch, row: PackedRow, scores_2N: Tensor, algorithm: Algorithm, metrics: MinibatchMetrics
    ) -> Tensor:
        current_N, entropy_N = scores_2N[0], scores_2N[1]
        fields = _fields(minibatch, row, entropy_N if algorithm.needs.entropy else None)
        out: LossOutput = algorithm.loss(current_N, fields)
        loss = out.per_token_N.sum() / out.denominator
        metrics.add(out.metrics, float(loss.detach()))
        is_first = self._num_steps_since_publish == 0
        _add_token_metrics(metrics, row, fields, current_N.detach(), entropy_N, self._version, is_first_step=is_first)
        return loss

    def _rows(self, samples: Sequence[Sample]) -> list[PackedRow]:
        """This data rank's rows; every rank gets the same number, the missing ones empty."""
        config, parallel = self._config, self._mesh.config
        shares = share_out(samples, parallel.num_data_ranks, share_prompts=config.share_prompts)
        own, num_rows = microbatches(
            samples,
            shares,
            self._mesh.data_rank,
            max_tokens=config.max_microbatch_tokens,
            share_prompts=config.share_prompts,
            num_stages=parallel.pp,
        )
        device = torch.device(self._mesh.dense.device_type)
        packed = [pack(b, share_prompts=config.share_prompts, dtype=self._dtype, device=device) for b in own]
        rows = [fitted(row, self._dtype) for row in packed]
        return rows + [empty_row(self._dtype, device) for _ in range(num_rows - len(rows))]

    def _gather(self, samples: Sequence[Sample], own: dict[int, Tensor]) -> list[Tensor]:
        """Per-token values of all samples on every process, from those that the reporting processes computed."""
        lengths = [len(sample.ids) for sample in samples]
        flat = torch.zeros(sum(lengths), device=self._mesh.dense.device_type)
        parts = list(torch.split(flat, lengths)) if samples else []
        if self._mesh.reports:
            for index, values_T in own.items():
                parts[index].copy_(values_T)
        dist.all_reduce(flat)
        return [part.cpu().clone() for part in parts]

    def _merge(self, metrics: MinibatchMetrics) -> MinibatchMetrics:
        gathered: list[MinibatchMetrics | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, metrics if self._mesh.reports else None)
        merged = MinibatchMetrics()
        for part in gathered:
            if part is not None:
                merged.merge(part)
        return merged

    def _raise_together(self, broken: list[str]) -> None:
        """Every process learns of every process's broken rows, after all have passed the same collectives."""
        count = torch.tensor(len(broken), device=self._mesh.dense.device_type)
        dist.all_reduce(count)
        if not count:
            return
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, broken)
        self._weights.clear()
        first = next(text for part in gathered for text in part)
        raise NonFiniteError(
            f"the loss of optimizer step {self._step} is {first}. The gradient was dropped on every process and the "
            "weights are unchanged; look at these samples' rewards and log-probabilities"
        )

    # ------------------------------------------------------------------------------------------- steps

    def optim_step(self) -> dict[str, float]:
        """As ``PolicyTrainer.optim_step``, with the norm over the whole model (F68). Collective."""
        rate = learning_rate(self._config.learning_rate, self._config.schedule, self._step, self._num_steps)
        norm, moved = self._weights.step(rate)
        self._step += 1
        self._num_steps_since_publish += 1
        return {"grad_norm": norm, "learning_rate": rate, "num_empty_steps": 0.0 if moved else 1.0}

    def publish(self) -> WeightUpdate:
        """Count the version up, after checking that all weights are finite everywhere (I13). Collective.

        The weights themselves travel by :meth:`publish_buckets`, which is called next.
        """
        self._weights.check_finite()
        self._version = PolicyVersion(self._version.lineage, self._version.number + 1)
        self._num_steps_since_publish = 0
        return WeightUpdate(version=self._version)

    def publish_buckets(self) -> Iterator[dict[str, Tensor]]:
        """Full weights in the compute type, in buckets of ``parallel.bucket_bytes``, alike on every process.

        Names are those of the model in one process; a tied head is there once, as the embedding. Collective: every
        process takes every bucket, and drops it before the next.
        """
        return whole_tensors(self._weights.parameters, self._mesh, self._mesh.config.bucket_bytes, self._dtype)

    # ------------------------------------------------------------------------------------- checkpoints

    def save(self, path: Path) -> None:
        """Write weights and optimizer moments of all processes into the folder ``path``. Collective.

        By torch.distributed.checkpoint: each process writes its shards, and any layout can read them.
        """
        path.mkdir(parents=True, exist_ok=True)
        num_moves = save_shards(self._weights, path)
        if dist.get_rank() == 0:
            write_state(
                path,
                {
                    "version": list(self._version),
                    "step": self._step,
                    "num_steps_since_publish": self._num_steps_since_publish,
                    "num_moves": num_moves,
                },
            )
        dist.barrier()

    def restore(self, path: Path) -> None:
        """Become the trainer that saved ``path``, whatever layout it had. Collective. Raises CheckpointError."""
        state = read_state(path)
        load_shards(self._weights, path, state.get("num_moves"))
        self._version = PolicyVersion(*state["version"])
        self._step = int(state["step"])
        self._num_steps_since_publish = int(state["num_steps_since_publish"])


def _scatter(row: PackedRow, values_N: Tensor) -> list[Tensor]:
    return row.scatter(values_N) if row.samples else []
