"""What a server needs of the engine behind it: the seam between our server and one range of vLLM versions."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headrace.engines.vllm.wire import Ready, ServerRequest
from headrace.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """A LoRA adapter over frozen weights, in peft's words."""

    rank: int
    alpha: float
    target_modules: list[str]
    """Names of the layers that have one, without their place in the model: q_proj, down_proj, ..."""
    name: str
    """What the trainer calls it: its tensors are named ``....lora_A.NAME.weight``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """How to start it; ``--options`` of the program, as JSON."""

    model: str
    """Folder with the model's configuration; weights are not read from it, they come from the trainer."""
    dtype: str
    vocab_size: int
    """The tokenizer's number of ids; those beyond have no probability."""
    max_context: int | None
    max_batch_size: int
    prefix_cache: bool
    kv_cache_bytes: int
    num_threads: int | None
    recompute: bool
    """Running requests compute their keys and values anew after an update."""
    seed: int
    adapter: AdapterOptions | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BackendOptions:
        adapter = data["adapter"]
        return cls(**{**data, "adapter": None if adapter is None else AdapterOptions(**adapter)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One sampled token of one request."""

    handle: int
    id: int
    logprob: float
    kept_ids: list[int] | None = None
    """The ids that could have been drawn; None where all could."""


@dataclass(slots=True, kw_only=True)
class Step:
    """What one step of the scheduler brought."""

    tokens: list[Token] = field(default_factory=list)
    ended: dict[int, Literal["stop", "length"]] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the engine's modules compute with, after a load."""

    stale: dict[str, str]
    """Name of a tensor that a module does not serve -> which module, and by how much."""
    unchecked: list[str]
    """Tensors whose module is not known here, so that nothing but their arrival is checked."""


class Backend(Protocol):
    """One engine in this process. Not thread-safe: the server's main thread alone calls it."""

    @property
    def ready(self) -> Ready: ...

    def submit(self, request: ServerRequest, version: PolicyVersion) -> None:
        """Let it take part from the next step on. ``version`` separates prefix caches."""
        ...

    def abort(self, handles: list[int]) -> None: ...

    def step(self) -> Step: ...

    def hold(self) -> Any:
        """Set aside everything in flight, keys and values included; returns what :meth:`release` takes."""
        ...

    def release(self, held: Any) -> None: ...

    def load(self, tensors: Mapping[str, Tensor], changed: Set[str]) -> None:
        """``tensors``: all parameters, by the trainer's names. ``changed``: those that differ from what was loaded
        last; the others may be left as they are. Raises on the first that does not fit."""
        ...

    def served(self, tensors: Mapping[str, Tensor]) -> Served:
        """Compare what the modules compute with what ``tensors`` say."""
        ...

    def drop_caches(self, *, recompute: bool) -> None:
        """After a load: no request that starts from now on finds keys of older weights. ``recompute``: running
        requests compute theirs anew, too."""
        ...

    def close(self) -> None:
        """Let go of everything. In a process of its own nobody asks."""
        ...
