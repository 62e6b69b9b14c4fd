"""Policy engines: ids in, ids out, with log-probabilities and a policy version for each token.

``TransformersEngine`` (``headrace.engines.embedded``) is the embedded engine: it runs in the trainer's process, on a
thread of its own, over any transformers causal language model. It imports torch, and is loaded when it is asked for:
whoever only calls an engine in another process does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.engines.errors import EngineError, RequestError

if TYPE_CHECKING:
    from headrace.engines.embedded import TransformersEngine, WeightCarrier

__all__ = ["EngineError", "RequestError", "TransformersEngine", "WeightCarrier"]


def __getattr__(name: str) -> Any:
    if name in ("TransformersEngine", "WeightCarrier"):
        from headrace.engines import embedded

        return getattr(embedded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
