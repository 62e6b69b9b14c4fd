"""One process of a parity check: the same training on a mesh and in one process, compared tensor by tensor.

Run as ``parallel_worker.py RANK JOBS.json``. A job names a layout, a model and a type. Every process computes the
one-process reference by itself, so that nothing but the layout differs. Process 0 writes the results.

A check is a function of (mesh, job) that returns numbers; every process must run it in the same order.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace.algorithms.fields import LossOutput, Minibatch, Totals
from headrace.child_process import how_it_ended
from headrace.config.schema import ParallelConfig, TrainerConfig
from headrace.model.load import LoadedModel, prepare_model
from headrace.model.parallel.check import ModelShape, ParallelError
from headrace.model.parallel.forecast import Pass, forecast
from headrace.model.parallel.mesh import ParallelMesh, join_processes
from headrace.model.parallel.state import like
from headrace.protocols import AlgorithmNeeds
from headrace.testing import Reinforce, compute_in_float64, make_reply, make_sample, tiny_model, tiny_tokenizer
from headrace.trainer.distributed import ParallelTrainer
from headrace.trainer.trainer import PolicyTrainer
from headrace.trainer.weights import NonFiniteError
from headrace.types import RoutingIds, Sample

Tensors = dict[str, torch.Tensor]
DEADLINE_S = 60.0
VOCAB = 64
TOKENIZER = tiny_tokenizer("".join(chr(c) for c in range(ord("A"), ord("A") + VOCAB - 9)))
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {"architecture": "llama", "tied": True, "num_kv_heads": 2},
    "qwen3-untied": {"architecture": "qwen3", "tied": False},
    "qwen3-moe": {"architecture": "qwen3_moe", "tied": False, "norm_topk_prob": True},
}


def load(job: dict[str, Any]) -> LoadedModel:
    shape = {"vocab_size": VOCAB, "num_layers": job.get("layers", 2), "initializer_range": 0.1}
    model = tiny_model(**MODELS[job["model"]], **shape, seed=job.get("seed", 0))
    if job["dtype"] == "float64":
        compute_in_float64(model)
    return prepare_model(model, TOKENIZER, job["dtype"])


def make_samples(num_groups: int = 4, seed: int = 0) -> tuple[Sample, ...]:
    """Groups of ragged replies with untrained stretches; the last episode has two branches."""
    rng = random.Random(seed)
    samples = []
    for group in range(num_groups):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        replies: list[list[int]] = []
        for member in range(3):
            reply = make_reply(rng, VOCAB, 14, replies)
            replies.append(reply)
            mask = [int(rng.random() < 0.8) for _ in reply]
            mask[rng.randrange(len(reply))] = 1
            samples.append(
                make_sample(
                    prompt, reply, group=group, member=member, reply_mask=mask, temperature=1.0 if group else 0.7
                )
            )
    samples.append(make_sample([5, 6, 7], [3, 4], group=0, member=0, branch=1, prefix_key="rewritten"))
    return tuple(samples)


def with_routing(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """Two random experts for every token and each of two layers; equal for the equal prompts of a group."""
    recorded = []
    for sample in samples:
        generator = torch.Generator().manual_seed(sample.key.group)
        ids = torch.rand(64, 2, 4, generator=generator).argsort(-1)[: len(sample.ids), :, :2]
        recorded.append(replace(sample, routing=RoutingIds((ids.to(torch.uint8),))))
    return tuple(recorded)


def algorithm_of(samples: tuple[Sample, ...]) -> Reinforce:
    rng = random.Random(1)
    advantages = {sample.id: rng.uniform(-1, 1) for sample in samples}
    return Reinforce(advantages, needs=AlgorithmNeeds(entropy=True), entropy_coefficient=0.1)


def minibatch_of(samples: tuple[Sample, ...], algorithm: Reinforce) -> Minibatch:
    totals = Totals(
        num_tokens=sum(s.num_trained for s in samples), num_episodes=len({s.key for s in samples}), max_length=16
    )
    return Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * algorithm.advantages[s.id] for s in samples],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=totals,
    )


def trainer_config(job: dict[str, Any]) -> TrainerConfig:
    options = {"max_microbatch_tokens": 60, "max_logit_tokens": 16, "learning_rate": 1e-3, "max_grad_norm": 0.05}
    return TrainerConfig(**{**options, **job.get("trainer", {})})


def one_process(job: dict[str, Any]) -> PolicyTrainer:
    return PolicyTrainer(load(job), trainer_config(job), num_steps=10)


def many_processes(job: dict[str, Any], mesh: ParallelMesh, **options: Any) -> ParallelTrainer:
    return ParallelTrainer(load(job), trainer_config(job), mesh, num_steps=10, **options)


def use_sgd(trainer: Any) -> None:
    masters = [master for master in trainer._weights.masters.values() if master.numel()]
    trainer._weights.optimizer = torch.optim.SGD(masters)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.norm())
    return float((found - expected).norm()) / scale if scale else float(found.norm())


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> float:
    """Largest distance over this process's tensors; all processes of a stage gather them together."""
    return max(distance(whole(found[name]).detach(), expected[name].detach()) for name in found)


# ------------------------------------------------------------------------------------------------ checks


def parity(mesh: ParallelMesh, job: dict[str, Any]) -> dict[str, Any]:
    """I4: log-probabilities, loss, gradients, norm, and weights after three steps of SGD and of AdamW."""
    samples = make_samples(job.get("groups", 4))
    if job.get("trainer", {}).get("router_replay"):
        samples = with_routing(samples)
    algorithm = algorithm_of(samples)
    minibatch = minibatch_of(samples, algorithm)
    fast = {
        **job,
        "trainer": {**job.get("trainer", {}), "learning_rate": 4.0},
    }  # or SGD's steps would be too small to see
    alone, together = one_process(fast), many_processes(fast, mesh)
    results: dict[str, Any] = {}
    pairs = zip(together.forward(samples), alone.forward(samples), strict=True)
    results["logprobs"] = max(float((a - b).abs().max()) for a, b in pairs)
    for optimizer in ("sgd", "adamw"):
        if optimizer == "sgd":
            use_sgd(alone), use_sgd(together)
        else:
            alone, together = one_process(job), many_processes(job, mesh)
        for step in range(3):
            expected = alone.forward_backward(minibatch, algorithm)
            found = together.forward_backward(minibatch, algorithm)
            if step == 0 and optimizer == "sgd":
                results["loss"] = abs(found["loss"] - expected["loss"]) / abs(expected["loss"])
                results["metrics"] = max(abs(found[n] - expected[n]) for n in expected)
                gradients = {n: m.grad for n, m in alone._weights.masters.items()}
                results["gradient"] = worst({n: p.grad for n, p in together._weights.parameters.items()}, gradients)
                last, expected_last = together.last_logprobs(), alone.last_logprobs()
                assert last.keys() == expected_last.keys()
                results["last_logprobs"] = max(float((last[n] - expected_last[n]).abs().max()) for n in last)
            together.forward(samples)  # a proof between gradient and step gathers weights that the step then changes
            if step == 1:  # gradients of two calls add up
                alone.forward_backward(minibatch, algorithm)
                together.forward_backward(minibatch, algorithm)
            expected, found = alone.optim_step(), together.optim_step()
            assert expected["grad_norm"] > 0.05, "the norm must be clipped, or a wrong norm would go unseen"
            error = abs(found["grad_norm"] - expected["grad_norm"]) / expected["grad_norm"]
            results["norm"] = max(error, results.get("norm", 0.0))
        weights = dict(alone._model.named_parameters())
        start = dict(load(job).model.named_parameters())
        moved = min(distance(weights[n], start[n]) for n in weights)
        results[f"moved_{optimizer}"] = moved
        results[f"weights_{optimizer}"] = worst(dict(together._weights.parameters), weights)
    results["local"] = {n: list(p.to_local().shape) for n, p in together._weights.parameters.items()}
    results["global"] = {n: list(p.shape) for n, p in together._weights.parameters.items()}
    return results


def publish(mesh: ParallelMesh, job: dict[str, Any]) -> dict[str, Any]:
    """Buckets hold the whole model, once each, as in one process, and are bounded."""
    trainer = many_processes(job, mesh)
    expected = dict(one_process(job)._model.named_parameters())
    seen: dict[str, float] = {}
    largest = 0
    assert trainer.publish().version.number == 1
    for bucket in trainer.publish_buckets():
        largest = max(largest, sum(t.numel() * t.element_size() for t in bucket.values()))
        for name, tensor in bucket.items():
            assert name not in seen and type(tensor) is torch.Tensor
            seen[name] = distance(tensor, expected[name])
    one = max(p.numel() * p.element_size() for p in expected.values())
    return {
        "missing": sorted(expected.keys() ^ seen.keys()),
        "error": max(seen.values()),
        "bounded": largest <= max(one, mesh.config.bucket_bytes),
        "whole_bytes": sum(p.numel() * p.element_size() for p in expected.values()),
        "largest_bytes": largest,
    }


def uneven(mesh: ParallelMesh, job: dict[str, Any]) -> dict[str, Any]:
    """F95: fewer episodes than data ranks; and a batch in which nothing has a gradient."""
    samples = make_samples(1)[:1]
    algorithm = algorithm_of(samples)
    alone, together = one_process(job), many_processes(job, mesh)
    alone.forward_backward(minibatch_of(samples, algorithm), algorithm)
    together.forward_backward(minibatch_of(samples, algorithm), algorithm)
    gradients = {n: m.grad for n, m in alone._weights.masters.items()}
    error = worst({n: p.grad for n, p in together._weights.parameters.items()}, gradients)
    together.optim_step()
    silent = replace(algorithm, advantages=dict.fromkeys(algorithm.advantages, 0.0), needs=AlgorithmNeeds())
    before = {n: p.to_local().clone() for n, p in together._weights.parameters.items()}
    metrics = together.forward_backward(minibatch_of(samples, silent), silent)
    metrics |= together.optim_step()
    same = all(torch.equal(before[n], p.to_local()) for n, p in together._weights.parameters.items())
    return {"error": error, "unmoved": same, "num_empty_steps": metrics["num_empty_steps"]}


class Broken(Reinforce):
    """Its loss is NaN for one episode, so on one data rank only."""

    def loss(self, logprobs_N: torch.Tensor, fields: Any) -> LossOutput:
        out = super().loss(logprobs_N, fields)
        return replace(out, per_token_N=out.per_token_N * (float("nan") if (fields.advantages_N == 7.0).any() else 1.0))


def faults(mesh: ParallelMesh, job: dict[str, Any]) -> dict[str, Any]:
    """I13 on every process for a fault on one; and processes that are given different samples."""
    samples = make_samples(2)
    trainer = many_processes(job, mesh)
    before = {n: p.to_local().clone() for n, p in trainer._weights.parameters.items()}
    algorithm = Broken({sample.id: 7.0 if i == 4 else 1.0 for i, sample in enumerate(samples)})
    messages = []
    try:
        trainer.forward_backward(minibatch_of(samples, algorithm), algorithm)
    except NonFiniteError as error:
        messages.append(str(error))
    try:
        trainer.forward(samples[: 3 + dist.get_rank()])
    except ParallelError as error:
        messages.append(str(error))
    same = all(torch.equal(before[n], p.to_local()) for n, p in trainer._weights.parameters.items())
    cleared = all(p.grad is None for p in trainer._weights.parameters.values())
    parameter = next(iter(trainer._weights.parameters.values()))
    if dist.get_rank() == 0:
        with torch.no_grad():
            parameter.to_local().fill_(float("inf"))
    try:
        trainer.publish()
    except NonFiniteError as error:
        messages.append(str(error))
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, messages)
    return {"messages": gathered, "unchanged": same and cleared, "version": trainer.version.number}


def checkpoint(mesh: ParallelMesh, job: dict[str, Any]) -> dict[str, Any]:
    """Saved in one layout, restored in others and in one process, and the other way round: weights, moments and the
    next step are those of one process."""
    samples = make_samples()
    algorithm = algorithm_of(samples)
    minibatch = minibatch_of(samples, algorithm)
    alone, saver = one_process(job), many_processes(job, mesh)
    for trainer in (alone, saver):
        for _ in range(2):
            trainer.forward_backward(minibatch, algorithm)
            trainer.optim_step()
    saver.publish()
    folder, folder_of_one = Path(job["folder"]), Path(job["folder"] + " of one")
    saver.save(folder)
    alone.publish()
    if dist.get_rank() == 0:
        alone.save(folder_of_one)
    dist.barrier()
    moments = {
        field: {n: alone._weights.optimizer.state[m][field].clone() for n, m in alone._weights.masters.items()}
        for field in ("exp_avg", "exp_avg_sq")
    }
    weights = {n: p.detach().clone() for n, p in alone._model.named_parameters()}
    alone.forward_backward(minibatch, algorithm)
    alone.optim_step()
    results: dict[str, Any] = {"one process": restored_alone(folder, job, weights, moments, alone)}
    saved = {name: (layout, folder) for name, layout in job["restore"].items()}
    saved["from one process"] = (job["layout"], folder_of_one)
    for name, (layout, path) in saved.items():
        other = ParallelMesh.create(ParallelConfig(**layout))
        trainer = many_processes({**job, "seed": 1}, other)
        trainer.restore(path)
        assert trainer.version.number == 1 and trainer.step == 2
        parameters = trainer._weights.parameters
        found = {"weights": worst(dict(parameters), weights)}
        for field, expected in moments.items():
            errors = []
            for n, master in trainer._weights.masters.items():
                state = trainer._weights.optimizer.state.get(master, {})
                local = state.get(field, torch.zeros_like(master))
                errors.append(distance(like(local, parameters[n]).full_tensor(), expected[n]))
            found[field] = max(errors)
        trainer.forward_backward(minibatch, algorithm)
        trainer.optim_step()
        found["next_step"] = worst(dict(parameters), dict(alone._model.named_parameters()))
        results[name] = found
    return results


def restored_alone(
    folder: Path, job: dict[str, Any], weights: Tensors, moments: dict[str, Tensors], next_step: PolicyTrainer
) -> dict[str, float]:
    """The checkpoint of several processes in one; ``next_step`` has made the step that this one makes now."""
    samples = make_samples()
    algorithm = algorithm_of(samples)
    trainer = one_process({**job, "seed": 1})
    trainer.restore(folder)
    assert trainer.version.number == 1 and trainer.step == 2
    found = {"weights": worst(dict(trainer._model.named_parameters()), weights)}
    states = {name: trainer._weights.optimizer.state[master] for name, master in trainer._weights.masters.items()}
    assert all(float(state["step"]) == 2 for state in states.values())
    for field, expected in moments.items():
        found[field] = worst({name: state[field] for name, state in states.items()}, expected)
    trainer.forward_backward(minibatch_of(samples, algorithm), algorithm)
    trainer.optim_step()
    return found | {
        "next_step": worst(dict(trainer._model.named_parameters()), dict(next_step._model.named_parameters()))
    }


def extras(mesh: ParallelMesh, job: dict[str, Any]) -> dict[str, Any]:
    """The frozen reference, recomputed activations, and bfloat16 over float32 masters, against one process."""
    samples = make_samples()
    algorithm = algorithm_of(samples)
    minibatch = minibatch_of(samples, algorithm)
    alone = PolicyTrainer(load(job), trainer_config(job), num_steps=10, with_reference=True)
    recompute = (
        {"activation_budget_bytes": budget(mesh, job)} if job["by_budget"] else {"activation_checkpointing": True}
    )
    together = many_processes(job, mesh, with_reference=True, **recompute)
    layers = together._stage.model.model.layers
    assert [getattr(layer, "gradient_checkpointing", False) for layer in layers].count(True) == job["recomputed"]
    start = alone.forward(samples)
    expected = alone.forward_backward(minibatch, algorithm)
    found = together.forward_backward(minibatch, algorithm)
    results = {"loss": abs(found["loss"] - expected["loss"]) / abs(expected["loss"])}
    gradients = {n: m.grad for n, m in alone._weights.masters.items()}
    results["gradient"] = worst({n: p.grad for n, p in together._weights.parameters.items()}, gradients)
    alone.optim_step(), together.optim_step()
    results["weights"] = worst(dict(together._weights.parameters), dict(alone._weights.masters))
    pairs = zip(together.forward(samples, "reference"), start, strict=True)
    results["reference"] = max(float((a - b).abs().max()) for a, b in pairs)
    pairs = zip(together.forward(samples), start, strict=True)
    results["moved"] = max(float((a - b).abs().max()) for a, b in pairs)
    return results


def budget(mesh: ParallelMesh, job: dict[str, Any]) -> int:
    """The largest that makes something to be recomputed."""
    config = trainer_config(job)
    shape = ModelShape.of(load(job).model.config.to_dict())
    work = Pass(num_tokens=config.max_microbatch_tokens, max_logit_tokens=config.max_logit_tokens, dtype=job["dtype"])
    return forecast(mesh.config, shape, work)[mesh.rank("pp")].activations_bytes - 1


CHECKS = {f.__name__: f for f in (parity, publish, uneven, faults, checkpoint, extras)}


def merge(parts: list[Any]) -> Any:
    """Numbers: the worst of all processes. Lists and texts: process 0's. ``local``: of every process."""
    first = parts[0]
    if isinstance(first, bool):
        return all(parts)
    if isinstance(first, (int, float)):
        return max(parts) if all(p == p for p in parts) else float("nan")
    if isinstance(first, dict):
        merged = {k: merge([p[k] for p in parts if k in p]) for k in first if k not in ("local", "global")}
        for k in ("local", "global"):
            if k in first:
                merged[k] = [p[k] for p in parts]
        return merged
    return first


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, spec = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    join_processes(
        rank=rank, num_processes=spec["processes"], address=f"file://{spec['rendezvous']}", deadline_s=DEADLINE_S
    )
    results: dict[str, Any] = {}
    for name, job in spec["jobs"].items():
        try:
            mesh = ParallelMesh.create(ParallelConfig(**job["layout"]))
            found: Any = CHECKS[job["check"]](mesh, job)
        except Exception:
            print(f"rank {rank}, job {name}", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            raise
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        results[name] = merge(parts)
        if rank == 0:
            Path(spec["results"]).write_text(json.dumps(results))
    dist.destroy_process_group()


def run(jobs: dict[str, dict[str, Any]], processes: int, deadline_s: float) -> dict[str, Any]:
    """Start the processes and return the results. Raises AssertionError with their stderr where one fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = {
            "processes": processes,
            "jobs": jobs,
            "rendezvous": str(folder / "rendezvous"),
            "results": str(folder / "results.json"),
        }
        (folder / "jobs.json").write_text(json.dumps(spec))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        logs = [(folder / f"{rank}.log").open("w") for rank in range(processes)]
        workers = [
            subprocess.Popen([sys.executable, __file__, str(rank), str(folder / "jobs.json")], stderr=log, env=env)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [worker.wait(timeout=deadline_s) for worker in workers]
        except subprocess.TimeoutExpired:
            codes = [None]  # type: ignore[list-item]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            for log in logs:
                log.close()
        texts = [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(processes)]
        done = (folder / "results.json").read_text() if (folder / "results.json").exists() else "none"
        ends = [how_it_ended(code) if code is not None else "took too long" for code in codes]
        assert codes == [0] * processes, f"they {ends}\n" + "\n---\n".join(texts) + f"\ndone before: {done}"
        loaded: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return loaded


if __name__ == "__main__":
    main()
