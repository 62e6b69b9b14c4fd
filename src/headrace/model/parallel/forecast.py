"""How much memory each rank of a layout needs, from the model's config.json alone. No torch.

Counted is what one training pass holds at its worst moment: the start of the backward pass of a second micro-batch,
when gradients, optimizer moments and all activations of a row are there. What a layer keeps for its backward pass was
read off transformers' Llama and Qwen3 code and agrees with measurement (``benchmarks/memory.py``).

In one process (``PolicyTrainer``) weights lie once; with several (``ParallelTrainer``) each rank has shards of them,
and whole layers are gathered for computing.

Legend: D hidden, I intermediate, Q query width, K key width, V vocabulary, T tokens of a rank's row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.config.schema import ParallelConfig, RunConfig
from headrace.model.parallel.check import ModelShape, ParallelError, layers_of_stage

_MASTER = 4
"""Bytes of a master weight, a gradient and each of AdamW's two moments: float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a training pass computes at once."""

    num_tokens: int
    """Of a packed row: ``trainer.max_microbatch_tokens``."""
    max_logit_tokens: int
    dtype: str = "float32"
    activation_checkpointing: bool = False
    activation_budget_bytes: int | None = None
    with_reference: bool = False
    num_rows: int = 2
    """Micro-batches of a minibatch on each data rank; a pipeline holds several at once."""

    @classmethod
    def of(cls, config: RunConfig) -> Pass:
        """What a run's training computes at once."""
        return cls(
            num_tokens=config.trainer.max_microbatch_tokens,
            max_logit_tokens=config.trainer.max_logit_tokens,
            dtype=config.model.dtype,
            activation_checkpointing=config.model.activation_checkpointing,
            activation_budget_bytes=config.model.activation_budget_bytes,
            with_reference=config.algorithm.kl is not None and config.algorithm.kl.coefficient > 0,
            num_rows=max(2, config.parallel.pp),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Bytes of one rank at the worst moment of training."""

    stage: int
    parameters_bytes: int
    """Master shards, and the compute copy where the compute type is another (one process)."""
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    num_recomputed: int
    """Layers of the stage, from its first on, whose activations are computed again in the backward pass."""
    logits_bytes: int
    buffers_bytes: int
    """Gathered layers, gradients not reduced yet, and what a layer's backward pass needs for a moment."""
    reference_bytes: int
    loading_bytes: int
    """Before training: the whole model and the shards made of it. Not part of the sum, but perhaps above it."""

    @property
    def training_bytes(self) -> int:
        parts = (f.name for f in fields(self) if f.name.endswith("_bytes") and f.name != "loading_bytes")
        return sum(getattr(self, name) for name in parts)

    @property
    def peak_bytes(self) -> int:
        return max(self.training_bytes, self.loading_bytes)


def forecast(parallel: ParallelConfig, shape: ModelShape, work: Pass) -> list[MemoryForecast]:
    """One forecast for each pipeline stage; all ranks of a stage need the same."""
    if parallel.world_size == 1:
        return [_one_process(shape, work)]
    return [_stage(parallel, shape, work, stage) for stage in range(parallel.pp)]


def recomputed_layers(parallel: ParallelConfig, shape: ModelShape, work: Pass) -> list[int]:
    """For each pipeline stage, how many of its layers are recomputed, from its first on: all of them, none, or as few
    as the budget allows. Raises ParallelError where the budget is below what a pass needs in any case."""
    return [_num_recomputed(parallel, shape, work, stage) for stage in range(parallel.pp)]


@dataclass(frozen=True, slots=True)
class _Weights:
    """Numbers of weights."""

    attention: int
    mlp: int
    """Dense part, split by tp."""
    norms: int
    """Replicated over tp, the router included."""
    experts: int
    vocabulary: int

    @classmethod
    def of(cls, s: ModelShape) -> _Weights:
        q, k = s.num_heads * s.head_size, s.num_kv_heads * s.head_size
        norms = 2 * s.hidden_size + (2 * s.head_size if s.qk_norm else 0) + s.num_experts * s.hidden_size
        return cls(
            attention=2 * s.hidden_size * q + 2 * s.hidden_size * k,
            mlp=0 if s.num_experts else 3 * s.hidden_size * s.intermediate_size,
            norms=norms,
            experts=3 * s.num_experts * s.hidden_size * s.expert_size,
            vocabulary=s.vocab_size * s.hidden_size,
        )

    @property
    def layer(self) -> int:
        return self.attention + self.mlp + self.norms + self.experts


def num_weights(shape: ModelShape) -> int:
    """Parameters of the whole model, a tied head once."""
    w = _Weights.of(shape)
    return w.layer * shape.num_layers + w.vocabulary * (1 if shape.tied else 2) + shape.hidden_size


def _one_process(s: ModelShape, work: Pass) -> MemoryForecast:
    total, compute = num_weights(s), _bytes(work.dtype)
    copies = 0 if compute == _MASTER else compute
    vocabulary = s.vocab_size * s.hidden_size
    alone = ParallelConfig()
    recomputed = _num_recomputed(alone, s, work, 0)
    return MemoryForecast(
        stage=0,
        parameters_bytes=total * (_MASTER + copies),
        gradients_bytes=total * _MASTER,
        optimizer_bytes=2 * total * _MASTER,
        activations_bytes=_activations(alone, s, work, 0, recomputed),
        num_recomputed=recomputed,
        logits_bytes=_logits(s, work, 1),
        # the head's gradient of this row, before it is added to the gathered one
        buffers_bytes=vocabulary * compute + work.num_tokens * _transient(s, work, 1),
        reference_bytes=total * compute if work.with_reference else 0,
        # float32 weights, and the converted ones
        loading_bytes=total * (_MASTER + copies),
    )


def _stage(p: ParallelConfig, s: ModelShape, work: Pass, stage: int) -> MemoryForecast:
    w, compute = _Weights.of(s), _bytes(work.dtype)
    first, last = stage == 0, stage == p.pp - 1
    layers = len(layers_of_stage(s.num_layers, p.pp, stage))
    fsdp, efsdp = p.ep * p.dp_shard * p.cp, p.dp_shard * p.cp * p.tp
    dispatched = p.ep * p.tp > 1
    ends = (1 if first else 0) + (1 if last and not (s.tied and first) else 0)
    root = w.vocabulary * ends // p.tp + (s.hidden_size if last else 0)
    dense_layer = (w.attention + w.mlp) // p.tp + w.norms
    expert_layer = w.experts // p.ep if dispatched else w.experts
    shards = (dense_layer * layers + root) // fsdp + expert_layer * layers // (efsdp if dispatched else fsdp)
    gathered_layer = dense_layer + expert_layer
    # FSDP2 holds the layer that computes, the next one, and the flat buffer that it arrives in
    kept_layers = layers if p.pp > 1 else 3
    recomputed = _num_recomputed(p, s, work, stage)
    transient = _tokens(p, work) * _transient(s, work, p.tp)
    # a layer's whole gradient, and the flat buffer that it is reduced in; a pipeline reduces all its layers at the end
    unreduced = (gathered_layer * (layers if p.pp > 1 else 2) + root) * compute
    whole = num_weights(s)
    return MemoryForecast(
        stage=stage,
        parameters_bytes=shards * _MASTER,
        gradients_bytes=shards * _MASTER,
        optimizer_bytes=2 * shards * _MASTER,
        activations_bytes=_activations(p, s, work, stage, recomputed),
        num_recomputed=recomputed,
        logits_bytes=_logits(s, work, p.tp) if last else 0,
        buffers_bytes=(gathered_layer * kept_layers + root) * compute + unreduced + transient,
        reference_bytes=((shards * _MASTER) + gathered_layer * compute) if work.with_reference else 0,
        loading_bytes=whole * (_MASTER if compute == _MASTER else _MASTER + compute) + shards * _MASTER,
    )


def _bytes(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2, "float64": 8}[dtype]


def _layer_activations(s: ModelShape, work: Pass, tp: int) -> int:
    """Bytes that a layer keeps for each token. A norm keeps its input and its product in float32, and its output."""
    c = _bytes(work.dtype)
    q, k = s.num_heads * s.head_size // tp, s.num_kv_heads * s.head_size // tp
    norm = s.hidden_size * (max(c, 4) + 2 * c)
    attention = c * (3 * q + 2 * k)  # q, k, v, the attention's output, and the output in the row's order
    if s.qk_norm:
        attention += (q + k) * (max(c, 4) + c)
    if s.num_experts:
        # sent, received and returned tokens, and four products of an expert, for each expert of a token
        mlp = c * s.num_experts_per_token * (4 * s.expert_size + 3 * s.hidden_size)
    else:
        mlp = c * 4 * s.intermediate_size // tp
    return 2 * norm + attention + mlp


def _tokens(p: ParallelConfig, work: Pass) -> int:
    """Of one row, on one rank."""
    return -(-work.num_tokens // p.cp)


def _activations(p: ParallelConfig, s: ModelShape, work: Pass, stage: int, recomputed: int) -> int:
    """Bytes of a stage's layers, and of the final norm, at the start of the backward pass. The first ``recomputed``
    layers keep their inputs only: the others' activations are gone when they are computed again."""
    c, last = _bytes(work.dtype), stage == p.pp - 1
    kept = len(layers_of_stage(s.num_layers, p.pp, stage)) - recomputed
    if recomputed:
        kept = max(1, kept)  # the layer that is being recomputed
    final = s.hidden_size * (max(c, 4) + 3 * c) if last else 0
    in_flight = 1
    if p.pp > 1:
        in_flight = work.num_rows if p.pp_schedule == "gpipe" else min(work.num_rows, p.pp - stage)
    per_token = recomputed * s.hidden_size * c + kept * _layer_activations(s, work, p.tp) + final
    return in_flight * _tokens(p, work) * per_token


def _num_recomputed(p: ParallelConfig, s: ModelShape, work: Pass, stage: int) -> int:
    num_layers = len(layers_of_stage(s.num_layers, p.pp, stage))
    if work.activation_checkpointing:
        return num_layers
    if work.activation_budget_bytes is None:
        return 0
    for recomputed in range(num_layers):  # the last one would have to be there as a whole in any case
        if _activations(p, s, work, stage, recomputed) <= work.activation_budget_bytes:
            return recomputed
    least = _activations(p, s, work, stage, num_layers - 1)
    raise ParallelError(
        f"model.activation_budget_bytes = {work.activation_budget_bytes:,}: with all layers but one recomputed, the "
        f"activations of {work.num_tokens:,} tokens still take {least:,} bytes on a process; raise it, or lower "
        "trainer.max_microbatch_tokens"
    )


def _transient(s: ModelShape, work: Pass, tp: int) -> int:
    """Bytes for each token that the backward pass of one layer holds besides: gradients of its widest products."""
    c = _bytes(work.dtype)
    wide = s.num_experts_per_token * s.expert_size if s.num_experts else s.intermediate_size // tp
    return c * (3 * wide + 2 * s.hidden_size)


def _logits(s: ModelShape, work: Pass, tp: int) -> int:
    """Two float32 buffers of one chunk, and a third in the compute type where that is another."""
    c = _bytes(work.dtype)
    per_logit = 2 * max(c, 4) + (c if c < 4 else 0)
    return min(work.max_logit_tokens, work.num_tokens) * (s.vocab_size // tp) * per_logit
