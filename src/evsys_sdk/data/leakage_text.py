"""Which text of a row and of a task is compared.

In: a training row or a `HarborTask`. Out: texts; the forms in which they are compared are `leakage_words`'s.

Of a row count: its messages, the conversation up to its last question, its instruction and history, its inputs, prompt
and answer columns, what its `metadata` and the descriptions of its `tools` say; of a row in no known shape every text
column. Answers shorter than 40 characters do not count: that two tasks have the same answer is no leak. HTML entities
and base64 are decoded (`leakage_encodings`). Of a task count: the instruction with the history before it, and what is
expected where it is a text of at least 12 words. Images count by their address. A task's system prompt, rubric, tests
and the rest of its `metadata` do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from evsys_sdk.data.columns import ANSWER_COLUMNS, PROMPT_COLUMNS, find_prompt
from evsys_sdk.data.leakage_encodings import decoded_texts, may_be_coded
from evsys_sdk.data.leakage_words import words_of
from evsys_sdk.data_types import HarborTask, InProcessVerifier, block_to_image_src
from evsys_sdk.protocols import Row

MIN_ANSWER_CHARS = 40
MIN_ANSWER_WORDS = 12
MIN_ASIDE_CHARS = 20
"""A text in `metadata` or in a tool's description counts from this length on; categories and names are shorter."""
MIN_LAST_TURN_WORDS = 8
"""A task's last turn counts without the turns before it when it is at least this long; `Go on.` is nobody's copy."""
_SHAPED = frozenset(("messages", "instruction", "inputs"))
_SYSTEM = ("system", "developer")
_ANSWERS = frozenset((*ANSWER_COLUMNS, "target_assistant", "expected", "label"))
_COLUMNS = _ANSWERS.union(PROMPT_COLUMNS)
_NO_DIGITS = str.maketrans("0123456789", "ghijklmnop")  # `1.png` and `2.png` do not differ in a number
_ASIDES = ("metadata", "tools", "functions")
_WITH_ASIDES = frozenset((*_ASIDES, "messages"))
_ASIDE = frozenset(("id", "task_id", "metadata", "verifier", "split", "source"))


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
    digest = hashlib.sha256(src.encode(errors="replace")).hexdigest()
    return f"image{digest.translate(_NO_DIGITS)}"


def task_texts(task: HarborTask) -> Iterator[tuple[str, str]]:
    """The texts by which a task is recognised, each with the part it is: `instruction` or `answer`."""
    last = next(decoded_texts(content_with_images(task.instruction)))
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
    return [text for role, text in _spoken(history) if role not in _SYSTEM]


def row_texts(row: Row) -> dict[str, bool]:
    """The texts of a row that training may teach, each once, and whether the system says it."""
    plain = _plain_texts(row)
    if not any(map(may_be_coded, plain)):
        return plain
    texts: dict[str, bool] = {}
    for text, from_system in plain.items():
        for said in decoded_texts(text):
            texts[said] = from_system and texts.get(said, True)
    return texts


def _plain_texts(row: Row) -> dict[str, bool]:
    """The texts as they stand in the row."""
    texts: dict[str, bool] = {}
    shaped = not _SHAPED.isdisjoint(row)
    for name, value in row.items():
        if name not in _SHAPED and (name in _ASIDE or (shaped and name not in _COLUMNS)):
            continue
        if not isinstance(value, str):
            for text, from_system in _texts_in(value):
                texts[text] = from_system and texts.get(text, True)
        elif name not in _ANSWERS or len(value) >= MIN_ANSWER_CHARS:
            texts[value] = name == "system"
    if row.get("input") and isinstance(row.get("instruction"), str):
        texts[str(find_prompt(row))] = False
    if "verifier" in row:
        texts.update(dict.fromkeys(_task_row_texts(row), False))
    if not _WITH_ASIDES.isdisjoint(row):
        for text in _aside_texts(row):
            texts.setdefault(text, True)  # many rows share their tools, as they share a system prompt
    return texts


def _aside_texts(row: Row) -> Iterator[str]:
    """What `metadata` says, and the tools that the row or a message offers."""
    asides = [row.get(name) for name in _ASIDES]
    messages = row.get("messages")
    if isinstance(messages, list):
        asides += [message["tools"] for message in messages if isinstance(message, dict) and "tools" in message]
    for aside in asides:
        if aside:
            yield from (text for text in _nested(aside) if len(text) >= MIN_ASIDE_CHARS)


def _texts_in(value: Any) -> Iterator[tuple[str, bool]]:
    """Of messages, content blocks, or whatever else holds texts; of each whether the system says it."""
    spoken = _spoken(value)
    for role, text in spoken:
        if role != "assistant" or len(text) >= MIN_ANSWER_CHARS:
            yield text, role in _SYSTEM
    if len(spoken) > 2:
        yield from ((text, False) for text in _conversation([one for one in spoken if one[0] not in _SYSTEM]))
    if not spoken:
        blocks = content_with_images(value) if isinstance(value, list) else ""
        yield from ((text, False) for text in ([blocks] if blocks else _nested(value)))


def _nested(value: Any) -> Iterator[str]:
    """Every text in lists and mappings, however deep."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict | list | tuple):
            waiting += reversed([*(one.values() if isinstance(one, dict) else one)])


def _conversation(spoken: list[tuple[str, str]]) -> Iterator[str]:
    """All that was said up to the last question, where there is more than that question."""
    last = max((index for index, (role, _) in enumerate(spoken) if role != "assistant"), default=0)
    if last:
        yield "\n".join(text for _, text in spoken[: last + 1])


def _spoken(messages: Any) -> list[tuple[str, str]]:
    """Role and text of every message that says something, also of what it hands to tools."""
    spoken = []
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(role := message.get("role"), str):
            content = message.get("content")
            text = content if isinstance(content, str) else content_with_images(content)
            if text:
                spoken.append((role, text))
            if message.get("tool_calls"):
                spoken += ((role, arguments) for arguments in _arguments(message["tool_calls"]))
    return spoken


def _arguments(calls: Any) -> Iterator[str]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        values = arguments.values() if isinstance(arguments, dict) else [arguments]
        yield from (value for value in values if isinstance(value, str) and value)


def _task_row_texts(row: Row) -> Iterator[str]:
    """A row that is a task is also known by its turns before the last and by a long answer."""
    plan, before = row["verifier"], _history(row.get("metadata"))
    if before:
        yield "\n".join([*before, content_with_images(row.get("instruction"))])
    expected = plan.get("expected") if isinstance(plan, dict) else None
    if isinstance(expected, str) and len(expected) >= MIN_ANSWER_CHARS:
        yield expected
