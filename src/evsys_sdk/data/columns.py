"""Values of a row by name, and how a row that cannot be used is told.

In: a row and a column, or a dotted path for a value inside a value. Out: the value. A value that is absent or null
counts as missing everywhere. What raises `BadRow` knows the row but not its place; `change_rows` knows the place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from evsys_sdk.errors import DataError, closest, shorten
from evsys_sdk.protocols import Row

PROMPT_COLUMNS = ("prompt", "query", "question", "instruction", "input")
ANSWER_COLUMNS = ("completion", "response", "answer", "output", "target", "tool_slug")


class BadRow(DataError):
    """Says what is wrong with a row, as the end of a sentence that begins with the row's place."""


class MissingKey(BadRow):
    """A row lacks a value that it needs."""

    def __init__(self, row: Row, key: str):
        near = closest(key, map(str, row)) if key not in row else None
        note = " (it is null)" if key in row else f" (closest: {near})" if near else ""
        super().__init__(f"has no {key!r}{note}; it has: {keys_of(row)}")
        self.key = key


def keys_of(row: Row) -> str:
    return shorten(", ".join(map(str, row)), 200) or "nothing"


def row_at(index: int) -> str:
    """How every message names a row."""
    return f"row {index} (counting from 0)"


def change_rows(rows: Iterable[Row], change: Callable[[Row], Row | None], *, name: str) -> Iterator[Row]:
    """`change` over every row; None leaves the row out. A bad row is named by transform and index."""
    for index, row in enumerate(rows):
        try:
            changed = change(row)
        except BadRow as exc:
            raise DataError(f"{name}: {row_at(index)} {exc}") from exc
        if changed is not None:
            yield changed


def lookup(row: Row, key: str) -> Any:
    """The value under `key`, or under the dotted path `key`; None when there is none."""
    value = row.get(key)
    if value is not None or "." not in key:
        return value
    value = row
    for part in key.split("."):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def required(row: Row, key: str) -> Any:
    """The value under `key`, or MissingKey."""
    value = lookup(row, key)
    if value is None:
        raise MissingKey(row, key)
    return value


def as_text(value: Any) -> str:
    """A value as it stands in a prompt: text and numbers plainly, lists and mappings as JSON."""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def find_prompt(row: Row) -> str | None:
    """What the row asks, from the first of `PROMPT_COLUMNS`; None when it asks nothing."""
    key = next((key for key in PROMPT_COLUMNS if row.get(key) is not None), None)
    if key is None:
        return None
    text = as_text(row[key])
    # Instruction data keeps the matter that the instruction is about in `input`.
    return f"{text}\n\n{as_text(row['input'])}" if key == "instruction" and row.get("input") else text


def find_answer(row: Row) -> Any:
    """What the row wants to hear, from the first of `ANSWER_COLUMNS`; None when it says nothing."""
    return next((row[key] for key in ANSWER_COLUMNS if row.get(key) is not None), None)


def fingerprint(value: Any) -> bytes:
    """16 bytes that are equal for equal content, whatever the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_stable)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _stable(value: Any) -> str:
    """What is not JSON (a date, an image of a Hugging Face row), as text that names no memory address."""
    content = getattr(value, "tobytes", None)
    data = content() if callable(content) else value if isinstance(value, bytes) else None
    return str(value) if data is None else hashlib.sha256(data).hexdigest()
