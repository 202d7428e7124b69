"""A JSON schema as a table that people read.

In: a schema. Out: a row per key: its dotted path, type, default and description.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

HEADER = ["key", "type", "default", "description"]
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def schema_rows(schema: dict[str, Any]) -> list[list[str]]:
    """One row per key, nested ones by their dotted path."""
    return list(_rows(schema, schema.get("$defs", {}), "", ()))


def _rows(schema: dict[str, Any], parts: dict[str, Any], prefix: str, within: tuple[str, ...]) -> Iterator[list[str]]:
    required = set(schema.get("required", []))
    for name, field in schema.get("properties", {}).items():
        path = f"{prefix}{name}"
        default = "required" if name in required else _short(field["default"]) if "default" in field else ""
        text = " ".join(str(field.get("description") or "").split())
        yield [path, _type(field), default, text]
        for suffix, ref in _nested(field):
            if ref in parts and ref not in within:  # a model may hold itself
                yield from _rows(parts[ref], parts, f"{path}{suffix}.", (*within, ref))


def _nested(field: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The models that a field holds: itself, in a list or in a mapping."""
    for option in [field, *field.get("anyOf", []), *field.get("allOf", [])]:
        if "$ref" in option:
            yield "", option["$ref"].rpartition("/")[2]
        for key, suffix in (("items", "[]"), ("additionalProperties", ".<name>")):
            inner = option.get(key)
            if isinstance(inner, dict):
                yield from ((suffix + rest, ref) for rest, ref in _nested(inner))


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(option) for option in field["anyOf"]))
    if "$ref" in field or "allOf" in field:
        return "mapping"
    if "enum" in field:
        return " | ".join(map(_short, field["enum"]))
    if "const" in field:
        return _short(field["const"])
    kind = {"object": "mapping", "array": "list"}.get(str(field.get("type")), str(field.get("type") or "any"))
    if kind == "list" and isinstance(field.get("items"), dict):
        kind = f"list of {_type(field['items'])}"
    bounds = " and ".join(f"{sign} {field[key]:g}" for key, sign in _BOUNDS.items() if key in field)
    return f"{kind} {bounds}" if bounds else kind


def _short(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)
