"""SmolLM2-135M out of its package: bit-equal weights, its own tokenizer, and a model that answers."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.model.fetch import PACKAGES, _obtain, fetch_model, verify_folder
from headrace.model.paths import resolve_model_path


def test_fetched_folder_is_verified_and_found_by_name(smollm2_path: Path) -> None:
    verify_folder(smollm2_path)
    assert resolve_model_path("smollm2-135m") == str(smollm2_path)
    written = (smollm2_path / "model.safetensors").stat().st_mtime_ns
    assert fetch_model("smollm2-135m") == smollm2_path
    assert (smollm2_path / "model.safetensors").stat().st_mtime_ns == written


def test_weights_are_the_dequantised_ones_bit_for_bit(smollm2_path: Path, tmp_path: Path) -> None:
    """float32 loses nothing: embedding (Q8_0), a projection (Q4_1) and a norm (F32) equal what gguf dequantises."""
    gguf = _obtain(PACKAGES["smollm2-135m"], tmp_path, print)
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    with safe_open(smollm2_path / "model.safetensors", framework="pt") as saved:
        assert len(saved.keys()) == len(tensors) == 272
        for theirs, ours in (
            ("token_embd.weight", "model.embed_tokens.weight"),
            ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
            ("blk.3.attn_v.weight", "model.layers.3.self_attn.v_proj.weight"),
            ("blk.3.attn_norm.weight", "model.layers.3.input_layernorm.weight"),
        ):
            expected = torch.from_numpy(numpy.array(dequantize(tensors[theirs].data, tensors[theirs].tensor_type)))
            assert saved.get_tensor(ours).dtype == torch.float32
            assert torch.equal(saved.get_tensor(ours), expected.view_as(saved.get_tensor(ours)))
            assert not torch.equal(expected.bfloat16().float(), expected) or theirs.endswith("norm.weight")


def test_tokenizer_splits_digits_first_and_knows_its_limits(smollm2_path: Path) -> None:
    """The GGUF conversion loses the pre-tokenizer 'smollm': two spaces before a digit would get other ids."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    assert tokenizer.tokenize("12  3") == ["1", "2", "ĠĠ", "3"]
    assert tokenizer.model_max_length == 8192
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 * 4 ="}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids).endswith("<|im_start|>user\n3 * 4 =<|im_end|>\n<|im_start|>assistant\n")


def test_model_answers(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    out = model.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])
