"""Part ``lease`` of benchmarks/gpu_check.py: an engine and a trainer take turns on one device's memory.

Rollout, hand-over, an optimizer step, hand-over with the new weights, rollout: by ``control/lease.py``, which books
what each holds and refuses one that lets go of less than nine tenths. It passes where besides the allocator knows of
little more than what the tenants say (on a GPU), and the second reply has the stepped weights' log-probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from headrace.algorithms.fields import Minibatch, Totals
from headrace.config.engines import TransformersEngineConfig
from headrace.config.schema import TrainerConfig
from headrace.control.lease import EngineTenant, Lease, TrainerTenant
from headrace.control.watchdog import Watchdog
from headrace.daemon_thread import DaemonThread
from headrace.engines.embedded import TransformersEngine
from headrace.model.load import LoadedModel, load_model
from headrace.protocols import WeightUpdate
from headrace.testing import Reinforce, make_sample
from headrace.trainer.trainer import PolicyTrainer
from headrace.types import Generation, GenerationRequest, PolicyVersion, Sampling
from headrace.weights.checksums import named_parameters
from headrace.weights.inprocess import CopiedWeights

DEADLINE_S = 60.0
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.5}
PROMPT = tuple(range(10, 42))


def check_lease(args: argparse.Namespace) -> dict[str, Any]:
    """What the hand-overs moved, and whether they were right."""
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    loaded = load_model(args.model, dtype, device=args.device)
    found = asyncio.run(_take_turns(loaded, args))
    gc.collect()
    found["passed"] = found["gap"] <= MAX_GAP[dtype] and found["allocator_agrees"]
    return found


async def _take_turns(loaded: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    thread = DaemonThread("trainer")
    trainer = PolicyTrainer(loaded, TrainerConfig(learning_rate=1e-4), num_steps=2)
    engine = TransformersEngine(
        CopiedWeights(loaded.model, PolicyVersion(0, 0)), TransformersEngineConfig(), vocab_size=loaded.vocab_size
    )
    published = _weights(loaded, 0)
    await thread.call(trainer.offload)
    tenants = {"engine": EngineTenant(engine, lambda: published), "trainer": TrainerTenant(trainer, thread.call)}
    lease = Lease(tenants, holder="engine", watchdog=Watchdog(time.monotonic, 1e9), deadline_s=DEADLINE_S)
    allocated = []
    await engine.generate(_request("before", args))
    await lease.give("trainer")
    allocated.append(_allocated(args.device))
    await thread.call(trainer.forward_backward, _minibatch(), Reinforce({}))
    await thread.call(trainer.optim_step)
    published = _weights(loaded, 1)
    await lease.give("engine")
    allocated.append(_allocated(args.device))
    await engine.resume()
    after = await engine.generate(_request("after", args))
    await lease.give("trainer")
    sample = make_sample(PROMPT, after.ids)
    (scored_T,) = await thread.call(trainer.forward, [sample])
    gap = _gap(after, scored_T)
    await engine.close()
    thread.stop()
    return {
        "hand_overs": [asdict(hand_over) for hand_over in lease.hand_overs],
        "allocated_bytes": allocated,
        "allocator_agrees": _agrees(allocated, lease),
        "gap": gap,
    }


def _weights(loaded: LoadedModel, number: int) -> WeightUpdate:
    """A copy in host memory, which is not lent."""
    tensors = {name: p.detach().to("cpu", copy=True) for name, p in named_parameters(loaded.model).items()}
    return WeightUpdate(version=PolicyVersion(0, number), tensors=tensors)


def _request(name: str, args: argparse.Namespace) -> GenerationRequest:
    num_tokens = max(2, args.max_new_tokens // args.scale)
    return GenerationRequest(id=name, prompt_ids=PROMPT, sampling=Sampling(max_new_tokens=num_tokens), seed=1)


def _minibatch() -> Minibatch:
    samples = [make_sample(PROMPT, [11 + m, 12, 13], member=m) for m in range(2)]
    return Minibatch(
        samples=samples,
        advantages=[torch.tensor(s.mask, dtype=torch.float32) * (1.0 - 2.0 * i) for i, s in enumerate(samples)],
        proximal_logprobs=None,
        reference_logprobs=None,
        totals=Totals(num_tokens=6, num_episodes=2, max_length=3),
    )


def _gap(reply: Generation, scored_T: torch.Tensor) -> float:
    return float((scored_T[len(PROMPT) :] - torch.tensor(reply.logprobs)).abs().max())


def _agrees(allocated: Sequence[int | None], lease: Lease) -> bool:
    """After each hand-over the allocator holds what the tenants say, and a third and 64 MiB for what they do not."""
    said = [sum(hand_over.after_bytes.values()) for hand_over in lease.hand_overs]
    return all(a is None or a <= 1.3 * s + (64 << 20) for a, s in zip(allocated, said, strict=False))


def _allocated(device: str) -> int | None:
    return torch.cuda.memory_allocated() if device == "cuda" else None
