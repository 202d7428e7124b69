"""Text with `{column}` holes, filled from a row.

In: a template such as `Query: {query}`, or `{user.name}` for a value inside a value; `{{` and `}}` stand for
braces. Out: a function from row to text, made once and then called for every row. A hole whose column is absent or
null raises `MissingKey`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import itemgetter
from typing import Annotated

from pydantic import AfterValidator

from evsys_sdk.data.columns import as_text, required
from evsys_sdk.errors import shorten
from evsys_sdk.protocols import Row

Render = Callable[[Row], str]
_TOKENS = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def compile_template(template: str) -> Render:
    """The function that fills `template`; ValueError when its braces do not pair up."""
    literals, keys = parse_template(template)
    if not keys:
        return lambda row: literals[0]
    if any("." in key for key in keys):
        return lambda row: _fill(literals, keys, row)
    return _fill_one(literals, keys) if len(keys) == 1 else _fill_many(literals, keys)


def parse_template(template: str) -> tuple[list[str], list[str]]:
    """Literal pieces and the keys between them: one literal more than keys."""
    literals, keys, last = [""], [], 0
    for token in _TOKENS.finditer(template):
        literals[-1] += template[last : token.start()]
        last = token.end()
        if token[1] is not None:
            keys.append(_checked_key(token[1]))
            literals.append("")
        elif len(token[0]) == 2:
            literals[-1] += token[0][0]
        else:
            near = shorten(template[token.start() :], 30)
            raise ValueError(f"a single {token[0]} at `{near}`; write {token[0] * 2} for a brace that is text")
    literals[-1] += template[last:]
    return literals, keys


def _checked_key(key: str) -> str:
    if not key.strip():
        raise ValueError("an empty hole {}; name a column in it, or write {{}} for braces that are text")
    return key.strip()


def _checked_template(text: str) -> str:
    parse_template(text)
    return text


Template = Annotated[str, AfterValidator(_checked_template)]
"""For an extension's Config: text whose braces are checked when the YAML is."""


# The common case is a column that is there and is text: adding or joining it is faster than asking first, and
# whatever is not text (None, a number, a list) makes both raise TypeError.
def _fill_one(literals: list[str], keys: list[str]) -> Render:
    (before, after), (key,) = literals, keys

    def render(row: Row) -> str:
        try:
            return before + row[key] + after
        except (KeyError, TypeError):
            return _fill(literals, keys, row)

    return render


def _fill_many(literals: list[str], keys: list[str]) -> Render:
    values = itemgetter(*keys)
    frame = [piece for literal in literals for piece in (literal, "")][:-1]

    def render(row: Row) -> str:
        pieces = frame.copy()
        try:
            pieces[1::2] = values(row)
            return "".join(pieces)
        except (KeyError, TypeError):
            return _fill(literals, keys, row)

    return render


def _fill(literals: list[str], keys: list[str], row: Row) -> str:
    pieces = [literals[0]]
    for key, literal in zip(keys, literals[1:], strict=True):
        pieces += (as_text(required(row, key)), literal)
    return "".join(pieces)
