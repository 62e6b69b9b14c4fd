"""One command of under 8 minutes that says whether headrace works, and how fast, on one GPU.

    python benchmarks/gpu_check.py --model MODEL_FOLDER --out gpu_check.json

No GPU could be had where this was written: every part was run on a CPU only (``--device cpu`` with a tiny model is a
test of the fast suite), so treat the first run on a GPU as a test of this script too. Parts, in this order; one that
fails is reported with its error, and the others still run; one that would start after ``--limit-s`` is reported as
skipped:

* ``parity``: log-probabilities of one set of samples, against the float32 model on unpadded rows with eager attention,
  which is exact enough to judge by: transformers on padded rows (eager, sdpa), headrace packed, and with a shared
  prompt, each in bfloat16 and float32, and the sdpa ones under each attention kernel of torch that the device has.
  A path passes where its error is at most twice that of transformers' own padded eager pass in that type.
* ``loop``: a run with the embedded engine in bfloat16: one-digit multiplication, a few batches. It passes where all
  its guards held (canary, ratio 1, books).
* ``trainer``: tokens/s, model FLOP/s over the measured rate of a matrix product (MFU), and peak memory of the gradient
  pass, from benchmarks/trainer.py, against padded transformers.
* ``lease``: engine and trainer hand the device's memory to each other (benchmarks/lease_check.py): what each hand-over
  moved, and that the engine then serves the stepped weights.

A memory forecast to set beside the measured peaks is not part of this yet. The last line printed is one JSON object;
the exit code is 0 where every part passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))

import trainer as trainer_benchmark
from lease_check import check_lease

from headrace.config.schema import RunConfig, TrainerConfig
from headrace.model.attention import ATTENTION_NAME
from headrace.model.load import LoadedModel, load_model
from headrace.record.metrics import read_metrics
from headrace.run import train
from headrace.testing import make_sample
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import Sample

KERNELS = {
    "default": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SLACK = {"float32": 1e-3, "bfloat16": 2e-3}
"""Mean |difference| that is allowed in any case."""


# ----------------------------------------------------------------------------------------------- parity


def parity_samples(vocab_size: int, scale: int) -> list[Sample]:
    """A group with one prompt, and replies of their own prompts with other lengths."""
    step = 0

    def ids(length: int) -> list[int]:
        nonlocal step
        step += length
        return [10 + (7919 * t) % (vocab_size - 10) for t in range(step - length, step)]

    prompt = ids(192 // scale)
    group = [make_sample(prompt, ids((24 + 16 * m) // scale), member=m) for m in range(4)]
    return group + [make_sample(ids(48 // scale), ids(n // scale), group=1 + n) for n in (32, 128, 400)]


@torch.no_grad()
def padded_logprobs(loaded: LoadedModel, samples: Sequence[Sample], attention: str) -> list[Tensor]:
    """transformers' own logits on right-padded rows: [trained tokens] for each sample."""
    model: Any = loaded.model
    width = max(len(s.ids) for s in samples)
    device = next(model.parameters()).device
    ids = torch.tensor([[*s.ids, *(0,) * (width - len(s.ids))] for s in samples], device=device)
    mask = torch.tensor([[1] * len(s.ids) + [0] * (width - len(s.ids)) for s in samples], device=device)
    model.set_attn_implementation(attention)
    try:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1, : loaded.vocab_size]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    logprobs = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0].cpu()
    return [
        row[torch.tensor(s.mask[1 : len(s.ids)]).bool().nonzero()[:, 0]]
        for row, s in zip(logprobs, samples, strict=True)
    ]


def ours_logprobs(loaded: LoadedModel, samples: Sequence[Sample], share: bool) -> list[Tensor]:
    trainer = PolicyTrainer(loaded, TrainerConfig(share_prompts=share), num_steps=1)
    return [v[torch.tensor(s.mask).bool()] for v, s in zip(trainer.forward(samples), samples, strict=True)]


def passes(loaded: LoadedModel, samples: Sequence[Sample]) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    yield "padded_eager", lambda: padded_logprobs(loaded, samples, "eager")
    for kernel, backend in KERNELS.items():
        for name, run in (
            ("padded_sdpa", lambda: padded_logprobs(loaded, samples, "sdpa")),
            ("packed", lambda: ours_logprobs(loaded, samples, False)),
            ("shared", lambda: ours_logprobs(loaded, samples, True)),
        ):

            def under_kernel(
                run: Callable[[], list[Tensor]] = run, backend: SDPBackend | None = backend
            ) -> list[Tensor]:
                with nullcontext() if backend is None else sdpa_kernel(backend):
                    return run()

            yield f"{name}/{kernel}", under_kernel


def check_parity(args: argparse.Namespace) -> dict[str, Any]:
    exact = load_model(args.model, "float32", device=args.device)
    samples = parity_samples(exact.vocab_size, args.scale)
    reference = torch.cat([padded_logprobs(exact, [s], "eager")[0] for s in samples])
    out: dict[str, Any] = {"num_tokens": len(reference)}
    for dtype in ("float32", "bfloat16"):
        loaded = exact if dtype == "float32" else load_model(args.model, dtype, device=args.device)
        found: dict[str, Any] = {}
        for name, run in passes(loaded, samples):
            try:
                error_N = (torch.cat(run()) - reference).abs()
            except RuntimeError as error:  # a kernel that the device, the type or the mask does not allow
                if "/" not in name or name.endswith("/default"):
                    raise
                found[name] = {"unsupported": str(error).splitlines()[0][:120]}
                continue
            found[name] = {"mean": float(error_N.mean()), "max": float(error_N.max())}
            allowed = 2 * found["padded_eager"]["mean"] + SLACK[dtype]
            found[name]["passed"] = found[name]["mean"] <= allowed
        out[dtype] = found
    out["passed"] = all(f.get("passed", True) for dtype in ("float32", "bfloat16") for f in out[dtype].values())
    return out


# ------------------------------------------------------------------------------------------------- loop


def check_loop(args: argparse.Namespace) -> dict[str, Any]:
    """A run of a few batches; its guards raise, which makes this part fail."""
    _reset_peak(args.device)
    with tempfile.TemporaryDirectory() as folder:
        data = {
            "name": "gpu-check",
            "output_dir": folder,
            "model": {"path": str(args.model), "dtype": "bfloat16", "device": args.device},
            "tasks": {"type": "arithmetic"},
            "rewards": [{"type": "last_number"}],
            "sampling": {"max_new_tokens": args.max_new_tokens},
            "trainer": {"num_batches": args.batches, "learning_rate": 1e-5},
            "rollout": {"groups_per_batch": args.groups, "group_size": 8},
            "checkpoint": {"every": 0},
            "monitor": {"progress": False},
        }
        started_s = time.perf_counter()
        result = train(RunConfig.model_validate(data))
        seconds = time.perf_counter() - started_s
        lines = list(read_metrics(result.run_dir))
    last = lines[-1]
    names = (
        "rate/generated_tokens_per_s",
        "rate/trained_tokens_per_s",
        "rate/samples_per_s",
        "canary/max_gap",
        "policy/max_ratio_error",
        "policy/logprob_gap_p95",
        "policy/logprob_gap_max",
    )
    return {
        "num_batches": len(lines),
        "seconds": seconds,
        "reward": [line["reward/mean"] for line in lines],
        "last_batch": {name: last[name] for name in names if name in last},
        "peak_memory_bytes": _peak(args.device),
        "passed": result.num_updates == args.batches,
    }


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int | None:
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


# ---------------------------------------------------------------------------------------------- trainer


def check_trainer(args: argparse.Namespace) -> dict[str, Any]:
    options = argparse.Namespace(
        model=args.model,
        threads=torch.get_num_threads(),
        dtype="bfloat16",
        device=args.device,
        repeats=3,
        scenarios=["group", "ragged", "long"],
        paths=list(trainer_benchmark.CONFIGS),
        scale=args.scale,
        peak_size=8192 if args.device == "cuda" else 256,
        profile=False,
        float64=False,
    )
    measured = trainer_benchmark.run(options)
    return measured | {"passed": measured["same_gradients"]}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "parity": check_parity,
    "loop": check_loop,
    "trainer": check_trainer,
    "lease": check_lease,
}


def run(args: argparse.Namespace) -> dict[str, Any]:
    started_s = time.perf_counter()
    out: dict[str, Any] = {"torch": torch.__version__, "device": args.device, "model": Path(args.model).name}
    if args.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        out["gpu"] = {"name": properties.name, "memory_bytes": properties.total_memory}
    for name, part in PARTS.items():
        spent_s = time.perf_counter() - started_s
        if spent_s > args.limit_s:
            out[name] = {"skipped": f"{spent_s:.0f} s were spent before it", "passed": False}
            continue
        try:
            out[name] = part(args)
        except Exception as error:  # told below and in the exit code; the GPU's time is too dear to lose the rest
            traceback.print_exc()
            out[name] = {"error": f"{type(error).__name__}: {error}", "passed": False}
        out[name]["seconds_in_all"] = time.perf_counter() - started_s - spent_s
        print(f"{name}: {json.dumps(out[name])}", file=sys.stderr, flush=True)
    out["seconds"] = time.perf_counter() - started_s
    out["passed"] = all(out[name]["passed"] for name in PARTS)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--scale", type=int, default=1, help="divide all lengths (for tests)")
    parser.add_argument("--limit-s", type=float, default=330.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu tries the script itself")
    result = run(args)
    text = json.dumps(result)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
