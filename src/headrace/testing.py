"""Small random models and a character-level tokenizer, for tests, examples and learning fixtures.

They need no network and no files: everything is built from a seed. A model of the default shape has about 134
thousand parameters (D=64, 2 layers, 4 heads, tied head) and learns small tasks on one CPU core in seconds.

Example::

    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), seed=0)
    folder = save_tiny(tmp_path / "tiny", seed=0)          # the same two as a Hugging Face folder
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from headrace.algorithms.fields import LossOutput, TokenFields
from headrace.model.attention import ATTENTION_NAME
from headrace.protocols import AlgorithmNeeds
from headrace.types import AttemptKey, Group, PolicyVersion, RolloutBatch, Sample

PAD, BOS, EOS, UNK, END = "<pad>", "<bos>", "<eos>", "<unk>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, BOS, EOS, UNK, END, *(f"<|{role}|>" for role in ROLES))

ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
"""All printable ASCII characters."""
SMALL_ALPHABET = string.ascii_lowercase + string.digits + " =\n"
"""39 characters: with the nine special tokens a vocabulary of 48, as in the string-reversal fixture."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One id per character of ``alphabet``, after nine special tokens (ids 0 to 8: pad, bos, eos, unk, end of turn,
    and one for each role). A message renders as ``<|role|>content<|end|>``, after one ``<bos>``; any other character
    becomes ``<unk>``. ``<|end|>`` ends a turn, ``<eos>`` a text.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *dict.fromkeys(alphabet)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": [t for t in SPECIAL_TOKENS if t not in (PAD, BOS, EOS, UNK)]})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    architecture: Literal["llama", "qwen3", "qwen3_moe"] = "llama",
    *,
    vocab_size: int | None = None,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    max_context: int = 512,
    tied: bool = True,
    initializer_range: float = 0.02,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> PreTrainedModel:
    """A random causal language model whose attention is headrace's, with weights that depend on ``seed`` alone.

    ``vocab_size`` defaults to that of :func:`tiny_tokenizer`; ``num_kv_heads`` to ``num_heads`` (smaller means
    grouped-query attention); further keywords go into the transformers configuration. Raise ``initializer_range``
    (to 0.2, say) where a test needs logits that are far from uniform. A ``qwen3_moe`` has four experts of size
    ``hidden_size``, two for each token.
    """
    shape = {
        "vocab_size": len(tiny_tokenizer()) if vocab_size is None else vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_context,
        "tie_word_embeddings": tied,
        "initializer_range": initializer_range,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
    }
    make_config: Any = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}[architecture]
    if architecture == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            make_config(**{**shape, **config}), attn_implementation=ATTENTION_NAME
        )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=[SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(END)],
        pad_token_id=SPECIAL_TOKENS.index(PAD),
    )
    model.to(dtype).eval()  # type: ignore[arg-type]
    return model


def compute_in_float64(model: PreTrainedModel) -> None:
    """Make a tiny model's norms and rotary angles compute in float64, in place.

    transformers computes both in float32 whatever the model's type is, and float32 kernels treat the last elements
    of a tensor differently, so that results depend on the shape to 1e-7. Tests of split invariance need less.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = partial(_rotary, module)
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = partial(_route, module)
    if getattr(model.config, "num_experts", 0):
        model.set_experts_implementation("eager")  # the grouped product has no float64


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    weighted: torch.Tensor = module.weight * normed
    return weighted


def _rotary(module: Any, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].double() * module.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def _route(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    scores, chosen = logits.softmax(-1).topk(module.top_k, dim=-1)
    if module.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores, chosen


def save_tiny(path: Path, *, alphabet: str = ALPHABET, **model_options: Any) -> Path:
    """Write a tiny model and its tokenizer as a Hugging Face folder at ``path``, and return ``path``.

    ``model_options`` go to :func:`tiny_model`.
    """
    tokenizer = tiny_tokenizer(alphabet)
    tiny_model(**{"vocab_size": len(tokenizer), **model_options}).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_reply(
    rng: random.Random, vocab_size: int, max_length: int, earlier: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Random ids of random length. Where there are ``earlier`` replies of the group, it often begins like one of them,
    as replies of one policy do, and may be the beginning of it or the whole."""
    reply = [rng.randrange(vocab_size) for _ in range(rng.randint(1, max_length))]
    if earlier and rng.random() < 0.7:
        other = rng.choice(earlier)
        begin = other[: rng.randint(1, len(other))]
        reply = [*begin, *(reply if rng.random() < 0.8 else ())][:max_length]
    return reply


def make_sample(
    prompt_ids: Sequence[int],
    reply_ids: Sequence[int],
    *,
    group: int = 0,
    member: int = 0,
    branch: int = 0,
    reply_mask: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    version: PolicyVersion = PolicyVersion(0, 0),  # an immutable tuple
    **fields: Any,
) -> Sample:
    """A training sample of a prompt and a reply. ``reply_mask`` and ``logprobs`` have one entry per reply id and
    default to ones and zeros; ``fields`` are further fields of Sample."""
    length = len(prompt_ids)
    mask = (0,) * length + (tuple(reply_mask) if reply_mask is not None else (1,) * len(reply_ids))
    given = tuple(logprobs) if logprobs is not None else (0.0,) * len(reply_ids)
    return Sample(
        **{
            "id": f"g{group}m{member}/{branch}",
            "key": AttemptKey(group, member),
            "ids": (*prompt_ids, *reply_ids),
            "mask": mask,
            "prefix_length": length,
            "prefix_key": f"g{group}",
            "behaviour_logprobs": (0.0,) * length + given,
            "versions": tuple(version if trained else None for trained in mask),
            **fields,
        }
    )


@dataclass(frozen=True)
class Reinforce:
    """The smallest algorithm: loss = -advantage x log-probability, summed, over the minibatch's tokens.

    ``advantages`` maps sample ids to the advantage of each of their tokens.
    """

    advantages: dict[str, float]
    needs: AlgorithmNeeds = field(default_factory=AlgorithmNeeds)
    zero_advantage_means_zero_gradient: bool = True
    entropy_coefficient: float = 0.0

    def keep_group(self, group: Group) -> bool:
        return True

    def shape_rewards(self, batch: RolloutBatch) -> list[float]:
        return [sample.reward or 0.0 for sample in batch.samples]

    def advantage(self, batch: RolloutBatch, **_: Any) -> list[torch.Tensor]:
        return [torch.tensor(sample.mask, dtype=torch.float32) * self.advantages[sample.id] for sample in batch.samples]

    def loss(self, logprobs_N: torch.Tensor, fields: TokenFields) -> LossOutput:
        per_token_N = -fields.advantages_N.to(logprobs_N.dtype) * logprobs_N
        if fields.entropy_N is not None:
            per_token_N = per_token_N - self.entropy_coefficient * fields.entropy_N
        return LossOutput(
            per_token_N=per_token_N,
            denominator=float(fields.totals.num_tokens),
            metrics={"mean_advantage": (float(fields.advantages_N.sum()), float(len(fields.advantages_N)))},
        )
