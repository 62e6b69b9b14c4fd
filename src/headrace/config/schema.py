"""The run's configuration: one TOML file, typed, nested; unknown keys fail. See ``load.py`` for reading it.

Each field's meaning and unit stand below it. Sections with ``type`` are unions: the type decides the other keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


# -------------------------------------------------------------------------------------------------- model


class LoraConfig(Section):
    """Train low-rank adapters through peft instead of all weights."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class ModelConfig(Section):
    path: str
    """A local folder, the name of a fetched model (``smollm2-135m``), or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of trainer and embedded engine. Master weights and optimizer state are float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer and embedded engine compute; auto: the first GPU where there is one, else the CPU."""
    chat_template: str | None = None
    """``chatml`` (roles only, no default system prompt), a Jinja file, or None for the model's own."""
    activation_checkpointing: bool = False
    lora: LoraConfig | None = None


# ------------------------------------------------------------------------------------------------- engine


class TransformersEngineConfig(Section):
    """The embedded engine: in process, shares the trainer's weights."""

    type: Literal["transformers"] = "transformers"
    max_batch_size: int = Field(64, ge=1)
    """Requests that decode together."""
    max_prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens prefilled at once."""
    max_context: int | None = Field(None, ge=2)
    """Prompt plus reply, in tokens; None takes the model's own limit."""
    prefix_cache_tokens: int = Field(16384, ge=0)
    """Prompt tokens whose keys and values are kept for later requests of the same version; 0 turns it off."""
    weights: Literal["shared", "copy"] = "shared"
    """``shared``: nothing is copied, and decoding waits from a batch's first optimizer step until its publish.
    ``copy``: the engine holds its own weights and keeps decoding during all of a batch's steps."""
    kv_policy: Literal["keep", "recompute"] = "keep"
    """What happens to the keys and values of running requests when weights change."""
    carry_kept_ids: bool = True
    """Return the kept-id sets of truncated sampling with each token."""
    num_threads: int | None = Field(None, ge=1)
    """Torch threads of decoding; None: all cores when synchronous, half of them when asynchronous."""


EngineConfig = TransformersEngineConfig
"""Grows into a union discriminated by ``type`` (vllm, sglang, openai)."""


class SamplingConfig(Section):
    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 means off."""
    stop_strings: tuple[str, ...] = ()


# -------------------------------------------------------------------------------------------------- tasks


class ArithmeticTasks(Section):
    """Built-in one-step arithmetic; train and held-out problems are split by unordered pair of operands."""

    type: Literal["arithmetic"] = "arithmetic"
    operation: Literal["multiply", "add"] = "multiply"
    min_operand: int = Field(2, ge=0)
    max_operand: int = Field(9, ge=1)
    held_out_fraction: float = Field(0.25, gt=0, lt=1)
    seed: int = 0
    """Of the split; the run's own seed does not move it."""


class FileTasks(Section):
    """A JSONL or Parquet file, one task a row: ``messages`` (or ``prompt``), ``answer``, optional ``id``,
    ``metadata``."""

    type: Literal["file"] = "file"
    path: Path
    held_out_path: Path | None = None
    held_out_fraction: float | None = Field(None, gt=0, lt=1)
    """Split off by content hash, where there is no file of its own."""
    answer_required: bool = True


class ReasoningGymTasks(Section):
    """Any generator of the reasoning-gym package (extra ``environments``)."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    size: int = Field(1000, ge=1)
    held_out_size: int = Field(100, ge=1)
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator."""


class EntryPointTasks(Section):
    """A third party's tasks: ``module:function``, called with ``options``; returns (train, held out)."""

    type: Literal["python"] = "python"
    factory: str
    options: dict[str, Any] = Field(default_factory=dict)


TasksConfig = Annotated[ArithmeticTasks | FileTasks | ReasoningGymTasks | EntryPointTasks, Field(discriminator="type")]


# ------------------------------------------------------------------------------------------------- reward


class RewardConfig(Section):
    """One reward of the weighted sum. ``type`` is a built-in name, an entry point, or ``module:function``."""

    type: str
    weight: float = 1.0
    deadline_s: float = Field(10.0, gt=0)
    """Per score; a reward that takes longer is a classed error, not a 0."""
    memory_bytes: int = Field(2 << 30, ge=1 << 20)
    """Address-space cap of a worker process, for rewards that run in one."""
    num_workers: int = Field(1, ge=1)
    options: dict[str, Any] = Field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- algorithm


class KlConfig(Section):
    coefficient: float = Field(0.0, ge=0)
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """``k3+``: value of k3, gradient of k2 (straight-through)."""
    placement: Literal["loss", "reward"] = "loss"


class CorrectionConfig(Section):
    """Importance correction between behaviour and proximal policy, rho = exp(proximal - behaviour)."""

    type: Literal["none", "truncated", "masked", "decoupled"] = "none"
    """``truncated``: min(rho, high). ``masked``: rho where low <= rho <= high, else 0 (IcePop).
    ``decoupled``: rho, capped at ``high`` where given (decoupled PPO)."""
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, gt=0)


class AlgorithmConfig(Section):
    """A preset, and what deviates from it. None means: as the preset says."""

    preset: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce, reinforce++, dapo, gspo, cispo, ppo, ppo_critic, or an entry point's name."""
    advantage: (
        Literal["group_normalised", "group_centred", "leave_one_out", "batch_whitened", "gae", "gae_whitened", "none"]
        | None
    ) = None
    ratio_level: Literal["token", "sequence"] | None = None
    objective: Literal["ppo", "cispo", "reinforce"] | None = None
    clip_low: float | None = Field(None, ge=0)
    clip_high: float | None = Field(None, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    aggregation: (
        Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]
        | None
    ) = None
    kl: KlConfig | None = None
    correction: CorrectionConfig | None = None
    """None: none for a synchronous run, decoupled with truncation at 2 for an asynchronous one."""
    entropy_coefficient: float | None = Field(None, ge=0)
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal."""
    overlong_buffer: int | None = Field(None, ge=1)
    """DAPO's soft punishment over the last tokens before ``max_new_tokens``, in tokens."""
    mask_truncated: bool | None = None
    """Overlong filtering: truncated replies keep their place in the group and train no token."""


# ----------------------------------------------------------------------------------------------- training


class ScheduleConfig(Section):
    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps from 0 to the full rate."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Rate at the end of the run over the full rate; linear and cosine only."""


class TrainerConfig(Section):
    num_batches: int = Field(100, ge=1)
    """Rollout batches, hence published versions, of the run."""
    learning_rate: float = Field(1e-6, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that a rollout batch is split into, for each epoch."""
    num_epochs: int = Field(1, ge=1)
    """Passes over a rollout batch."""
    max_microbatch_tokens: int = Field(8192, ge=16)
    """Packed tokens of one forward and backward pass; a longer sample gets a micro-batch of its own."""
    max_logit_tokens: int = Field(1024, ge=1)
    """Trained tokens whose [., V] logits are held at once."""
    skip_zero_gradient: bool = True
    """Skip the backward pass of groups whose loss gradient is provably zero; they still count in denominators."""
    share_prompts: bool = True
    """Compute a group's shared prompt once in the training pass (equal in loss and gradient)."""
    num_threads: int | None = Field(None, ge=1)


class CriticSection(Section):
    """What both kinds of critic have: an optimizer of their own, and the numbers of GAE and of the value loss."""

    learning_rate: float = Field(1e-5, ge=0)
    schedule: ScheduleConfig = ScheduleConfig()
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    warmup_batches: int = Field(0, ge=0)
    """The run's first rollout batches, which train the critic only. They are published as versions like any other,
    with the policy's weights as they were; the policy's own schedule starts after them."""
    value_clip: float | None = Field(0.2, gt=0)
    """Largest step of a value away from what it was at behaviour time, in units of the reward."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount for each trained token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE: 1 compares the whole return with the value, 0 looks one token ahead."""


class SharedCriticConfig(CriticSection):
    """A value head on the policy's own hidden states."""

    type: Literal["shared"] = "shared"
    train_backbone: bool = False
    """Let the value loss move the policy's weights too; its optimizer then steps on the sum of both gradients."""
    loss_coefficient: float = Field(0.1, gt=0)
    """Weight of the value loss in the backbone's gradient; the head itself learns from the whole."""


class SeparateCriticConfig(CriticSection):
    """A model of its own with a value head."""

    type: Literal["separate"] = "separate"
    path: str | None = None
    """What it starts from, as ``model.path``; None takes the policy's start. It must speak the policy's ids."""
    lora: LoraConfig | None = None


CriticConfig = Annotated[SharedCriticConfig | SeparateCriticConfig, Field(discriminator="type")]


class RolloutConfig(Section):
    groups_per_batch: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    min_group_size: int = Field(2, ge=1)
    """Scored members below which a group cannot be used."""
    on_failure: Literal["refill", "shrink", "discard"] = "refill"
    """A member without a score: try it again (up to ``max_retries``), go on with fewer, or drop the group."""
    max_retries: int = Field(2, ge=0)
    max_staleness: int = Field(0, ge=0)
    """Largest age of a trained token, in versions. 0 is the synchronous run."""
    on_overage: Literal["wait", "mask", "drop"] = "wait"
    max_concurrent: int = Field(256, ge=1)
    """Episodes in flight."""
    max_filter_factor: int = Field(8, ge=1)
    """Dynamic sampling gives up after issuing this many times the groups of a batch, and trains what there is."""
    generation_deadline_s: float = Field(600.0, gt=0)
    """For one turn's generation."""
    episode_deadline_s: float = Field(1800.0, gt=0)


class EvaluationConfig(Section):
    every: int = Field(0, ge=0)
    """Rollout batches between evaluations; 0 turns them off, except ``at_start`` and ``at_end``."""
    at_start: bool = False
    at_end: bool = False
    num_tasks: int | None = Field(None, ge=1)
    """The first so many held-out tasks; None takes all."""
    num_samples: int = Field(4, ge=1)
    """Sampled replies per task."""
    greedy: bool = True
    """Also one greedy reply per task."""
    deadline_s: float = Field(1800.0, gt=0)


class CheckpointConfig(Section):
    every: int = Field(10, ge=0)
    """Rollout batches between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: int = Field(2, ge=1)
    """Complete checkpoints kept on disk; the older ones are removed."""


class GuardsConfig(Section):
    """Bounds of the run-time checks. The checks cannot be turned off; their bounds can be moved."""

    max_ratio_error_float32: float = Field(1e-3, gt=0)
    """I5 and I6: largest |ratio - 1| of fresh on-policy tokens, and largest canary gap, in float32."""
    max_ratio_error_bfloat16: float = Field(0.5, gt=0)
    """The same for bfloat16."""
    canary_every: int = Field(1, ge=1)
    """Syncs between canaries (I6)."""
    max_error_share: float = Field(0.5, gt=0, le=1)
    """Share of episodes of a batch without a score above which the run stops (I14)."""
    collapse_window: int = Field(10, ge=2)
    """Batches over which the collapse alarm looks at reward and entropy."""
    on_collapse: Literal["warn", "stop"] = "warn"
    stall_min_s: float = Field(300.0, gt=0)
    """I19: no progress for max(this, 10 x the median time between groups) makes a report."""


class WaitsConfig(Section):
    """Deadlines of the waits inside the loop, in seconds; each is named in the report when it passes."""

    forward_backward_s: float = Field(3600.0, gt=0)
    optim_step_s: float = Field(600.0, gt=0)
    publish_s: float = Field(600.0, gt=0)
    checkpoint_s: float = Field(1800.0, gt=0)
    rollout_batch_s: float = Field(7200.0, gt=0)
    """For gathering one rollout batch."""


class MonitorConfig(Section):
    sinks: tuple[str, ...] = ()
    """Besides metrics.jsonl: tensorboard, wandb, trackio, mlflow, prometheus, or an entry point's name."""
    sink_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Per sink: passed to its package's own start call."""
    progress: bool = True
    """Live progress in the terminal."""
    episodes_in_report: int = Field(12, ge=0)


class RunConfig(Section):
    """A run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0)
    output_dir: Path = Path("runs")
    """The run's folder is ``output_dir / name``."""
    model: ModelConfig
    tasks: TasksConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig | None = None
    """For algorithms whose advantages need values (PPO with GAE); absent: no critic."""
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()
    waits: WaitsConfig = WaitsConfig()
    monitor: MonitorConfig = MonitorConfig()

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name
