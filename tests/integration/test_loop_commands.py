"""``headrace eval``, ``inspect``, ``report`` and ``model export`` on a run that was really made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loop_runs import last_weights, run_to_end, small_data, warm_model, write_toml
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.cli.main import main
from headrace.loop_eval import evaluate_checkpoint


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not cut."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four batches, checkpoints at 2 and 4, evaluated at start and end."""
    folder = tmp_path_factory.mktemp("commands")
    data = small_data(
        folder,
        "demo",
        trainer={"num_batches": 4, "learning_rate": 1e-3},
        evaluation={"at_start": True, "at_end": True, "num_samples": 2},
    )
    status, output = run_to_end("train", str(write_toml(folder / "demo.toml", data)), log=folder / "log")
    assert status == 0, output
    return folder / "demo"


def test_the_run_leaves_the_record_that_the_design_names(run_dir: Path) -> None:
    """DESIGN.md, section 7."""
    assert {p.name for p in run_dir.iterdir()} >= {
        "run.json",
        "metrics.jsonl",
        "episodes",
        "ledger",
        "spans",
        "checkpoints",
        "report.html",
        "curve.png",
        "evaluations",
    }
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert all((run_dir / "checkpoints" / n / "COMPLETE").is_file() for n in ("step-2", "step-4"))
    assert sorted(p.name for p in (run_dir / "evaluations").iterdir()) == ["version-0.0.json", "version-0.4.json"]
    html = (run_dir / "report.html").read_text().replace("http://www.w3.org", "")
    assert "http://" not in html and "https://" not in html, "self-contained: nothing is fetched"


def test_eval_of_a_run_measures_its_last_checkpoint(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tasks, seeds and weights as the run's own evaluation at its end: the same result."""
    (result,) = evaluate_checkpoint(str(run_dir))
    own = json.loads((run_dir / "evaluations/version-0.4.json").read_text())
    found = json.loads(result.to_json())
    replies = [[[a["score"] for a in t["sampled"]], t["greedy"]["score"]] for t in found["tasks"]]
    assert replies == [[[a["score"] for a in t["sampled"]], t["greedy"]["score"]] for t in own["tasks"]]
    assert main(["eval", str(run_dir), "--num-tasks", "3", "--num-samples", "1"]) == 0
    printed = capsys.readouterr().out
    assert "demo (step 4)" in printed and "greedy" in printed


def test_eval_of_a_checkpoint_against_the_model_it_started_from(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A paired comparison, task by task; two different policies, on the same tasks."""
    first, second = evaluate_checkpoint(str(run_dir / "checkpoints/step-2"), against=str(warm_model()))
    assert [t.task_id for t in first.tasks] == [t.task_id for t in second.tasks]
    printed = capsys.readouterr().out
    assert "demo (step-2)" in printed and str(warm_model().name) in printed
    start = json.loads((run_dir / "evaluations/version-0.0.json").read_text())
    assert [t.greedy.score for t in second.tasks] == [t["greedy"]["score"] for t in start["tasks"]]


def test_eval_of_a_model_on_the_tasks_of_a_file(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = run_dir.parent / "demo.toml"
    assert main(["eval", str(warm_model()), "--tasks", str(toml), "--num-tasks", "2", "--num-samples", "1"]) == 0
    capsys.readouterr()
    assert main(["eval", str(warm_model())]) == 2
    assert "say on which tasks with --tasks" in capsys.readouterr().err


def test_inspect_says_how_far_a_run_came_and_that_its_books_balance(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 rollout batches" in printed and "2, 4" in printed
    assert "issued 64" in printed and "trained 64" in printed and "in_flight 0" in printed


def test_report_is_written_again_from_the_record_alone(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "report.html").unlink()
    (run_dir / "curve.png").unlink()
    assert main(["report", str(run_dir)]) == 0
    assert (run_dir / "report.html").stat().st_size > 10_000 and (run_dir / "curve.png").stat().st_size > 1_000
    assert str(run_dir / "report.html") in capsys.readouterr().out


def test_export_makes_a_folder_that_transformers_loads(run_dir: Path, tmp_path: Path) -> None:
    assert main(["model", "export", str(run_dir), str(tmp_path / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = last_weights(run_dir)
    exported = dict(model.named_parameters())
    assert exported and all(torch.equal(exported[name], trained[name]) for name in exported)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("abc", add_special_tokens=False)) == "abc"
