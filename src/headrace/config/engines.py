"""What serves the policy: a section for each type of engine, told apart by ``type``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from headrace.config.base import Section
from headrace.config.carriers import CarrierConfig, MemoryCarrierConfig

_URL = r"^https?://[^/\s@]+(/\S*)?$"
"""No credentials in it: they would stand in the run's files."""
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"


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


class SglangEngineConfig(Section):
    """An SGLang server that somebody else has started, over HTTP (extra ``http``; docs/sglang.md)."""

    type: Literal["sglang"] = "sglang"
    urls: tuple[Annotated[str, Field(pattern=_URL)], ...] = Field(min_length=1)
    """Of the servers, one for each engine, for example ``http://10.0.0.7:30000``. A server belongs to one run."""
    weights_path: Path | None = None
    """A folder that the trainer writes and the server's machine reads under the same name; None: ``weights`` in the
    run's folder."""
    api_key_variable: str | None = Field(None, pattern=_VARIABLE)
    """Environment variable that holds the server's key; the key itself stands in no file."""
    max_concurrent: int = Field(256, ge=1)
    """Requests that are at the server at once; the others wait here."""
    max_context: int | None = Field(None, ge=2)
    """Prompt plus reply, in tokens; None takes the model's own limit."""
    kv_policy: Literal["keep", "recompute"] = "recompute"
    """What happens to the keys and values of running requests when weights change."""
    start_deadline_s: float = Field(60.0, gt=0)
    """For a server that is being started to answer."""
    update_deadline_s: float = Field(600.0, gt=0)
    """For the server to load a version, and to compute its checksum."""

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def num_threads(self) -> None:
        """It has its own machine."""


class OpenAiEngineConfig(Section):
    """Any server with OpenAI's chat completions, for ``headrace eval`` (extra ``http``; docs/openai.md). It tells no
    ids and no log-probabilities of what it sampled from, so nothing is trained on its replies."""

    type: Literal["openai"] = "openai"
    url: str = Field(pattern=_URL)
    """Up to and with the version: ``https://api.openai.com/v1``, ``http://127.0.0.1:8000/v1``."""
    api_key_variable: str | None = Field(None, pattern=_VARIABLE)
    """Environment variable that holds the key; the key itself stands in no file."""
    length_option: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """What the server calls the bound of a reply; OpenAI's newer models take ``max_completion_tokens`` only."""
    send_seed: bool = True
    """Send each request's seed. Turn it off for servers that refuse it."""
    max_concurrent: int = Field(16, ge=1)
    """Requests at once."""
    request_deadline_s: float = Field(300.0, gt=0)
    """For one reply, all tries together: a request is repeated after status 429 or 5xx, or a lost connection."""
    start_deadline_s: float = Field(10.0, gt=0)
    """For the server to answer at all."""

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def max_context(self) -> None:
        """The server's business."""

    @property
    def num_threads(self) -> None:
        """It has its own machine."""


def _engine_type(engine: Any) -> Any:
    """Files from before there was a choice name no type: the embedded engine."""
    return engine.get("type", "transformers") if isinstance(engine, dict) else getattr(engine, "type", None)


EngineConfig = Annotated[
    Annotated[TransformersEngineConfig, Tag("transformers")]
    | Annotated[VllmEngineConfig, Tag("vllm")]
    | Annotated[SglangEngineConfig, Tag("sglang")]
    | Annotated[OpenAiEngineConfig, Tag("openai")],
    Discriminator(_engine_type),
]


def carrier_problems(engine: TransformersEngineConfig | VllmEngineConfig, num_processes: int) -> Iterator[str]:
    """Of ``engine.carrier`` beside the rest. ``num_processes``: of the trainer; several share no weights."""
    is_here = isinstance(engine, TransformersEngineConfig) or engine.mode == "in_process"
    if engine.shares_weights and num_processes == 1:
        if engine.carrier.model_fields_set:  # an empty section is what dump.py writes for the default
            yield (
                'engine.carrier has no effect: engine.weights = "shared", so nothing travels; set engine.weights = '
                '"copy", or remove it'
            )
    elif engine.carrier.type == "broadcast" and is_here:
        yield (
            'engine.carrier.type = "broadcast" with an engine in the trainer\'s own process: there is nobody to '
            'broadcast to; use "memory", or "file" or "delta" where others read them too'
        )
