"""The recipes for 8 and 64 GPUs: they pass the dry run without weights, their layouts fit the models' published shapes,
and their launch manifests can be made. They have not been run: no such machine was at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.launch import rendered
from headrace.cli.main import main
from headrace.config.checks import check_config
from headrace.config.cluster_checks import actor_counts
from headrace.config.load import load_config
from headrace.model.parallel.check import ModelShape, check_layout

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "hidden_act": "silu", "tie_word_embeddings": False,
          "max_position_embeddings": 40960}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    # As published in each model's config.json.
    "Qwen/Qwen3-8B": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096,
                      "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                      "num_key_value_heads": 8},
    "Qwen/Qwen3-32B": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120,
                       "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
                       "num_key_value_heads": 8},
    "Qwen/Qwen3-30B-A3B": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
                           "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                           "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                           "mlp_only_layers": [], "num_hidden_layers": 48, "num_attention_heads": 32,
                           "num_key_value_heads": 4},
}  # fmt: skip


def test_there_are_recipes_for_8_and_64_gpus_dense_and_moe() -> None:
    assert len(RECIPES) == 4
    found = {(load_config(r).launch.num_nodes * 8, "A3B" in load_config(r).model.path) for r in RECIPES}
    assert found == {(8, False), (8, True), (64, False), (64, True)}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_a_recipe_passes_the_dry_run_and_says_that_it_was_not_run(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("reasoning_gym")
    assert main(["train", str(recipe), "--dry-run", "--tasks.size", "20", "--tasks.held_out_size", "10"]) == 0
    assert "rollout batches" in capsys.readouterr().out
    assert "NOT RUN HERE" in recipe.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_a_recipes_layout_fits_its_model_and_its_machines(recipe: Path, tmp_path: Path) -> None:
    """Every GPU of the launch has exactly one user."""
    config = load_config(recipe)
    check_config(config)
    (tmp_path / "config.json").write_text(json.dumps(_QWEN3 | SHAPES[config.model.path]))
    check_layout(config.parallel, ModelShape.of_folder(tmp_path))
    counts = actor_counts(config)
    num_gpus = config.launch.num_nodes * config.launch.gpus_per_node
    assert counts["engine"] + counts["trainer"] + 1 == num_gpus, "engines, ranks, and the controller's own rank"
    num_cpus = 4 * num_gpus + counts["environment"] + 2 * counts["reward"]
    assert num_cpus <= config.launch.num_nodes * config.launch.cpus_per_node


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.stem)
def test_a_recipe_can_be_launched(recipe: Path) -> None:
    text = rendered(load_config(recipe), "kubernetes")
    assert "kind: RayJob" in text and "secretKeyRef" in text
