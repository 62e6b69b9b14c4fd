"""One command that says whether the SGLang engine works against a real SGLang, on one GPU.

    python benchmarks/sglang_check.py --model MODEL_FOLDER --sglang-python .venv-sglang/bin/python --out check.json
    python benchmarks/sglang_check.py --model MODEL_FOLDER --url http://127.0.0.1:30000 --out check.json

It waits for a GPU, and says so: without one it prints that and ends with exit code 3, since no wheel of SGLang runs on
a CPU. No GPU could be had where this was written, so that no part has ever run against SGLang; a test runs all of them
against the scripted server that is built from SGLang's contract. Treat the first run as a test of this script too.

The first form starts a server and ends it; in the second it must run already, with --enable-deterministic-inference and
the dtype of --dtype. Parts, in this order; one that fails is reported with its error, and the others still run:

* ``start``: version, model, seeds, log-probabilities, what they mean (the probe of every run's start).
* ``parity``: log-probabilities of sampled tokens against transformers' forward pass of the same weights.
* ``updates``: embedding, attention, MLP, norm and head are perturbed in turn; after each update the server's
  log-probabilities must be the new weights'; the same update twice changes nothing.
* ``in_flight``: a long request over an update, under kv_policy recompute and keep: each token against the weights that
  its version names. recompute must agree, keep tells its gap.
* ``abort``: partial tokens, and how long they took.
* ``memory``: release and acquire of weights and cache, then an update, then parity once more.

The last line printed is one JSON object; the exit code is 0 where every part passed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.checked import sglang_calls
from headrace.child_process import how_it_ended
from headrace.config.engines import SglangEngineConfig
from headrace.engines.sglang.engine import SglangEngine
from headrace.engines.sglang.start import Expected
from headrace.protocols import WeightUpdate
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling
from headrace.weights.checksums import named_parameters
from headrace.weights.inprocess import WeightUpdateError
from headrace.weights.model_folder import ModelFolders

NO_GPU = 3
PORT = 30017
KINDS = {"embedding": "embed_tokens", "attention": "q_proj", "mlp": "down_proj", "norm": "norm", "head": "lm_head"}
BOUND = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest gap of a log-probability: that of guards.max_ratio_error_*."""


class Check:
    """One server, one model, and what each part found."""

    def __init__(self, args: argparse.Namespace, url: str, folder: Path) -> None:
        self.args = args
        self.url = url
        self.folder = folder
        dtype = getattr(torch, args.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.vocab_size = len(tokenizer)
        self.prompt = tuple(tokenizer("The mill stands by the river, and its wheel turns because")["input_ids"])
        self.version = PolicyVersion(0, 0)
        self.engine = self.make_engine("recompute")

    def make_engine(self, kv_policy: str) -> SglangEngine:
        config = SglangEngineConfig(urls=(self.url,), kv_policy=kv_policy, start_deadline_s=self.args.start_s)
        return SglangEngine(
            config,
            sglang_calls(config, self.url),
            ModelFolders(self.folder, Path(self.args.model)),
            self.update(),
            expected=Expected(
                dtype=self.args.dtype,
                architectures=tuple(self.model.config.architectures or ()),
                max_context=self.args.max_context,
            ),
            vocab_size=self.vocab_size,
            make_update_error=WeightUpdateError,
        )

    def update(self) -> WeightUpdate:
        return WeightUpdate(version=self.version, tensors=named_parameters(self.model))

    def request(self, name: str, num_tokens: int, salt: str | None = None) -> GenerationRequest:
        sampling = Sampling(max_new_tokens=num_tokens)
        return GenerationRequest(id=name, prompt_ids=self.prompt, sampling=sampling, seed=7, cache_salt=salt)

    @torch.no_grad()
    def gap(self, reply: Generation, start: int = 0, end: int | None = None) -> float:
        """Largest |log-probability of the server - of this model| over a reply's tokens ``start`` to ``end``."""
        ids = torch.tensor([[*self.prompt, *reply.ids]], device=self.args.device)
        logprobs = torch.log_softmax(self.model(ids).logits[0, len(self.prompt) - 1 : -1].float(), -1)
        own = logprobs[torch.arange(len(reply.ids)), ids[0, len(self.prompt) :]].cpu()
        gaps = (own - torch.tensor(reply.logprobs)).abs()[start:end]
        return gaps.max().item() if len(gaps) else 0.0

    async def publish(self) -> float:
        """The next version; returns the seconds that it took."""
        self.version = PolicyVersion(0, self.version.number + 1)
        started_s = time.perf_counter()
        await self.engine.pause("keep")
        await self.engine.update_weights(self.update())
        await self.engine.resume()
        return time.perf_counter() - started_s

    @torch.no_grad()
    def perturb(self, part: str) -> str:
        """Move one tensor whose name has ``part``; returns its name."""
        name, tensor = next((n, p) for n, p in named_parameters(self.model).items() if part in n)
        generator = torch.Generator().manual_seed(len(name))
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        tensor += self.args.noise * tensor.std() * noise if tensor.ndim > 1 else self.args.noise * noise
        return name

    # -------------------------------------------------------------------------------------------- parts

    async def start(self) -> dict[str, Any]:
        started_s = time.perf_counter()
        await self.engine.start()
        return {"passed": await self.engine.healthy(), "seconds": time.perf_counter() - started_s}

    async def parity(self) -> dict[str, Any]:
        replies = [await self.engine.generate(self.request(f"p{n}", self.args.num_tokens)) for n in range(2)]
        gap = max(self.gap(reply) for reply in replies)
        same = replies[0].ids == replies[1].ids
        return {"passed": gap <= BOUND[self.args.dtype] and same, "max_gap": gap, "same_seed_same_reply": same}

    async def updates(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        names = list(named_parameters(self.model))
        for kind, part in KINDS.items():
            if not any(part in name for name in names):
                found[kind] = "not in this model (tied)"
                continue
            name = self.perturb(part)
            seconds = await self.publish()
            gap = self.gap(await self.engine.generate(self.request(kind, self.args.num_tokens)))
            found[kind] = {"tensor": name, "max_gap": gap, "seconds": seconds}
        await self.engine.pause("keep")
        await self.engine.update_weights(self.update())
        await self.engine.resume()
        gaps = [row["max_gap"] for row in found.values() if isinstance(row, dict)]
        return {"passed": max(gaps) <= BOUND[self.args.dtype], **found}

    async def in_flight(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for policy in ("recompute", "keep"):
            await self.engine.close()
            self.version = PolicyVersion(0, self.version.number + 1)
            self.engine = self.make_engine(policy)
            await self.engine.start()
            long = asyncio.create_task(self.engine.generate(self.request("long", self.args.long_tokens)))
            await asyncio.sleep(self.args.flight_s)
            await self.engine.pause("keep")
            self.perturb(KINDS["mlp"])
            self.version = PolicyVersion(0, self.version.number + 1)
            await self.engine.update_weights(self.update())
            await self.engine.resume()
            reply = await long
            new = next((s for s in reply.version_spans if s.version == self.version), None)
            spans = [[str(s.version), s.start, s.end] for s in reply.version_spans]
            gap = None if new is None else self.gap(reply, new.start, new.end)
            found[policy] = {"spans": spans, "max_gap_after_switch": gap}
        gap = found["recompute"]["max_gap_after_switch"]
        return {"passed": gap is not None and gap <= BOUND[self.args.dtype], **found}

    async def abort(self) -> dict[str, Any]:
        task = asyncio.create_task(self.engine.generate(self.request("aborted", self.args.long_tokens)))
        await asyncio.sleep(self.args.flight_s)
        started_s = time.perf_counter()
        await self.engine.abort("aborted")
        reply = await task
        seconds = time.perf_counter() - started_s
        passed = reply.finish_reason == "abort" and 0 < len(reply.ids) < self.args.long_tokens
        return {"passed": passed, "num_tokens": len(reply.ids), "seconds": seconds}

    async def memory(self) -> dict[str, Any]:
        await self.engine.pause("keep")
        started_s = time.perf_counter()
        await self.engine.release()
        await self.engine.acquire()
        seconds = time.perf_counter() - started_s
        await self.engine.update_weights(self.update())
        await self.engine.resume()
        return {**await self.parity(), "seconds": seconds}


async def run_parts(check: Check) -> dict[str, Any]:
    """Every part's result, or its error."""
    parts: Sequence[Callable[[], Awaitable[dict[str, Any]]]]
    parts = (check.start, check.parity, check.updates, check.in_flight, check.abort, check.memory)
    found: dict[str, Any] = {}
    for part in parts:
        name = part.__name__
        try:
            found[name] = await asyncio.wait_for(part(), check.args.part_s)
        except Exception as error:
            found[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    await check.engine.close()
    return found


def launch(args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [args.sglang_python, "-m", "sglang.launch_server", "--model-path", args.model, "--port", str(PORT)]
    command += ["--dtype", args.dtype, "--enable-deterministic-inference", "--enable-memory-saver"]
    return subprocess.Popen(command)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder with a small model")
    parser.add_argument("--url", help="of a server that runs; without it one is started with --sglang-python")
    parser.add_argument("--sglang-python", help="a Python that has sglang")
    parser.add_argument("--dtype", choices=tuple(BOUND), default="bfloat16")
    parser.add_argument(
        "--device", default="cuda", help="of transformers' forward pass; cpu is for tests of this script"
    )
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--flight-s", type=float, default=2.0)
    parser.add_argument("--start-s", type=float, default=600.0)
    parser.add_argument("--part-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: SGLang has no wheel for CPUs, so this check waits for a machine that has one")
        return NO_GPU
    if args.url is None and args.sglang_python is None:
        parser.error("say --url, or --sglang-python to start a server with")
    server = None if args.url else launch(args)
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-sglang-check-") as folder:
            url = args.url or f"http://127.0.0.1:{PORT}"
            found = asyncio.run(run_parts(Check(args, url, Path(folder))))
    finally:
        if server is not None:
            if (code := server.poll()) is not None:
                print(f"the server that was started here {how_it_ended(code)}", flush=True)
            server.terminate()
            server.wait(60)
    passed = all(part["passed"] for part in found.values())
    text = json.dumps({"passed": passed, "dtype": args.dtype, "parts": found})
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
