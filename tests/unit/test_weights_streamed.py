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
    ("change", "word", "is_broken"),
    [
        (lambda b: b[:-1], "model.norm.weight is missing", True),
        (lambda b: [*b, {"other": torch.zeros(1)}], "other is not a parameter of the engine's model", True),
        (
            lambda b: [{"model.norm.weight": torch.zeros(3)}, *b[:-1]],
            r"model.norm.weight is torch.float32 \(3,\)",
            False,
        ),
        (lambda b: [{n: t.double() for n, t in bucket.items()} for bucket in b], "is torch.float64", False),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_what_does_not_fit_is_an_error_after_the_last_bucket(change, word, is_broken) -> None:  # type: ignore[no-untyped-def]
    """All buckets are taken even so: the other processes make them together with this one. Where something was written
    by then, the weights are of no version, and say so until a complete update (issue 4); else nothing was changed."""
    own, taken = carrier(), []
    before = own.checksums()
    changed = change(buckets_of())

    def buckets() -> Iterator[Bucket]:
        for bucket in changed:
            taken.append(bucket)
            yield bucket

    with pytest.raises(WeightUpdateError, match=word):
        own.receive(WeightUpdate(version=V1, buckets=buckets))
    assert len(taken) == len(changed) and own.version == V0
    assert bool(own.broken) == is_broken == (own.checksums() != before)
    own.receive(update(buckets_of()))
    assert own.version == V1 and not own.broken


def test_a_stream_that_breaks_off_leaves_weights_of_no_version() -> None:
    """Issue 4: the error of the stream is what is raised; ``broken`` says what it means."""
    own = carrier()

    def buckets() -> Iterator[Bucket]:
        yield buckets_of()[0]
        raise RuntimeError("a peer is gone")

    with pytest.raises(RuntimeError, match="a peer is gone"):
        own.receive(WeightUpdate(version=V1, buckets=buckets))
    assert "weights 0.1 arrived in part, 1 of their tensors were written" in own.broken
    assert "RuntimeError: a peer is gone" in own.broken and own.version == V0


def test_refuses_older_versions_and_updates_without_buckets() -> None:
    own = carrier()
    own.receive(update(buckets_of()))
    with pytest.raises(WeightUpdateError, match="never goes back"):
        own.receive(update(buckets_of(), V0))
    with pytest.raises(WeightUpdateError, match="without buckets"):
        own.receive(WeightUpdate(version=V1, tensors={}))
