"""Export: the policy as a plain Hugging Face folder that ``from_pretrained`` loads."""

from __future__ import annotations

from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from headrace.model.load import ADAPTER_NAME, LoadedModel


def export_model(loaded: LoadedModel, path: Path) -> None:
    """Write weights (safetensors, in the compute type), configuration, generation config and tokenizer to ``path``.

    A LoRA adapter is merged: the model that is written has the base's architecture and needs no peft.
    """
    path.mkdir(parents=True, exist_ok=True)
    if loaded.base is None:
        loaded.model.save_pretrained(path)
    else:
        loaded.base.save_pretrained(path, state_dict=_merged(loaded))
    loaded.tokenizer.save_pretrained(path)


@torch.no_grad()
def _merged(loaded: LoadedModel) -> dict[str, Tensor]:
    assert loaded.base is not None
    state: dict[str, Tensor] = dict(loaded.base.state_dict())
    for name, module in loaded.model.named_modules():
        if isinstance(module, LoraLayer):
            weight = state[f"{name}.weight"]
            delta: Tensor = module.get_delta_weight(ADAPTER_NAME)  # type: ignore[attr-defined]
            state[f"{name}.weight"] = (weight.float() + delta.float()).to(weight.dtype)
    return state
