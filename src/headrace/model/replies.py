"""Written replies to training samples: the very ids that the policy is to produce when an engine prompts it.

A prompt is rendered as the loop renders it, generation prompt included; the reply's text is encoded on its own, and
the id that ends a turn follows. So nothing is ever looked up in a rendered whole: the mask comes from the segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, tensor

from headrace.errors import ConfigError
from headrace.model.renderer import ChatRenderer
from headrace.types import AttemptKey, Message, Sample


@dataclass(frozen=True, slots=True)
class Weighted:
    """A sample and what each of its tokens counts in the loss ([T], 0 where the mask is 0)."""

    sample: Sample
    weight_T: Tensor


def reply_ids(renderer: ChatRenderer, text: str) -> tuple[int, ...]:
    """Ids of a whole reply, its end-of-turn id included."""
    return (*renderer.encode_text(text), renderer.turn_end_id)


def written_sample(
    ids: Sequence[int], mask: Sequence[int], *, key: AttemptKey, name: str, prefix_length: int, weight: float = 1.0
) -> Sample:
    """A sample that no engine sampled: it carries neither log-probabilities nor versions."""
    return Sample(
        id=f"{key}/{name}",
        key=key,
        ids=tuple(ids),
        mask=tuple(mask),
        stream="supervised",
        prefix_length=prefix_length,
        prefix_key=f"row-{key.group}",
        weight=weight,
        behaviour_logprobs=(0.0,) * len(ids),
        versions=(None,) * len(ids),
    )


def conversation_samples(
    renderer: ChatRenderer, messages: Sequence[Message], weights: Sequence[float], row: int
) -> list[Weighted]:
    """Samples that train the assistant's messages with a weight above 0.

    One sample as long as the template only appends. Where it rewrites what stood before (drops earlier reasoning, for
    example), a message starts a sample of its own, since that is the prompt that the policy will see.
    """
    found: list[Weighted] = []
    ids: list[int] = []
    weight: list[float] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not weights[index]:
            continue
        prompt = renderer.render(messages[:index])
        if not ids or list(prompt[: len(ids)]) != ids:
            if ids:
                found.append(_weighted(ids, weight, row, len(found)))
            ids, weight = [], []
        reply = reply_ids(renderer, message["content"])
        weight += [0.0] * (len(prompt) - len(ids)) + [weights[index]] * len(reply)
        ids = [*prompt, *reply]
    found.append(_weighted(ids, weight, row, len(found)))
    return found


def _weighted(ids: Sequence[int], weight: Sequence[float], row: int, number: int) -> Weighted:
    mask = [int(w > 0) for w in weight]
    sample = written_sample(ids, mask, key=AttemptKey(row, number), name="0", prefix_length=0)
    return Weighted(sample, tensor(list(weight)))


def check_length(samples: Sequence[Sample], max_context: int, where: str) -> None:
    """Raises ConfigError naming the row where an example does not fit: headrace never cuts one."""
    longest = max(len(sample.ids) for sample in samples)
    if longest > max_context:
        raise ConfigError(
            f"{where}: the example has {longest} tokens, more than the model's context of {max_context}; shorten or "
            "remove it (headrace never cuts one)"
        )
