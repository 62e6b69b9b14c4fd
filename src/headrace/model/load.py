"""Load a causal language model and its tokenizer, ready for trainer and embedded engine at once.

What is guaranteed about a loaded model:

* Its attention is headrace's (``attention.py``), and :func:`~headrace.model.verify.verify_model` has proved on a few
  tokens that packed passes give what transformers' own attention gives.
* No dropout: every rate in the configuration and in the modules is 0, and the model is in eval mode, so that two
  scoring calls are bit-equal (F15).
* ``bfloat16`` means bf16 weights and compute over float32 master copies (``masters``), which the optimizer owns: it
  steps the masters and rounds them into the model. The engine reads the same bf16 storage.
* With LoRA, only the adapter's weights are trainable (float32), and ``base`` is the same model without adapter:
  other module objects over the same weights, so that a reference pass never switches an adapter off under a running
  engine.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from headrace.config.base import LoraConfig
from headrace.errors import HeadraceError
from headrace.model.attention import ATTENTION_NAME
from headrace.model.head import output_head
from headrace.model.linear import use_onednn
from headrace.model.memory import PeakMemory
from headrace.model.paths import resolve_model_path
from headrace.model.routing import watch_routers
from headrace.model.verify import verify_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""float64 is for tests."""

ADAPTER_NAME = "headrace"


class ModelError(HeadraceError):
    """A model that cannot be loaded or is of a kind that headrace cannot train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, its tokenizer, and what trainer and engine must know about them."""

    model: PreTrainedModel
    """In eval mode. Call it with ``layout=...`` (see attention.py)."""
    tokenizer: PreTrainedTokenizerBase
    dtype: str
    path: str
    """As given; empty for a model that was built in memory."""
    masters: dict[str, Tensor]
    """float32 copies of the trainable weights that are not float32 themselves, by parameter name."""
    memory: PeakMemory
    """Of this process, since before the model was loaded (since it was prepared, where it was built in memory)."""
    base: PreTrainedModel | None = None
    """With LoRA: the model without its adapter, sharing all weights."""

    @property
    def vocab_size(self) -> int:
        """Ids from here on are padding rows of the embedding: they are never sampled and have no probability."""
        return len(self.tokenizer)

    @property
    def max_context(self) -> int:
        """Prompt plus reply, in tokens, that the model's positions allow."""
        return int(self.model.config.get_text_config().max_position_embeddings)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a hub id, without loading the model."""
    location = resolve_path(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(location)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer in {path}: {error}. {_HINT}") from error
    return tokenizer


def load_model(
    path: str | Path,
    dtype: str = "float32",
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
) -> LoadedModel:
    """Load a model for training and generation.

    ``path`` is a local folder or a hub id (HF_HUB_OFFLINE is respected). ``seed`` decides the adapter's random start.
    ``device``: auto is the first GPU where there is one. Raises ModelError where the folder is not there, there is no
    such device, or the model is of a kind that packed passes cannot compute.
    """
    location = resolve_path(path)
    target = _find_device(device)
    memory = PeakMemory(target)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(location)
        _zero_dropout(config)
        _refuse_unsupported(config, str(path))
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            location, config=config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"no model could be loaded from {path}: {error}. {_HINT}") from error
    model.to(target)  # type: ignore[arg-type]
    return prepare_model(model, load_tokenizer(path), dtype, lora=lora, seed=seed, path=str(path), memory=memory)


def prepare_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str = "float32",
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    path: str = "",
    memory: PeakMemory | None = None,
) -> LoadedModel:
    """Make a :class:`LoadedModel` of a model that is already in memory. The model is changed in place."""
    memory = memory or PeakMemory(next(model.parameters()).device)
    if dtype not in DTYPES:
        raise ModelError(f"model dtype is '{dtype}'; it must be one of {', '.join(DTYPES)}")
    _zero_dropout(model.config)
    _refuse_unsupported(model.config, path or type(model).__name__)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.use_cache = False
    model.eval()  # type: ignore[no-untyped-call]
    full = {name: p.detach() for name, p in model.named_parameters()}
    # Parameters only: model.to(dtype) would round the rotary frequencies too, so that far positions get wrong angles.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype])
    use_onednn(model)
    verify_model(model, output_head(model, len(tokenizer)))
    watch_routers(model)
    base = _add_adapter(model, lora, seed) if lora else None
    masters = {
        name: full[name].float()
        for name, p in model.named_parameters()
        if p.requires_grad and p.dtype not in (torch.float32, torch.float64)
    }
    return LoadedModel(
        model=model, tokenizer=tokenizer, dtype=dtype, path=path, masters=masters, memory=memory, base=base
    )


def _find_device(name: str) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelError('model.device is "cuda", but torch sees no GPU here; use "auto" or "cpu"')
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def resolve_path(path: str | Path) -> str:
    """The folder or hub id to load from. Raises ModelError for what looks like a local path and is not there, and
    ModelNotFetchedError for the name of a model that was not fetched yet."""
    text = resolve_model_path(str(path))
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path: the folder {folder} holds no config.json, so it is no model folder. {_HINT}")
        return str(folder)
    looks_local = text.startswith((".", "~", os.sep)) or text.count("/") > 1 or "/" not in text
    if looks_local:
        raise ModelError(f"model.path: there is no folder {folder}. {_HINT}")
    return text


_HINT = (
    "Give a local Hugging Face folder, a hub id such as org/name (with network, or cached), or fetch the quickstart's "
    "model with: headrace model fetch smollm2-135m"
)


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the module tree over the very same parameters and buffers."""
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def _add_adapter(model: PreTrainedModel, lora: LoraConfig, seed: int) -> PreTrainedModel:
    """Put a LoRA adapter into ``model`` (through peft), freeze the rest, and return the model without it."""
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    base = share_weights(model)
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    peft_config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # declared int, but any number works
        lora_dropout=0.0,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(peft_config, model, adapter_name=ADAPTER_NAME)
        except ValueError as error:
            raise ModelError(f"model.lora.target_modules does not fit this model: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()  # adapters are their own float32 masters
    base.requires_grad_(False)
    return base


def _zero_dropout(config: Any) -> None:
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if ("dropout" in name or name.endswith(("_pdrop", "jitter_noise"))) and isinstance(value, float):
                setattr(part, name, 0.0)


def _refuse_unsupported(config: Any, what: str) -> None:
    """Some kinds of layers look right on the few tokens that verify_model computes, and are wrong on long ones."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(text, "sliding_window", None)
    if kinds or (window and getattr(text, "use_sliding_window", True)):
        named = ", ".join(sorted(kinds)) or f"a sliding window of {window} tokens"
        raise ModelError(
            f"{what}: this model has layers with {named}; headrace computes full causal attention only. "
            "Choose a model whose layers all have full attention"
        )
