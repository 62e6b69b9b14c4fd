"""Messages to prompt ids and reply ids to text, by the model's own chat template.

I3: text never becomes a control id. Control ids are all added tokens of the tokenizer (end of turn, role tags, tool
tags). Where a message contains the literal text of one, the template is rendered around placeholders, its own pieces
are encoded as usual, and the text is encoded in parts that contain no whole literal. Otherwise the tokenizer's own
joint encoding is used, so that ordinary prompts are exactly what the model knows. In both cases the control ids of
the result are compared with those of the template's own pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from headrace.errors import HeadraceError
from headrace.model.load import load_tokenizer, resolve_path
from headrace.types import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Roles only: unlike many models' own templates it adds no system prompt."""


class RenderError(HeadraceError):
    """A chat template that cannot be used, or a prompt whose control ids are not the template's."""


class ChatRenderer:
    """The Renderer of one tokenizer and template.

    Example::

        renderer = ChatRenderer(tokenizer, "chatml")
        ids = renderer.render([{"role": "user", "content": "3 * 4 ="}])
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, eos_ids: Sequence[int] = ()
    ) -> None:
        """``chat_template``: None for the tokenizer's own, "chatml", or the path of a Jinja file. ``eos_ids``: the
        end ids of the model's generation config. Raises RenderError where there is no usable template."""
        self._tokenizer = tokenizer
        self._template = _read_template(tokenizer, chat_template)
        added = tokenizer.added_tokens_decoder
        self._special_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._literals = {token.content for token in added.values() if token.content.strip()}
        self._control_ids = {i for i, token in added.items() if token.content.strip()} | self._special_ids
        longest_first = sorted(self._literals, key=lambda text: (-len(text), text))
        self._control = re.compile("(?=(" + "|".join(map(re.escape, longest_first)) + "))") if longest_first else None
        self._stop_ids = self._find_stop_ids(eos_ids)

    @classmethod
    def from_path(cls, path: str | Path, chat_template: str | None = None) -> ChatRenderer:
        """The renderer of a local model folder or hub id, end ids of its generation config included."""
        return cls(load_tokenizer(path), chat_template, generation_eos_ids(path))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends a turn: of the generation config, of the tokenizer, and of the template (F30)."""
        return self._stop_ids

    @property
    def turn_end_id(self) -> int:
        """The id that the template writes behind an assistant's message; the tokenizer's end of text where it writes
        none."""
        return self._turn_end_id

    @property
    def vocab_size(self) -> int:
        """Ids from here on are padding rows of the model's embedding."""
        return len(self._tokenizer)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text may ever become (I3)."""
        return frozenset(self._control_ids)

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Prompt ids, generation prompt included. Raises RenderError where the template refuses the messages."""
        holders, texts = _with_placeholders(messages)
        pieces = self._pieces(self._apply(holders, add_generation_prompt=True), texts)
        parts = [self._encode_text(text) if is_text else self._encode(text) for is_text, text in pieces]
        ids = [i for part in parts for i in part]
        expected = self._controls(ids)
        if not any(self._has_control(text) for text in texts.values()):
            ids = self._encode(self._apply(messages, add_generation_prompt=True))
        found = self._controls(ids)
        if found != expected:
            raise RenderError(
                f"rendering a prompt gave control ids {found} where the template writes {expected}: a text became a "
                "control id, or the template changes with the text (I3). Use a simpler template (model.chat_template)"
            )
        bos = self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise RenderError(f"the chat template writes {self._tokenizer.bos_token!r} twice at the start of a prompt")
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Reply text without special tokens; tags that a parser reads (tool calls, reasoning) stay."""
        text = self._tokenizer.decode(
            [i for i in ids if i not in self._special_ids], clean_up_tokenization_spaces=False
        )
        return str(text)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a text that stands alone, without any control id (I3) and without BOS."""
        return tuple(self._encode_text(text))

    def _apply(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(m) for m in messages],
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise RenderError(f"the chat template refused the messages {list(messages)}: {error}") from error

    def _pieces(self, rendered: str, texts: Mapping[str, str]) -> list[tuple[bool, str]]:
        """(is text of a message, string) in order, empty strings left out."""
        if not texts:
            return [(False, rendered)]
        parts = re.split("(" + "|".join(map(re.escape, texts)) + ")", rendered)
        return [(part in texts, texts.get(part, part)) for part in parts if texts.get(part, part)]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_text(self, text: str) -> list[int]:
        """Cut inside every control literal, so that no part holds a whole one, and encode the parts."""
        cuts = [] if self._control is None else [match.start() + 1 for match in self._control.finditer(text)]
        ids: list[int] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            ids += self._tokenizer.encode(text[start:end], add_special_tokens=False, split_special_tokens=True)
        if self._controls(ids):
            raise RenderError(f"a text became the control ids {self._controls(ids)} (I3): {text[:200]!r}")
        return ids

    def _has_control(self, text: str) -> bool:
        return self._control is not None and self._control.search(text) is not None

    def _controls(self, ids: Sequence[int]) -> list[int]:
        # an unknown character says nothing about control
        unknown = self._tokenizer.unk_token_id
        return [i for i in ids if i in self._control_ids and i != unknown]

    def _find_stop_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        stop = {int(i) for i in eos_ids}
        if self._tokenizer.eos_token_id is not None:
            stop.add(int(self._tokenizer.eos_token_id))
        turn: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        after = self._apply(turn, add_generation_prompt=False).rpartition(_MARK)[2]
        written = self._controls(self._encode(after))[:1]
        stop.update(written)
        if not stop:
            raise RenderError("neither tokenizer, generation config nor chat template name an id that ends a turn")
        eos = self._tokenizer.eos_token_id
        self._turn_end_id = written[0] if written else min(stop) if eos is None else int(eos)
        return tuple(sorted(stop))


_MARK = "headrace0text"


def _with_placeholders(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """Messages with every content string (and string inside tool calls and the like) replaced, and what stood there."""
    everything = repr(list(messages))
    salt = 0
    while f"{_MARK}{salt}x" in everything:
        salt += 1
    texts: dict[str, str] = {}

    def replace(value: Any) -> Any:
        if isinstance(value, str):
            placeholder = f"{_MARK}{salt}x{len(texts)}y"
            texts[placeholder] = value
            return placeholder
        if isinstance(value, Mapping):
            return {k: v if k in ("role", "type", "id") else replace(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [replace(v) for v in value]
        return value

    return [replace(m) for m in messages], texts


def _read_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    if chat_template is None:
        if not isinstance(tokenizer.chat_template, str):
            raise RenderError("the tokenizer has no chat template; set model.chat_template to 'chatml' or a Jinja file")
        return tokenizer.chat_template
    if chat_template == "chatml":
        missing = [t for t in ("<|im_start|>", "<|im_end|>") if t not in tokenizer.get_added_vocab()]
        if missing:
            raise RenderError(
                f"model.chat_template = 'chatml', but the tokenizer has no token {' and no '.join(missing)}"
            )
        return CHATML
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise RenderError(f"model.chat_template: there is no file {path}; give 'chatml', a Jinja file, or leave it out")
    return path.read_text(encoding="utf-8")


def generation_eos_ids(path: str | Path) -> tuple[int, ...]:
    """End ids in the generation config of a model folder or hub id; empty where it has none."""
    try:
        config = GenerationConfig.from_pretrained(resolve_path(path))
    except OSError:  # a model without generation config is a model without further end ids
        return ()
    eos = config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
