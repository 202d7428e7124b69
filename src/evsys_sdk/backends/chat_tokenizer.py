"""A Hugging Face tokenizer as the training surface wants it.

In: a tokenizer of `transformers`. Out: plain encode and decode, and the model's own chat template. Marks such as
`<|im_end|>` come from the template alone: in what a person or a model wrote they are text like any other. Messages
without such marks get exactly the tokens that the template itself gives.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from evsys_engine.types import JsonObject
from evsys_sdk.data_types import content_text, text_block
from evsys_sdk.errors import BackendError, DataError, error_boundary
from evsys_sdk.training_api import Messages

PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters without a meaning, which stand for marks while the template is rendered."""


class ChatTokenizer:
    """Plain encode and decode, the model's own chat template, or another one."""

    def __init__(self, tokenizer: Any, template: str | None = None):
        self.inner, self.template = tokenizer, template
        self.eos_token_id: int = tokenizer.eos_token_id

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def with_template(self, template: str) -> ChatTokenizer:
        """This tokenizer's tokens under another chat template, in Jinja."""
        return ChatTokenizer(self.inner, template)

    @cached_property
    def text_start(self) -> list[int]:
        """The marks that the tokenizer puts before any text (Llama's beginning of text); mostly none."""
        marked = list(self.inner.encode("a", add_special_tokens=True))
        plain = list(self.inner.encode("a", add_special_tokens=False))
        at = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
        return marked[:at]

    def encode(self, text: str) -> list[int]:
        """The tokens of `text` alone; a mark in it is text."""
        if self._marks is None or not self._marks.search(text):
            return list(self.inner.encode(text, add_special_tokens=False))
        return list(self._plain.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False))

    def apply_chat_template(self, messages: Messages, *, add_generation_prompt: bool = False) -> list[int]:
        """The chat as tokens. Tools that the model may call stand on a message as `tools`."""
        template = self.template or getattr(self.inner, "chat_template", None)
        if not template:
            raise BackendError("this model's tokenizer has no chat template; use a chat model")
        if not isinstance(template, str):  # several, by name
            template = "\n".join(template.values())
        tools = [tool for message in messages for tool in message.get("tools") or []]
        chat = [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
        # What the template would leave out without a word is refused.
        for index, message in enumerate(chat):
            if message.get("tool_calls") and "tool_calls" not in template:
                raise DataError(
                    f"messages[{index}] calls tools, and this model's chat template has no place for that; "
                    "write the calls into its content, or use a model that was made for tools"
                )
        if tools and "tools" not in template:
            raise DataError("this model's chat template has no place for tools; describe them in a system message")
        if self._marks is None or not _any_text([chat, tools], self._marks.search):
            return [int(token) for token in self._render(chat, tools, add_generation_prompt, tokenize=True)]
        return self._with_marks_as_text(chat, tools, add_generation_prompt)

    def _render(self, chat: Messages, tools: list[JsonObject], speak: bool, *, tokenize: bool) -> Any:
        roles = ", ".join(str(message.get("role")) for message in chat)
        if self._wants_blocks:
            chat = [{**message, "content": [text_block(message["content"])]} for message in chat]
        with error_boundary(DataError, f"the chat template (roles here: {roles})"):
            return self.inner.apply_chat_template(
                chat,
                tools=tools or None,
                chat_template=self.template,
                add_generation_prompt=speak,
                tokenize=tokenize,
                return_dict=False,
            )

    def _with_marks_as_text(self, chat: Messages, tools: list[JsonObject], speak: bool) -> list[int]:
        """What the template makes of the chat while stand-ins hold the place of the marks that people wrote: every mark
        in that is the template's own, and between them lies text."""
        assert self._marks is not None
        stand_in, original = self._stand_ins([*chat, *tools])
        chat, tools = [_map_text(message, stand_in) for message in chat], [_map_text(tool, stand_in) for tool in tools]
        rendered = self._render(chat, tools, speak, tokenize=False)
        tokens, place = list[int](), 0
        for mark in self._marks.finditer(rendered):
            tokens += [*self.encode(original(rendered[place : mark.start()])), self._ids[mark[0]]]
            place = mark.end()
        return [*tokens, *self.encode(original(rendered[place:]))]

    def _stand_ins(self, parts: list[JsonObject]) -> tuple[Callable[[str], str], Callable[[str], str]]:
        """Marks to characters that occur nowhere in `parts`, and back."""
        assert self._marks is not None
        used = set(json.dumps(parts, ensure_ascii=False, default=str))
        free = (chr(code) for code in PRIVATE if chr(code) not in used)
        there = dict(zip(self._ids, free, strict=False))
        back = {ord(character): mark for mark, character in there.items()}
        marks = self._marks
        return lambda text: marks.sub(lambda found: there[found[0]], text), lambda text: text.translate(back)

    @cached_property
    def _wants_blocks(self) -> bool:
        """Whether the template shows text only as a block, as some of models that also see images do."""
        text = "a probe"
        return not self._shows(text, text) and self._shows(text, [text_block(text)])

    def _shows(self, text: str, content: object) -> bool:
        try:
            chat = [{"role": "user", "content": content}]
            return text in self.inner.apply_chat_template(chat, chat_template=self.template, tokenize=False)
        except Exception:  # a template may raise whatever it likes; the real messages will tell
            return False

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The marks: tokens that are found in a text as they stand and mean something to the model."""
        added = self.inner.added_tokens_decoder.items()
        marks = {str(token.content): int(number) for number, token in added if token.special}
        named = zip(self.inner.all_special_tokens, self.inner.all_special_ids, strict=True)
        return marks | {str(text): int(number) for text, number in named}

    @cached_property
    def _marks(self) -> re.Pattern[str] | None:
        # Alternatives are tried in order: a mark that begins like a shorter one must come before it.
        longest_first = sorted(filter(None, self._ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @cached_property
    def _plain(self) -> Any:
        # A copy: the setting is the tokenizer's own, and other threads use the original.
        return copy.deepcopy(self.inner)


def _plain_message(message: JsonObject, place: str) -> JsonObject:
    """The message as templates expect it: text as content, the arguments of calls as mappings."""
    content = message.get("content")
    if isinstance(content, list):
        shown = [block for block in content if block.get("type", "text") != "text"]
        if shown:
            raise DataError(f"{place}: a block of type {shown[0]['type']!r} cannot be shown to a model that reads text")
    plain = {key: value for key, value in message.items() if key != "tools"} | {"content": content_text(content)}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _plain_call(call: JsonObject) -> JsonObject:
    """Arguments come as JSON text from most servers; templates write them as JSON themselves."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
        function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _map_text(part: Any, change: Callable[[str], str]) -> Any:
    """`part` with every text in it changed."""
    if isinstance(part, str):
        return change(part)
    if isinstance(part, dict):
        return {key: _map_text(value, change) for key, value in part.items()}
    return [_map_text(value, change) for value in part] if isinstance(part, list) else part


def _any_text(part: object, test: Callable[[str], object]) -> bool:
    if isinstance(part, str):
        return bool(test(part))
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return any(_any_text(value, test) for value in values)
