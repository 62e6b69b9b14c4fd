"""vLLM 0.32: everything that depends on its version. Written against 0.32.0; another range gets a file beside this
and a line in ``config/vllm_versions.py``.

vLLM runs inside this process (no engine-core process of its own), and the server calls its steps one by one. So a
pause is simply not calling, weights change between two steps, and the modules are at hand for loading and checking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from headrace.engines.vllm.server.adapter import base_name, is_adapter, largest_rank, write_folder
from headrace.engines.vllm.server.backend import BackendOptions, Served, Step, Token
from headrace.engines.vllm.wire import Ready, ServerRequest
from headrace.types import PolicyVersion

NUM_TIES = 8
"""Ids asked for beyond top-k: vLLM keeps all ids that tie with the k-th."""
BLOCK_SIZE = 32
"""Tokens; the prefix cache finds whole blocks. The least that attention on CPUs takes."""
LOGPROBS_MODE = "processed_logprobs"


def make_vocabulary_limit() -> type:
    """A logits processor that takes the padding ids beyond the tokenizer's out of the distribution."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class VocabularyLimit(LogitsProcessor):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._vocab_size: int = vllm_config.additional_config["headrace_vocab_size"]

        def apply(self, logits: Tensor) -> Tensor:
            logits[:, self._vocab_size :] = -torch.inf
            return logits

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Nothing depends on the batch."""

    return VocabularyLimit


@dataclass(frozen=True, slots=True)
class _Held:
    running: list[Any]
    waiting: list[Any]


class VllmBackend:
    """``backend.Backend`` over vLLM's LLMEngine."""

    def __init__(self, options: BackendOptions) -> None:
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        from vllm import __version__
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        model_vocab_size = _vocab_size(options.model)
        limit: dict[str, Any] = {}
        if options.vocab_size < model_vocab_size:
            limit = {
                "logits_processors": [make_vocabulary_limit()],
                "additional_config": {"headrace_vocab_size": options.vocab_size},
            }
        self._adapter = options.adapter
        if options.adapter is not None:
            limit |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": largest_rank(options.adapter)}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=options.model,
                dtype=options.dtype,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=options.max_context,
                max_num_seqs=options.max_batch_size,
                kv_cache_memory_bytes=options.kv_cache_bytes,
                enable_prefix_caching=options.prefix_cache,
                block_size=BLOCK_SIZE,
                enforce_eager=True,
                logprobs_mode=LOGPROBS_MODE,
                max_logprobs=-1,
                generation_config="vllm",
                disable_log_stats=True,
                async_scheduling=False,
                seed=options.seed,
                **limit,
            )
        )
        self._core = self._engine.engine_core.engine_core
        self._worker = self._engine.model_executor.driver_worker.worker
        self._model: nn.Module = self._worker.model_runner.model
        config = self._engine.model_config
        self.ready = Ready(
            vllm_version=__version__,
            max_context=int(config.max_model_len),
            vocab_size=model_vocab_size,
            dtype=str(config.dtype).removeprefix("torch."),
            logprobs=str(config.logprobs_mode),
            kv_total_tokens=(self._worker.vllm_config.cache_config.num_gpu_blocks or 0) * BLOCK_SIZE,
        )
        self._requests: dict[str, ServerRequest] = {}
        self._names: dict[int, str] = {}
        self._is_cold: set[str] = set()

    # ---------------------------------------------------------------------------------------- requests

    def submit(self, request: ServerRequest, version: PolicyVersion) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed & (2**63 - 1),
            stop_token_ids=request.stop_ids,
            ignore_eos=True,
            detokenize=False,
            logprobs=request.top_k + NUM_TIES if request.top_k else 0,
            output_kind=RequestOutputKind.DELTA,
        )
        # The version in the salt: keys and values of older weights are never found, whatever is left in the cache.
        prompt = tokens_input(list(request.prompt_ids), cache_salt=f"{version}/{request.cache_salt}")
        name = str(request.handle)
        lora = None if self._adapter is None else _lora_request(".")  # by its id: it is loaded
        self._names[request.handle] = self._engine.add_request(name, prompt, params, lora_request=lora)
        self._requests[name] = request
        self._is_cold.add(name)

    def abort(self, handles: list[int]) -> None:
        known = [self._names.pop(handle) for handle in handles if handle in self._names]
        self._engine.abort_request(known, internal=True)
        for handle in handles:
            self._requests.pop(str(handle), None)
            self._is_cold.discard(str(handle))

    def step(self) -> Step:
        step = Step()
        for output in self._engine.step():
            request = self._requests.get(output.request_id)
            if request is None:  # aborted while the step ran
                continue
            if output.request_id in self._is_cold:
                self._is_cold.discard(output.request_id)
                num_cached = output.num_cached_tokens or 0
                step.num_cached_tokens += num_cached
                step.num_prefill_tokens += len(request.prompt_ids) - num_cached
            (completion,) = output.outputs
            step.tokens += _tokens(request, completion)
            if completion.finish_reason is not None:
                if completion.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"vLLM ended a request with finish reason {completion.finish_reason!r}")
                step.ended[request.handle] = completion.finish_reason
                del self._requests[output.request_id], self._names[request.handle]
        return step

    # ----------------------------------------------------------------------- setting requests aside

    def hold(self) -> _Held:
        scheduler = self._core.scheduler
        held = _Held(list(scheduler.running), list(scheduler.waiting))
        scheduler.running = []
        scheduler.waiting.remove_requests(held.waiting)
        return held

    def release(self, held: _Held) -> None:
        scheduler = self._core.scheduler
        scheduler.running = held.running + scheduler.running
        for request in reversed(held.waiting):
            scheduler.waiting.prepend_request(request)

    # ----------------------------------------------------------------------------------------- weights

    def load(self, tensors: Mapping[str, Tensor], changed: Set[str]) -> None:
        if any(not is_adapter(name) for name in changed):
            self._load_base({base_name(name): t for name, t in tensors.items() if not is_adapter(name)})
        if self._adapter is not None and any(is_adapter(name) for name in changed):
            with TemporaryDirectory(prefix="headrace-adapter-") as folder:
                write_folder(Path(folder), self._adapter, tensors)
                self._engine.add_lora(_lora_request(folder, load_inplace=True))

    def _load_base(self, tensors: Mapping[str, Tensor]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model: Any = self._model
        expected = {base_name(name) for name, _ in model.named_parameters()}
        with set_current_vllm_config(self._worker.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(model, self._engine.model_config)
        repack_tied_heads(model)
        missing = sorted(expected - {base_name(name) for name in loaded}) if loaded is not None else []
        if missing:
            raise RuntimeError(f"vLLM's model has parameters that no tensor was loaded into: {', '.join(missing[:5])}")

    @torch.no_grad()
    def served(self, tensors: Mapping[str, Tensor]) -> Served:
        unseen = set(tensors)
        stale: dict[str, str] = {}
        for name, module, parts in self._modules_with_weights(tensors):
            unseen -= set(parts)
            gap = _gap(module, [tensors[part] for part in parts])
            if gap is not None:
                stale |= dict.fromkeys(parts, f"vLLM's {name} computes with something else (relative gap {gap:.1e})")
        for part, lies in self._adapter_parts(tensors):
            unseen.discard(part)
            expected = tensors[part].to(lies.dtype)
            if self._adapter is not None and ".lora_B." in part:  # vLLM multiplies the scale into it
                expected = expected * (self._adapter.alpha / self._adapter.rank)
            if not torch.allclose(lies, expected, rtol=1e-2 if lies.dtype == torch.bfloat16 else 1e-6, atol=0):
                stale[part] = "vLLM holds another adapter"
        return Served(stale=stale, unchecked=sorted(unseen))

    def _modules_with_weights(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module, list[str]]]:
        """(name, module, names of the tensors that its weight is made of), where all of them are known."""
        packed: Mapping[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        tied = {id(module) for module in _tied_heads(self._model)}
        theirs = {base_name(name): name for name in tensors if not is_adapter(name)}
        for full_name, module in self._model.named_modules():
            if hasattr(module, "base_layer") or not isinstance(getattr(module, "weight", None), Tensor):
                continue
            name = full_name.removesuffix(".base_layer")
            parts = [f"{part}.weight" for part in _parts(name, packed)]
            if id(module) in tied:
                parts = [part for part in theirs if part.endswith("embed_tokens.weight")]
            if parts and all(part in theirs for part in parts):
                yield name, module, [theirs[part] for part in parts]

    def _adapter_parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, what vLLM holds of it) of each of the adapter's tensors that it holds."""
        if self._adapter is None:
            return
        packed: Mapping[str, list[str]] = getattr(self._model, "packed_modules_mapping", {})
        rank, name = self._adapter.rank, self._adapter.name
        for full_name, module in self._model.named_modules():
            if not hasattr(module, "lora_a_stacked"):
                continue
            for number, part in enumerate(_parts(full_name, packed)):
                a, b = f"{part}.lora_A.{name}.weight", f"{part}.lora_B.{name}.weight"
                if a in tensors:
                    yield a, module.lora_a_stacked[number][0, 0, :rank]
                    yield b, module.lora_b_stacked[number][0, 0, :, :rank]

    def drop_caches(self, *, recompute: bool) -> None:
        self._engine.reset_prefix_cache(reset_running_requests=recompute)

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _lora_request(folder: str, *, load_inplace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name="policy", lora_int_id=1, lora_path=folder, load_inplace=load_inplace)


def _parts(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """The trainer's names of the layers that vLLM's module ``name`` is made of."""
    prefix, dot, last = name.rpartition(".")
    return [f"{prefix}{dot}{part}" for part in packed.get(last, [last])]


def repack_tied_heads(model: nn.Module) -> None:
    """On a CPU, a linear layer computes with a packed copy of its weight. Reloading packs each layer that a tensor was
    loaded into; a tied head is none of them, and would go on with the old embedding (ENGINES.md: log-probabilities
    wrong by 0.6, no error anywhere)."""
    for head in _tied_heads(model):
        head.quant_method.process_weights_after_loading(head)


def _tied_heads(model: nn.Module) -> list[Any]:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    embeddings = {
        m.weight.data_ptr()
        for m in modules
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    }
    return [m for m in modules if isinstance(m, ParallelLMHead) and m.weight.data_ptr() in embeddings]


def _gap(module: Any, parts: list[Tensor]) -> float | None:
    """How far the module is from computing with ``parts`` stacked, relative to the size of its results; None where it
    is no further than rounding. Layers whose weight lies open are compared bit for bit."""
    weight = torch.cat([part.to(module.weight.device) for part in parts])
    if weight.ndim != 2 or not hasattr(module, "quant_method") or type(module).__name__ == "VocabParallelEmbedding":
        same = torch.equal(module.weight[: len(weight)], weight)
        return None if same else float((module.weight[: len(weight)] - weight).abs().max() / weight.abs().max())
    generator = torch.Generator().manual_seed(0)
    x_1D = torch.randn(1, weight.shape[1], generator=generator).to(weight)
    got = module.quant_method.apply(module, x_1D, None)[:, : len(weight)].float()
    expected = torch.nn.functional.linear(x_1D, weight).float()
    scale = float(x_1D.float().norm() * weight.float().norm(dim=1).max())
    gap = float((got - expected).abs().max()) / scale if scale else 0.0
    return gap if not gap <= (2e-6 if weight.dtype == torch.float32 else 1e-2) else None


def _tokens(request: ServerRequest, completion: Any) -> Iterator[Token]:
    for token_id, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        kept: list[int] | None = None
        if request.top_k:
            kept = sorted(i for i, entry in logprobs.items() if entry.logprob > -torch.inf)
            if len(kept) >= request.top_k + NUM_TIES:
                raise RuntimeError(f"more than {NUM_TIES} ids tie with the {request.top_k}th: their set is not known")
        elif request.top_p < 1:
            raise RuntimeError("top_p without top_k: the client should have refused it")
        yield Token(handle=request.handle, id=int(token_id), logprob=float(logprobs[token_id].logprob), kept_ids=kept)


def _vocab_size(model: str) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
