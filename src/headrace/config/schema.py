"""The run's configuration: one TOML file, typed, nested; unknown keys fail. See ``load.py`` for reading it.

Each field's meaning and unit stand below it. Sections with ``type`` are unions: the type decides the other keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.config.base import LoraConfig, OptimizerSection, Section
from headrace.config.cluster import ClusterConfig, InProcessCluster
from headrace.config.critic import CriticConfig
from headrace.config.engines import EngineConfig, TransformersEngineConfig
from headrace.config.fleet import FleetConfig
from headrace.config.launch import LaunchConfig
from headrace.config.teacher import TeacherConfig

# -------------------------------------------------------------------------------------------------- model


class ModelConfig(Section):
    path: str
    """A local folder, the name of a fetched model (``smollm2-135m``), or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of trainer and embedded engine. Master weights and optimizer state are float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where trainer and embedded engine compute; auto: the first GPU where there is one, else the CPU. Several
    processes ([parallel]) compute on the CPU."""
    chat_template: str | None = None
    """``chatml`` (roles only, no default system prompt), a Jinja file, or None for the model's own."""
    activation_checkpointing: bool = False
    """Recompute every layer in the backward pass, instead of keeping what it needs: least memory, most time."""
    activation_budget_bytes: int | None = Field(None, ge=1)
    """Recompute only as many layers as are needed to keep the activations of a full micro-batch within so many bytes,
    on each process; what they take without is the line ``activations`` of ``headrace plan``."""
    lora: LoraConfig | None = None


# ------------------------------------------------------------------------------------------------- engine


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


class GoldConfig(Section):
    """The gold standard: rewards that judge the replies of each evaluation beside ``rewards``, and are never trained
    on. They tell whether what the policy gains is worth anything (over-optimisation of a learned reward)."""

    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    on_over_optimisation: Literal["warn", "stop"] = "warn"
    """What to do where ``rewards`` rise and gold falls, both beyond chance."""


# ---------------------------------------------------------------------------------------------- algorithm


Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]


class KlConfig(Section):
    coefficient: float = Field(0.0, ge=0)
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """``k3+``: value of k3, gradient of k2 (straight-through)."""
    placement: Literal["loss", "reward"] = "loss"
    unbiased: bool = False
    """Times the importance ratio, with its gradient: right off policy too (k1 and k3 in the loss)."""
    aggregation: Aggregation | None = None
    """Of the KL term in the loss; None: the policy term's."""


class CorrectionConfig(Section):
    """Importance correction between behaviour and proximal policy, rho = exp(proximal - behaviour)."""

    type: Literal["none", "truncated", "masked", "rejected", "decoupled"] = "none"
    """``truncated``: min(rho, high). ``masked``: rho where low <= rho <= high, else 0 (IcePop). ``rejected``: 1 there.
    ``decoupled``: rho, capped at ``high`` where given (decoupled PPO)."""
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, gt=0)
    level: Literal["token", "sequence", "geometric"] | None = None
    """rho of the token (the default), of the whole episode (product), or its geometric mean over the episode."""
    batch_normalised: bool | None = None
    """Divide the weights by their mean over the minibatch."""
    veto: float | None = Field(None, gt=0, lt=1)
    """Reject episodes with any token whose rho is below this."""
    max_drift: float | None = Field(None, ge=0)
    """Off-policy sequence masking: reject tokens with A < 0 of episodes whose mean log-ratio to the current policy,
    mean(lo - l), is above this."""
    proximal: Literal["recomputed", "interpolated"] | None = None
    """Where the proximal log-probabilities come from: a pass at the start of the batch (the default), or between
    behaviour and current policy by the age of the token (A-3PO)."""


class SelectionConfig(Section):
    """A choice of tokens over the whole minibatch. None: as the preset or the type says."""

    type: Literal["none", "clip_cov", "kl_cov", "m2po"] | None = None
    """``clip_cov``: no loss for a random ``fraction`` of the tokens, of those with covariance of advantage and
    log-probability in (low, high). ``kl_cov``: ``penalty`` x |log-ratio| on the ``fraction`` with the largest
    covariance. ``m2po``: no loss for the largest log-ratios, until the mean square is at most ``threshold``."""
    fraction: float | None = Field(None, gt=0, le=1)
    low: float | None = None
    high: float | None = None
    penalty: float | None = Field(None, gt=0)
    threshold: float | None = Field(None, gt=0)


class SupervisedConfig(Section):
    """Cross-entropy on the samples of the supervised stream, where a minibatch has any."""

    coefficient: float = Field(1.0, ge=0)
    aggregation: Aggregation = "token_mean"


class DistillationConfig(Section):
    """KL to a teacher on tokens that carry its log-probabilities, where a minibatch has any."""

    coefficient: float = Field(1.0, ge=0)
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3+"
    """On policy, ``k2`` and ``k3+`` have the gradient of the reverse KL."""
    unbiased: bool = False
    """Times the importance ratio, with its gradient: right off policy too (k1 and k3)."""
    aggregation: Aggregation = "token_mean"


class AlgorithmConfig(Section):
    """A preset, and what deviates from it. None means: as the preset says."""

    preset: str = "grpo"
    """A name of docs/algorithms.md (grpo, dr_grpo, dapo, rloo, reinforce++, gspo, ppo, ppo_critic, ...), or an entry
    point's name."""
    advantage: (
        Literal[
            "group_normalised",
            "group_normalised_biased",
            "group_centred",
            "group_centred_whitened",
            "leave_one_out",
            "length_weighted",
            "mean_normalised",
            "greedy_centred",
            "batch_whitened",
            "gae",
            "gae_whitened",
            "none",
        ]
        | None
    ) = None
    discount: float | None = Field(None, gt=0, le=1)
    """Of later rewards in a token's return; advantages greedy_centred, batch_whitened and none alone (GAE discounts by
    ``critic.gamma``)."""
    objective: (
        Literal[
            "ppo",
            "ratio",
            "gmpo",
            "sapo",
            "reinforce",
            "cispo",
            "topr",
            "dppo_tv",
            "dppo_tv_penalised",
            "dppo_kl",
            "quadratic",
        ]
        | None
    ) = None
    ratio_level: Literal["token", "sequence", "trajectory"] | None = None
    """The ratio of a token, its geometric mean over the episode, or the whole episode's (product)."""
    ratio_anchor: Literal["proximal", "behaviour"] | None = None
    """The ratio is taken to the policy at the start of the rollout batch, or to the one that sampled the token."""
    clip_low: float | None = Field(None, ge=0)
    clip_high: float | None = Field(None, ge=0)
    """Distances from ratio 1; for gmpo bounds of the log-ratio."""
    dual_clip: float | None = Field(None, gt=1)
    temperature_positive: float | None = Field(None, gt=0)
    temperature_negative: float | None = Field(None, gt=0)
    """sapo's gates for A > 0 and the others."""
    trust_low: float | None = Field(None, ge=0)
    trust_high: float | None = Field(None, ge=0)
    """dppo's largest distance from the anchor downwards and upwards, in probability (tv) or nats (kl)."""
    ratio_cap: float | None = Field(None, gt=0)
    """dppo's cap of the ratio."""
    penalty: float | None = Field(None, gt=0)
    """quadratic's weight of half the squared log-ratio of an episode (beta of DRO, tau of Kimi k1.5), and
    dppo_tv_penalised's of the squared log-ratio of a token."""
    aggregation: Aggregation | None = None
    kl: KlConfig | None = None
    correction: CorrectionConfig | None = None
    """None: none for a synchronous run or a ratio to the behaviour policy, else decoupled with truncation at 2."""
    selection: SelectionConfig | None = None
    supervised: SupervisedConfig = SupervisedConfig()
    distillation: DistillationConfig = DistillationConfig()
    entropy_coefficient: float | None = Field(None, ge=0)
    dynamic_sampling: bool | None = None
    """Replace groups whose rewards are all equal."""
    overlong_buffer: int | None = Field(None, ge=0)
    """DAPO's soft punishment over the last tokens before ``max_new_tokens``, in tokens; 0 turns it off."""
    mask_truncated: bool | None = None
    """Overlong filtering: truncated replies keep their place in the group and train no token."""


# ----------------------------------------------------------------------------------------------- training


class TrainerConfig(OptimizerSection):
    num_batches: int = Field(100, ge=1)
    """Rollout batches, hence published versions, of the run."""
    learning_rate: float = Field(1e-6, ge=0)
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps that a rollout batch is split into, for each epoch."""
    num_epochs: int = Field(1, ge=1)
    """Passes over a rollout batch."""
    max_microbatch_tokens: int = Field(1024, ge=16)
    """Packed tokens of one forward and backward pass; a longer sample gets a micro-batch of its own. What suits a
    CPU's caches is the default; a GPU wants several times as many."""
    max_logit_tokens: int = Field(1024, ge=1)
    """Trained tokens whose [., V] logits are held at once."""
    skip_zero_gradient: bool = True
    """Skip the backward pass of groups whose loss gradient is provably zero; they still count in denominators."""
    share_prompts: bool = True
    """Compute a group's shared prompt, and what its replies have in common, once in the training pass (equal in loss
    and gradient)."""
    router_aux_coefficient: float = Field(0.0, ge=0)
    """Weight of the load-balance loss of each router of a mixture-of-experts model (docs/moe.md); 0 turns it off. On,
    it costs one more forward pass a step, and no sample's pass is skipped."""
    router_replay: bool = False
    """Train each token through the experts that the engine chose for it, with weights from the trainer's routers."""
    num_threads: int | None = Field(None, ge=1)


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
    overlap: bool = False
    """Copy weights and optimizer state into host memory, and write them while the run goes on. One process only."""


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


class ParallelConfig(Section):
    """How many processes train, and how model and batch are split among them. All 1: one process, no splitting.

    A process stands at one place of each axis, so the number of processes is the product of all axes. ``dp_replicate``,
    ``dp_shard`` and ``ep`` split the batch; ``cp`` splits each packed row, ``tp`` each layer, ``pp`` the stack of
    layers. Weights, gradients and optimizer state are sharded (FSDP2) over ``dp_shard``, ``ep`` and ``cp``.
    """

    dp_replicate: int = Field(1, ge=1)
    """Copies of the sharded model; gradients are summed over them."""
    dp_shard: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    """Expert parallel: each of these ranks owns its part of the experts; tokens travel to them."""
    cp: int = Field(1, ge=1)
    """Context parallel: tokens of a row are split; attention exchanges heads for tokens (Ulysses)."""
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    pp_schedule: Literal["gpipe", "1f1b"] = "1f1b"
    offload_parameters: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses (accelerators only)."""
    offload_optimizer: bool = False
    """Keep a master copy and the optimizer's moments in host memory, and step there."""
    bucket_bytes: int = Field(256 << 20, ge=1 << 10)
    """Full weights that one publishing step holds at once; a single larger tensor makes a bucket of its own."""

    @property
    def world_size(self) -> int:
        return self.num_data_ranks * self.cp * self.tp * self.pp

    @property
    def num_data_ranks(self) -> int:
        """Parts that a minibatch is split into."""
        return self.dp_replicate * self.dp_shard * self.ep


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


class SupervisedDataConfig(Section):
    """Conversations that are imitated beside the rollouts, by cross-entropy with a denominator of its own
    (``algorithm.supervised``): rows as ``headrace sft`` reads them."""

    path: Path
    conversations_per_batch: int = Field(8, ge=1)
    """Of each rollout batch; the file is passed through in shuffled order, again and again."""


class RunConfig(Section):
    """A run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0)
    output_dir: Path = Path("runs")
    """The run's folder is ``output_dir / name``."""
    model: ModelConfig
    tasks: TasksConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    gold: GoldConfig | None = None
    supervised_data: SupervisedDataConfig | None = None
    teacher: TeacherConfig | None = None
    engine: EngineConfig = TransformersEngineConfig()
    fleet: FleetConfig | None = None
    """Several engines behind one, and restarts; absent: one engine."""
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig | None = None
    """For algorithms whose advantages need values (PPO with GAE); absent: no critic."""
    parallel: ParallelConfig = ParallelConfig()
    cluster: ClusterConfig = InProcessCluster()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guards: GuardsConfig = GuardsConfig()
    waits: WaitsConfig = WaitsConfig()
    monitor: MonitorConfig = MonitorConfig()
    launch: LaunchConfig | None = None
    """For ``headrace launch`` only."""

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name
