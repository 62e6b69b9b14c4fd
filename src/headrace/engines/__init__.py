"""Policy engines: ids in, ids out, with log-probabilities and a policy version for each token.

``TransformersEngine`` (``headrace.engines.embedded``) is the embedded engine: it runs in the trainer's process, on a
thread of its own, over any transformers causal language model. Imports torch; torch-free rooms must not import it.
"""

from headrace.engines.embedded import TransformersEngine, WeightCarrier
from headrace.engines.errors import EngineError, RequestError

__all__ = ["EngineError", "RequestError", "TransformersEngine", "WeightCarrier"]
