"""Done line 7 of issue 3: an impossible layout is one clear error before work starts, from config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.config.checks import check_config
from headrace.config.load import load_config
from headrace.config.schema import ParallelConfig
from headrace.errors import ConfigError
from headrace.model.parallel.check import ModelShape, ParallelError, check_layout, layers_of_stage
from headrace.testing import tiny_model

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
MOE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("layout", "model", "words"),
    [
        ({"tp": 3}, LLAMA, ["parallel.tp = 3 does not divide the model's 8 attention heads"]),
        ({"tp": 8}, LLAMA, ["parallel.tp = 8 does not divide the model's 4 key-value heads", "a divisor of 4"]),
        ({"cp": 8}, LLAMA, ["parallel.cp = 8 does not divide the model's 4 key-value heads"]),
        ({"tp": 4, "cp": 2}, LLAMA, ["parallel.tp x parallel.cp = 8 does not divide the model's 4 key-value heads"]),
        ({"pp": 7}, LLAMA, ["parallel.pp = 7 is above the model's 6 layers", "at most 6"]),
        ({"ep": 2}, LLAMA, ["parallel.ep = 2, but this model (llama) has no experts"]),
        ({"ep": 4}, MOE, ["parallel.ep = 4 does not divide the model's 6 experts"]),
        ({"tp": 2}, {**LLAMA, "intermediate_size": 255}, ["does not divide the model's intermediate size 255"]),
        ({"tp": 4}, {**LLAMA, "vocab_size": 6}, ["leaves a rank without vocabulary (6 ids)"]),
    ],
)
def test_impossible_layout_is_one_clear_error(layout: dict[str, int], model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ParallelError) as caught:
        check_layout(ParallelConfig(**layout), ModelShape.of(model))
    assert all(word in str(caught.value) for word in words)


def test_number_of_processes_must_be_the_product_of_the_axes() -> None:
    layout = ParallelConfig(dp_shard=2, tp=2)
    check_layout(layout, ModelShape.of(LLAMA), num_processes=4)
    with pytest.raises(ParallelError, match=r"asks for 4 processes \(dp_shard 2 x tp 2\), but 3 were started"):
        check_layout(layout, ModelShape.of(LLAMA), num_processes=3)


def test_several_problems_are_told_at_once() -> None:
    with pytest.raises(ParallelError, match=r"key-value heads.*; .*layers.*; .*no experts"):
        check_layout(ParallelConfig(tp=8, pp=8, ep=2), ModelShape.of(LLAMA))


@pytest.mark.parametrize("layout", [{}, {"tp": 4, "pp": 6, "dp_shard": 5}, {"tp": 2, "cp": 2}])
def test_possible_layouts_pass(layout: dict[str, int]) -> None:
    check_layout(ParallelConfig(**layout), ModelShape.of(LLAMA))


def test_shape_is_read_from_a_model_folder(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", num_heads=4, num_kv_heads=2, tied=False).save_pretrained(tmp_path)
    shape = ModelShape.of_folder(tmp_path)
    assert (shape.num_experts, shape.expert_size, shape.num_experts_per_token) == (4, 64, 2)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_size, shape.num_layers) == (4, 2, 16, 2)
    assert shape.qk_norm and not shape.tied
    with pytest.raises(ParallelError, match=r"holds no readable config.json"):
        ModelShape.of_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ParallelError, match="no 'num_attention_heads'"):
        ModelShape.of_folder(tmp_path)


def test_check_needs_no_torch() -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "import headrace.model.parallel.check, headrace.model.parallel.forecast"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_layers_are_dealt_out_evenly_and_in_order() -> None:
    stages = [layers_of_stage(7, 3, stage) for stage in range(3)]
    assert [list(stage) for stage in stages] == [[0, 1, 2], [3, 4], [5, 6]]


RUN = '[model]\npath = "m"\n[tasks]\ntype = "arithmetic"\n[[rewards]]\ntype = "exact"\n'


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('[parallel]\npp_schedule = "gpipe"', "parallel.pp_schedule has no effect"),
        ("[parallel]\noffload_optimizer = true", "parallel.offload_optimizer has no effect: the run has one process"),
        (
            "[parallel]\ntp = 2\noffload_optimizer = true\noffload_parameters = true",
            "parallel.offload_optimizer has no effect: parallel.offload_parameters",
        ),
        ('[parallel]\ntp = 2\n[engine]\nweights = "shared"', 'engine.weights = "shared" with 2 processes'),
        ("[parallel]\ntp = 2\n[model.lora]\nrank = 4", "model.lora with 2 processes"),
        ("[parallel]\ntpp = 2", "tp"),
        ("[parallel]\ntp = 0", "greater than or equal to 1"),
    ],
)
def test_options_without_effect_are_refused(text: str, word: str, tmp_path: Path) -> None:
    """I20 for the parallel section."""
    path = tmp_path / "run.toml"
    path.write_text(f"{RUN}\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path))
    assert word in str(caught.value)
