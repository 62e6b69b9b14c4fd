"""Memory of a training step: forecast (``headrace plan``) against the measured growth of peak memory.

Each configuration runs in fresh processes: import, note what is resident, build the trainer, make two optimizer
steps of two micro-batches, and compare the growth of the peak with the forecast of that rank.

    python benchmarks/memory.py [--only NAME] [--output memory.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from headrace.child_process import how_it_ended

DEADLINE_S = 600
WIDE = {"hidden_size": 1024, "num_layers": 4, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 16384}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "one process": {"model": WIDE, "tokens": 512},
    "one process, bfloat16": {"model": WIDE, "tokens": 512, "dtype": "bfloat16"},
    "one process, recomputing": {"model": WIDE, "tokens": 1024, "recompute": True},
    "one process, half recomputing": {"model": WIDE, "tokens": 1024, "budget": 400 << 20},
    "dp_shard 2": {"model": WIDE, "tokens": 512, "layout": {"dp_shard": 2}},
    "tp 2": {"model": WIDE, "tokens": 512, "layout": {"tp": 2}},
    "pp 2, 1f1b": {"model": WIDE, "tokens": 512, "layout": {"pp": 2}},
    "cp 2": {"model": WIDE, "tokens": 1024, "layout": {"cp": 2}},
    "ep 2": {"model": {**WIDE, "architecture": "qwen3_moe", "num_layers": 2}, "tokens": 512, "layout": {"ep": 2}},
}
MAX_LOGIT_TOKENS = 512


def measure(job: dict[str, Any], rank: int, rendezvous: str) -> dict[str, Any]:
    """In a process of its own: (growth of the peak, forecast) of this rank."""
    import torch

    import headrace.trainer.distributed as distributed
    from headrace.algorithms.fields import Minibatch, Totals
    from headrace.config.schema import ParallelConfig, TrainerConfig
    from headrace.model.load import prepare_model
    from headrace.model.memory import PeakMemory
    from headrace.model.parallel.check import ModelShape
    from headrace.model.parallel.forecast import Pass, forecast
    from headrace.model.parallel.mesh import ParallelMesh, join_processes
    from headrace.testing import Reinforce, make_sample, tiny_model, tiny_tokenizer
    from headrace.trainer.trainer import PolicyTrainer

    torch.set_num_threads(1)
    layout = ParallelConfig(**job.get("layout", {}))
    tokens, dtype = job["tokens"], job.get("dtype", "float32")
    recompute = {
        "activation_checkpointing": job.get("recompute", False),
        "activation_budget_bytes": job.get("budget"),
    }
    if layout.world_size > 1:
        join_processes(rank=rank, num_processes=layout.world_size, address=rendezvous, deadline_s=DEADLINE_S)
    warm_up()
    memory = PeakMemory(torch.device("cpu"))
    architecture = job["model"].get("architecture", "llama")
    model = tiny_model(**{**job["model"], "architecture": architecture, "tied": False, "max_context": 16384})
    shape = ModelShape.of(model.config.to_dict())
    alphabet = "".join(chr(c) for c in range(0x4E00, 0x4E00 + shape.vocab_size - 9))
    loaded = prepare_model(model, tiny_tokenizer(alphabet), dtype)
    del model
    config = TrainerConfig(
        max_microbatch_tokens=tokens, max_logit_tokens=MAX_LOGIT_TOKENS, share_prompts=False, learning_rate=1e-4
    )
    # as many rows as the layout needs, each filled to the last token
    num_rows = 2 * layout.num_data_ranks
    length = 256
    samples = tuple(
        make_sample([1] * (length // 2), [2 + i % 50] * (length // 2 + 1), group=i)
        for i in range(num_rows * tokens // length)
    )
    algorithm = Reinforce({sample.id: 1.0 - 2.0 * (i % 2) for i, sample in enumerate(samples)})
    minibatch = Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * algorithm.advantages[s.id] for s in samples],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=sum(s.num_trained for s in samples), num_episodes=len(samples), max_length=length),
    )
    trainer: Any
    if layout.world_size == 1:
        trainer = PolicyTrainer(loaded, config, num_steps=2, **recompute)
        stage = 0
    else:
        mesh = ParallelMesh.create(layout)
        trainer = distributed.ParallelTrainer(loaded, config, mesh, num_steps=2, **recompute)
        stage = mesh.rank("pp")
    for _ in range(2):
        trainer.forward_backward(minibatch, algorithm)
        trainer.optim_step()
    growth = memory.growth()
    if isinstance(growth, str):
        raise SystemExit(f"peak memory is unknown: {growth}")
    work = Pass(
        num_tokens=tokens,
        max_logit_tokens=MAX_LOGIT_TOKENS,
        dtype=dtype,
        **recompute,
        num_rows=2,
    )
    expected = forecast(layout, shape, work)[stage]
    parts = {name: getattr(expected, name) for name in expected.__dataclass_fields__ if name != "stage"}
    return {
        "rank": rank,
        "measured_bytes": growth,
        "forecast_bytes": expected.peak_bytes,
        "ratio": expected.peak_bytes / growth,
        **parts,
    }


def warm_up() -> None:
    """Everything that is imported late is imported: a step of a model of a few kilobytes."""
    from headrace.algorithms.fields import Minibatch, Totals
    from headrace.config.schema import TrainerConfig
    from headrace.model.load import prepare_model
    from headrace.testing import Reinforce, make_sample, tiny_model, tiny_tokenizer
    from headrace.trainer.trainer import PolicyTrainer

    sample = make_sample([1], [2, 3])
    totals = Totals(num_tokens=2, num_episodes=1, max_length=2)
    minibatch = Minibatch(
        samples=(sample,),
        advantages=[sample_advantages(sample)],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=totals,
    )
    trainer = PolicyTrainer(prepare_model(tiny_model(), tiny_tokenizer()), TrainerConfig(), num_steps=1)
    trainer.forward_backward(minibatch, Reinforce({sample.id: 1.0}))
    trainer.optim_step()


def sample_advantages(sample: Any) -> Any:
    import torch

    return torch.tensor(sample.mask, dtype=torch.float32)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    size = 1
    for count in (v for v in job.get("layout", {}).values() if isinstance(v, int)):
        size *= count
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        command = [sys.executable, __file__, "--job", json.dumps(job), "--rendezvous", rendezvous]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, env=env, text=True)
            for rank in range(size)
        ]
        try:
            outputs = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if any(worker.returncode for worker in workers):
        ends = [f"rank {rank} {how_it_ended(worker.returncode)}" for rank, worker in enumerate(workers)]
        raise SystemExit(f"a process failed: {'; '.join(ends)}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=sorted(CONFIGURATIONS))
    parser.add_argument("--output", type=Path, default=Path("memory.json"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(measure(json.loads(args.job), args.rank, args.rendezvous)))
        return
    results: dict[str, Any] = {}
    for name in args.only or CONFIGURATIONS:
        results[name] = run(CONFIGURATIONS[name])
        for found in results[name]:
            print(
                f"{name:26} rank {found['rank']}: measured {found['measured_bytes'] / 2**30:.2f} GiB, forecast "
                f"{found['forecast_bytes'] / 2**30:.2f} GiB ({found['ratio']:.2f})",
                flush=True,
            )
        args.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
