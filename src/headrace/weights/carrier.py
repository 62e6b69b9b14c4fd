"""What all carriers between two copies of the weights have in common: a sender, a manifest, a receiver.

``sender.send(update, base)`` puts the weights where receivers find them and says where, in a **manifest**: JSON, so
that it travels by whatever connects the two (a call, a socket, a queue), and holds no weights itself. ``receiver.read(
manifest)`` hands out tensors that have passed every check, or raises and changes nothing; ``receiver.commit(read)`` is
called once the engine computes with them. Between the two the receiver is still of the old version, so a crash at any
moment leaves the old version or the new one.

Every manifest has::

    {"version": [lineage, number], "base": [lineage, number] or null, "tensors": [[name, dtype, shape, place, checksum],
     ...], ...}

with torch's names of dtypes, and a ``place`` that only its carrier understands. ``base`` is the version that the
manifest builds on; null where it needs none.

A late joiner is given ``sender.latest()``, which is made of what was published, never of the trainer's live tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.errors import HeadraceError
from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksum

Manifest = dict[str, Any]


class WeightUpdateError(HeadraceError):
    """A weight update does not fit, or could not be carried. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor of every update must look like."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedWeights:
    """An update that has passed every check. The tensors may lie in the carrier's memory: do not keep them, and do not
    write into them."""

    version: PolicyVersion
    tensors: Mapping[str, Tensor]
    checksums: Mapping[str, str]
    specs: Mapping[str, TensorSpec]


class WeightSender(Protocol):
    """The trainer's side. Methods block; one thread at a time."""

    @property
    def receiver(self) -> Mapping[str, Any]:
        """JSON: what :func:`headrace.weights.receivers.make_receiver` makes the other end of, in any process."""
        ...

    @property
    def inherit(self) -> tuple[int, ...]:
        """Open descriptors that the receiver's process must inherit."""
        ...

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        """Put the weights where receivers find them. ``base``: what the one receiver holds; None for several, or for
        one that holds nothing. The same update again changes nothing. Raises WeightUpdateError (no room, nothing to
        send), after which the last version still stands."""
        ...

    def transfer(self) -> None:
        """What must run beside ``receiver.read`` of the last manifest, in another thread; most carriers need nothing.
        Raises WeightUpdateError where a receiver did not take part in time."""
        ...

    def latest(self) -> WeightUpdate | None:
        """The newest published version by manifest, for an engine that joins late; None before the first, or where a
        carrier keeps nothing (then send again)."""
        ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """The engine's side."""

    @property
    def version(self) -> PolicyVersion | None:
        """Of the last committed update; None before the first."""
        ...

    def read(self, manifest: Mapping[str, Any]) -> ReceivedWeights | None:
        """All tensors of the version, checked; None where it is the committed one. Raises WeightUpdateError."""
        ...

    def commit(self, read: ReceivedWeights) -> None:
        """The engine computes with them now: what comes next is checked against them."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Held:
    """What a receiver knows of the last committed update, and the checks that follow from it."""

    version: PolicyVersion | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)

    def commit(self, read: ReceivedWeights) -> None:
        self.version, self.checksums, self.specs = read.version, read.checksums, read.specs

    def version_problems(self, version: PolicyVersion, base: Any, sums: Mapping[str, str]) -> Iterator[str]:
        """Why ``version`` cannot follow. ``base``: what it builds on, for carriers that cannot get it themselves."""
        held = self.version
        if held is None:
            return
        if version < held:
            yield f"they are older than the engine's {held}; an engine never goes back"
        elif version == held:
            if sums != self.checksums:
                yield f"the engine holds other weights under the same version {held}"
        elif base is not None and PolicyVersion(*base) != held:
            yield f"they build on {PolicyVersion(*base)}, but the engine holds {held}"

    def checked(
        self,
        version: PolicyVersion,
        base: Any,
        sums: Mapping[str, str],
        specs: Mapping[str, TensorSpec],
        fetch: Callable[[], tuple[Mapping[str, Tensor], list[str]]],
    ) -> ReceivedWeights | None:
        """What every ``read`` does: what was announced against what is held, then the tensors, bit for bit, against
        what was announced. None where ``version`` is the held one. ``fetch`` gives tensors, and why others could not
        be had; it is called only where they may come. Raises WeightUpdateError."""
        problems = list(self.version_problems(version, base, sums))
        if not problems and version == self.version:
            return None
        problems += self.spec_problems(specs)
        if problems:
            raise refused(version, problems)
        tensors, problems = fetch()
        problems = problems + damaged(tensors.items(), sums)
        if problems:
            raise refused(version, problems)
        return ReceivedWeights(version=version, tensors=tensors, checksums=sums, specs=specs)

    def spec_problems(self, specs: Mapping[str, TensorSpec]) -> list[str]:
        """The first update fixes names, shapes and dtypes."""
        expected = self.specs or specs
        problems = [f"{name} is missing" for name in expected if name not in specs]
        for name, spec in specs.items():
            if name not in expected:
                problems.append(f"{name} was never part of it")
            elif spec != expected[name]:
                was = expected[name]
                problems.append(f"{name} is {spec.dtype} {spec.shape}, the engine's is {was.dtype} {was.shape}")
        return problems


def refused(version: PolicyVersion, problems: list[str]) -> WeightUpdateError:
    """One error for all ``problems``, the first five in words."""
    more = f" and {len(problems) - 5} more problems" if len(problems) > 5 else ""
    return WeightUpdateError(
        f"weights {version} do not fit this engine, nothing was changed: " + "; ".join(problems[:5]) + more
    )


def specs_of(manifest: Mapping[str, Any]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(dtype, tuple(shape)) for name, dtype, shape, *_ in manifest["tensors"]}


def checksums_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest for name, *_, digest in manifest["tensors"]}


def damaged(tensors: Iterable[tuple[str, Tensor]], sums: Mapping[str, str]) -> list[str]:
    """Those of ``tensors`` whose bits are not those that were sent, as problems."""
    return [
        f"{name} arrived with other bits than were sent (checksum)"
        for name, tensor in tensors
        if checksum(tensor) != sums[name]
    ]


def dtype_named(name: str) -> torch.dtype | None:
    """torch's dtype of that name; None where there is none."""
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw_bytes(tensor: Tensor) -> Tensor:
    """uint8 [N] over the bits of ``tensor``, on its device; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def update_by(manifest: Mapping[str, Any]) -> WeightUpdate:
    """What an engine in any process is given: a version, and where its weights are."""
    return WeightUpdate(version=PolicyVersion(*manifest["version"]), manifest=manifest)


def tensors_of(update: WeightUpdate) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, from buckets or at once. Take all of them. Raises WeightUpdateError where there are none."""
    if update.buckets is not None:
        for bucket in update.buckets():
            yield from bucket.items()
    elif update.tensors is not None:
        yield from update.tensors.items()
    else:
        raise WeightUpdateError(
            f"weights {update.version} came without tensors, but this engine does not share the trainer's storage; "
            "publish with tensors or buckets"
        )


def carry(sender: WeightSender, receiver: WeightReceiver, update: WeightUpdate) -> ReceivedWeights | None:
    """Both ends in one process: send, transfer and read. What was read is not committed yet."""
    manifest = sender.send(update, receiver.version)
    failures: list[BaseException] = []

    def transfer() -> None:
        try:
            sender.transfer()
        except BaseException as error:  # told below, in the thread that asked
            failures.append(error)

    beside = threading.Thread(target=transfer, name="headrace-weights-transfer", daemon=True)
    beside.start()
    try:
        read = receiver.read(manifest)
    finally:
        beside.join()  # bounded: every transfer has a deadline of its own
    if failures:
        raise failures[0]
    return read


@dataclass(frozen=True, slots=True)
class Subscription:
    """Stands in a sender's place at an engine that is fed by manifests only (``WeightUpdate.manifest``), so that one
    sender publishes once for many engines. Closing it closes nothing."""

    receiver: Mapping[str, Any]
    inherit: tuple[int, ...] = ()

    @classmethod
    def to(cls, sender: WeightSender) -> Subscription:
        return cls(sender.receiver, sender.inherit)

    def send(self, update: WeightUpdate, base: PolicyVersion | None) -> Manifest:
        raise WeightUpdateError(
            f"weights {update.version} came without a manifest, but this engine is one of several that a sender "
            "publishes for: send once, and give every engine WeightUpdate(version, manifest=...)"
        )

    def transfer(self) -> None:
        """Nothing: the sender itself transfers."""

    def latest(self) -> WeightUpdate | None:
        return None

    def close(self) -> None:
        """Nothing: the sender belongs to whoever made it."""
