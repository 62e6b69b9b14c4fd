"""GGUF to a Hugging Face folder: float32 weights, tokenizer and chat template, nothing lost.

A quantised weight is scale x integer (+ offset) with float16 scales; its value needs more bits than bfloat16 has and
fits into float32, so the folder is float32. Three things that the plain way gets wrong (measured, transformers 5.24):

* ``save_pretrained`` refuses a model that came from GGUF ("quantized with gguf"), so the weights move into a model of
  the same configuration without the quantisation entry.
* The tokenizer's pre-tokenizer ``smollm`` splits digits off first. The conversion drops that, which changes ids
  wherever spaces stand before a digit; it is put back.
* The tokenizer comes without its context length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

_NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path")


def convert_llama_gguf(gguf: Path, folder: Path, notify: Callable[[str], None]) -> str:
    """Write ``gguf`` (a Llama) into ``folder`` as float32 safetensors with its tokenizer.

    Returns the :func:`content_checksum` of the weights.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    notify("dequantising the weights")
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = {name: value for name, value in source.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(source.state_dict(), strict=True)
    del source
    notify("writing the weights")
    model.save_pretrained(folder)
    notify("converting the tokenizer")
    _write_tokenizer(gguf, folder, model.config.max_position_embeddings)
    return content_checksum(dict(model.named_parameters()))


def content_checksum(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes: unlike a file's, it does not depend on the library's header."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_tokenizer(gguf: Path, folder: Path, max_context: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = max_context
    tokenizer.save_pretrained(folder)
