"""The output head: hidden states to logits, as plain numbers that a chunked scorer can work with.

Legend: V vocabulary, D model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from headrace.errors import HeadraceError
from headrace.model.linear import PLAIN


class HeadError(HeadraceError):
    """A model whose output head headrace cannot compute by itself."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """This process holds the head's rows from ``start`` on; the others of ``group`` hold the rest (tensor parallel)."""

    group: dist.ProcessGroup
    start: int


@dataclass(frozen=True, slots=True)
class OutputHead:
    """logits = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap); scale 1 and softcap None mean off."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float = 1.0
    softcap: float | None = None
    shard: VocabShard | None = None

    @classmethod
    def of(
        cls, model: PreTrainedModel, weight_VD: Tensor, bias_V: Tensor | None, shard: VocabShard | None = None
    ) -> OutputHead:
        """With scale and softcap of the model's configuration."""
        config = model.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        if divisor := getattr(config, "logits_scaling", None):
            scale /= float(divisor)
        softcap = getattr(config, "final_logit_softcapping", None)
        return cls(weight_VD, bias_V, scale, float(softcap) if softcap else None, shard)


def head_of(model: PreTrainedModel) -> torch.nn.Linear:
    """The head's module. Raises HeadError where it is no plain linear layer."""
    linear: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(linear, torch.nn.Linear) or type(linear) not in PLAIN:
        raise HeadError(
            f"the output head of {type(model).__name__} is a {type(linear).__name__}, not a plain linear layer; "
            "headrace computes logits in chunks by itself and cannot do that here (LoRA on the head is refused too)"
        )
    return linear


def has_tied_head(model: PreTrainedModel) -> bool:
    """Whether the head's weight is the embedding's. False where either is not here (pipeline stages)."""
    head: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embedding: object = model.get_input_embeddings()
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(embedding, "weight", None)


def output_head(model: PreTrainedModel, vocab_size: int) -> OutputHead:
    """The head of ``model``, cut to the tokenizer's ``vocab_size``: padding rows have no probability (F14).

    Raises HeadError where the head is no plain linear layer. Tied heads give the embedding's own weight.
    """
    linear = head_of(model)
    weight: Tensor = linear.weight
    bias: Tensor | None = linear.bias
    if vocab_size > weight.shape[0]:
        raise HeadError(
            f"the tokenizer has {vocab_size} ids but the model's head only {weight.shape[0]} rows; "
            "they do not belong together"
        )
    if vocab_size < weight.shape[0]:
        weight, bias = weight[:vocab_size], None if bias is None else bias[:vocab_size]
    return OutputHead.of(model, weight, bias)
