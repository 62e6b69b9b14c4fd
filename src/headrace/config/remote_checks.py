"""What engines that are reached over HTTP cannot do: refused at start, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.engines import OpenAiEngineConfig, SglangEngineConfig
from headrace.config.schema import RunConfig

NO_TRAINING = (
    'engine.type = "openai" cannot train: such a server takes and returns text, so that neither the sampled ids nor '
    "their log-probabilities are known, and no ratio can be taken; it can be evaluated (headrace eval NAME --tasks "
    "RUN.TOML). Train with transformers, vllm or sglang"
)


def remote_engine_problems(config: RunConfig) -> Iterator[str]:
    """Of servers that are reached over HTTP (I20)."""
    if isinstance(config.engine, OpenAiEngineConfig) and config.sampling.top_k:
        yield (
            f'sampling.top_k = {config.sampling.top_k} has no effect with engine.type = "openai": chat completions '
            "know no top-k; remove it"
        )
    if isinstance(config.engine, SglangEngineConfig):
        yield from _sglang(config, config.engine)


def _sglang(config: RunConfig, engine: SglangEngineConfig) -> Iterator[str]:
    if len(engine.urls) > 1:
        yield (
            f"engine.urls names {len(engine.urls)} servers, and the run has one engine, which is one server: name one"
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
