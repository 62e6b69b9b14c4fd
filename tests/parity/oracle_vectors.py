"""The oracle's vectors: ``EXPECTED[name]`` are literals of up to 17 digits, inputs and definitions are in oracle_cases.

For objectives: the loss under each aggregation and ``slope``, the derivative of each token's own loss by its current
log-probability (``gradient = slope * oracle_core.shares``). For sequence objectives: ``mean``, ``value``, ``slope``.
For corrections: the weight of each token, and under ``<name>/ppo`` PPO 0.2/0.28 with that weight. Presets: advantages,
loss and gradient. The rest: what the function returns.
"""

from typing import Any

import oracle_vectors_corrections
import oracle_vectors_objectives
import oracle_vectors_rest
import oracle_vectors_token_objectives

EXPECTED: dict[str, Any] = {
    **oracle_vectors_objectives.EXPECTED,
    **oracle_vectors_token_objectives.EXPECTED,
    **oracle_vectors_corrections.EXPECTED,
    **oracle_vectors_rest.EXPECTED,
}
