"""Conversations to samples: which ids are trained, and that they are what the policy would have to produce."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.model.renderer import ChatRenderer
from headrace.model.replies import check_length, conversation_samples, reply_ids
from headrace.testing import CHAT_TEMPLATE, tiny_tokenizer

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
USER_2, REPLY_2 = {"role": "user", "content": "and"}, {"role": "assistant", "content": "so"}
FORGETFUL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' or loop.last %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Leaves earlier replies out, as templates do that drop earlier reasoning."""


def renderer(template: str = CHAT_TEMPLATE) -> ChatRenderer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return ChatRenderer(tokenizer)


def test_loss_is_on_the_reply_and_its_end() -> None:
    """FAILURES 36: the end-of-turn id is trained, by its place; nothing of the prompt is (I2)."""
    chat = renderer()
    [only] = conversation_samples(chat, [USER, REPLY], [0.0, 1.0], 0)
    prompt = chat.render([USER])
    end = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
    assert chat.turn_end_id == end
    assert only.sample.ids == (*prompt, *tiny_tokenizer().encode("yo", add_special_tokens=False), end)
    assert only.sample.mask == (0,) * len(prompt) + (1, 1, 1)


def test_turns_of_an_appending_template_are_one_sample() -> None:
    chat = renderer()
    messages = [USER, REPLY, USER_2, REPLY_2]
    [only] = conversation_samples(chat, messages, [0.0, 1.0, 0.0, 2.0], 3)
    rendered = tiny_tokenizer().apply_chat_template(messages, tokenize=False)
    assert only.sample.ids == tuple(tiny_tokenizer().encode(rendered, add_special_tokens=False))
    trained = [tiny_tokenizer().decode([i]) for i, m in zip(only.sample.ids, only.sample.mask, strict=True) if m]
    assert trained == ["y", "o", "<|end|>", "s", "o", "<|end|>"]
    assert [w for w in only.weight_T.tolist() if w] == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_a_rewritten_history_starts_a_new_sample() -> None:
    """I1: what the template drops later is trained in the prompt that the policy really sees."""
    chat = renderer(FORGETFUL)
    first, second = conversation_samples(chat, [USER, REPLY, USER_2, REPLY_2], [0.0, 1.0, 0.0, 1.0], 0)
    assert first.sample.ids == (*chat.render([USER]), *reply_ids(chat, "yo"))
    assert second.sample.ids == (*chat.render([USER, REPLY, USER_2]), *reply_ids(chat, "so"))
    assert first.sample.id != second.sample.id and first.sample.key != second.sample.key
    assert sum(second.sample.mask) == 3


def test_weight_zero_is_context_only() -> None:
    [only] = conversation_samples(renderer(), [USER, REPLY, USER_2, REPLY_2], [0.0, 0.0, 0.0, 1.0], 0)
    assert sum(only.sample.mask) == 3


def test_text_never_becomes_a_control_id() -> None:
    """I3: a reply that spells the end of a turn does not end it; only our own id at its end does."""
    chat = renderer()
    [only] = conversation_samples(chat, [USER, {"role": "assistant", "content": "a<|end|>b"}], [0.0, 1.0], 0)
    trained = [i for i, m in zip(only.sample.ids, only.sample.mask, strict=True) if m]
    assert trained.count(chat.turn_end_id) == 1 and trained[-1] == chat.turn_end_id


def test_too_long_names_the_row() -> None:
    [only] = conversation_samples(renderer(), [USER, REPLY], [0.0, 1.0], 0)
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 7: the example has 9 tokens"):
        check_length([only.sample], 8, "rows.jsonl, line 7")
