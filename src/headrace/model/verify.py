"""Prove at load time that packed passes compute what transformers itself computes for a model.

A list of known architectures would go stale; some models swallow an argument that changes their attention (sinks,
soft caps) or scale their logits in a way of their own. So a few tokens are scored twice: one by one with
transformers' eager attention and its own logits, and packed into one row, with a shared prompt, by our code.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from headrace.errors import HeadraceError
from headrace.model.attention import ATTENTION_NAME
from headrace.model.head import OutputHead
from headrace.model.logprobs import token_logprobs
from headrace.model.packing import pack
from headrace.types import AttemptKey, Sample

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.5}
"""Largest difference of log-probabilities; in bfloat16 two orders of summation differ by a few hundredths."""


class VerificationError(HeadraceError):
    """A model whose packed log-probabilities are not those of its own forward pass."""


@torch.no_grad()
def verify_model(model: PreTrainedModel, head: OutputHead) -> None:
    """Raises VerificationError where a packed row of ``model`` is not scored as transformers scores its sequences."""
    vocab_size = head.weight_VD.shape[0]
    samples = [
        _sample(index, prompt_length, reply_length, prefix_key, vocab_size)
        for index, (prompt_length, reply_length, prefix_key) in enumerate([(4, 5, "a"), (4, 3, "a"), (3, 4, "b")])
    ]
    parameter = next(model.parameters())
    row = pack(list(enumerate(samples)), share_prompts=True, dtype=parameter.dtype, device=parameter.device)
    try:
        packed_N, _ = token_logprobs(model, head, row, max_logit_tokens=8)
        model.set_attn_implementation("eager")
        expected = [_plain_logprobs(model, sample, vocab_size) for sample in samples]
    except Exception as error:
        raise VerificationError(
            f"{type(model).__name__} cannot run headrace's packed pass ({type(error).__name__}: {error}); "
            "choose a decoder-only model whose attention goes through transformers' attention interface"
        ) from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    gap = float((packed_N - torch.cat(expected)).abs().max())
    if not gap <= TOLERANCE[parameter.dtype]:
        raise VerificationError(
            f"{type(model).__name__}: packed log-probabilities differ from the model's own by {gap:.3g} "
            f"(allowed {TOLERANCE[parameter.dtype]:g}); headrace does not know a part of this architecture and "
            "would train it wrong. Choose another model"
        )


def _plain_logprobs(model: PreTrainedModel, sample: Sample, vocab_size: int) -> torch.Tensor:
    ids = torch.tensor([sample.ids], device=next(model.parameters()).device)
    logits_TV = model(input_ids=ids, use_cache=False).logits[0, :, :vocab_size]
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    places = [t for t, trained in enumerate(sample.mask) if trained]
    logprobs_TV = logits_TV[[t - 1 for t in places]].log_softmax(dim=-1)
    chosen: torch.Tensor = logprobs_TV.gather(1, ids[0, places, None])[:, 0]
    return chosen


def _sample(index: int, prompt_length: int, reply_length: int, prefix_key: str, vocab_size: int) -> Sample:
    length = prompt_length + reply_length
    ids = [ord(prefix_key) + 7 * t if t < prompt_length else 31 * (index + 1) + 5 * t for t in range(length)]
    return Sample(
        id=f"verify/{index}",
        key=AttemptKey(0, index),
        ids=tuple(i % vocab_size for i in ids),
        mask=(0,) * prompt_length + (1,) * reply_length,
        prefix_length=prompt_length,
        prefix_key=prefix_key,
        behaviour_logprobs=(0.0,) * length,
        versions=(None,) * length,
    )
