"""Pydantic models in words: mistakes as sentences with a place, a value and the nearest right word, and JSON schemas
that explain themselves.

In: a ValidationError and the model it came from, or a model. Out: `Problem`s with paths relative to that model, or its
JSON schema, in which the text under each field of the source is its description. The source is read when a schema is
asked for, and not when the models are loaded.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from evsys_sdk.errors import MOST_PROBLEMS, Problem, closest
from evsys_sdk.format import count

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

KeyPath = tuple[str | int, ...]
UNION_TAGS = frozenset({"(text)", "(typed)", "(values)", "(range)", "(auto)", "(settings)"})
"""What pydantic puts into the place of a mistake to say which form it took a value for that has several."""
MOST_PLACES = 3
"""Places that are named for a key that stands in the wrong one."""
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

places_of_keys: Callable[[], dict[str, list[str]]] = dict
"""Every key of the config -> where it may stand. `config.key_places` sets it, which knows the config's models."""


def show_path(path: KeyPath) -> str:
    """`("runs", 0, "data")` -> `runs[0].data`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@lru_cache(maxsize=4096)
def split_path(text: str) -> KeyPath:
    """`runs[0].data` or `runs.0.data` -> `("runs", 0, "data")`."""
    parts = [part for part in re.split(r"\.|\[([0-9]+)\]", text) if part]
    return tuple(int(part) if re.fullmatch(r"[0-9]{1,9}", part) else part for part in parts)


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """One problem per mistake, in the order pydantic found them; the many after the first hundred are counted."""
    details = error.errors(include_url=False)
    problems = []
    for detail in details[:MOST_PROBLEMS]:
        value = detail["input"]
        hide = detail["type"] == "missing" or isinstance(value, dict | list | BaseModel)
        path = show_path(_place(detail))
        problems.append(Problem(path=path, message=_message(detail, model), value=None if hide else value))
    return [*problems, *count_the_rest([show_path(_place(detail)) for detail in details[MOST_PROBLEMS:]])]


def count_the_rest(paths: list[str]) -> list[Problem]:
    """One problem that stands for those beyond the first hundred, at the first of them."""
    more = f", and {len(paths) - 1:,} more problems" if len(paths) > 1 else ""
    return [Problem(path=paths[0], message=f"is wrong too{more}")] if paths else []


def _place(detail: ErrorDetails) -> KeyPath:
    """Where the mistake is in the file; which form pydantic took a value for is not a place."""
    return tuple(part for part in detail["loc"] if part not in UNION_TAGS)


def _message(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, context = detail["type"], detail.get("ctx") or {}
    if kind == "extra_forbidden":
        place = _place(detail)
        is_ours = model.__module__.startswith("evsys_sdk.config.")
        return unknown_key(str(place[-1]), known_keys(model, place[:-1]), in_params=is_ours)
    if kind == "literal_error":
        words = [word.strip(" '") for word in context.get("expected", "").replace(" or ", ",").split(",")]
        near = closest(str(detail["input"]), words)
        return f"must be one of {', '.join(words)}{f'; closest: {near}' if near else ''}"
    if kind == "value_error":
        return str(context.get("error", detail["msg"]))
    return _WORDS.get(kind) or detail["msg"][0].lower() + detail["msg"][1:]


PARAMS_PLACES = {
    "algorithm": "run.algorithm.params",
    "backend": "run.backend.params",
    "transform": "run.data.transforms[].params",
    "callback": "callbacks[].params",
    "inference_client": "run.eval.inference.params",
    "log_store": "log_store.params",
    "data_store": "data_store.params",
    "launcher": "launcher.params",
    "deployer": "deploy.params",
    "proposer": "research.proposers[].params",
}
"""Kind of extension -> where its settings stand in the config."""


def unknown_key(key: str, known: list[str], *, in_params: bool = True, not_under: str | None = None) -> str:
    """`unknown key; closest: learning_rate`; for a key that the config knows in another place, that place; the whole
    list when neither helps. `in_params`: that place may be the settings of an extension; `not_under` is the place where
    the key stands, which may know it for another kind."""
    near = closest(key, known)
    places = [
        place
        for place in places_of_keys().get(key, [])
        if place != not_under and (in_params or not place.endswith(".params"))
    ]
    if near and not places:
        return f"unknown key; closest: {near}"
    if places:
        more = f" and {count(len(places) - MOST_PLACES, 'more place')}" if len(places) > MOST_PLACES else ""
        where = " or ".join(f"`{place}`" if place else "the top level" for place in places[:MOST_PLACES])
        hint = f"; closest here: {near}" if near else ""
        return f"unknown key here; it belongs {'at' if places[0] == '' else 'under'} {where}{more}{hint}"
    return f"unknown key; known: {', '.join(known) or 'none'}"


def known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Field names of the model that stands at `path` inside `model`; empty when none does."""
    found = model_at(model, path)
    return sorted(info.alias or name for name, info in found.model_fields.items()) if found else []


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model class at `path`, following lists and optional fields."""
    current: Any = model  # a model, or a mapping of them
    for part in path:
        if isinstance(part, int):
            continue
        if get_origin(current) is dict:  # whatever the key is called
            current = model_in(get_args(current)[1])
            continue
        if current is None or part not in current.model_fields:
            return None
        annotation = current.model_fields[part].annotation
        current = annotation if get_origin(annotation) is dict else model_in(annotation)
    return None if get_origin(current) is dict else current


def model_in(annotation: object) -> type[BaseModel] | None:
    """The first model that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (list, Union, types.UnionType, Annotated):
        return next((found for arg in get_args(annotation) if (found := model_in(arg))), None)
    return None


def described_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of `model`, with the fields' own words."""
    schema: dict[str, Any] = model.model_json_schema()
    definitions = schema.get("$defs", {})
    parts = [(schema, model)]
    parts += [(definitions[part.__name__], part) for part in _models_in(model, set()) if part.__name__ in definitions]
    for definition, described in parts:
        texts = field_texts(described)
        for name, field in definition.get("properties", {}).items():
            if name in texts:
                field.setdefault("description", texts[name])
    return schema


def field_texts(model: type[BaseModel]) -> dict[str, str]:
    """The string that stands under each field in the source, for the model and what it inherits."""
    texts: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):  # made in a shell, or no source at hand
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                if isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
                    texts[field.target.id] = " ".join(text.value.value.split())
    return texts


def _models_in(annotation: object, seen: set[object]) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return
        seen.add(annotation)
        yield annotation
        for field in annotation.model_fields.values():
            yield from _models_in(field.annotation, seen)
    for part in get_args(annotation):
        yield from _models_in(part, seen)
