"""The trainer of one process: gradients from minibatches, optimizer steps, published versions, checkpoints.

It knows nothing of algorithms: a loss comes in as ``algorithm.loss(log-probabilities, fields)``.

Legend: T tokens of a sample, N trained tokens of a micro-batch.
"""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headrace.algorithms.fields import LossOutput, Minibatch, TokenFields, sample_columns
from headrace.config.schema import ParallelConfig, TrainerConfig
from headrace.model.head import output_head
from headrace.model.load import LoadedModel
from headrace.model.logprobs import hidden_states, score_hidden
from headrace.model.packing import PackedRow, packed_rows
from headrace.model.parallel.forecast import Pass
from headrace.model.routing import RouterPass
from headrace.protocols import Algorithm, WeightUpdate, WholeMinibatchAlgorithm
from headrace.trainer.critic import Critic
from headrace.trainer.export import export_model
from headrace.trainer.memory import MemoryGauge, MemoryUse
from headrace.trainer.metrics import MinibatchMetrics
from headrace.trainer.plan import may_skip
from headrace.trainer.recompute import recompute_activations
from headrace.trainer.residence import TrainerResidence, tensors_of_optimizer
from headrace.trainer.routers import Routers
from headrace.trainer.schedule import learning_rate
from headrace.trainer.weights import NonFiniteError, TrainableWeights, Write, read_state, write_state
from headrace.types import PolicyVersion, Sample


class PolicyTrainer:
    """Implements ``protocols.Trainer``.

    Example::

        trainer = PolicyTrainer(loaded, config.trainer, num_steps=100)
        for minibatch in plan_update(batch, algorithm, trainer, config.trainer, max_new_tokens=128, seed=0):
            trainer.forward_backward(minibatch, algorithm)
            trainer.optim_step()
        engine_update = trainer.publish()
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: TrainerConfig,
        *,
        num_steps: int,
        with_reference: bool = False,
        activation_checkpointing: bool = False,
        activation_budget_bytes: int | None = None,
        lineage: int = 0,
        critic: Critic | None = None,
        beside: str = "",
    ) -> None:
        """``num_steps``: optimizer steps of the whole run (the critic's warm-up left out), for the schedule.
        ``with_reference`` keeps the weights of this moment for ``forward(..., "reference")``: a frozen copy, or with
        LoRA the base model, which costs nothing. Build the trainer before restoring a checkpoint, so that the
        reference is the run's start. ``beside``: what else the process will hold, which no forecast counts."""
        work = Pass(
            num_tokens=config.max_microbatch_tokens,
            max_logit_tokens=config.max_logit_tokens,
            dtype=loaded.dtype,
            activation_checkpointing=activation_checkpointing,
            activation_budget_bytes=activation_budget_bytes,
            with_reference=with_reference,
        )
        not_counted = "the adapter" if loaded.base is not None else "the critic" if critic is not None else beside
        self._gauge = MemoryGauge(loaded, work, ParallelConfig(), not_counted=not_counted)
        self._loaded = loaded
        self._model = loaded.model
        self._config = config
        self._num_steps = num_steps
        self._routers = Routers.of(loaded.model, config)
        self._reference = _make_reference(loaded) if with_reference else None  # before hooks are put on parameters
        self._weights = TrainableWeights(loaded, config)
        self._version = PolicyVersion(lineage, 0)
        self._step = 0
        self._num_steps_since_publish = 0
        self._last_logprobs: dict[str, Tensor] = {}
        self._critic = critic
        self._residence = TrainerResidence(self._resident)
        recompute_activations(self._model, work)
        if critic is not None and critic.backbone is not None:
            recompute_activations(critic.backbone, work)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    @property
    def holds_published_weights(self) -> bool:
        """No optimizer step was made since the last publish."""
        return self._num_steps_since_publish == 0

    @property
    def config(self) -> TrainerConfig:
        return self._config

    @property
    def policy_is_frozen(self) -> bool:
        """True during the critic's warm-up: its first rollout batches leave the policy as it is."""
        return self._critic is not None and self._version.number < self._critic.config.warmup_batches

    def set_lineage(self, lineage: int) -> None:
        """Open a new lineage after a resume; the version number stays."""
        self._version = PolicyVersion(lineage, self._version.number)

    def last_logprobs(self) -> dict[str, Tensor]:
        """Log-probabilities that the last forward_backward computed: sample id -> float32 [T] on the CPU, 0 where
        the mask is 0. Samples whose pass was skipped are absent."""
        return dict(self._last_logprobs)

    def offload(self) -> None:
        """Leave the device's memory: everything moves into host memory. Nothing else may be called until
        :meth:`onload`. Without critic."""
        self._residence.offload()

    def onload(self) -> None:
        """Come back, bit for bit as it was."""
        self._residence.onload()

    def held_bytes(self) -> int:
        """Memory of weights, masters, gradients, moments and reference on the device."""
        return self._residence.held_bytes()

    def _resident(self) -> Iterator[Tensor]:
        for model in (self._model, self._reference):
            if model is not None:
                yield from model.parameters()
        yield from self._weights.masters.values()
        yield from (t.grad for t in (*self._model.parameters(), *self._weights.masters.values()) if t.grad is not None)
        yield from tensors_of_optimizer(self._weights.optimizer)

    def memory(self) -> list[MemoryUse]:
        """What this process has needed at its peak, beside its forecast."""
        return [self._gauge.read()]

    # ------------------------------------------------------------------------------------------ passes

    @torch.no_grad()
    def forward(
        self, samples: Sequence[Sample], model: Literal["policy", "reference", "critic"] = "policy"
    ) -> list[Tensor]:
        """Log-probabilities of ``samples``, each float32 [T] on the CPU, 0 where the mask is 0; of the critic: values.

        By the same code and the same micro-batches as a gradient pass over the same samples.
        """
        scorer = self._model
        if model == "critic":
            if self._critic is None:
                raise ValueError("this trainer was built without a critic (critic=...)")
            return self._critic.forward(samples, self._rows, self._model)
        if model == "reference":
            if self._reference is None:
                raise ValueError("this trainer was built without a reference model (with_reference=True)")
            scorer = self._reference
        out = [torch.zeros(len(sample.ids)) for sample in samples]
        for row in self._rows(samples):
            routing = self._routers.new_pass(row) if self._routers is not None and model == "policy" else None
            logprobs_N, _ = self._score_hidden(scorer, hidden_states(scorer, row, routing), row)
            for index, logprobs_T in zip(row.indices, row.scatter(logprobs_N), strict=True):
                out[index] = logprobs_T
        return out

    def forward_backward(self, minibatch: Minibatch, algorithm: Algorithm) -> dict[str, float]:
        """Add the gradient of one minibatch and return its metrics.

        Samples whose advantages are all exactly 0 are left out where the algorithm says that their gradient is
        provably 0; they still count in ``minibatch.totals``. Raises NonFiniteError, the gradient dropped, where the
        loss of a micro-batch is not finite.
        """
        minibatch = self._prepared(minibatch, algorithm)
        skipped = _skipped(minibatch, algorithm, self._config)
        kept = _select(minibatch, [i for i in range(len(minibatch.samples)) if i not in skipped])
        metrics = MinibatchMetrics()
        self._last_logprobs = {}
        num_trained = 0
        routers = self._routers
        slope_LE = None if routers is None else self._balance_slope(routers, kept.samples)
        load = None if routers is None else routers.new_load()
        try:
            for row in self._rows(kept.samples):
                num_trained += len(row.target_N)
                routing = None if routers is None else routers.new_pass(row, slope_LE)
                self._train_row(kept, row, algorithm, metrics, routing)
                if load is not None and routing is not None:
                    load.add(routing)
            if self._critic is not None and not self._critic.is_shared:
                self._critic.forward_backward(minibatch, self._rows, metrics)
        except NonFiniteError:
            self._weights.clear()
            if self._critic is not None:
                self._critic.clear()
            raise
        router_metrics = {} if routers is None or load is None else routers.metrics(load)
        return (
            metrics.result()
            | router_metrics
            | {
                "num_trained_tokens": float(num_trained),
                "num_samples": float(len(minibatch.samples)),
                "num_skipped_samples": float(len(skipped)),
            }
        )

    def _prepared(self, minibatch: Minibatch, algorithm: Algorithm) -> Minibatch:
        """What the algorithm must know of the whole minibatch, by one more pass where no earlier one can serve."""
        if not algorithm.needs.prepare:
            return minibatch
        if not isinstance(algorithm, WholeMinibatchAlgorithm):
            raise TypeError(f"{type(algorithm).__name__}.needs.prepare is set, but it has no method prepare")
        current = minibatch.proximal_logprobs if self._num_steps_since_publish == 0 else None
        logprobs = self.forward(minibatch.samples) if current is None else current
        prepared: Minibatch = algorithm.prepare(minibatch, logprobs, step=self._step)
        return prepared

    @torch.no_grad()
    def _balance_slope(self, routers: Routers, samples: Sequence[Sample]) -> Tensor | None:
        """What the load-balance loss must know of the whole minibatch beforehand: its loss is a product of two sums
        over all tokens, so it is no sum over micro-batches until one of them is known."""
        routers.check_recorded(samples)
        if not routers.coefficient or self.policy_is_frozen:
            return None
        load = routers.new_load()
        for row in self._rows(samples):
            routing = routers.new_pass(row)
            hidden_states(self._model, row, routing)
            load.add(routing)
        return load.slope(routers.coefficient)

    def _train_row(
        self,
        minibatch: Minibatch,
        row: PackedRow,
        algorithm: Algorithm,
        metrics: MinibatchMetrics,
        routing: RouterPass | None,
    ) -> None:
        with torch.set_grad_enabled(not self.policy_is_frozen):
            hidden_UD = hidden_states(self._model, row, routing)
            current_N, entropy_N = self._score_hidden(self._model, hidden_UD, row)
            fields = _fields(minibatch, row, entropy_N if algorithm.needs.entropy else None)
            out: LossOutput = algorithm.loss(current_N, fields)
            loss = out.per_token_N.sum() / out.denominator
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(
                f"the loss of optimizer step {self._step} is {value} in the micro-batch of samples "
                f"{', '.join(s.id for s in row.samples[:4])}{' ...' if len(row.samples) > 4 else ''}. The gradient "
                "was dropped and the weights are unchanged; look at these samples' rewards and log-probabilities"
            )
        total = loss
        if self._critic is not None and self._critic.is_shared:
            total = loss + self._critic.loss(hidden_UD, minibatch, row, metrics)
        if total.requires_grad:
            total.backward()  # type: ignore[no-untyped-call]
        current_N = current_N.detach()
        metrics.add(out.metrics, value)
        is_first = self._num_steps_since_publish == 0
        _add_token_metrics(metrics, row, fields, current_N, entropy_N, self._version, is_first_step=is_first)
        for sample, logprobs_T in zip(row.samples, row.scatter(current_N), strict=True):
            self._last_logprobs[sample.id] = logprobs_T

    def _rows(self, samples: Sequence[Sample]) -> Iterator[PackedRow]:
        weight, limit = next(self._model.parameters()), self._config.max_microbatch_tokens
        share = self._config.share_prompts
        return packed_rows(samples, limit, share_prompts=share, dtype=weight.dtype, device=weight.device)

    def _score_hidden(self, model: PreTrainedModel, hidden_UD: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
        head = output_head(model, self._loaded.vocab_size)
        return score_hidden(hidden_UD, head, row, max_logit_tokens=self._config.max_logit_tokens)

    # ------------------------------------------------------------------------------------------- steps

    def optim_step(self) -> dict[str, float]:
        """Clip the gathered gradient by its global norm, make one AdamW step, clear the gradient.

        Raises NonFiniteError, with the weights untouched, where the gradient is not finite. Where it is exactly 0
        the weights stay as they are; step count and schedule advance all the same. A critic makes its own step first;
        while it warms up, it alone does: then the policy's step count and schedule stand still.
        """
        metrics = {} if self._critic is None else self._critic.optim_step()
        if self.policy_is_frozen:
            self._num_steps_since_publish += 1
            return metrics
        rate = learning_rate(self._config.learning_rate, self._config.schedule, self._step, self._num_steps)
        norm, moved = self._weights.step(rate)
        self._step += 1
        self._num_steps_since_publish += 1
        return metrics | {"grad_norm": norm, "learning_rate": rate, "num_empty_steps": 0.0 if moved else 1.0}

    def publish(self) -> WeightUpdate:
        """Count the version up by 1, after checking that all weights are finite (I13).

        The embedded engine reads the same storage, so there are no tensors to carry.
        """
        self._weights.check_finite()
        self._version = PolicyVersion(self._version.lineage, self._version.number + 1)
        self._num_steps_since_publish = 0
        return WeightUpdate(version=self._version)

    # ------------------------------------------------------------------------------------- checkpoints

    def save(self, path: Path) -> None:
        """Write everything that a restored trainer needs into the folder ``path``: weights and optimizer moments
        (safetensors), version, step and torch's random state (JSON). Nothing in it is ever unpickled."""
        self._writer(copied=False)(path)

    def snapshot(self) -> Write:
        """What :meth:`save` would write now, copied into host memory: call it with the folder, at any time and on any
        thread, while this trainer goes on."""
        return self._writer(copied=True)

    def _writer(self, *, copied: bool) -> Write:
        parts = [self._weights.writer(copied=copied)]
        if self._critic is not None:
            parts.append(self._critic.writer(copied=copied))
        state = {
            "version": list(self._version),
            "step": self._step,
            "num_steps_since_publish": self._num_steps_since_publish,
            "torch_random_state": base64.b64encode(bytes(torch.get_rng_state().tolist())).decode(),
        }

        def write(path: Path) -> None:
            path.mkdir(parents=True, exist_ok=True)
            for part in parts:
                part(path)
            write_state(path, state)

        return write

    def restore(self, path: Path) -> None:
        """Become, bit for bit, the trainer that saved ``path``; of several processes' checkpoint, weights and optimizer
        state (it has no random state). Raises CheckpointError where it does not fit."""
        state = read_state(path)
        self._weights.restore(path)
        if self._critic is not None:
            self._critic.restore(path)
        self._version = PolicyVersion(*state["version"])
        self._step = int(state["step"])
        self._num_steps_since_publish = int(state["num_steps_since_publish"])
        if "torch_random_state" in state:
            random_state = base64.b64decode(state["torch_random_state"])
            torch.set_rng_state(torch.tensor(list(random_state), dtype=torch.uint8))

    def export(self, path: Path) -> None:
        """Write the policy as a plain Hugging Face folder, LoRA merged, tokenizer included."""
        export_model(self._loaded, path)


def _make_reference(loaded: LoadedModel) -> PreTrainedModel:
    if loaded.base is not None:
        return loaded.base
    reference = copy.deepcopy(loaded.model)
    reference.requires_grad_(False)
    return reference


def _skipped(minibatch: Minibatch, algorithm: Algorithm, config: TrainerConfig) -> set[int]:
    """Places of samples whose gradient is provably 0."""
    if not may_skip(algorithm, config):
        return set()
    return {
        i
        for i, (sample, advantages_T) in enumerate(zip(minibatch.samples, minibatch.advantages, strict=True))
        if sample.stream == "rl" and sample.teacher_logprobs is None and not advantages_T.any()
    }


def _add_token_metrics(
    metrics: MinibatchMetrics,
    row: PackedRow,
    fields: TokenFields,
    current_N: Tensor,
    entropy_N: Tensor,
    version: PolicyVersion,
    *,
    is_first_step: bool,
) -> None:
    """Of the rl tokens, the only ones that an engine has sampled. ``current_N`` is detached. ``version``: the one that
    the batch's steps began from. ``is_first_step``: the current policy still is that version; afterwards it has moved
    and says nothing about the engine, and the proximal policy stands for it where somebody computed it."""
    places = fields.places_of("rl")
    own = slice(None) if places is None else places
    behaviour_N = fields.behaviour_logprobs_N[own]
    proximal_N = fields.proximal_logprobs_N
    if proximal_N is None and is_first_step:
        proximal_N = current_N
    if len(behaviour_N):
        metrics.add_tokens(
            proximal_N=None if proximal_N is None else proximal_N[own],
            behaviour_N=behaviour_N,
            entropy_N=entropy_N[own],
        )
    tokens = [
        (token_version == version, sample.num_versions == 1)
        for sample in row.samples
        for token_version, trained in zip(sample.versions, sample.mask, strict=True)
        if trained
    ]
    is_current_N, is_whole_N = torch.tensor(tokens, dtype=torch.bool, device=current_N.device).view(-1, 2).unbind(1)
    if proximal_N is not None:
        current_version_N = fields.behaviour_logprobs_N[is_current_N]
        metrics.add_same_weights(proximal_N[is_current_N], current_version_N, is_whole_N[is_current_N])
    if is_first_step:
        fresh_N = is_current_N & is_whole_N
        metrics.add_fresh(current_N[fresh_N], fields.behaviour_logprobs_N[fresh_N])


def _select(minibatch: Minibatch, places: list[int]) -> Minibatch:
    def pick(values: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if values is None else [values[i] for i in places]

    return replace(
        minibatch,
        samples=tuple(minibatch.samples[i] for i in places),
        advantages=[minibatch.advantages[i] for i in places],
        proximal_logprobs=pick(minibatch.proximal_logprobs),
        reference_logprobs=pick(minibatch.reference_logprobs),
        selected=pick(minibatch.selected),
        values=pick(minibatch.values),
        value_targets=pick(minibatch.value_targets),
    )


def _fields(minibatch: Minibatch, row: PackedRow, entropy_N: Tensor | None) -> TokenFields:
    """What the algorithm sees of one row. Only trained tokens are read, so nothing behind a mask can matter."""

    def gather(values: Sequence[Tensor] | None) -> Tensor | None:
        return None if values is None else row.gather(values)

    return TokenFields(
        advantages_N=row.gather(minibatch.advantages),
        proximal_logprobs_N=gather(minibatch.proximal_logprobs),
        reference_logprobs_N=gather(minibatch.reference_logprobs),
        totals=minibatch.totals,
        entropy_N=entropy_N,
        selected_N=gather(minibatch.selected),
        mean_correction=minibatch.mean_correction,
        **sample_columns(row.samples, minibatch.version, row.target_N.device),
    )
