"""The contract of weight carriers, run on every one that a CPU can run (issue 4, end criterion 2)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_oracle import assert_scored, generate, make_engine, plain_logits, request, sharp_model
from weight_links import ALL, BETWEEN, COPIES, Link, linked, move, receiver_of

from headrace.engines import EngineError
from headrace.protocols import WeightUpdate
from headrace.types import PolicyVersion
from headrace.weights import WeightUpdateError, checksums, named_parameters
from headrace.weights.canary import Canary, SyncError
from headrace.weights.carried import CarriedWeights
from headrace.weights.parameters import Parameters

V0, V1, V2, V3 = (PolicyVersion(0, n) for n in range(4))
ASKED = request("r", (1, 2, 3), max_new_tokens=6)
NORM = "model.norm.weight"


@pytest.fixture(params=COPIES)
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Link]:
    """A carrier to a copy of the weights."""
    with linked(request.param, sharp_model(), tmp_path) as made:
        yield made


def send(engine: Any, update: WeightUpdate) -> None:
    """Pause, update, resume, as the loop does."""

    async def main() -> None:
        await engine.pause("keep")
        await engine.update_weights(update)
        await engine.resume()

    asyncio.run(main())


def sums(model: Any) -> dict[str, str]:
    return checksums(named_parameters(model).items())


# ------------------------------------------------------------------------------------------------ arrival


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ALL)
def test_every_parameter_arrives(kind: str, tied: bool, tmp_path: Path) -> None:
    """F78, F81, F82: after each parameter in turn (embedding, attention, MLP, norms, head) is perturbed and published,
    the engine's replies score as a forward pass of the new weights, and not as the old ones; before, a copy still
    serves the old ones. Checksums name the one tensor."""
    with linked(kind, sharp_model(tied=tied), tmp_path) as link:
        trainer = link.trainer
        engine = make_engine(trainer, carrier=link.carrier)
        for number, (name, parameter) in enumerate(named_parameters(trainer).items(), start=1):
            old_sums, old_model = engine.weight_checksums(), copy.deepcopy(trainer)
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            if kind != "shared":
                assert_scored(old_model, ASKED, generate(engine, [ASKED])[0])
            send(engine, link.update(PolicyVersion(0, number)))
            reply = generate(engine, [ASKED])[0]
            assert_scored(trainer, ASKED, reply)
            assert reply.version_spans[0].version == PolicyVersion(0, number)
            with pytest.raises(AssertionError, match="log-probabilities differ"):
                assert_scored(old_model, ASKED, reply)
            new_sums = engine.weight_checksums()
            assert new_sums == sums(trainer)
            assert [n for n in new_sums if new_sums[n] != old_sums[n]] == [name]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("kind", ["copied", *BETWEEN])
def test_an_adapter_travels_alone(kind: str, tmp_path: Path) -> None:
    """F78, F79, F80: with LoRA only the adapter is sent; each of its tensors, perturbed in turn, reaches the engine's
    log-probabilities, the base stays as it was, and what is not of the adapter is refused."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(
        sharp_model(num_layers=1), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    base_sums = {name: digest for name, digest in sums(wrapped).items() if "lora_" not in name}
    with linked(kind, wrapped, tmp_path, only_adapter=True) as link:
        engine = make_engine(wrapped, carrier=link.carrier)
        adapter = link.travelling()
        assert adapter and all("lora_" in name for name in adapter)
        for number, name in enumerate(adapter, start=1):
            old_model = copy.deepcopy(wrapped.get_base_model())
            with torch.no_grad():
                wrapped.get_parameter(name).add_(torch.randn(adapter[name].shape) * 0.3)
            send(engine, link.update(PolicyVersion(0, number)))
            reply = generate(engine, [ASKED])[0]
            assert_scored(wrapped.get_base_model(), ASKED, reply, bound=1e-4)
            with pytest.raises(AssertionError, match="log-probabilities differ"):
                assert_scored(old_model, ASKED, reply, bound=1e-4)
        held = engine.weight_checksums()
        assert held == sums(wrapped) and base_sums.items() <= held.items()
        base_name = next(iter(base_sums))
        with_base = {**link.travelling(), base_name: wrapped.get_parameter(base_name).detach()}
        message = "was never part of it|is not a parameter of the engine's model that updates bring"
        with pytest.raises(WeightUpdateError, match=message):
            link.carrier.receive(link.update(PolicyVersion(0, 99), with_base))
        assert engine.weight_checksums() == held


# --------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"{NORM} is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra (is not a parameter of the engine's model|was never part)"),
        (lambda t: t.update({NORM: torch.zeros(3)}), rf"{NORM} is (torch\.)?float32 \(3,\)"),
        (lambda t: t.update({NORM: torch.zeros(64).bfloat16()}), rf"{NORM} is (torch\.)?bfloat16"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_what_does_not_fit_is_refused_by_name(link: Link, change: Any, message: str, is_first: bool) -> None:
    """F79, F82: a name, shape or dtype that does not fit is refused by name, at the first update too. The engine goes
    on serving the old version, or, where it was fed in place, nothing; a good update mends it."""
    engine = make_engine(link.trainer, carrier=link.carrier)
    number = 1
    if not is_first:
        send(engine, link.update(V1))
        number = 2
    served, before = copy.deepcopy(link.trainer), engine.weight_checksums()
    move(link.trainer)
    wrong = link.travelling()
    change(wrong)
    with pytest.raises(WeightUpdateError, match=message):
        send(engine, link.update(PolicyVersion(0, number), wrong))
    assert engine.version == PolicyVersion(0, number - 1)
    if link.carrier.broken:
        assert link.kind == "streamed"
        assert_serves_nothing(engine)
    else:
        assert engine.weight_checksums() == before
        asyncio.run(engine.resume())
        assert_scored(served, ASKED, generate(engine, [ASKED])[0])
    send(engine, link.update(PolicyVersion(0, number + 1)))
    assert_scored(link.trainer, ASKED, generate(engine, [ASKED])[0])
    assert engine.weight_checksums() == sums(link.trainer)


def test_versions_go_forward_only(link: Link) -> None:
    """F87: an older version is refused; another lineage is newer."""
    link.carrier.receive(link.update(V2))
    with pytest.raises(WeightUpdateError, match=r"older than .*0\.2"):
        link.carrier.receive(link.update(V1))
    assert link.carrier.version == V2
    move(link.trainer)
    link.carrier.receive(link.update(PolicyVersion(1, 0)))
    assert link.carrier.version == PolicyVersion(1, 0) and link.carrier.checksums() == sums(link.trainer)


def test_two_identical_syncs_change_nothing(link: Link, tmp_path: Path) -> None:
    """F83: the same version again, and the same bits as the next version, leave every weight and every reply as they
    were; the same version again writes no file."""
    engine = make_engine(link.trainer, carrier=link.carrier)
    move(link.trainer)
    send(engine, link.update(V1))
    before, reply, files = engine.weight_checksums(), generate(engine, [ASKED])[0], listing(tmp_path)
    send(engine, link.update(V1))
    assert engine.weight_checksums() == before and generate(engine, [ASKED])[0] == reply
    assert listing(tmp_path) == files
    send(engine, link.update(V2))
    again = generate(engine, [ASKED])[0]
    assert engine.weight_checksums() == before and engine.version == V2
    assert (again.ids, again.logprobs) == (reply.ids, reply.logprobs)


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("weights-*")}


@pytest.mark.parametrize("kind", BETWEEN)
def test_other_weights_under_the_same_version_are_refused(kind: str, tmp_path: Path) -> None:
    """F101: a version names one set of bits."""
    with linked(kind, sharp_model(), tmp_path) as link:
        link.carrier.receive(link.update(V1))
        before = link.carrier.checksums()
        move(link.trainer)
        with pytest.raises(WeightUpdateError, match="under the same version"):
            link.carrier.receive(link.update(V1))
        assert link.carrier.checksums() == before


# ----------------------------------------------------------------------------------------- late joiners


@pytest.mark.parametrize("kind", ["shared_memory", "file", "delta"])  # a broadcast keeps nothing: its own tests
def test_a_late_joiner_and_one_that_fell_behind_catch_up(kind: str, tmp_path: Path) -> None:
    """F88: after nine updates an engine that has only the initial weights, and one that stopped at the third, get the
    newest by the sender's ``latest()``: not the trainer's live tensors, which have moved on. Both go on from there."""
    with linked(kind, sharp_model(), tmp_path) as link:
        late = [CarriedWeights(link.trainer, V0, receiver_of(link.sender)) for _ in range(2)]
        assert link.sender.latest() is None
        for number in range(1, 10):
            move(link.trainer, number, scale=0.05 if number % 3 else 0.0)
            link.carrier.receive(link.update(PolicyVersion(0, number)))
            if number == 3:
                late[1].receive(link.sender.latest())
        published = sums(link.trainer)
        move(link.trainer, 10)
        for engine_side in late:
            engine_side.receive(link.sender.latest())
            assert engine_side.version == PolicyVersion(0, 9) and engine_side.checksums() == published
        link.carrier.receive(link.update(PolicyVersion(0, 10)))
        for engine_side in late:
            engine_side.receive(link.sender.latest())
            assert engine_side.checksums() == sums(link.trainer) == link.carrier.checksums()


# --------------------------------------------------------------------------------------------- half ways


class Stopped(Exception):
    """A crash, as far as an exception can be one."""


def assert_serves_nothing(engine: Any) -> None:
    """Every way to get a token out of it is refused."""

    async def main() -> None:
        assert not await engine.healthy()
        with pytest.raises(EngineError):
            await engine.resume()
        with pytest.raises(EngineError):
            await engine.generate(ASKED)
        with pytest.raises(EngineError):
            await engine.probe([ASKED])

    asyncio.run(main())


def test_a_sender_that_stops_half_way_leaves_the_old_version(link: Link) -> None:
    """Issue 4: whatever tensor the publish stops at, the engine serves the old version, or, where its weights were
    written in place, nothing. The next complete update mends it."""
    engine = make_engine(link.trainer, carrier=link.carrier)
    served = copy.deepcopy(link.trainer)
    names = list(link.travelling())
    for number, last in enumerate(range(0, len(names), 4), start=1):
        move(link.trainer, number)

        def buckets(last: int = last) -> Iterator[dict[str, torch.Tensor]]:
            for name, tensor in list(link.travelling().items())[:last]:
                yield {name: tensor}
            raise Stopped(f"before {names[last]}")

        if link.kind == "copied":
            update = link.update(PolicyVersion(0, number), dict(list(link.travelling().items())[:last]))
        else:
            update = WeightUpdate(version=PolicyVersion(0, number), buckets=buckets)
        with pytest.raises((Stopped, WeightUpdateError, EngineError)):
            link.carrier.receive(update)
        if link.kind == "streamed" and last:
            assert_serves_nothing(engine)
        else:
            assert_scored(served, ASKED, generate(engine, [ASKED])[0])
            assert engine.weight_checksums() == sums(served)
    send(engine, link.update(PolicyVersion(0, 99)))
    assert_scored(link.trainer, ASKED, generate(engine, [ASKED])[0])


@pytest.mark.parametrize("kind", ["copied", *BETWEEN])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_an_engine_that_stops_while_it_writes_serves_nothing(
    kind: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 4: past the checks only the copying is left; an engine that fails in it is neither old nor new."""

    def write(self: Parameters, new: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in list(new.items())[:after]:
                self._by_name[name].copy_(tensor)
        raise Stopped

    with linked(kind, sharp_model(), tmp_path) as link:
        engine = make_engine(link.trainer, carrier=link.carrier)
        send(engine, link.update(V1))
        move(link.trainer)
        monkeypatch.setattr(Parameters, "write", write)
        with pytest.raises(EngineError, match="Stopped"):
            send(engine, link.update(V2))
        assert_serves_nothing(engine)


# ------------------------------------------------------------------------------------------------- canary


def canary_of(link: Link, engine: Any) -> Canary:
    async def score(samples: Any) -> list[list[float]]:
        out = []
        for sample in samples:
            logits = plain_logits(link.trainer, sample.ids, 1)
            picked = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids[1:])[:, None]).flatten()
            out.append([0.0, *picked.tolist()])
        return out

    async def trainer_sums() -> dict[str, str]:
        return sums(link.trainer)

    return Canary(
        engine,
        score,
        (1, 2, 3, 4),
        bound=1e-3,
        trainer_checksums=trainer_sums,
        shares_weights=False,
    )


@pytest.mark.parametrize("victim", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", NORM])
@pytest.mark.parametrize("kind", BETWEEN)
def test_the_canary_names_a_tensor_that_was_corrupted_on_the_way(kind: str, victim: str, tmp_path: Path) -> None:
    """I6: one bit of one tensor, flipped after the carrier's own checks, so that nothing but the canary can see it: the
    run stops and names it. Without the flip the canary passes."""
    with linked(kind, sharp_model(), tmp_path) as link:
        engine = make_engine(link.trainer, carrier=link.carrier)
        canary = canary_of(link, engine)
        receiver, read = link.carrier._receiver, link.carrier._receiver.read
        flips = False

        def corrupting(manifest: Any) -> Any:
            received = read(manifest)
            if flips:
                tensors = {name: tensor.clone() for name, tensor in received.tensors.items()}
                tensors[victim].view(torch.int32).flatten()[5] ^= 1
                received = type(received)(
                    version=received.version, tensors=tensors, checksums=received.checksums, specs=received.specs
                )
            return received

        receiver.read = corrupting

        async def sync(version: PolicyVersion) -> None:
            move(link.trainer, version.number)
            await engine.pause("keep")
            await engine.update_weights(link.update(version))
            await canary.prove(version)
            await engine.resume()

        async def main() -> None:
            nonlocal flips
            await sync(V1)
            flips = True
            with pytest.raises(SyncError, match=rf"these tensors differ between trainer and engine: {victim}\."):
                await sync(V2)

        asyncio.run(main())
