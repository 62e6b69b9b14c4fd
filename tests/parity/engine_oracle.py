"""What engine tests compare with: transformers' own forward pass, one sequence at a time, without cache or packing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from headrace.config.engines import TransformersEngineConfig
from headrace.engines import TransformersEngine
from headrace.model.attention import ATTENTION_NAME
from headrace.testing import tiny_model
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling
from headrace.weights import SharedWeights

VOCAB = 48


def sharp_model(**options: Any) -> Any:
    """A tiny model whose logits are far from uniform, with padding rows above the tokenizer's ids."""
    options = {"vocab_size": VOCAB + 16, "num_kv_heads": 2, "initializer_range": 0.25, **options}
    return tiny_model(**options)


def make_engine(model: Any, *, carrier: Any = None, decode: Any = None, **config: Any) -> TransformersEngine:
    return TransformersEngine(
        carrier or SharedWeights(model, PolicyVersion(0, 0)),
        TransformersEngineConfig(**config),
        vocab_size=VOCAB,
        decode=decode,
    )


def request(name: str, prompt_ids: Sequence[int], *, seed: int = 0, **options: Any) -> GenerationRequest:
    sampling = {k: options.pop(k) for k in list(options) if k in Sampling.__dataclass_fields__}
    return GenerationRequest(id=name, prompt_ids=tuple(prompt_ids), sampling=Sampling(**sampling), seed=seed, **options)


def generate(engine: TransformersEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    async def main() -> list[Generation]:
        return list(await asyncio.gather(*(engine.generate(r) for r in requests)))

    return asyncio.run(main())


@torch.no_grad()
def plain_logits(model: Any, ids: Sequence[int], num_prompt: int) -> torch.Tensor:
    """Logits [T, VOCAB], in float32 or float64, that predict ``ids[num_prompt:]``, by transformers' eager attention."""
    model.set_attn_implementation("eager")
    try:
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0, num_prompt - 1 : -1, :VOCAB]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def reply_logprobs(model: Any, asked: GenerationRequest, reply: Generation) -> torch.Tensor:
    """Log-probabilities [T] of the declared distribution, from a plain forward pass and the reply's kept ids."""
    logits = plain_logits(model, asked.prompt_ids + reply.ids, len(asked.prompt_ids))
    scaled = logits.double() / (asked.sampling.temperature or 1.0)
    if reply.kept_ids is not None:
        allowed = torch.zeros_like(scaled, dtype=torch.bool)
        for t, kept in enumerate(reply.kept_ids):
            allowed[t, list(kept)] = True
        scaled = scaled.masked_fill(~allowed, float("-inf"))
    return scaled.log_softmax(-1).gather(1, torch.tensor(reply.ids).unsqueeze(1)).squeeze(1)


def assert_scored(model: Any, asked: GenerationRequest, reply: Generation, bound: float = 1e-5) -> None:
    gap = (reply_logprobs(model, asked, reply) - torch.tensor(reply.logprobs)).abs().max()
    assert gap < bound, f"{asked.id}: log-probabilities differ by {gap}"
