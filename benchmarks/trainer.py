"""The trainer's gradient pass against plain transformers on padded batches: one model, one run, in alternation.

    python benchmarks/trainer.py --model MODEL_FOLDER --threads 1 --out trainer.json

Every path computes the same loss and gradient; no optimizer step is made.

* ``plain``: what a trainer over transformers does: right-padded rows with an attention mask, sdpa attention, logits of
  the reply's positions only (``logits_to_keep``), log_softmax, gather, backward.
* ``packed``: headrace without padding and without sharing prompts; log-probabilities in chunks.
* ``shared``: packed, a group's prompt once. ``recomputed``: shared, with activation checkpointing.
* ``whole_logits``: shared, all logits at once instead of in chunks of 256 predictors.

How equal the gradients are is reported three times, each as the largest norm(a - b) / norm(b) of a tensor:
``gradient_difference`` from the plain path, ``sharing_difference`` from ``packed``, which differs from ``shared`` by
nothing but the sharing, and ``float64_difference`` from the plain path of the same model in float64, which says how far
each of them, the plain one too, is from the truth (float32 only; ``--no-float64`` leaves it out).

Scenarios: ``group`` is 8 replies of 32 tokens to one prompt of 256; ``ragged`` is 16 prompts of their own whose replies
are long-tailed; ``long`` is 8 sequences of 512 tokens that are trained on all but their first token. tokens/s counts
all of the samples' tokens for every path, so that its ratio is that of times. Achieved FLOP/s counts what the
path's own tokens need (2 per multiply-add, backward twice the forward, causal attention halved, recomputation not
counted) over the rate of a large matrix product measured in the same alternation. Peak memory is the growth of
the process over its state before the pass. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.schema import TrainerConfig
from headrace.model.attention import ATTENTION_NAME
from headrace.model.load import LoadedModel, load_model, prepare_model
from headrace.model.packing import PackedRow
from headrace.testing import Reinforce, compute_in_float64, make_sample
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import Sample

PEAK_SIZE = 2048
TARGETS = {"group": ("shared", "ratio", 2.0), "long": ("packed", "share_of_peak", 0.6)}
MATCHES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest relative difference of a gradient tensor from the plain path's; both sum in other orders."""
SHARING_TARGET = 1e-5
"""Largest relative difference of a gradient tensor that sharing a prompt may make, in float32."""


# -------------------------------------------------------------------------------------------- scenarios


def scenarios(vocab_size: int, scale: int) -> dict[str, tuple[Sample, ...]]:
    """``scale`` divides all lengths (1 outside tests)."""
    rng = random.Random(0)

    def ids(length: int) -> list[int]:
        return [rng.randrange(10, vocab_size) for _ in range(length)]

    prompt = ids(256 // scale)
    group = tuple(make_sample(prompt, ids(32 // scale), group=0, member=m) for m in range(8))
    lengths = [min(448, max(8, round(rng.lognormvariate(4.0, 1.0)))) // scale for _ in range(16)]
    ragged = tuple(make_sample(ids(64 // scale), ids(n), group=g) for g, n in enumerate(lengths))
    long = tuple(make_sample(ids(1), ids(512 // scale - 1), group=g) for g in range(8))
    return {"group": group, "ragged": ragged, "long": long}


def minibatch_of(samples: Sequence[Sample]) -> tuple[Minibatch, Reinforce]:
    algorithm = Reinforce({s.id: 1.0 + 0.5 * (-1) ** i for i, s in enumerate(samples)})
    return Minibatch(
        samples=tuple(samples),
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * algorithm.advantages[s.id] for s in samples],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=sum(s.num_trained for s in samples), num_episodes=len(samples), max_length=512),
    ), algorithm


# ------------------------------------------------------------------------------------------------ paths


def plain_pass(loaded: LoadedModel, samples: Sequence[Sample], minibatch: Minibatch) -> None:
    model: Any = loaded.model
    device = next(model.parameters()).device
    width = max(len(s.ids) for s in samples)
    ids = torch.tensor([[*s.ids, *(0,) * (width - len(s.ids))] for s in samples], device=device)
    attention = torch.tensor([[1] * len(s.ids) + [0] * (width - len(s.ids)) for s in samples], device=device)
    advantages = torch.stack([torch.nn.functional.pad(a, (0, width - len(a))) for a in minibatch.advantages]).to(device)
    first = min(s.mask.index(1) for s in samples)
    kept = width - first  # the trained positions, and the one before them; the last position predicts nothing
    logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=kept + 1, use_cache=False).logits[:, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    logprobs = logits.to(wide).log_softmax(-1).gather(2, ids[:, first:, None])[:, :, 0]
    (-(logprobs * advantages[:, first:]).sum() / minibatch.totals.num_tokens).backward()


@contextmanager
def attention_of(loaded: LoadedModel, name: str) -> Iterator[None]:
    loaded.model.set_attn_implementation(name)
    try:
        yield
    finally:
        loaded.model.set_attn_implementation(ATTENTION_NAME)


@contextmanager
def recomputing(loaded: LoadedModel, on: bool) -> Iterator[None]:
    """PolicyTrainer turns recomputation on for good; here it must go off again."""
    layers: list[Any] = [m for m in loaded.model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for layer in layers:
        layer.gradient_checkpointing = layer.training = on
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


CONFIGS = {
    "packed": TrainerConfig(share_prompts=False, max_logit_tokens=256),
    "shared": TrainerConfig(max_logit_tokens=256),
    "recomputed": TrainerConfig(max_logit_tokens=256),
    "whole_logits": TrainerConfig(max_logit_tokens=1 << 20),
}


def make_trainer(loaded: LoadedModel) -> PolicyTrainer:
    """One for all paths, which differ in its configuration: in bfloat16 a trainer puts hooks on the parameters."""
    return PolicyTrainer(loaded, CONFIGS["shared"], num_steps=1, activation_checkpointing=True)


def build_paths(
    loaded: LoadedModel, trainer: PolicyTrainer, samples: Sequence[Sample]
) -> dict[str, tuple[Callable[[], None], list[PackedRow]]]:
    """name -> (one gradient pass, the rows whose tokens it needs: for the plain path those of ``packed``)."""
    minibatch, algorithm = minibatch_of(samples)

    def rows(name: str) -> list[PackedRow]:
        trainer._config = CONFIGS[name]
        return list(trainer._rows(samples))

    def ours(name: str) -> Callable[[], None]:
        def run() -> None:
            trainer._config = CONFIGS[name]
            with recomputing(loaded, name == "recomputed"):
                trainer.forward_backward(minibatch, algorithm)

        return run

    def plain() -> None:
        with attention_of(loaded, "sdpa"), recomputing(loaded, False):
            plain_pass(loaded, samples, minibatch)

    return {"plain": (plain, rows("packed"))} | {name: (ours(name), rows(name)) for name in CONFIGS}


def clear(loaded: LoadedModel) -> None:
    for tensor in (*loaded.model.parameters(), *loaded.masters.values()):
        tensor.grad = None


def gradients(loaded: LoadedModel) -> dict[str, Tensor]:
    named = {**dict(loaded.model.named_parameters()), **loaded.masters}
    return {name: p.grad.detach().float() for name, p in named.items() if p.grad is not None}


def float64_gradients(path: str, samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Of the plain path, in a model of its own."""
    loaded = load_model(path)
    compute_in_float64(loaded.model)
    loaded = prepare_model(loaded.model, loaded.tokenizer, "float64")
    with attention_of(loaded, "sdpa"):
        plain_pass(loaded, samples, minibatch_of(samples)[0])
    return {name: p.grad for name, p in loaded.model.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest norm(a - b) / norm(b) of a tensor."""
    return max(float((found[k].to(g) - g).norm() / g.norm()) for k, g in expected.items() if float(g.norm()) > 0)


# -------------------------------------------------------------------------------------------- measuring


def flops(loaded: LoadedModel, rows: Sequence[PackedRow]) -> float:
    """Forward and backward of packed rows; attention as the pairs that may see each other."""
    model: Any = loaded.model
    linear = [m for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)]
    per_token = 2 * sum(m.weight.numel() for m in linear)
    config = model.config.get_text_config()
    head = 2 * config.hidden_size * loaded.vocab_size
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_pair = 4 * config.num_attention_heads * head_dim * config.num_hidden_layers
    # A token at position p sees p + 1 tokens, also where its prompt is shared.
    pairs = sum(int((row.positions_1T + 1).sum()) for row in rows)
    tokens = sum(row.num_tokens for row in rows)
    predictors = sum(len(row.predictor_U) for row in rows)
    return 3.0 * (per_token * tokens + head * predictors + per_pair * pairs)


def peak_flops_per_s(clock: Callable[[], float], dtype: torch.dtype, device: torch.device, size: int) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        started = clock()
        a @ b
        best = min(best, clock() - started)
    return 2.0 * size**3 / best


def make_clock(device: torch.device, threads: int) -> tuple[str, Callable[[], float]]:
    """CPU time where one thread does all the work, since other processes cannot disturb it; wall time otherwise."""
    if device.type != "cpu":

        def synchronised() -> float:
            torch.cuda.synchronize()
            return time.perf_counter()

        return "wall", synchronised
    return ("cpu", time.process_time) if threads == 1 else ("wall", time.perf_counter)


def peak_growth_bytes(run: Callable[[], None], device: torch.device) -> int | None:
    """Growth of resident memory during ``run`` over what was held before; None where the system does not tell."""
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
        before = _status_bytes("VmRSS")
        run()
        return _status_bytes("VmHWM") - before
    except (OSError, AttributeError):
        return None


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def measure(
    loaded: LoadedModel,
    trainer: PolicyTrainer,
    samples: Sequence[Sample],
    clock: Callable[[], float],
    repeats: int,
    peak_size: int,
    chosen: Sequence[str],
    truth: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """One scenario: parity and memory of each path once, then times in alternation. ``truth``: float64 gradients."""
    weight = next(loaded.model.parameters())
    paths = {name: path for name, path in build_paths(loaded, trainer, samples).items() if name in chosen}
    needed = {name: flops(loaded, rows) for name, (_, rows) in paths.items()}
    out: dict[str, dict[str, Any]] = {}
    plain: dict[str, Tensor] = {}
    packed: dict[str, Tensor] = {}
    for name, (run, _) in paths.items():
        clear(loaded)
        grown = peak_growth_bytes(run, weight.device)
        found = gradients(loaded)
        plain, packed = plain or found, found if name == "packed" else packed
        out[name] = {"gradient_difference": difference(found, plain), "peak_growth_bytes": grown}
        if packed:
            out[name]["sharing_difference"] = difference(found, packed)
        if truth is not None:
            out[name]["float64_difference"] = difference(found, truth)
    times: dict[str, list[float]] = {name: [] for name in paths}
    peaks: list[float] = []
    for _ in range(repeats):
        peaks.append(peak_flops_per_s(clock, weight.dtype, weight.device, peak_size))
        for name, (run, _) in paths.items():
            clear(loaded)
            started = clock()
            run()
            times[name].append(clock() - started)
    clear(loaded)
    num_tokens = sum(len(s.ids) for s in samples)
    for name, taken in times.items():
        out[name] |= {
            "seconds": statistics.median(taken),
            "tokens_per_s": num_tokens / statistics.median(taken),
            "ratio": statistics.median(p / t for p, t in zip(times["plain"], taken, strict=True)),
            "achieved_flops_per_s": needed[name] / statistics.median(taken),
            "share_of_peak": statistics.median(needed[name] / t / p for p, t in zip(peaks, taken, strict=True)),
        }
    return {"num_tokens": num_tokens, "peak_flops_per_s": statistics.median(peaks), "paths": out}


def profile(loaded: LoadedModel, trainer: PolicyTrainer, samples: Sequence[Sample], path: str) -> list[dict[str, Any]]:
    """Where the time of one pass goes: the ten operators with the most time of their own."""
    run, _ = build_paths(loaded, trainer, samples)[path]
    clear(loaded)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run()
    clear(loaded)
    events = sorted(recorded.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in events)
    return [{"operator": e.key, "share": e.self_cpu_time_total / total, "calls": e.count} for e in events[:10]]


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    loaded = load_model(args.model, args.dtype, device=args.device)
    trainer = make_trainer(loaded)
    device = torch.device(args.device)
    clock_name, clock = make_clock(device, args.threads)
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "device": args.device,
        "threads": args.threads,
        "clock": clock_name,
        "torch": torch.__version__,
        "repeats": args.repeats,
        "scenarios": {},
    }
    for name, samples in scenarios(loaded.vocab_size, args.scale).items():
        if name not in args.scenarios:
            continue
        truth = float64_gradients(args.model, samples) if args.float64 and args.dtype == "float32" else None
        chosen = ["plain", *args.paths]
        measured = measure(loaded, trainer, samples, clock, args.repeats, args.peak_size, chosen, truth)
        del truth
        if args.profile:
            measured["profile"] = profile(loaded, trainer, samples, args.paths[0])
        result["scenarios"][name] = measured
        print(f"{name}: {json.dumps(measured)}", file=sys.stderr, flush=True)
    result["targets"] = {
        name: {
            "path": path,
            "measure": key,
            "target": target,
            "measured": result["scenarios"][name]["paths"][path][key],
            "met": result["scenarios"][name]["paths"][path][key] >= target,
        }
        for name, (path, key, target) in TARGETS.items()
        if name in result["scenarios"] and path in args.paths
    }
    shared = [s["paths"]["shared"] for s in result["scenarios"].values() if "shared" in s["paths"]]
    sharing = [path["sharing_difference"] for path in shared if "sharing_difference" in path]
    if sharing and args.dtype == "float32":
        met = max(sharing) <= SHARING_TARGET
        result["targets"]["sharing"] = {"target": SHARING_TARGET, "measured": max(sharing), "met": met}
    differences = [p["gradient_difference"] for s in result["scenarios"].values() for p in s["paths"].values()]
    result["same_gradients"] = max(differences) <= MATCHES[next(loaded.model.parameters()).dtype]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scenarios", nargs="+", default=["group", "ragged", "long"])
    parser.add_argument("--paths", nargs="+", default=list(CONFIGS), choices=list(CONFIGS), help="besides plain")
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths (for tests)")
    parser.add_argument("--peak-size", type=int, default=PEAK_SIZE)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-float64", dest="float64", action="store_false", help="no comparison with float64")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = json.dumps(run(args))
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
