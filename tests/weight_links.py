"""One of every carrier that a CPU can run, both ends in this process, in one shape for the tests of the contract."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.broadcast import BroadcastSender
from headrace.weights.carried import CarriedWeights
from headrace.weights.checksums import named_parameters
from headrace.weights.file import DeltaSender, FileSender
from headrace.weights.inprocess import CopiedWeights, SharedWeights
from headrace.weights.parameters import adapter_travels, all_travel
from headrace.weights.receivers import make_receiver
from headrace.weights.shared_memory import SharedMemorySender
from headrace.weights.streamed import StreamedWeights

V0 = PolicyVersion(0, 0)

IN_PROCESS = ("shared", "copied", "streamed")
BETWEEN = ("shared_memory", "file", "delta", "broadcast")
ALL = IN_PROCESS + BETWEEN
COPIES = ALL[1:]


def make_sender(kind: str, folder: Path) -> Any:
    if kind == "shared_memory":
        return SharedMemorySender()
    if kind == "file":
        return FileSender(folder / "weights", shard_bytes=1 << 14)
    if kind == "delta":
        return DeltaSender(folder / "weights", anchor_every=4, shard_bytes=1 << 14)
    return BroadcastSender(bucket_bytes=1 << 14, deadline_s=20.0)


def receiver_of(sender: Any) -> Any:
    """The other end, from what would travel to another process."""
    return make_receiver(json.loads(json.dumps(sender.receiver)))


@dataclass
class Link:
    """A trainer's model, and an engine's side that is fed by one carrier."""

    kind: str
    trainer: nn.Module
    carrier: Any
    sender: Any = None
    only_adapter: bool = False
    close: Callable[[], None] = field(default=lambda: None)

    def travelling(self) -> dict[str, Tensor]:
        travels = adapter_travels if self.only_adapter else all_travel
        return {name: p.detach() for name, p in named_parameters(self.trainer).items() if travels(name)}

    def update(self, version: PolicyVersion, tensors: dict[str, Tensor] | None = None) -> WeightUpdate:
        """What the loop would hand to the engine: the trainer's weights, or ``tensors`` in their place."""
        if self.kind == "shared":
            return WeightUpdate(version=version)
        sent = self.travelling() if tensors is None else tensors
        if self.kind == "streamed":
            return WeightUpdate(version=version, buckets=lambda: iter([{name: t} for name, t in sent.items()]))
        return WeightUpdate(version=version, tensors=sent)


@contextmanager
def linked(kind: str, trainer: nn.Module, folder: Path, *, only_adapter: bool = False) -> Iterator[Link]:
    travels = adapter_travels if only_adapter else all_travel
    with ExitStack() as stack:
        if kind == "shared":
            yield Link(kind, trainer, SharedWeights(trainer, V0))
        elif kind == "copied":
            yield Link(kind, trainer, CopiedWeights(trainer, V0, travels), only_adapter=only_adapter)
        elif kind == "streamed":
            yield Link(kind, trainer, StreamedWeights(copy.deepcopy(trainer), V0))
        else:
            sender = make_sender(kind, folder)
            stack.callback(sender.close)
            carrier = CarriedWeights(trainer, V0, receiver_of(sender), sender, travels)
            yield Link(kind, trainer, carrier, sender, only_adapter)


def move(model: nn.Module, seed: int = 0, scale: float = 0.05) -> None:
    """An optimizer step, as far as weights are concerned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * scale)
