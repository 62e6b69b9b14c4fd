"""How long weights take to reach an engine's copy, by carrier, and how many bytes travel.

    python benchmarks/weights.py --num-millions 135 --out weights.json

A model of about that many parameters (bfloat16 unless ``--dtype`` says otherwise) is changed in ``--changed`` of its
values (1 %, each by one unit in the last place, as an optimizer step leaves most of a bfloat16 model), sent, received,
checked (checksum of every tensor) and written into the engine's copy. All carriers take turns in one run; each round
also times a plain memory copy of the same parameters, which is what the ratios are to. ``delta_dense`` is the delta
carrier with every value changed: it publishes whole.

Both ends of each carrier are in this process, with ``--threads`` torch threads; folders are in ``--folder`` (a
temporary one). Files are flushed to disk, so the disk's speed is in them. The last line printed is one JSON object:
seconds (the median of ``--rounds``), how many times those of the memory copy, bytes, and their share of the whole
weights' bytes.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.protocols import WeightUpdate
from headrace.testing import tiny_model
from headrace.types import PolicyVersion
from headrace.weights.broadcast import BroadcastSender
from headrace.weights.carried import CarriedWeights
from headrace.weights.checksums import checksums, named_parameters
from headrace.weights.file import DeltaSender, FileSender
from headrace.weights.inprocess import CopiedWeights
from headrace.weights.receivers import make_receiver
from headrace.weights.shared_memory import SharedMemorySender
from headrace.weights.streamed import StreamedWeights

V0 = PolicyVersion(0, 0)
CARRIERS = ("copied", "streamed", "shared_memory", "file", "delta", "delta_dense", "broadcast")
_WORDS = {2: torch.int16, 4: torch.int32}
_WIDTH = 576
"""Hidden size, SmolLM2-135M's; each layer then has 13 x its square parameters."""


def make_model(num_millions: float, dtype: torch.dtype) -> nn.Module:
    """Mostly layers, and an embedding of a sixth of it or so."""
    num_parameters = num_millions * 1e6
    vocab_size = max(64, round(num_parameters / 6 / _WIDTH))
    num_layers = max(1, round((num_parameters - vocab_size * _WIDTH) / (16 * _WIDTH**2)))
    return tiny_model(
        hidden_size=_WIDTH, num_heads=9, num_layers=num_layers, vocab_size=vocab_size, dtype=dtype
    ).requires_grad_(False)


def change(model: nn.Module, share: float, seed: int) -> None:
    """``share`` of the values by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        words = parameter.data.view(_WORDS[parameter.element_size()]).flatten()
        if share >= 1:
            words ^= 1
            continue
        picked = torch.randint(0, len(words), (round(share * len(words)),), generator=generator)
        words[picked] ^= 1


class Copy:
    """The plain memory copy that everything is compared with."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs = [(p, p.detach().clone()) for p in model.parameters()]

    def time_s(self) -> float:
        started_s = time.perf_counter()
        for source, target in self._pairs:
            target.copy_(source)
        return time.perf_counter() - started_s


class Route:
    """One carrier to one engine's copy."""

    def __init__(self, name: str, model: nn.Module, sender: Any, carrier: Any) -> None:
        self.name = name
        self.model = model
        self._sender = sender
        self._carrier = carrier
        self.seconds: list[float] = []
        self.send_s: list[float] = []
        self.num_bytes = 0

    def send(self, version: PolicyVersion) -> None:
        """Once, timed; the engine's copy must have the bits afterwards."""
        tensors: dict[str, Tensor] = dict(named_parameters(self.model))
        update = WeightUpdate(version=version, tensors=tensors)
        if self.name == "streamed":
            update = WeightUpdate(version=version, buckets=lambda: iter([{n: t} for n, t in tensors.items()]))
        sent_s = 0.0
        if self._sender is not None:
            real = type(self._sender).send

            def timed(*args: Any) -> Any:
                nonlocal sent_s
                started_s = time.perf_counter()
                manifest = real(self._sender, *args)
                sent_s = time.perf_counter() - started_s
                return manifest

            self._sender.send = timed
        started_s = time.perf_counter()
        self._carrier.receive(update)
        self.seconds.append(time.perf_counter() - started_s)
        self.send_s.append(sent_s)
        whole = sum(t.numel() * t.element_size() for t in tensors.values())
        self.num_bytes = getattr(self._sender, "num_bytes", whole)
        assert self._carrier.checksums() == checksums(tensors.items()), f"{self.name}: other bits arrived"


@contextmanager
def routes(model: nn.Module, names: list[str], folder: Path) -> Iterator[list[Route]]:
    makers: dict[str, Any] = {
        "shared_memory": SharedMemorySender,
        "file": lambda: FileSender(folder / "file", keep=1),
        "delta": lambda: DeltaSender(folder / "delta", keep=1),
        "delta_dense": lambda: DeltaSender(folder / "delta_dense", keep=1),
        "broadcast": BroadcastSender,
    }
    made = []
    with ExitStack() as stack:
        for name in names:
            if name in makers:
                sender = makers[name]()
                stack.callback(sender.close)
                # A model of its own where everything changes: the others publish what a step changes.
                own = copy.deepcopy(model) if name == "delta_dense" else model
                carrier: Any = CarriedWeights(own, V0, make_receiver(sender.receiver), sender)
            else:
                sender, own = None, model
                carrier = CopiedWeights(model, V0) if name == "copied" else StreamedWeights(copy.deepcopy(model), V0)
            made.append(Route(name, own, sender, carrier))
        yield made


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    model = make_model(args.num_millions, getattr(torch, args.dtype))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    memory = Copy(model)
    copies_s: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="headrace-weights-", dir=args.folder) as folder,
        routes(model, args.carriers, Path(folder)) as made,
    ):
        for number in range(args.rounds + 1):  # the first one publishes whole everywhere, and warms up
            change(model, args.changed, number)
            copies_s.append(memory.time_s())
            for route in made:
                if route.name == "delta_dense":
                    change(route.model, 1.0, number)
                route.send(PolicyVersion(0, number + 1))
            print(number, json.dumps({route.name: round(route.seconds[-1], 4) for route in made}), flush=True)
    copy_s = statistics.median(copies_s[1:])
    return {
        "benchmark": "weights",
        "dtype": args.dtype,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_bytes": whole,
        "changed_share": args.changed,
        "threads": args.threads,
        "memory_copy_s": copy_s,
        "carriers": {route.name: summary(route, copy_s, whole) for route in made},
    }


def summary(route: Route, copy_s: float, whole: int) -> dict[str, float]:
    total_s = statistics.median(route.seconds[1:])
    return {
        "total_s": total_s,
        "send_s": statistics.median(route.send_s[1:]),
        "times_memory_copy": total_s / copy_s,
        "first_s": route.seconds[0],
        "num_bytes": route.num_bytes,
        "share_of_bytes": route.num_bytes / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-millions", type=float, default=135.0, help="parameters of the model, in millions")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the values that a step changes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--carriers", nargs="+", choices=CARRIERS, default=list(CARRIERS))
    parser.add_argument("--folder", type=Path, help="where the folders of the file carriers lie")
    parser.add_argument("--out", type=Path, help="also write the JSON object there")
    args = parser.parse_args()
    text = json.dumps(run(args))
    if args.out is not None:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
