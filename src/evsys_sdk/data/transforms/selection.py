"""Which rows to keep, by what is in them.

In: rows. Out: some of them, unchanged and in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field, field_validator, model_validator

from evsys_sdk.config.base import Name, Params
from evsys_sdk.data.columns import BadRow, fingerprint, lookup, require
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.errors import VerifierFailed, shorten
from evsys_sdk.patterns import pattern_matches
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform


@register_transform("dedupe")
class Dedupe(RowByRow):
    """Keep the first of the rows that agree in `key`. A row without the key is an error, not a duplicate."""

    cfg: Config

    class Config(Params):
        key: Name | list[Name] | None = None
        """A column, several that must all agree, or none for the whole row."""

    def changer(self) -> Change:
        key = self.cfg.key
        seen: set[str | bytes] = set()

        def change(row: Row) -> Row | None:
            # Text stands for itself, all else for its content, so that 1 is not True.
            if key is None:
                mark: str | bytes = fingerprint(row)
            else:
                value = require(row, key) if isinstance(key, str) else [require(row, part) for part in key]
                mark = value if isinstance(value, str) else fingerprint(value)
            if mark in seen:
                return None
            seen.add(mark)
            return row

        return change


@register_transform("filter")
class Filter(RowByRow):
    """Keep the rows whose `key` meets every condition given. A row without the key meets only `exists: false`."""

    cfg: Config

    class Config(Params):
        key: Name
        """A column, or a dotted path."""
        equals: Any = None
        """Keep rows whose value is this."""
        not_equals: Any = None
        """Keep rows whose value is another."""
        in_: list[Any] | None = Field(default=None, alias="in", description="Keep rows whose value is one of these.")
        not_in: list[Any] | None = None
        """Keep rows whose value is none of these."""
        min: float | None = None
        """Keep rows whose value is at least this."""
        max: float | None = None
        """Keep rows whose value is at most this."""
        min_length: int | None = Field(default=None, ge=0)
        """Characters of a text, items of a list."""
        max_length: int | None = Field(default=None, ge=0)
        """Keep rows whose text or list is at most this long."""
        contains: Any = None
        """A part of a text, an item of a list, a key of a mapping."""
        regex: str | None = None
        """Found anywhere in a text, as Python's `re.search` does; a row that takes 5 seconds is an error."""
        exists: bool | None = None
        """Keep rows that have (or lack) the value."""

        @field_validator("regex")
        @classmethod
        def _compiles(cls, pattern: str | None) -> str | None:
            try:
                re.compile(pattern or "")
            except re.error as exc:
                raise ValueError(f"not a regular expression: {exc}") from exc
            return pattern

        @model_validator(mode="after")
        def _asks_something(self) -> Filter.Config:
            tests = _tests(self)
            if not tests and self.exists is None:
                raise ValueError(f"has no condition; give at least one of {', '.join(CONDITIONS)}, exists")
            if tests and self.exists is False:
                raise ValueError("exists: false leaves no value for the other conditions")
            return self

    def changer(self) -> Change:
        key, wanted, tests = self.cfg.key, self.cfg.exists is not False, _tests(self.cfg)

        def change(row: Row) -> Row | None:
            value = lookup(row, key)
            if value is None:
                return None if wanted else row
            return row if wanted and all(test(value) for test in tests) else None

        return change


def _tests(cfg: Filter.Config) -> list[Callable[[Any], bool]]:
    given = {name: getattr(cfg, "in_" if name == "in" else name) for name in CONDITIONS}
    return [partial(CONDITIONS[name], wanted) for name, wanted in given.items() if wanted is not None]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"holds {shorten(repr(value))}, which is not a number; min and max compare numbers")
    return value


def _length(value: object) -> int:
    if not isinstance(value, str | list | dict):
        raise BadRow(f"holds {shorten(repr(value))}, which has no length; min_length and max_length measure text")
    return len(value)


def _contains(wanted: object, value: object) -> bool:
    if isinstance(value, str) and not isinstance(wanted, str):
        raise BadRow(f"holds text, and contains looks for {wanted!r}, which is none")
    if not isinstance(value, str | list | dict):
        raise BadRow(f"holds {shorten(repr(value))}, which contains nothing; contains looks into text and lists")
    return wanted in value


def _matches(pattern: str, value: object) -> bool:
    if not isinstance(value, str):
        raise BadRow(f"holds {shorten(repr(value))}, which is not text; regex reads text")
    try:
        return pattern_matches(pattern, value)
    except VerifierFailed as exc:
        raise BadRow(f"cannot be matched with regex: {exc}") from exc


CONDITIONS: dict[str, Callable[[Any, Any], bool]] = {
    "equals": lambda wanted, value: value == wanted,
    "not_equals": lambda wanted, value: value != wanted,
    "in": lambda wanted, value: value in wanted,
    "not_in": lambda wanted, value: value not in wanted,
    "min": lambda wanted, value: _number(value) >= wanted,
    "max": lambda wanted, value: _number(value) <= wanted,
    "min_length": lambda wanted, value: _length(value) >= wanted,
    "max_length": lambda wanted, value: _length(value) <= wanted,
    "contains": _contains,
    "regex": _matches,
}
"""Condition -> does `value` meet what is `wanted`?"""
