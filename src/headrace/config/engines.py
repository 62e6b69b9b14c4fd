"""What serves the policy: a section for each type of engine, told apart by ``type``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from headrace.config.base import Section
from headrace.config.carriers import CarrierConfig, MemoryCarrierConfig


class TransformersEngineConfig(Section):
    """The embedded engine: in process, shares the trainer's weights."""

    is_default_type: ClassVar[bool] = True
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
    carrier: CarrierConfig = MemoryCarrierConfig()
    """How weights reach the copy."""
    packed_weights: bool | None = None
    """Keep a second copy of the linear layers' weights, laid out for decoding (engines/packed.py). None: where that
    helps, which is float32 on a CPU; true is refused elsewhere."""
    kv_policy: Literal["keep", "recompute"] = "keep"
    """What happens to the keys and values of running requests when weights change."""
    carry_kept_ids: bool = True
    """Return the kept-id sets of truncated sampling with each token."""
    num_threads: int | None = Field(None, ge=1)
    """Torch threads of decoding; None: all cores when synchronous, half of them when asynchronous."""

    @property
    def shares_weights(self) -> bool:
        """The engine reads the trainer's own storage."""
        return self.weights == "shared"


class VllmEngineConfig(Section):
    """vLLM, which needs a Python that has it (``make setup-vllm``)."""

    type: Literal["vllm"] = "vllm"
    mode: Literal["server", "in_process"] = "server"
    """``server``: a process of its own, run by a Python that has vLLM. ``in_process``: a thread of the run's own
    process; the run must be started with a Python that has vLLM and headrace."""
    python: str | None = None
    """Of the server. None: $HEADRACE_VLLM_PYTHON, else .venv-vllm of the working directory or checkout."""
    max_batch_size: int = Field(64, ge=1)
    """Requests that decode together."""
    max_context: int | None = Field(None, ge=2)
    """Prompt plus reply, in tokens; None takes the model's own limit."""
    prefix_cache: bool = True
    """Keep keys and values of prompts for later requests of the same version."""
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 20)
    """Memory for keys and values. vLLM refuses to start where one request of ``max_context`` does not fit."""
    kv_policy: Literal["keep", "recompute"] = "keep"
    """What happens to the keys and values of running requests when weights change."""
    carrier: CarrierConfig = MemoryCarrierConfig()
    """How weights reach the server."""
    num_threads: int | None = Field(None, ge=1)
    """Torch threads of the server; None: all cores when synchronous, half of them when asynchronous."""
    start_deadline_s: float = Field(600.0, gt=0)
    """For the server to start and build its model."""

    @property
    def shares_weights(self) -> bool:
        return False


def _engine_type(engine: Any) -> Any:
    """Files from before there was a choice name no type: the embedded engine."""
    return engine.get("type", "transformers") if isinstance(engine, dict) else getattr(engine, "type", None)


EngineConfig = Annotated[
    Annotated[TransformersEngineConfig, Tag("transformers")] | Annotated[VllmEngineConfig, Tag("vllm")],
    Discriminator(_engine_type),
]


def carrier_problems(engine: EngineConfig, num_processes: int) -> Iterator[str]:
    """Of ``engine.carrier`` beside the rest. ``num_processes``: of the trainer; several share no weights."""
    is_here = isinstance(engine, TransformersEngineConfig) or engine.mode == "in_process"
    if engine.shares_weights and num_processes == 1:
        if "carrier" in engine.model_fields_set:
            yield (
                'engine.carrier has no effect: engine.weights = "shared", so nothing travels; set engine.weights = '
                '"copy", or remove it'
            )
    elif engine.carrier.type == "broadcast" and is_here:
        yield (
            'engine.carrier.type = "broadcast" with an engine in the trainer\'s own process: there is nobody to '
            'broadcast to; use "memory", or "file" or "delta" where others read them too'
        )
