"""What a log-probability means to headrace, and the probe that an engine must pass before it serves anything.

Declared (``types.Sampling``, docs/engine.md): of the distribution that was sampled from, softmax(logits / temperature),
then top-k, then top-p over what top-k left, renormalised. Engines can be set to return something else under the same
name (of the raw logits, say), which biases every importance ratio and raises nothing. So it is measured, on a few
prompts:

* one id can be drawn (top_k = 1; top_p near 0): its log-probability is 0;
* top-p is measured after top-k: top_k = 2 with top_p = 0.4 leaves one id, though no id of the whole vocabulary may have
  that much mass (of engines that take both at once);
* two ids can be drawn (top_k = 2): their probabilities add up to 1, and the log of their odds halves when the
  temperature doubles;
* the seed decides: same seed, same reply; other seeds, other replies.

That the numbers are the policy's is the canary's business (I6).
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from headrace.engines.errors import EngineError
from headrace.types import Generation, GenerationRequest, Sampling

Probe = Callable[[Sequence[GenerationRequest]], Awaitable[list[Generation]]]

_TOLERANCE = 1e-3
_HOT = 2.0
"""The highest temperature that vLLM takes."""
_NUM_PROMPTS = 8
ONE_ID: Sequence[Mapping[str, Any]] = ({"top_k": 1}, {"top_k": 2, "top_p": 1e-6}, {"top_k": 2, "top_p": 0.4})
"""Samplings that leave one id. No id of a model has half of the mass for certain, so the last tells the order."""
ONE_ID_BY_ONE: Sequence[Mapping[str, Any]] = ({"top_k": 1}, {"top_p": 1e-6})
"""For engines that are not asked for top-k and top-p at once."""


class SemanticsError(EngineError):
    """The engine's log-probabilities are not of the distribution that it samples from."""


async def check_semantics(probe: Probe, vocab_size: int, one_id: Sequence[Mapping[str, Any]] = ONE_ID) -> None:
    """Raises SemanticsError naming what does not hold. ``one_id``: samplings that leave one id."""
    different = range(_NUM_PROMPTS)
    same = [0] * _NUM_PROMPTS

    async def draws(prompts: Sequence[int], seeds: Sequence[int], **sampling: Any) -> list[Generation]:
        """One reply for each prompt and seed."""
        declared = Sampling(**{"max_new_tokens": 1, "temperature": _HOT, **sampling})
        return await probe(
            [
                GenerationRequest(
                    id=f"semantics-{n}",
                    prompt_ids=tuple((prompt * 5 + i) % vocab_size for i in range(1, 9)),
                    sampling=declared,
                    seed=seed,
                    cache_salt="semantics",
                )
                for n, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            ]
        )

    problems = []
    for one in one_id:
        wrong = [
            r.logprobs[0] for r in await draws(different, different, **one) if not abs(r.logprobs[0]) <= _TOLERANCE
        ]
        if wrong:
            problems.append(f"with {one} one id can be drawn, but its log-probability is {wrong[0]:.4f}, not 0")
    pair = {r.ids[0]: math.exp(r.logprobs[0]) for r in await draws(same, different, top_k=2)}
    if len(pair) > 2 or (len(pair) == 2 and abs(sum(pair.values()) - 1) > _TOLERANCE):
        total = sum(pair.values())
        problems.append(f"with top_k = 2, {len(pair)} ids were drawn, of probability {total:.4f} together, not 1")
    warm = await draws(different, different, top_k=2, temperature=_HOT / 2)
    hot = await draws(different, different, top_k=2)
    problems += list(_odds_that_do_not_halve(warm, hot))
    first, again, *others = await draws(same, [1, *range(1, _NUM_PROMPTS)], max_new_tokens=8)
    gaps = [abs(a - b) for a, b in zip(first.logprobs, again.logprobs, strict=True)]
    if first.ids != again.ids or max(gaps) > _TOLERANCE:
        problems.append("the same seed gave two replies")
    if all(other.ids == first.ids for other in others):
        problems.append(f"{_NUM_PROMPTS - 1} seeds gave one reply")
    if problems:
        raise SemanticsError(
            "the engine's log-probabilities are not of the distribution that it samples from, as headrace declares it: "
            + "; ".join(problems)
        )


def _odds_that_do_not_halve(warm: Sequence[Generation], hot: Sequence[Generation]) -> Iterator[str]:
    """Replies of one token each, of two possible, at a temperature and at twice as much."""
    for a, b in zip(warm, hot, strict=True):
        log_odds, allowed = [], _TOLERANCE
        for logprob in (a.logprobs[0], b.logprobs[0]):
            rest = max(-math.expm1(min(0.0, logprob)), 1e-12)  # of the other id
            log_odds.append(abs(logprob - math.log(rest)))
            # A log-probability is good to 1e-6 or so, which is much of the rest where that is small.
            allowed += 1e-5 / rest
        if not abs(log_odds[0] - 2 * log_odds[1]) <= allowed + _TOLERANCE * log_odds[0]:
            yield (
                f"doubling the temperature should halve the log of the odds of two ids, {log_odds[0]:.4f}, and gave "
                f"{log_odds[1]:.4f}"
            )
            return
