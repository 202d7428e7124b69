"""Values of a row by column, text with `{column}` holes, and errors of rows that cannot be used.

In: a row and a column, a dotted path for a value inside a value, or a template such as `Query: {user.name}` (`{{` and
`}}` stand for braces). Out: the value, or a function from row to text, made once and called for every row. A value that
is absent or null counts as missing everywhere. What raises `BadRow` knows the row but not its place; `change_rows`
knows the place.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Annotated, Any

from pydantic import AfterValidator

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
        note = f" (it is null); {fix_empty(key)}" if key in row else f" (closest: {near})" if near else ""
        super().__init__(f"has no {key!r}{note}; it has: {keys_of(row)}")
        self.key = key


def fix_empty(column: str) -> str:
    """What to do about a cell that is empty in a CSV file, or null in JSON."""
    return f"fill it, or drop such rows first with {{kind: filter, params: {{key: {column}, exists: true}}}}"


def refuse_row(row: Row, what: str, columns: Iterable[str], setting: str) -> BadRow:
    """The error for a row in which none of the columns has a value: one of them is empty, or all are absent."""
    empty = next((column for column in columns if column in row), None)
    if empty is not None:
        return BadRow(f"has {what}: its column {empty!r} is empty (null); {fix_empty(empty)}")
    return BadRow(f"has {what}: none of {', '.join(columns)}; it has: {keys_of(row)}; set {setting}")


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
    # A column whose own name has a dot comes before the path.
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


def require(row: Row, key: str) -> Any:
    """The value under `key`, or MissingKey."""
    value = lookup(row, key)
    if value is None:
        raise MissingKey(row, key)
    return value


def as_text(value: object) -> str:
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


def find_messages(row: Row, columns: Iterable[str]) -> list[Row] | None:
    """The chat messages in the first of the columns that has a value; None where that value is anything else.

    TRL, verl and others keep a prompt and its completion as lists of messages (or as one message).
    """
    value = next((row[key] for key in columns if row.get(key) is not None), None)
    if isinstance(value, dict):
        value = [value]
    is_chat = isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value)
    return value if is_chat else None


def find_answer(row: Row) -> Any:
    """What the row wants to hear, from the first of `ANSWER_COLUMNS`; None when it says nothing."""
    return next((row[key] for key in ANSWER_COLUMNS if row.get(key) is not None), None)


def fingerprint(value: object) -> bytes:
    """16 bytes that are equal for equal content, whatever the order of keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=_stable_text)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _stable_text(value: object) -> str:
    """What is not JSON (a date, an image of a Hugging Face row), as text that names no memory address."""
    content = getattr(value, "tobytes", None)
    data = content() if callable(content) else value if isinstance(value, bytes) else None
    return str(value) if data is None else hashlib.sha256(data).hexdigest()


Render = Callable[[Row], str]
# Doubled braces before single ones: the first alternative that fits counts.
_TOKENS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def compile_template(template: str) -> Render:
    """The function that fills `template`; ValueError when its braces do not pair up."""
    literals, keys = parse_template(template)
    if not keys:
        return lambda row: literals[0]

    def fill(row: Row) -> str:
        pieces = [literals[0]]
        for key, literal in zip(keys, literals[1:], strict=True):
            pieces += (as_text(require(row, key)), literal)
        return "".join(pieces)

    if any("." in key for key in keys):
        return fill
    # The common case is a column that is there and is text: adding or joining it is faster than asking first, and
    # whatever is not text (None, a number, a list) makes both raise TypeError.
    if len(keys) == 1:
        (before, after), (key,) = literals, keys

        def fill_one(row: Row) -> str:
            try:
                text: str = before + row[key] + after
            except (KeyError, TypeError):
                return fill(row)
            return text

        return fill_one
    values = itemgetter(*keys)
    frame = [piece for literal in literals for piece in (literal, "")][:-1]

    def fill_many(row: Row) -> str:
        pieces = frame.copy()
        try:
            pieces[1::2] = values(row)
            return "".join(pieces)
        except (KeyError, TypeError):
            return fill(row)

    return fill_many


def parse_template(template: str) -> tuple[list[str], list[str]]:
    """Literal pieces and the keys between them: one literal more than keys."""
    literals, keys, last = [""], [], 0
    for token in _TOKENS.finditer(template):
        literals[-1] += template[last : token.start()]
        last = token.end()
        if token[1] is not None:
            if not token[1].strip():
                raise ValueError("an empty hole {}; name a column in it, or write {{}} for braces that are text")
            keys.append(token[1].strip())
            literals.append("")
        elif len(token[0]) == 2:
            literals[-1] += token[0][0]
        else:
            near = shorten(template[token.start() :], 30)
            raise ValueError(f"a single {token[0]} at `{near}`; write {token[0] * 2} for a brace that is text")
    literals[-1] += template[last:]
    return literals, keys


def _checked_template(text: str) -> str:
    parse_template(text)
    return text


Template = Annotated[str, AfterValidator(_checked_template)]
"""For an extension's Config: text whose braces are checked when the YAML is."""
