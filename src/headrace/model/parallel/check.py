"""Can this model be split this way? Answered from its config.json, before any process starts. No torch.

Each problem is one sentence: the key, its value, the number that does not fit, and what to do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.config.schema import ParallelConfig
from headrace.errors import HeadraceError


class ParallelError(HeadraceError):
    """A layout that cannot be, or processes that do not do the same thing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder-only model that splitting and memory depend on."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool
    num_experts: int = 0
    """0 for a dense model."""
    expert_size: int = 0
    num_experts_per_token: int = 0
    qk_norm: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the contents of a config.json (its text part, where it has one). Raises ParallelError."""
        text: Mapping[str, Any] = config.get("text_config") or config
        try:
            heads = int(text["num_attention_heads"])
            hidden = int(text["hidden_size"])
            num_experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
            return cls(
                architecture=str(text.get("model_type", "")),
                num_layers=int(text["num_hidden_layers"]),
                hidden_size=hidden,
                intermediate_size=int(text["intermediate_size"]),
                num_heads=heads,
                num_kv_heads=int(text.get("num_key_value_heads") or heads),
                head_size=int(text.get("head_dim") or hidden // heads),
                vocab_size=int(text["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
                num_experts=num_experts,
                expert_size=int(text.get("moe_intermediate_size") or text["intermediate_size"]) if num_experts else 0,
                num_experts_per_token=int(text.get("num_experts_per_tok") or 1) if num_experts else 0,
                qk_norm=str(text.get("model_type", "")).startswith("qwen3"),
            )
        except KeyError as error:
            raise ParallelError(
                f"the model's configuration has no {error}, so headrace cannot tell how to split it; choose a "
                "decoder-only model with a usual config.json"
            ) from None

    @classmethod
    def of_folder(cls, folder: Path) -> ModelShape:
        """From a model folder. Raises ParallelError where it holds no readable config.json."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ParallelError(f"{folder} holds no readable config.json: {error}") from None
        return cls.of(config)


def check_layout(parallel: ParallelConfig, shape: ModelShape, *, num_processes: int | None = None) -> None:
    """Refuse a layout that this model cannot have. ``num_processes``: those that were started, if already known.

    Raises:
        ParallelError: one sentence for each problem.
    """
    problems = [*_problems(parallel, shape)]
    if num_processes is not None and num_processes != parallel.world_size:
        axes = ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp")
        product = " x ".join(f"{name} {getattr(parallel, name)}" for name in axes if getattr(parallel, name) > 1)
        problems.append(
            f"[parallel] asks for {parallel.world_size} processes ({product or 'all axes 1'}), but {num_processes} "
            "were started; change an axis or the number of processes"
        )
    if problems:
        raise ParallelError("; ".join(problems))


def _problems(parallel: ParallelConfig, shape: ModelShape) -> Iterator[str]:
    split = parallel.tp * parallel.cp
    what = "parallel.tp" if parallel.cp == 1 else "parallel.cp" if parallel.tp == 1 else "parallel.tp x parallel.cp"
    for count, name in ((shape.num_heads, "attention heads"), (shape.num_kv_heads, "key-value heads")):
        if count % split:
            yield (
                f"{what} = {split} does not divide the model's {count} {name}: each rank needs whole heads; choose a "
                f"divisor of {count}"
            )
    if shape.num_layers < parallel.pp:
        yield (
            f"parallel.pp = {parallel.pp} is above the model's {shape.num_layers} layers: a stage would be empty; "
            f"choose at most {shape.num_layers}"
        )
    if parallel.tp > 1 and shape.intermediate_size % parallel.tp:
        yield (
            f"parallel.tp = {parallel.tp} does not divide the model's intermediate size {shape.intermediate_size}; "
            "choose a divisor"
        )
    if parallel.tp > shape.vocab_size // 2:
        yield f"parallel.tp = {parallel.tp} leaves a rank without vocabulary ({shape.vocab_size} ids); lower it"
    if parallel.ep > 1 and not shape.num_experts:
        yield (
            f"parallel.ep = {parallel.ep}, but this model ({shape.architecture}) has no experts; set parallel.ep = 1 "
            "and use dp_shard or dp_replicate"
        )
    if shape.num_experts and shape.num_experts % parallel.ep:
        yield (
            f"parallel.ep = {parallel.ep} does not divide the model's {shape.num_experts} experts: each rank needs "
            "whole experts; choose a divisor"
        )


def layers_of_stage(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of one pipeline stage: contiguous, as even as can be, the first stages take the remainder."""
    each, remainder = divmod(num_layers, num_stages)
    start = stage * each + min(stage, remainder)
    return range(start, start + each + (stage < remainder))
