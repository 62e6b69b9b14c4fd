"""Every carrier to real vLLM that a CPU can run. Skips where there is no .venv-vllm (tests/allowed_skips.txt)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from loop_runs import write_toml
from test_engine_vllm_runs import run_data
from vllm_fixture import Session, gaps, make_vllm, perturb, request, sync, vllm_model, vllm_python

from headrace.cli.main import main
from headrace.protocols import WeightUpdate
from headrace.record.metrics import read_metrics
from headrace.types import PolicyVersion
from headrace.weights import WeightUpdateError, checksums, named_parameters
from headrace.weights.carrier import Subscription, update_by
from headrace.weights.file import DeltaSender
from headrace.weights.store import versions_in

PROMPT = tuple(range(3, 43))
EXACT = 1e-4
DELTA = {"type": "delta"}
PARTS = {
    "embedding": "model.embed_tokens.weight",
    "attention": "model.layers.0.self_attn.k_proj.weight",
    "mlp": "model.layers.1.mlp.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


@pytest.fixture(scope="module", autouse=True)
def there_is_vllm() -> None:
    """Skips before anything is opened."""
    vllm_python()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("carrier", ["file", "delta", "broadcast"])
def test_every_part_arrives(carrier: str, tmp_path: Path) -> None:
    """Issue 4, end criterion 2, F81: embedding, attention, MLP, norm and head, perturbed in turn: vLLM's
    log-probabilities are those of a forward pass of the new weights; the same version again is nothing; what does not
    fit is refused by name, and a good update follows."""
    model = vllm_model(tied=False)
    session = Session(lambda: make_vllm(model, tmp_path, carrier={"type": carrier}))
    engine = session.engine
    try:
        for number, name in enumerate(PARTS.values(), start=1):
            perturb(model, [name], seed=number)
            session.run(sync(engine, model, number))
            asked = request(f"r{number}", PROMPT, number, max_new_tokens=12)
            assert float(gaps(model, asked, session.run(engine.generate(asked))).max()) < EXACT, name
            assert engine.weight_checksums() == checksums(named_parameters(model).items())
        session.run(sync(engine, model, number))
        wrong = dict(named_parameters(model))
        wrong["model.norm.weight"] = wrong["model.norm.weight"][:3]

        async def refused() -> None:
            await engine.pause("keep")
            with pytest.raises(WeightUpdateError, match=r"model\.norm\.weight is float32 \(3,\)"):
                await engine.update_weights(WeightUpdate(version=PolicyVersion(0, number + 1), tensors=wrong))

        session.run(refused())
        perturb(model, seed=99)
        session.run(sync(engine, model, number + 2))
        asked = request("last", PROMPT, max_new_tokens=12)
        assert float(gaps(model, asked, session.run(engine.generate(asked))).max()) < EXACT
    finally:
        session.close()


@pytest.mark.timeout(280)
def test_an_engine_joins_late_and_follows(tmp_path: Path) -> None:
    """F88: a second server starts from what was published for the first one, whole version and differences, and not
    from the trainer's live weights; from then on both are fed by manifest."""
    model = vllm_model()
    sender = DeltaSender(tmp_path / "weights")
    for number in range(3):
        perturb(model, ["model.norm.weight"], seed=number)
        sender.send(WeightUpdate(version=PolicyVersion(0, number), tensors=named_parameters(model)), None)
    kinds = [json.loads(path.read_text())["kind"] for path in sorted((tmp_path / "weights").glob("*.json"))]
    assert kinds == ["full", "delta", "delta"]
    published = copy.deepcopy(model)
    perturb(model, seed=7)  # an optimizer step that nobody has published yet
    late = Session(
        lambda: make_vllm(model, tmp_path, sender=Subscription.to(sender), initial=sender.latest(), carrier=DELTA)
    )
    try:
        assert late.engine.version == PolicyVersion(0, 2)
        asked = request("r", PROMPT, max_new_tokens=12)
        assert float(gaps(published, asked, late.run(late.engine.generate(asked))).max()) < EXACT
        manifest = sender.send(WeightUpdate(version=PolicyVersion(0, 3), tensors=named_parameters(model)), None)

        async def follow() -> None:
            await late.engine.pause("keep")
            await late.engine.update_weights(update_by(manifest))
            await late.engine.resume()

        late.run(follow())
        assert float(gaps(model, asked, late.run(late.engine.generate(asked))).max()) < EXACT
        assert late.engine.weight_checksums() == checksums(named_parameters(model).items())
    finally:
        late.close()
        sender.close()


@pytest.mark.timeout(280)
def test_a_run_over_deltas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Issue 4: a whole run whose weights reach vLLM as differences in the run's folder: every sync is exact, and the
    folder ends with the last version."""
    data = run_data(tmp_path, "run", engine={"carrier": DELTA}, trainer={"num_batches": 3})
    assert main(["train", str(write_toml(tmp_path / "run.toml", data))]) == 0, capsys.readouterr().err
    metrics = list(read_metrics(tmp_path / "run"))
    assert len(metrics) == 3 and all(m["canary/max_gap"] < EXACT for m in metrics)
    assert versions_in(tmp_path / "run" / "weights")[-1].number == 3
