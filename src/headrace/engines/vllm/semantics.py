"""What a log-probability means to headrace, and the probe that an engine must pass before it serves anything.

Declared (``types.Sampling``, docs/engine.md): of the distribution that was sampled from, softmax(logits / temperature),
then top-k, then top-p over what top-k left, renormalised. Engines can be set to return something else under the same
name (of the raw logits, say), which biases every importance ratio and raises nothing. So it is measured, on one prompt:

* one id can be drawn (top_k = 1; top_p near 0): its log-probability is 0;
* two ids can be drawn (top_k = 2): their probabilities add up to 1, and the log of their odds halves when the
  temperature doubles;
* top-p is measured after top-k: at a temperature where no id of the whole vocabulary has much mass, top_k = 2 with
  top_p = 0.4 leaves one id;
* the seed decides: same seed, same reply; other seeds, other replies.

That the numbers are the policy's is the canary's business (I6).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace.engines.errors import EngineError
from headrace.types import Generation, GenerationRequest, Sampling

Probe = Callable[[Sequence[GenerationRequest]], Awaitable[list[Generation]]]

_TOLERANCE = 1e-3
_HOT = 16.0
"""A temperature at which two ids of any model have odds near 1, so that both are seen and neither rounds away."""
_NUM_SEEDS = 8


class SemanticsError(EngineError):
    """The engine's log-probabilities are not of the distribution that it samples from."""


async def check_semantics(probe: Probe, vocab_size: int) -> None:
    """Raises SemanticsError naming what does not hold."""
    prompt_ids = tuple(i % vocab_size for i in range(1, 9))

    async def draws(seeds: Sequence[int], **sampling: Any) -> list[Generation]:
        declared = Sampling(**{"max_new_tokens": 1, **sampling})
        return await probe(
            [
                GenerationRequest(
                    id=f"semantics-{n}", prompt_ids=prompt_ids, sampling=declared, seed=seed, cache_salt="semantics"
                )
                for n, seed in enumerate(seeds)
            ]
        )

    problems = []
    for one in ({"top_k": 1}, {"top_k": 2, "top_p": 1e-6}, {"top_k": 2, "top_p": 0.4, "temperature": _HOT}):
        (reply,) = await draws([0], **one)
        if not abs(reply.logprobs[0]) <= _TOLERANCE:
            problems.append(
                f"with {one} one id can be drawn, but its log-probability is {reply.logprobs[0]:.4f}, not 0"
            )
    seeds = range(_NUM_SEEDS)
    odds = []
    for temperature in (_HOT, 2 * _HOT):
        pair = {r.ids[0]: r.logprobs[0] for r in await draws(seeds, top_k=2, temperature=temperature)}
        total = sum(math.exp(logprob) for logprob in pair.values())
        if len(pair) > 2 or (len(pair) == 2 and abs(total - 1) > _TOLERANCE):
            problems.append(
                f"with top_k = 2 at temperature {temperature}, {len(pair)} ids were drawn, of probability {total:.4f} "
                "together, not 1"
            )
        odds.append(max(abs(_log_odds(logprob)) for logprob in pair.values()))
    if not abs(odds[0] - 2 * odds[1]) <= _TOLERANCE * max(1.0, odds[0]):
        problems.append(
            f"doubling the temperature should halve the log of the odds of two ids, {odds[0]:.4f}, and gave "
            f"{odds[1]:.4f}"
        )
    same, again, *others = await draws([1, 1, *range(2, 8)], max_new_tokens=8, temperature=_HOT)
    gaps = [abs(a - b) for a, b in zip(same.logprobs, again.logprobs, strict=True)]
    if same.ids != again.ids or max(gaps) > _TOLERANCE:
        problems.append("the same seed gave two replies")
    if all(other.ids == same.ids for other in others):
        problems.append("seven seeds gave one reply")
    if problems:
        raise SemanticsError(
            "the engine's log-probabilities are not of the distribution that it samples from, as headrace declares it: "
            + "; ".join(problems)
        )


def _log_odds(logprob: float) -> float:
    """log(p / (1 - p))"""
    return logprob - math.log(-math.expm1(logprob)) if logprob < 0 else math.inf
