"""Which text of a row and of a task is compared, and in what form.

In: a training row or a `HarborTask`. Out: texts, and for each its words and the two keys by which near copies are
recognised. Case, punctuation and white space are forgotten only here, and only here numbers become `#`.

Of a row count: its messages, the conversation up to its last question, its instruction and history, its inputs, prompt
and answer columns; of a row in no known shape every text column. Answers shorter than 40 characters do not count: that
two tasks have the same answer is no leak. Of a task count: the instruction with the history before it, and what is
expected where it is a text of at least 12 words. Images count by their address. A task's system
prompt, rubric, tests and the rest of its `metadata` do not count.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from evsys_sdk.data.columns import ANSWER_COLUMNS, PROMPT_COLUMNS
from evsys_sdk.data_types import HarborTask, InProcessVerifier, block_to_image_src
from evsys_sdk.protocols import Row

MIN_ANSWER_CHARS = 40
MIN_ANSWER_WORDS = 12
MIN_LAST_TURN_WORDS = 8
"""A task's last turn counts without the turns before it when it is at least this long; `Go on.` is nobody's copy."""
_SHAPED = frozenset(("messages", "instruction", "inputs"))
_ANSWERS = frozenset((*ANSWER_COLUMNS, "target_assistant", "expected", "label"))
_COLUMNS = _ANSWERS.union(PROMPT_COLUMNS)
_ASIDE = frozenset(("id", "task_id", "metadata", "verifier", "split", "source"))

_SIGNS = "-+*/^%<>=×÷"
_OPERATOR = rf"(?<=[\d\s])[{_SIGNS}](?=\s*\d)"  # before a number a sign is no punctuation
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # written without spaces: each is a word
_ASCII_WORDS = re.compile(rf"[a-z0-9]+|{_OPERATOR}")
_WORDS = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+|{_OPERATOR}")
# Bytes are translated and searched many times faster than text, and most text is ASCII.
_FOLDED = bytes(ord(chr(code).lower()) if chr(code).isalnum() else 32 for code in range(128)) + bytes(128)
_ASCII_SIGNS = _SIGNS[:-2].encode()
# Patterns that begin with a digit or a sign are found quickly where there is none, which is the usual case.
_SIGNED = re.compile(rf"[{_SIGNS}]\s*\d")
_APART = re.compile(r"\d \d")
_LOOSE_SPACES = re.compile(r"(?<!\d) | (?!\d)")
_NUMBERS = re.compile(rf"\d(?:[\d {_SIGNS[1:]}-]*\d)?")  # in a key: numbers with nothing but signs between them
_SIGNED_NUMBER = re.compile(rf"[{_SIGNS}]+#")


def words_of(text: str) -> list[str]:
    """The words, folded: no case, no punctuation, no white space."""
    if text.isascii():
        data = text.encode()
        if len(data.translate(None, _ASCII_SIGNS)) == len(data) or not _SIGNED.search(text):
            return data.translate(_FOLDED).decode().split()
        return _ASCII_WORDS.findall(text.lower())
    return _WORDS.findall(unicodedata.normalize("NFKC", text).casefold())


def key_of(words: list[str]) -> str:
    """Equal for texts that differ in case, punctuation and white space only. `1 12` and `11 2` stay apart."""
    text = " ".join(words)
    return _LOOSE_SPACES.sub("", text) if _APART.search(text) else text.replace(" ", "")


def without_numbers(key: str) -> str:
    """Equal for texts that differ in their numbers besides."""
    masked = _NUMBERS.sub("#", key)
    return masked if masked == key else _SIGNED_NUMBER.sub("#", masked)


def content_with_images(content: Any) -> str:
    """The text of a message's content, with the address (or, of an image by value, the hash) of each image."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "\n".join(part for block in content if isinstance(block, dict) and (part := _block_text(block)))


def _block_text(block: dict[str, Any]) -> str:
    src = block_to_image_src(block)
    if src is None:
        text = block.get("text")
        return text if isinstance(text, str) else ""
    return src if len(src) < 500 else hashlib.sha256(src.encode(errors="replace")).hexdigest()


def task_texts(task: HarborTask) -> Iterator[tuple[str, str]]:
    """The texts by which a task is recognised, each with the part it is: `instruction` or `answer`."""
    last = content_with_images(task.instruction)
    before = _history(task.metadata)
    if before:
        yield "instruction", "\n".join([*before, last])
    if not before or len(words_of(last)) >= MIN_LAST_TURN_WORDS:
        yield "instruction", last
    expected = task.verifier.expected if isinstance(task.verifier, InProcessVerifier) else None
    if isinstance(expected, str) and len(words_of(expected)) >= MIN_ANSWER_WORDS:
        yield "answer", expected


def _history(metadata: Any) -> list[str]:
    history = metadata.get("history") if isinstance(metadata, dict) else None
    return [text for role, text in _spoken(history) if role != "system"]


def row_texts(row: Row) -> list[str]:
    """The texts of a row that training may teach, each once."""
    texts: dict[str, None] = {}
    shaped = not _SHAPED.isdisjoint(row)
    for name, value in row.items():
        if name not in _SHAPED and (name in _ASIDE or (shaped and name not in _COLUMNS)):
            continue
        if not isinstance(value, str):
            texts.update(dict.fromkeys(_texts_in(value)))
        elif name not in _ANSWERS or len(value) >= MIN_ANSWER_CHARS:
            texts[value] = None
    if "verifier" in row:
        texts.update(dict.fromkeys(_task_row_texts(row)))
    return list(texts)


def _texts_in(value: Any) -> list[str]:
    """Of messages, content blocks, or a mapping of texts."""
    if isinstance(value, dict):
        return [text for text in value.values() if isinstance(text, str)]
    spoken = _spoken(value)
    texts = [text for role, text in spoken if role != "assistant" or len(text) >= MIN_ANSWER_CHARS]
    if len(spoken) > 2:
        texts += _conversation([(role, text) for role, text in spoken if role != "system"])
    if not spoken and isinstance(value, list):
        texts.append(content_with_images(value))
    return texts


def _conversation(spoken: list[tuple[str, str]]) -> Iterator[str]:
    """All that was said up to the last question, where there is more than that question."""
    last = max((index for index, (role, _) in enumerate(spoken) if role != "assistant"), default=0)
    if last:
        yield "\n".join(text for _, text in spoken[: last + 1])


def _spoken(messages: Any) -> list[tuple[str, str]]:
    """Role and text of every message that says something."""
    spoken = []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(role := message.get("role"), str):
            content = message.get("content")
            text = content if isinstance(content, str) else content_with_images(content)
            if text:
                spoken.append((role, text))
    return spoken


def _task_row_texts(row: Row) -> Iterator[str]:
    """A row that is a task is also known by its turns before the last and by a long answer."""
    plan, before = row["verifier"], _history(row.get("metadata"))
    if before:
        yield "\n".join([*before, content_with_images(row.get("instruction"))])
    expected = plan.get("expected") if isinstance(plan, dict) else None
    if isinstance(expected, str) and len(expected) >= MIN_ANSWER_CHARS:
        yield expected
