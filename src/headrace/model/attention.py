"""One attention entry for trainer and engine: the layout that travels with a forward call does the attending.

Trainer and embedded engine share one model object, perhaps on two threads at once, so nothing about a pass may live
in the model. Each pass hands its own layout through the model's keyword arguments::

    model(input_ids=ids, position_ids=positions, layout=PackedLayout(...), use_cache=False)

and every attention layer calls ``layout.attend(module, query, key, value, scaling)``. What a pass wants of the model's
routers goes the same way (``routing=...``).

Legend: B batch, H query heads, K key-value heads, T tokens of this pass, D head size.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION_NAME = "headrace"


class AttentionLayout(Protocol):
    """Who attends to whom in one pass."""

    def attend(
        self, module: torch.nn.Module, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float
    ) -> Tensor:
        """Returns [B, T, H, D]. ``module.layer_idx`` tells which layer asks."""
        ...


Choice = tuple[Tensor, Tensor, Tensor]
"""What a router answers: logits [T, E] over its experts, weights [T, K] and ids [T, K] of the K experts of a token."""


class Routing(ABC):
    """What one pass wants of the routers of a mixture-of-experts model; see ``routing.py``."""

    @abstractmethod
    def route(self, number: int, router: Any, choice: Choice) -> Choice:
        """The choice to go on with, in the place of router ``number``'s own."""


class _Announced(threading.local):
    """Left by a layer's attention for the router behind it."""

    routing: Routing | None = None


announced = _Announced()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    routing: Routing | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if layout is None:
        raise ValueError(
            f"a model with attention '{ATTENTION_NAME}' was called without layout=...; "
            "every pass must say which tokens see each other"
        )
    announced.routing = routing
    return layout.attend(module, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Layouts build their own masks, so transformers must not build one."""
    return None


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
