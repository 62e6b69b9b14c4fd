"""Loading: one model for trainer and engine, without dropout, proved against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.base import LoraConfig
from headrace.errors import HeadraceError
from headrace.model.head import HeadError, output_head
from headrace.model.load import ModelError, load_model, load_tokenizer, prepare_model
from headrace.model.logprobs import token_logprobs
from headrace.model.packing import pack
from headrace.model.verify import VerificationError
from headrace.testing import make_sample, save_tiny, tiny_model, tiny_tokenizer


def logprobs(loaded: object, model: torch.nn.Module | None = None) -> torch.Tensor:
    used = model if model is not None else loaded.model
    row = pack([(0, make_sample([1, 2, 3], [4, 5]))], share_prompts=True, dtype=used.dtype, device=torch.device("cpu"))
    return token_logprobs(used, output_head(used, loaded.vocab_size), row, max_logit_tokens=8)[0].detach()


def test_loads_a_folder(tmp_path: Path) -> None:
    """The same weights and tokenizer come back, with headrace's attention."""
    loaded = load_model(save_tiny(tmp_path / "m", seed=3))
    expected = tiny_model(seed=3)
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), expected.parameters(), strict=True))
    assert loaded.model.config._attn_implementation == "headrace"
    assert loaded.vocab_size == len(tiny_tokenizer()) == len(load_tokenizer(tmp_path / "m"))
    assert loaded.max_context == 512


@pytest.mark.parametrize("path", ["/nowhere/model", "./model", "model", "a/b/c"])
def test_missing_folder_names_the_fetch_command(path: str) -> None:
    """One clear error that says what to do."""
    with pytest.raises(HeadraceError, match="headrace model fetch"):
        load_model(path)


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    """A run's folder given by mistake, for example."""
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path)


def test_dropout_is_off_and_scoring_is_bit_equal(tmp_path: Path) -> None:
    """F15: two identical scoring calls agree bit for bit, whatever rates the checkpoint declares."""
    folder = save_tiny(tmp_path / "m", attention_dropout=0.5)
    assert AutoConfig.from_pretrained(folder).attention_dropout == 0.5
    loaded = load_model(folder)
    assert loaded.model.config.attention_dropout == 0.0
    assert not loaded.model.training
    assert torch.equal(logprobs(loaded), logprobs(loaded))


def test_bfloat16_keeps_float32_masters(tmp_path: Path) -> None:
    """The masters are the checkpoint's float32 values, not the rounded ones."""
    loaded = load_model(save_tiny(tmp_path / "m"), "bfloat16")
    exact = dict(tiny_model().named_parameters())
    assert set(loaded.masters) == set(exact)
    assert all(torch.equal(master, exact[name]) for name, master in loaded.masters.items())
    assert all(p.dtype == torch.bfloat16 for p in loaded.model.parameters())


def test_bfloat16_keeps_exact_rotary_frequencies(tmp_path: Path) -> None:
    """F1: rounded to bfloat16 they turn far positions by whole radians, and the exported model, or another engine,
    which has them in float32, would be another policy."""
    path = save_tiny(tmp_path / "m", initializer_range=0.2)
    loaded = load_model(path, "bfloat16")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ours, theirs = dict(loaded.model.named_buffers()), dict(plain.named_buffers())
    assert ours.keys() == theirs.keys() and ours
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_missing_device_is_named(tmp_path: Path) -> None:
    """One clear error instead of a failure inside torch."""
    if torch.cuda.is_available():
        assert next(load_model(save_tiny(tmp_path / "m"), device="auto").model.parameters()).is_cuda
        return
    with pytest.raises(ModelError, match=r"model\.device"):
        load_model(save_tiny(tmp_path / "m"), device="cuda")


def test_lora_trains_only_the_adapter_and_shares_the_base() -> None:
    """The base without adapter is other modules over the same storage: no copy, and no switch to flip."""
    loaded = prepare_model(tiny_model(initializer_range=0.2), tiny_tokenizer(), lora=LoraConfig(rank=4), seed=5)
    trained = [name for name, p in loaded.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    storages = {p.data_ptr() for p in loaded.model.parameters()}
    assert loaded.base is not None and all(p.data_ptr() in storages for p in loaded.base.parameters())
    assert torch.equal(logprobs(loaded), logprobs(loaded, loaded.base))  # an untrained adapter changes nothing
    with torch.no_grad():
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.1)
    assert not torch.equal(logprobs(loaded), logprobs(loaded, loaded.base))


def test_lora_start_depends_on_the_seed_alone() -> None:
    """I18: same seed, same adapter."""

    def adapter(seed: int) -> list[torch.Tensor]:
        loaded = prepare_model(tiny_model(), tiny_tokenizer(), lora=LoraConfig(rank=2), seed=seed)
        return [p.detach() for n, p in loaded.model.named_parameters() if "lora_A" in n]

    torch.manual_seed(1)
    first = adapter(7)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, adapter(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, adapter(8), strict=True))


def test_lora_on_unknown_modules_is_an_error() -> None:
    """The message names the option."""
    with pytest.raises(ModelError, match="target_modules"):
        prepare_model(tiny_model(), tiny_tokenizer(), lora=LoraConfig(target_modules=("nothing",)))


def test_sliding_window_is_refused() -> None:
    """Right on few tokens and wrong on many: it must be refused by name."""
    model = tiny_model("qwen3")
    model.config.layer_types = ["sliding_attention", "full_attention"]
    with pytest.raises(ModelError, match="sliding_attention"):
        prepare_model(model, tiny_tokenizer())


def test_architecture_that_changes_its_logits_is_refused() -> None:
    """verify_model catches what no list knows: here a model that doubles its logits."""
    model = tiny_model(initializer_range=0.2)
    original = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        out = original(*args, **kwargs)
        out.logits = 2 * out.logits
        return out

    model.forward = forward
    with pytest.raises(VerificationError, match="differ"):
        prepare_model(model, tiny_tokenizer())


def test_head_that_is_not_linear_is_refused() -> None:
    """A head with an adapter, or of another kind, cannot be computed in chunks."""
    model = tiny_model(tied=False)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(HeadError, match="Sequential"):
        prepare_model(model, tiny_tokenizer())


def test_tokenizer_of_another_model_is_refused() -> None:
    """More ids than rows."""
    with pytest.raises(HeadError, match="do not belong together"):
        prepare_model(tiny_model(vocab_size=50), tiny_tokenizer())


def test_unknown_dtype() -> None:
    """One clear error."""
    with pytest.raises(ModelError, match="float16"):
        prepare_model(tiny_model(), tiny_tokenizer(), "float16")
