"""What each type of engine cannot do, or not with these options: refused at start, with the reason (I20)."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.engines import (
    OpenAiEngineConfig,
    SglangEngineConfig,
    TransformersEngineConfig,
    VllmEngineConfig,
    carrier_problems,
)
from headrace.config.schema import RunConfig

NO_TRAINING = (
    'engine.type = "openai" cannot train: such a server takes and returns text, so that neither the sampled ids nor '
    "their log-probabilities are known, and no ratio can be taken; it can be evaluated (headrace eval NAME --tasks "
    "RUN.TOML). Train with transformers, vllm or sglang"
)


def engine_problems(config: RunConfig) -> Iterator[str]:
    engine = config.engine
    if isinstance(engine, TransformersEngineConfig | VllmEngineConfig):
        yield from carrier_problems(engine, config.parallel.world_size)
    if isinstance(engine, VllmEngineConfig):
        yield from _vllm(config, engine)
    if isinstance(engine, SglangEngineConfig):
        yield from _sglang(config, engine)
    if isinstance(engine, OpenAiEngineConfig) and config.sampling.top_k:
        yield (
            f'sampling.top_k = {config.sampling.top_k} has no effect with engine.type = "openai": chat completions '
            "know no top-k; remove it"
        )


MAX_VLLM_RANK = 512
"""Of an adapter."""


def _vllm(config: RunConfig, engine: VllmEngineConfig) -> Iterator[str]:
    if engine.mode == "in_process":
        if "python" in engine.model_fields_set:
            yield (
                'engine.python has no effect: with engine.mode = "in_process", vLLM runs in the Python that runs '
                "headrace; remove it"
            )
        if config.fleet is not None and config.fleet.num_engines > 1:
            yield (
                f'fleet.num_engines = {config.fleet.num_engines} with engine.mode = "in_process": a process holds one '
                'vLLM; use mode = "server"'
            )
        if config.parallel.world_size > 1:
            yield (
                f'engine.mode = "in_process" with {config.parallel.world_size} processes: vLLM and the trainer would '
                'each make the process group of the process that they share; use mode = "server"'
            )
    if config.model.lora is not None and config.model.lora.rank > MAX_VLLM_RANK:
        yield f"model.lora.rank = {config.model.lora.rank}: vLLM takes {MAX_VLLM_RANK} at most; lower it"
    if config.sampling.temperature > 2:
        yield f"sampling.temperature = {config.sampling.temperature}: vLLM takes 2 at most; lower it"
    if config.sampling.top_p < 1 and not config.sampling.top_k:
        yield (
            f"sampling.top_p = {config.sampling.top_p} without sampling.top_k: vLLM tells the kept ids, which the "
            "trainer scores with, of a bounded number only; set sampling.top_k too (1000, say)"
        )


def _sglang(config: RunConfig, engine: SglangEngineConfig) -> Iterator[str]:
    if len(engine.urls) > 1 and config.fleet is None:
        yield (
            f"engine.urls names {len(engine.urls)} servers, and the run has one engine, which is one server: name one, "
            "or set [fleet]"
        )
    if config.model.lora is not None:
        yield (
            'engine.type = "sglang" with model.lora: adapters do not travel to SGLang yet; train all weights (remove '
            'model.lora), or use engine.type = "transformers"'
        )
    if config.sampling.top_p < 1 and config.sampling.top_k:
        yield (
            f"sampling.top_p = {config.sampling.top_p} with sampling.top_k = {config.sampling.top_k}: SGLang measures "
            "top-p over all ids, headrace over those that top-k left; set one of the two"
        )
    if engine.kv_policy == "keep" and config.guards.canary_every == 1:
        yield (
            'engine.kv_policy = "keep" has no effect: guards.canary_every is 1, and SGLang runs no probe beside '
            "requests that it holds, so that each sync computes them anew; remove it, or raise guards.canary_every"
        )
