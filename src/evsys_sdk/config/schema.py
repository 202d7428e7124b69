"""JSON schemas that explain themselves.

In: a pydantic model. Out: its JSON schema, in which the text under each field of the source is its description.
Reading the source happens here, when somebody asks, and not when the models are loaded.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel


def described_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of `model`, with the fields' own words."""
    schema: dict[str, Any] = model.model_json_schema()
    parts = {part.__name__: part for part in _models_in(model, set())}
    _describe(schema, model)
    for name, definition in schema.get("$defs", {}).items():
        if name in parts:
            _describe(definition, parts[name])
    return schema


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    texts = field_texts(model)
    for name, field in schema.get("properties", {}).items():
        if name in texts:
            field.setdefault("description", texts[name])


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """The string that stands under each field in the source, for the model and what it inherits."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            texts.update(_own_texts(cls))
    return texts


def _own_texts(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made in a shell, or no source at hand
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                found[field.target.id] = " ".join(text.value.value.split())
    return found


def _models_in(annotation: Any, seen: set[Any]) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return
        seen.add(annotation)
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models_in(field.annotation, seen)
    for part in get_args(annotation):
        yield from _models_in(part, seen)
