"""The interfaces between rooms. Rooms of one layer meet here and are wired in ``loop.py``.

Everything here is a structural type: a third party's class needs the methods, not the base class.
No torch at import time; tensors appear in annotations only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from headrace.types import (
    Episode,
    FinishReason,
    Generation,
    GenerationRequest,
    Group,
    Message,
    PolicyVersion,
    RolloutBatch,
    Sample,
    Sampling,
    ScoreResult,
    Task,
)

if TYPE_CHECKING:
    from torch import Tensor


class Clock(Protocol):
    """Monotonic seconds. Injected everywhere, so that tests never sleep."""

    def __call__(self) -> float: ...


# ---------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can promise; checked against the configuration before work starts."""

    logprobs: bool = True
    """Returns the log-probability of each sampled id under the distribution actually sampled from."""
    kept_ids: bool = False
    """Returns the kept-id sets of truncated sampling, so that the trainer can score the same distribution."""
    routing_ids: bool = False
    """Returns the experts that its routers chose for each token (mixture-of-experts models)."""
    version_spans: bool = True
    in_flight_updates: bool = False
    """Weights may change between two decode steps of one request."""
    max_context: int = 0
    """Prompt plus reply, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start; rates are differences of two snapshots."""

    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    """Requests that can run at once; 0: not known."""
    kv_used_tokens: int = 0
    """Room for keys and values that running requests take now, in tokens."""
    kv_total_tokens: int = 0
    """All of that room; 0: not known, or without a bound."""
    num_generated_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_prefix_tokens: int = 0
    """Prompt tokens whose prefill was shared or found in the prefix cache."""
    num_decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """New weights for an engine. ``tensors`` is None where the engine shares the trainer's storage."""

    version: PolicyVersion
    tensors: Mapping[str, Tensor] | None = None
    buckets: Callable[[], Iterator[Mapping[str, Tensor]]] | None = None
    """Of a trainer of several processes: makes the whole tensors, a bounded number at a time. Take all of them."""
    manifest: Mapping[str, Any] | None = None
    """JSON: where a carrier has put them already (``headrace.weights.carrier``); then nothing else is read."""


class Probed(Protocol):
    """As much of an engine as its canary needs."""

    @property
    def version(self) -> PolicyVersion: ...

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]: ...

    def weight_checksums(self) -> Mapping[str, str]: ...


@runtime_checkable
class Engine(Protocol):
    """A policy engine: ids in, ids out. All waits are the caller's to bound (I19)."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def version(self) -> PolicyVersion:
        """The version that the next decode step will use."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample a reply. Returns the partial reply with finish reason 'abort' after :meth:`abort`."""
        ...

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate these alone, also while paused: no other request advances. For the canary (I6), which must
        prove new weights before anything else is served by them. Prefix caches are used and filled as usual."""
        ...

    async def abort(self, request_id: str) -> None:
        """End one request now; its ``generate`` returns what it has. Unknown ids are ignored."""
        ...

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Return once no decode step runs. ``keep`` holds running requests, ``abort`` ends them."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, update: WeightUpdate) -> None:
        """Switch to ``update.version``; the engine must be paused. Running requests go on under the engine's
        ``kv_policy`` (keep or recompute); prefix caches of older versions are dropped."""
        ...

    async def healthy(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def weight_checksums(self) -> Mapping[str, str]:
        """Name -> checksum of the weights that the next decode step will use (I6)."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Messages in. ``sampling.stop_ids`` and ``top_k`` say nothing to an engine of text."""

    id: str
    messages: tuple[Message, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """Text out. Where a stop string ended it, most servers have cut that off."""

    text: str
    finish_reason: FinishReason


@runtime_checkable
class ChatEngine(Protocol):
    """Text in, text out: somebody's server. What it sampled is not known by ids, nor with which probability, so an
    episode that it plays has no trace: it can be evaluated or judge others, and is never trained."""

    @property
    def version(self) -> PolicyVersion:
        """Always the same: what the server has is not ours to number."""
        ...

    async def chat(self, request: ChatRequest) -> ChatReply: ...

    async def close(self) -> None: ...


@runtime_checkable
class LendableEngine(Engine, Protocol):
    """An engine that can hand over its device's memory: one half of a lease (``control/lease.py``)."""

    async def release(self) -> None:
        """Free weights and keys and values; the engine must be paused. Requests in flight stand still."""
        ...

    async def acquire(self) -> None:
        """Room for them again; ``update_weights`` must follow before anything is served."""
        ...

    def held_bytes(self) -> int: ...


@runtime_checkable
class LendableTrainer(Protocol):
    """The other half. Blocking, on the trainer's thread."""

    def offload(self) -> None:
        """Move everything into host memory; nothing else may be called until :meth:`onload`."""
        ...

    def onload(self) -> None: ...

    def held_bytes(self) -> int: ...


@runtime_checkable
class Fleet(Protocol):
    """What an engine made of several engines says besides: each of them is proved by its name (I6)."""

    async def unproved(self) -> Mapping[str, Probed]:
        """Name -> engine, of those that hold the published version and have not been proved to serve it. A call on one
        that is lost meanwhile raises :class:`headrace.errors.EngineLost`: the fleet has taken it out."""
        ...

    def proved(self, name: str, version: PolicyVersion) -> None:
        """The engine serves ``version``: it may take work."""
        ...

    def batch_metrics(self) -> Mapping[str, float]:
        """What happened since this was last asked, named for metrics.jsonl."""
        ...


class CatchUp(Protocol):
    """How an engine that joins between two publishes gets the weights that the others serve, and is proved."""

    async def update(self) -> WeightUpdate | None:
        """The published weights, as tensors (or a reference to them) that stay as they are; None where the trainer has
        begun to change them and no copy is left: then the engine waits for the next publish."""
        ...

    async def prove(self, name: str, engine: Probed, update: WeightUpdate) -> bool:
        """True where the engine serves ``update`` (I6); False where that cannot be told any more. Raises where it
        serves something else."""
        ...


# ------------------------------------------------------------------------------- tasks and environments


class Renderer(Protocol):
    """Messages to ids and back, by the model's own chat template. Text never becomes a control id (I3)."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt ids, generation prompt included."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Reply text without control ids."""
        ...


class TaskSource(Protocol):
    """A finite, indexable set of tasks; order and epochs are the control room's business."""

    @property
    def fingerprint(self) -> str:
        """Changes when any task changes; a resumed run must find the same."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the policy sees next. ``done`` ends the episode after this observation."""

    messages: tuple[Message, ...]
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """Single use: one reset, then steps until done. Gymnasium's words, made async."""

    async def reset(self, task: Task, seed: int) -> Observation: ...

    async def step(self, action: str) -> Observation: ...

    async def close(self) -> None: ...


@runtime_checkable
class Reward(Protocol):
    """Judges an episode. Errors come back as ScoreError, never as a value (I14)."""

    @property
    def name(self) -> str: ...

    @property
    def value_range(self) -> tuple[float, float]:
        """Declared range of ``Score.value``, bounds included."""
        ...

    @property
    def deadline_s(self) -> float:
        """Seconds after which one score ends as an error by itself, waiting for a free worker included."""
        ...

    async def start(self) -> None:
        """Start workers and self-test them (I15); raises where a known input is judged wrongly."""
        ...

    async def score(self, episode: Episode) -> ScoreResult: ...

    async def score_group(self, group: Group) -> list[ScoreResult]: ...

    async def close(self) -> None: ...


# ------------------------------------------------------------------------------- algorithms and trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmNeeds:
    """What the trainer must compute for an algorithm besides log-probabilities."""

    reference: bool = False
    proximal: bool = False
    """Proximal log-probabilities as a separate pass even when a batch makes one optimizer step."""
    entropy: bool = False
    """Differentiable entropy per token."""
    skips_proximal: bool = False
    """No loss reads the proximal log-probabilities, also where a batch makes several optimizer steps: no pass for
    them."""
    prepare: bool = False
    """It is a :class:`WholeMinibatchAlgorithm`: ``prepare`` is called before each minibatch's first pass."""
    greedy_baseline: bool = False
    """Each group needs a scored greedy reply, ``Group.baseline``."""
    values: bool = False
    """A critic's values; the algorithm is then a :class:`CriticAlgorithm`."""


class Algorithm(Protocol):
    """Turns scores into advantages and a loss. It never sees the model; the trainer never sees its name."""

    @property
    def needs(self) -> AlgorithmNeeds: ...

    @property
    def zero_advantage_means_zero_gradient(self) -> bool:
        """True where a sample whose advantages are all exactly 0 provably adds nothing to the gradient
        (no KL, entropy, critic or auxiliary term), so that its backward pass may be skipped."""
        ...

    def keep_group(self, group: Group) -> bool:
        """Dynamic sampling: False for groups that are filtered out and replaced."""
        ...

    def shape_rewards(self, batch: RolloutBatch) -> list[float]:
        """Reward of each sample after shaping (overlong penalty and the like), in sample order."""
        ...

    def advantage(
        self,
        batch: RolloutBatch,
        *,
        proximal_logprobs: Sequence[Tensor] | None = None,
        reference_logprobs: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Per-token advantages: for each sample a float32 tensor [T], 0 where the mask is 0."""
        ...

    def loss(self, logprobs_N: Tensor, fields: Any) -> Any:
        """(per-token loss [N], denominator): see ``headrace.algorithms.fields`` for the field types. The
        trainer minimises sum(per-token loss) / denominator, with one denominator for the whole minibatch."""
        ...


@runtime_checkable
class WholeMinibatchAlgorithm(Protocol):
    """An algorithm that chooses among all tokens of a minibatch, which a micro-batch cannot do (FAILURES.md 55)."""

    def prepare(self, minibatch: Any, logprobs: Sequence[Tensor], *, step: int) -> Any:
        """The minibatch (``headrace.algorithms.fields.Minibatch``) with its ``selected`` and ``mean_correction``.

        ``logprobs``: of the current policy, one [T] for each sample of the whole minibatch, those of all ranks and
        those that will be skipped too. ``step``: optimizer steps done, for random choices.
        """
        ...


@runtime_checkable
class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm whose ``needs.values`` is True: it reads a critic's values and says what they should have been."""

    def advantage(
        self,
        batch: RolloutBatch,
        *,
        proximal_logprobs: Sequence[Tensor] | None = None,
        reference_logprobs: Sequence[Tensor] | None = None,
        values: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """``values``: for each sample a float32 [T]; entry t is the value of the state in which id t was sampled."""
        ...

    def value_targets(
        self,
        batch: RolloutBatch,
        *,
        values: Sequence[Tensor],
        proximal_logprobs: Sequence[Tensor] | None = None,
        reference_logprobs: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """What the critic is trained towards: for each sample a float32 tensor [T], 0 where the mask is 0."""
        ...


class Trainer(Protocol):
    """The four verbs, plus forward, save and restore. Blocking: the loop calls it on the trainer's own thread."""

    @property
    def version(self) -> PolicyVersion: ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    def forward(self, samples: Sequence[Sample], model: Literal["policy", "reference", "critic"]) -> list[Tensor]:
        """Log-probabilities of ``samples``, each [T] in float32, 0 where the mask is 0; of the critic: values. No
        gradient."""
        ...

    def forward_backward(self, minibatch: Any, algorithm: Algorithm) -> dict[str, float]:
        """Add the gradient of one minibatch (``headrace.algorithms.fields.Minibatch``); returns metrics."""
        ...

    def optim_step(self) -> dict[str, float]:
        """One optimizer step from the gathered gradient, then clear it. Non-finite gradients raise (I13)."""
        ...

    def publish(self) -> WeightUpdate:
        """The next policy version, checked to be finite (I13)."""
        ...

    def save(self, path: Path) -> None: ...

    def restore(self, path: Path) -> None: ...


# -------------------------------------------------------------------------------------------- monitoring


class Sink(Protocol):
    """Where metrics also go. A sink that cannot start raises in its constructor; later failures are caught,
    counted and shown by the fan-out, and never stop training."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
