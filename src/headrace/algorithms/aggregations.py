"""From a loss per token to one number: sum(weight * loss) / denominator, with one denominator for the minibatch.

The denominators are counts of the whole minibatch before any rejection (I17), so that the sum over any split into
micro-batches is the same (FAILURES.md 53) and a rejected token does not raise the weight of the others.
Legend: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from headrace.algorithms.fields import Totals


class Aggregation(NamedTuple):
    """``token_weight``: f(trained tokens of the token's episode [N]) -> weight [N]; None: 1 for every token."""

    denominator: Callable[[Totals], float]
    token_weight: Callable[[Tensor], Tensor] | None = None


AGGREGATIONS: dict[str, Aggregation] = {
    # DAPO, arXiv 2503.14476, section 3.3: every token of the minibatch weighs the same.
    "token_mean": Aggregation(lambda totals: totals.num_tokens),
    # GRPO, arXiv 2402.03300, equation 3: every episode weighs the same, whatever its length.
    "seq_mean_token_mean": Aggregation(lambda totals: totals.num_episodes, lambda lengths_N: 1.0 / lengths_N),
    # The policy gradient as derived: an episode's log-probability is the sum over its tokens.
    "seq_mean_token_sum": Aggregation(lambda totals: totals.num_episodes),
    # Dr. GRPO, arXiv 2503.20783, section 3.2: divided by a constant, never by a length of the batch.
    "seq_mean_token_sum_norm": Aggregation(lambda totals: totals.num_episodes * totals.max_length),
    "token_sum": Aggregation(lambda totals: 1.0),
}
