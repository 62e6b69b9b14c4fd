"""The carrier that is fed by buckets: every parameter once, in place, and loud where something does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.protocols import WeightUpdate
from headrace.testing import tiny_model
from headrace.types import PolicyVersion
from headrace.weights.checksums import checksums
from headrace.weights.inprocess import WeightUpdateError
from headrace.weights.streamed import StreamedWeights

V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
Bucket = dict[str, torch.Tensor]


def carrier() -> StreamedWeights:
    return StreamedWeights(tiny_model(num_layers=1), V0)


def buckets_of(seed: int = 1) -> list[Bucket]:
    model = tiny_model(num_layers=1, seed=seed)
    return [{name: p.detach()} for name, p in model.named_parameters()]


def update(buckets: list[Bucket], version: PolicyVersion = V1) -> WeightUpdate:
    return WeightUpdate(version=version, buckets=lambda: iter(buckets))


def test_takes_every_bucket_in_place() -> None:
    own = carrier()
    storage = {p.data_ptr() for p in own.model.parameters()}
    buckets = buckets_of()
    own.receive(update(buckets))
    assert own.version == V1
    assert own.checksums() == checksums((n, t) for bucket in buckets for n, t in bucket.items())
    assert {p.data_ptr() for p in own.model.parameters()} == storage


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda b: b[:-1], "model.norm.weight is missing"),
        (lambda b: [*b, {"other": torch.zeros(1)}], "other .* does not fit"),
        (lambda b: [{"model.norm.weight": torch.zeros(3)}, *b[:-1]], "does not fit"),
        (lambda b: [{n: t.double() for n, t in bucket.items()} for bucket in b], "does not fit"),
    ],
)
def test_what_does_not_fit_is_an_error_after_the_last_bucket(change, word) -> None:  # type: ignore[no-untyped-def]
    """All buckets are taken even so: the other processes make them together with this one."""
    own, taken = carrier(), []
    changed = change(buckets_of())

    def buckets() -> Iterator[Bucket]:
        for bucket in changed:
            taken.append(bucket)
            yield bucket

    with pytest.raises(WeightUpdateError, match=word):
        own.receive(WeightUpdate(version=V1, buckets=buckets))
    assert len(taken) == len(changed) and own.version == V0


def test_refuses_older_versions_and_updates_without_buckets() -> None:
    own = carrier()
    own.receive(update(buckets_of()))
    with pytest.raises(WeightUpdateError, match="never goes back"):
        own.receive(update(buckets_of(), V0))
    with pytest.raises(WeightUpdateError, match="without buckets"):
        own.receive(WeightUpdate(version=V1, tensors={}))
