"""A LoRA adapter between the trainer's names and peft's folder, which vLLM loads. Needs no vLLM.

The trainer's parameters are those of a model that peft has put an adapter into: of a layer that has one, the frozen
weight is ``LAYER.base_layer.weight``, and the adapter ``LAYER.lora_A.NAME.weight`` and ``LAYER.lora_B.NAME.weight``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.engines.vllm.server.backend import AdapterOptions

if TYPE_CHECKING:
    from torch import Tensor

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Upper bounds of a rank that vLLM can be started with."""


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """A frozen weight's name in the model without adapter."""
    return name.replace(".base_layer.", ".")


def largest_rank(options: AdapterOptions) -> int:
    """Raises ValueError for a rank that vLLM cannot have."""
    for rank in RANKS:
        if options.rank <= rank:
            return rank
    raise ValueError(f"model.lora.rank = {options.rank}: vLLM takes {RANKS[-1]} at most")


def write_folder(folder: Path, options: AdapterOptions, tensors: Mapping[str, Tensor]) -> None:
    """The adapter among ``tensors`` in peft's format."""
    from safetensors.torch import save_file

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": options.target_modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    adapter = {
        f"base_model.model.{name.replace(f'.{options.name}.', '.')}": tensor.contiguous()
        for name, tensor in tensors.items()
        if is_adapter(name)
    }
    save_file(adapter, folder / "adapter_model.safetensors")
