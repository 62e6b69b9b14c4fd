"""What computes in a simulated run: an engine, a trainer, judges and environments, without a model.

``weights`` are one integer that every optimizer step mixes with what it trained on; sampled ids and log-probabilities
follow from it. So two runs trained on the same tokens in the same order exactly if their weights agree at the end, and
an engine that serves other weights than the trainer's is found by the real canary.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.algorithms.fields import Minibatch
from headrace.protocols import Algorithm, Observation, WeightUpdate
from headrace.scripted import END, ScriptedEngine, ScriptedTrainer, spans_of
from headrace.simulate.errors import InvariantBroken, PlannedFault
from headrace.simulate.monitor import Monitor
from headrace.simulate.scenario import Scenario
from headrace.types import (
    AttemptKey,
    Episode,
    Generation,
    GenerationRequest,
    PolicyVersion,
    Sample,
    Score,
    ScoreResult,
    Task,
    VersionSpan,
)
from headrace.weights.checksums import checksums

_WEIGHTS = "weights"


def logprob_of(weights: int) -> float:
    """Of every token under these weights."""
    return -1.0 - (weights % 9973) / 9973


def tensors_of(weights: int) -> dict[str, Tensor]:
    return {_WEIGHTS: torch.tensor(weights)}


def weights_of(update: WeightUpdate) -> int:
    assert update.tensors is not None
    return int(update.tensors[_WEIGHTS])


class SimulatedEngine(ScriptedEngine):
    """Samples a token at a time, each with the version and the weights of its moment."""

    def __init__(self, name: str, version: PolicyVersion, weights: int, plan: Scenario, monitor: Monitor) -> None:
        super().__init__()
        self.name, self.version, self.weights = name, version, weights
        self._plan, self._monitor = plan, monitor

    async def generate(self, request: GenerationRequest) -> Generation:
        plan, limit = self._plan, request.sampling.max_new_tokens
        if plan.fails("generate", request.id):
            await asyncio.sleep(1.0 if plan.chance("how", request.id) < 0.6 else math.inf)
            raise PlannedFault(f"request {request.id} failed as planned")
        group = request.id.split("m")[0]
        token_s = (0.2 + plan.chance("speed", request.seed)) * (20.0 if plan.chance("slow", group) < plan.slow else 1.0)
        aborted = self._aborted[request.id] = asyncio.Event()
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[PolicyVersion] = []
        while len(ids) < limit and ids[-1:] != [END] and await self._next_token(aborted, token_s):
            place = request.first_draw + len(ids)
            draw = zlib.crc32(f"{self.weights}/{request.seed}/{place}".encode())
            ids.append(END if place and draw % 3 == 0 else 48 + draw % 2)
            logprobs.append(logprob_of(self.weights))
            versions.append(self.version)
            self._monitor.sampled(self.name, self.version, request.id)
        self._num_tokens += len(ids)
        return Generation(
            request_id=request.id,
            ids=tuple(ids),
            logprobs=tuple(logprobs),
            version_spans=tuple(spans_of(versions)),
            finish_reason="abort" if aborted.is_set() else "stop" if ids[-1:] == [END] else "length",
        )

    async def probe(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [
            Generation(
                request_id=request.id,
                ids=(65,) * request.sampling.max_new_tokens,
                logprobs=(logprob_of(self.weights),) * request.sampling.max_new_tokens,
                version_spans=(VersionSpan(self.version, 0, request.sampling.max_new_tokens),),
                finish_reason="length",
            )
            for request in requests
        ]

    async def update_weights(self, update: WeightUpdate) -> None:
        await super().update_weights(update)
        self.weights = weights_of(update)

    def weight_checksums(self) -> Mapping[str, str]:
        return checksums(tensors_of(self.weights).items())


class SimulatedTrainer(ScriptedTrainer):
    """Remembers, in its checkpoints too, every attempt that it was trained on along the surviving lineage."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.weights = 1
        self.consumed: list[AttemptKey] = []
        self._gradient = hashlib.blake2b(digest_size=6)
        self._monitor = monitor

    async def checksums(self) -> dict[str, str]:
        return checksums(tensors_of(self.weights).items())

    def forward(self, samples: Sequence[Sample], model: str = "policy") -> list[Tensor]:
        return [torch.tensor(sample.mask, dtype=torch.float32) * logprob_of(self.weights) for sample in samples]

    def forward_backward(self, minibatch: Minibatch, algorithm: Algorithm) -> dict[str, float]:
        self._monitor.trained(minibatch.samples, self.version, self.consumed)
        self.consumed += [sample.key for sample in minibatch.samples]
        metrics = super().forward_backward(minibatch, algorithm)
        self.batches.clear()
        errors = [0.0]
        for sample, advantages_T in zip(minibatch.samples, minibatch.advantages, strict=True):
            self._gradient.update(repr((sample.key, sample.ids, sample.mask, advantages_T.tolist())).encode())
            fresh = [x for x, v in zip(sample.behaviour_logprobs, sample.versions, strict=True) if v == self.version]
            errors += [abs(x - logprob_of(self.weights)) for x in fresh]
        return {**metrics, "max_ratio_error": max(errors)}

    def optim_step(self) -> dict[str, float]:
        metrics = super().optim_step()
        self._gradient.update(str(self.weights).encode())
        self.weights = int.from_bytes(self._gradient.digest(), "big")
        self._gradient = hashlib.blake2b(digest_size=6)
        return metrics

    def publish(self) -> WeightUpdate:
        update = super().publish()
        self._monitor.published(self.version)
        return update

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As a model's: it stands for one too."""
        return iter(tensors_of(self.weights).items())

    def snapshot(self) -> Callable[[Path], None]:
        state = json.dumps(
            {"version": self.version, "step": self.step, "weights": self.weights, "consumed": self.consumed}
        )

        def write(path: Path) -> None:
            (path / "trainer.json").write_text(state)
            (path / "checksum.txt").write_text(hashlib.blake2b(state.encode()).hexdigest())

        return write

    def restore(self, path: Path) -> None:
        text = (path / "trainer.json").read_text()
        if (path / "checksum.txt").read_text() != hashlib.blake2b(text.encode()).hexdigest():
            raise InvariantBroken("I12", f"checkpoint {path.name} is marked complete, and it is not whole")
        state = json.loads(text)
        self.version, self.step, self.weights = PolicyVersion(*state["version"]), state["step"], state["weights"]
        self.consumed = [AttemptKey(*key) for key in state["consumed"]]


@dataclass(frozen=True)
class Raised:
    """What a call on the trainer's thread raised: a thread of the controller's own, so that it arrives as it is."""

    error: Exception


class TrainerWorker:
    """The actor of the trainer's calls, one at a time, and of a checkpoint's writer."""

    def __init__(self, plan: Scenario, on_event: Callable[[str, str], object]) -> None:
        self._plan, self._on_event = plan, on_event
        self._turn = asyncio.Lock()
        self._num_calls = 0

    async def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        async with self._turn:
            self._num_calls += 1
            name = getattr(function, "__name__", "call")
            await asyncio.sleep(5.0 * self._plan.chance("duration", name, self._num_calls))
            self._on_event("trainer", name)
            try:
                return function(*args)
            except Exception as error:
                return Raised(error)


class RemoteThread:
    """Stands for a ``DaemonThread`` whose calls are made by an actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._call(function, args))

    async def _call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        result = await self._handle.call("run", function, args)
        if isinstance(result, Raised):
            raise result.error
        return result

    def stop(self) -> None:
        """Nothing to stop: the actor ends with its life."""


class Judge:
    """The actor that scores. Its verdict follows from the reply."""

    def __init__(self, plan: Scenario) -> None:
        self._plan = plan

    async def score(self, episode: Episode) -> ScoreResult:
        if self._plan.fails("score", episode.key):
            await asyncio.sleep(1.0 if self._plan.chance("how", episode.key) < 0.6 else math.inf)
            raise PlannedFault(f"the judge of {episode.key} failed as planned")
        await asyncio.sleep(self._plan.chance("judge", episode.key))
        return Score(value=float(zlib.crc32(f"{episode.task.id}/{episode.reply}".encode()) % 2))


class EnvironmentWorker:
    """The actor that holds environments, each known by its number."""

    def __init__(self, plan: Scenario) -> None:
        self._plan = plan
        self._turns: dict[int, int] = {}
        self._keys: dict[int, int] = {}

    async def reset(self, number: int, task: Task, seed: int) -> Observation:
        self._turns[number], self._keys[number] = 0, seed
        await self._work("reset", seed)
        return Observation(messages=task.messages)

    async def step(self, number: int, action: str) -> Observation:
        self._turns[number] += 1
        await self._work(f"step {self._turns[number]}", self._keys[number])
        is_done = self._turns[number] >= self._plan.max_turns
        return Observation(messages=() if is_done else ({"role": "user", "content": "go on"},), done=is_done)

    async def close(self, number: int) -> None:
        self._turns.pop(number, None)
        self._keys.pop(number, None)

    async def _work(self, what: str, seed: int) -> None:
        if self._plan.fails(what, seed):
            await asyncio.sleep(1.0 if self._plan.chance("how", what, seed) < 0.6 else math.inf)
            raise PlannedFault(f"{what} failed as planned")
        await asyncio.sleep(self._plan.chance("environment", what, seed))
