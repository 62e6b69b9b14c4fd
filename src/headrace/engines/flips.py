"""How often batch shape flips a token (I18): the same requests alone and together, compared up to the first difference.

The random stream of a request does not depend on its neighbours, but the logits do in their last bits: another number
of rows makes another order of sums inside a matrix product. A token flips where the uniform number, or an argmax, lies
within that rounding of a boundary. The rate is measured and reported, not hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.protocols import Engine
from headrace.types import Generation, GenerationRequest


@dataclass(frozen=True, slots=True)
class Flips:
    """``num_flips`` replies differ; ``num_tokens`` tokens were compared, each reply up to its first difference."""

    num_flips: int
    num_tokens: int
    max_logprob_gap: float
    """Largest difference of log-probabilities over the tokens that are equal."""

    @property
    def rate(self) -> float:
        """Flips for each token that had the same tokens before it."""
        return self.num_flips / self.num_tokens if self.num_tokens else 0.0


async def measure_flips(engine: Engine, requests: Sequence[GenerationRequest]) -> Flips:
    """Generate ``requests`` one by one, then all at once, with the same seeds and cold prefix caches."""
    alone = [
        await engine.generate(replace(r, id=f"{r.id}/alone", cache_salt=f"alone-{i}")) for i, r in enumerate(requests)
    ]
    together = await asyncio.gather(
        *(engine.generate(replace(r, id=f"{r.id}/together", cache_salt="together")) for r in requests)
    )
    return count_flips(alone, together)


def count_flips(a: Sequence[Generation], b: Sequence[Generation]) -> Flips:
    """Compare replies pairwise; both sides must be replies to the same requests."""
    num_flips = num_tokens = 0
    gap = 0.0
    for one, other in zip(a, b, strict=True):
        pairs = zip(one.ids, other.ids, one.logprobs, other.logprobs, strict=False)
        for id_a, id_b, logprob_a, logprob_b in pairs:
            num_tokens += 1
            if id_a != id_b:
                num_flips += 1
                break
            gap = max(gap, abs(logprob_a - logprob_b))
    return Flips(num_flips, num_tokens, gap)
