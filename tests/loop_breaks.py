"""Faults for the processes of the loop's tests: each function breaks one thing, before the command starts."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any


def slow_fsync() -> None:
    """Every flush takes 20 ms, so that a kill finds the process in the middle of a checkpoint."""
    flush = os.fsync

    def fsync(fd: int) -> None:
        time.sleep(0.02)
        flush(fd)

    os.fsync = fsync


def die_after_second_checkpoint() -> None:
    """kill -9 by itself, once the marker of the second checkpoint is written and before the books say so."""
    from headrace.record.checkpoints import CheckpointStore

    remove_surplus = CheckpointStore._remove_surplus
    written = []

    def die(self: CheckpointStore) -> None:
        remove_surplus(self)
        written.append(self)
        if len(written) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    CheckpointStore._remove_surplus = die


def _after_first_update(cls: type, name: str, instead: Any) -> None:
    """Once the first update has been published, proved and resumed from, ``instead(original, self, *arguments)`` is
    called for the method."""
    from headrace.engines.embedded import TransformersEngine

    original, resume, proved = getattr(cls, name), TransformersEngine.resume, []

    async def counted(self: TransformersEngine) -> None:
        if self.version.number >= 1:
            proved.append(1)
        await resume(self)

    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not proved:
            return original(self, *arguments, **keywords)
        return instead(original, self, *arguments, **keywords)

    TransformersEngine.resume = counted
    setattr(cls, name, method)


def _hang(*_: Any, **__: Any) -> None:
    threading.Event().wait()


def hang_in_decode_after_first_update() -> None:
    from headrace.engines.compute import Compute

    _after_first_update(Compute, "decode", _hang)


def die_in_decode_after_first_update() -> None:
    from headrace.engines.compute import Compute

    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("device lost")

    _after_first_update(Compute, "decode", die)


def hang_in_gradient_after_first_update() -> None:
    from headrace.trainer.trainer import PolicyTrainer

    _after_first_update(PolicyTrainer, "forward_backward", _hang)


def slow_gradient() -> None:
    from headrace.trainer.trainer import PolicyTrainer

    original = PolicyTrainer.forward_backward

    def forward_backward(self: Any, *arguments: Any) -> Any:
        time.sleep(0.2)
        return original(self, *arguments)

    PolicyTrainer.forward_backward = forward_backward


def poison_weights_after_first_update() -> None:
    import torch

    from headrace.trainer.weights import TrainableWeights

    def poison(original: Any, self: TrainableWeights, rate: float) -> Any:
        result = original(self, rate)
        with torch.no_grad():
            next(iter(self.masters.values())).view(-1)[7] = float("nan")
        return result

    _after_first_update(TrainableWeights, "step", poison)


def poison_gradient_after_first_update() -> None:
    from headrace.trainer.weights import TrainableWeights

    def poison(original: Any, self: TrainableWeights, rate: float) -> Any:
        master = next(iter(self.masters.values()))
        if master.grad is not None:
            master.grad.view(-1)[7] = float("inf")
        return original(self, rate)

    _after_first_update(TrainableWeights, "step", poison)


def wrong_temperature() -> None:
    """The engine samples, and reports, at 1.3 times the temperature that it was asked for."""
    from dataclasses import replace

    from headrace.engines.embedded import TransformersEngine

    generate = TransformersEngine.generate

    async def hot(self: Any, request: Any) -> Any:
        sampling = replace(request.sampling, temperature=1.3 * request.sampling.temperature)
        return await generate(self, replace(request, sampling=sampling))

    TransformersEngine.generate = hot


def forget_a_tensor() -> None:
    """The carrier takes every tensor of an update but one."""
    import torch

    from headrace.weights.inprocess import CopiedWeights

    receive, victim = CopiedWeights.receive, "model.layers.1.mlp.up_proj.weight"

    def forgetful(self: Any, update: Any) -> None:
        parameter = self.model.get_parameter(victim)
        kept = parameter.clone()
        receive(self, update)
        with torch.no_grad():
            parameter.copy_(kept)

    CopiedWeights.receive = forgetful
