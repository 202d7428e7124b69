"""Cells of CSV downloads."""

from __future__ import annotations

import json


def cell(value: object) -> object:
    """A spreadsheet runs a text that begins like a formula; a quote before it makes it text."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
