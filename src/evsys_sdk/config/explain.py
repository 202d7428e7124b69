"""Turn pydantic's errors into sentences with a place, a value, and the nearest right word.

In: a ValidationError and the model it came from. Out: `Problem`s with paths relative to that model.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
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


MOST_PROBLEMS = 100
"""Mistakes of one block that are explained one by one: a hint costs a comparison with every known word."""
MOST_PLACES = 3
"""Places that are named for a key that stands in the wrong one."""


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """One problem per mistake, in the order pydantic found them; the many after the first hundred are counted."""
    details = error.errors(include_url=False)
    explained = [_problem(detail, model) for detail in details[:MOST_PROBLEMS]]
    return [*explained, *the_rest([show_path(_place(detail)) for detail in details[MOST_PROBLEMS:]])]


def the_rest(paths: list[str]) -> list[Problem]:
    """One problem that stands for those beyond the first hundred, at the first of them."""
    more = f", and {len(paths) - 1:,} more problems" if len(paths) > 1 else ""
    return [Problem(path=paths[0], message=f"is wrong too{more}")] if paths else []


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
        place = _place(detail)
        is_ours = model.__module__.startswith("evsys_sdk.config.")
        return unknown_key(str(place[-1]), known_keys(model, place[:-1]), in_params=is_ours)
    if kind == "literal_error":
        return _not_one_of(detail["input"], context.get("expected", ""))
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    if kind in _WORDS:
        return _WORDS[kind]
    message: str = detail["msg"]
    return message[0].lower() + message[1:]


def unknown_key(key: str, known: list[str], *, in_params: bool = True) -> str:
    """`unknown key; closest: learning_rate`; for a key that the config knows in another place, that place; the whole
    list when neither helps. `in_params`: that place may be the settings of an extension."""
    near = closest(key, known)
    places = [place for place in places_of_keys().get(key, []) if in_params or not place.endswith(".params")]
    if near and not places:
        return f"unknown key; closest: {near}"
    if places:
        more = f" and {len(places) - MOST_PLACES} more places" if len(places) > MOST_PLACES else ""
        where = " or ".join(f"`{place}`" if place else "the top level" for place in places[:MOST_PLACES])
        hint = f"; closest here: {near}" if near else ""
        return f"unknown key here; it belongs {'at' if places[0] == '' else 'under'} {where}{more}{hint}"
    return f"unknown key; known: {', '.join(known) or 'none'}"


@cache
def places_of_keys() -> dict[str, list[str]]:
    """Every key of the config -> where it may stand, the shallowest place first: `continual` -> `run`. The settings of
    built-in algorithms, backends, transforms and callbacks are keys too."""
    from evsys_sdk import registry
    from evsys_sdk.config.models import ExperimentConfig

    found: dict[str, dict[str, None]] = {}
    for key, place in _keys_in(ExperimentConfig, "", ()):
        found.setdefault(key, {})[place] = None
    blocks = {
        "run.algorithm": registry.algorithms,
        "run.backend": registry.backends,
        "run.data.transforms[]": registry.transforms,
        "callbacks[]": registry.callbacks,
    }
    for block, kinds in blocks.items():
        for kind in kinds.names():
            config = registry.config_model(kinds.get(kind))
            for key in config.model_fields if config is not None else ():
                found.setdefault(key, {})[f"{block}.params"] = None
    return {key: sorted(places, key=lambda place: place.count(".")) for key, places in found.items()}


def _keys_in(model: type[BaseModel], place: str, above: tuple[type[BaseModel], ...]) -> Iterator[tuple[str, str]]:
    for name, info in model.model_fields.items():
        if name in ("kind", "params", "runs", "matrix", "search"):  # everywhere, or again what `run` is
            continue
        yield info.alias or name, place
        inner = _model_in(info.annotation)
        if inner is not None and inner not in above:
            mark = "[]" if get_origin(info.annotation) is list else ""
            yield from _keys_in(inner, f"{place}.{name}{mark}".lstrip("."), (*above, model))


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
