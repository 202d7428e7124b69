"""Turn pydantic's errors into sentences with a place, a value, and the nearest right word.

In: a ValidationError and the model it came from. Out: `Problem`s with paths relative to that model.
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from evsys_sdk.config.base import UNION_TAGS
from evsys_sdk.config.document import KeyPath, show_path
from evsys_sdk.errors import Problem, closest

_WORDS = {
    "missing": "is missing; it has no default",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """One problem per mistake, in the order pydantic found them."""
    return [_problem(detail, model) for detail in error.errors(include_url=False)]


def _problem(detail: Any, model: type[BaseModel]) -> Problem:
    path = _place(detail)
    value = detail["input"]
    hide = detail["type"] == "missing" or isinstance(value, dict | list | BaseModel)
    return Problem(path=show_path(path), message=_message(detail, model), value=None if hide else value)


def _place(detail: Any) -> KeyPath:
    """Where the mistake is in the file; which form pydantic took a value for is not a place."""
    return tuple(part for part in detail["loc"] if part not in UNION_TAGS)


def _message(detail: Any, model: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "extra_forbidden":
        return unknown_key(str(detail["loc"][-1]), known_keys(model, _place(detail)[:-1]))
    if kind == "literal_error":
        return _not_one_of(detail["input"], context.get("expected", ""))
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind in _WORDS:
        return _WORDS[kind]
    message: str = detail["msg"]
    return message[0].lower() + message[1:]


def unknown_key(key: str, known: list[str]) -> str:
    """`unknown key; closest: learning_rate`, or the whole list when nothing is close."""
    near = closest(key, known)
    if near:
        return f"unknown key; closest: {near}"
    return f"unknown key; known: {', '.join(known) or 'none'}"


def _not_one_of(value: object, expected: str) -> str:
    words = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
    near = closest(str(value), words)
    hint = f"; closest: {near}" if near else ""
    return f"must be one of {', '.join(words)}{hint}"


def known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Field names of the model that stands at `path` inside `model`; empty when none does."""
    found = model_at(model, path)
    return sorted(info.alias or name for name, info in found.model_fields.items()) if found else []


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model class at `path`, following lists and optional fields."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        if get_origin(current) is dict:  # whatever the key is called
            current = _model_in(get_args(current)[1])
            continue
        if current is None or part not in current.model_fields:
            return None
        annotation = current.model_fields[part].annotation
        current = annotation if get_origin(annotation) is dict else _model_in(annotation)
    return None if get_origin(current) is dict else current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, types.UnionType, Annotated):
        return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
    return None
