"""The embedded engine against transformers' ``generate()``: one model, one run, in alternation.

    python benchmarks/engine.py --model MODEL_FOLDER --threads 2 --out engine.json

* ``equal_12`` and ``equal_64``: 4 prompts x 8 members, 12 or 64 new tokens each, no end of text, temperature 1.
  ``generate()`` gets the 32 left-padded rows in one call, as trainers do.
* ``mixed``: 64 requests (8 prompts x 8 members) whose lengths are drawn once from a long-tailed (log-normal)
  distribution cut to [4, 128]. The engine runs 32 rows; ``generate()`` gets the same requests in the same order in two
  calls of 32 rows, each of which runs until its longest reply is done (that is what one batched call does; a stopping
  criterion for each row would only fill up with padding). Only useful tokens count on both sides.

Both sides sample; the engine also returns log-probabilities, ``generate()`` here does not. The last line printed is
one JSON object: tokens/s by side, their ratio for each alternation and its median, and the engine's flip rate (how
often batch shape changes a token, see docs/engine.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headrace.config.engines import TransformersEngineConfig
from headrace.engines import TransformersEngine
from headrace.engines.flips import measure_flips
from headrace.model.attention import ATTENTION_NAME
from headrace.types import GenerationRequest, PolicyVersion, Sampling
from headrace.weights import SharedWeights

MAX_ROWS = 32


def build_requests(tokenizer: Any, lengths: list[int], num_prompts: int, tag: str) -> list[GenerationRequest]:
    """``len(lengths)`` requests, spread over ``num_prompts`` prompts in groups."""
    size = len(lengths) // num_prompts
    prompts = []
    for i in range(num_prompts):
        message = {"role": "user", "content": f"What is {2 + i % 8} * {3 + i // 2 % 7}? Answer with the number."}
        text = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(tuple(tokenizer(text)["input_ids"]))
    return [
        GenerationRequest(
            id=f"{tag}-{i}",
            prompt_ids=prompts[i // size],
            sampling=Sampling(max_new_tokens=length),
            seed=i,
            prefix_key=f"{tag}-{i // size}",
            cache_salt=tag,
        )
        for i, length in enumerate(lengths)
    ]


def long_tailed(num: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(128, max(4, round(rng.lognormvariate(2.8, 0.9)))) for _ in range(num)]


async def time_engine(engine: TransformersEngine, requests: list[GenerationRequest]) -> float:
    started = time.perf_counter()
    replies = await asyncio.gather(*(engine.generate(r) for r in requests))
    elapsed = time.perf_counter() - started
    assert [len(g.ids) for g in replies] == [r.sampling.max_new_tokens for r in requests]
    return elapsed


@torch.no_grad()
def time_generate(model: Any, requests: list[GenerationRequest]) -> float:
    """Left-padded batches of MAX_ROWS in order, each until its longest request is done."""
    started = time.perf_counter()
    for first in range(0, len(requests), MAX_ROWS):
        batch = requests[first : first + MAX_ROWS]
        width = max(len(r.prompt_ids) for r in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch])
        longest = max(r.sampling.max_new_tokens for r in batch)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=longest, eos_token_id=None, pad_token_id=0
        )
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        assert out.shape[1] == width + longest
    return time.perf_counter() - started


async def compare(
    engine: TransformersEngine, model: Any, tokenizer: Any, name: str, lengths: list[int], prompts: int, repeats: int
) -> dict[str, Any]:
    rows = []
    for repeat in range(-1, repeats):  # the first is a warm-up
        requests = build_requests(tokenizer, lengths, prompts, f"{name}-{repeat}")
        model.set_attn_implementation(ATTENTION_NAME)
        engine_s = await time_engine(engine, requests)
        model.set_attn_implementation("sdpa")
        generate_s = time_generate(model, requests)
        if repeat >= 0:
            rows.append((engine_s, generate_s))
    num_tokens = sum(lengths)
    return {
        "num_requests": len(lengths),
        "num_useful_tokens": num_tokens,
        "engine_tokens_per_s": num_tokens / statistics.median(e for e, _ in rows),
        "generate_tokens_per_s": num_tokens / statistics.median(g for _, g in rows),
        "ratio": statistics.median(g / e for e, g in rows),
        "ratios": [g / e for e, g in rows],
    }


async def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model.eval()
    config = TransformersEngineConfig(max_batch_size=MAX_ROWS, num_threads=args.threads)
    engine = TransformersEngine(SharedWeights(model, PolicyVersion(0, 0)), config, vocab_size=len(tokenizer))
    scenarios = {"equal_12": ([12] * 32, 4), "equal_64": ([64] * 32, 4), "mixed": (long_tailed(64, seed=0), 8)}
    result: dict[str, Any] = {"model": str(args.model), "dtype": args.dtype, "threads": args.threads}
    for name in args.scenarios or scenarios:
        lengths, prompts = scenarios[name]
        result[name] = await compare(engine, model, tokenizer, name, lengths, prompts, args.repeats)
        print(name, json.dumps(result[name]), flush=True)
    if args.flips:
        model.set_attn_implementation(ATTENTION_NAME)
        flips = await measure_flips(engine, build_requests(tokenizer, [32] * args.flips, args.flips // 4, "flips"))
        result["flips"] = {
            "num_flips": flips.num_flips,
            "num_tokens": flips.num_tokens,
            "rate": flips.rate,
            "max_logprob_gap": flips.max_logprob_gap,
        }
    stats = engine.stats()
    result["engine_prefill_s"], result["engine_decode_s"] = stats.prefill_s, stats.decode_s
    await engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder, such as SmolLM2-135M's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scenarios", nargs="*", choices=["equal_12", "equal_64", "mixed"])
    parser.add_argument("--flips", type=int, default=16, help="requests for the flip rate; 0 leaves it out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = asyncio.run(run(args))
    line = json.dumps(result)
    if args.out:
        args.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
