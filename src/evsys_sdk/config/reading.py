"""Notes which settings were read, so that a setting that nothing reads can be reported.

In: config models. Out: the settings a user gave and no code looked at. Our own models inherit `Tracked`;
`listening` gives an extension's plain pydantic `Config` the same ears. The notes lie in the instance's `__dict__`
under a name that is no field, where pydantic's comparison and serialisation do not look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

_NOTES = "·read"
_WHOLE = frozenset({"model_dump", "model_dump_json", "model_copy", "__iter__"})


class Tracked:
    """Mix-in for pydantic models: reading a field leaves a note."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in _WHOLE:
            _note_all(self)  # who takes everything has read everything
        elif name[0] != "_" and name in type(self).__pydantic_fields__:  # type: ignore[attr-defined]
            object.__getattribute__(self, "__dict__").setdefault(_NOTES, set()).add(name)
        return value


def _note_all(model: Any) -> None:
    fields = object.__getattribute__(model, "__dict__")
    fields.setdefault(_NOTES, set()).update(type(model).__pydantic_fields__)
    for _, child in _children(fields):
        _note_all(child)


@cache
def _tracking(config: type[BaseModel]) -> type[BaseModel]:
    names = {"__module__": config.__module__, "__qualname__": config.__qualname__}
    return type(config.__name__, (Tracked, config), names)


@cache
def listening(cls: type) -> type:
    """`cls`, or where its `Config` does not note reads, the same class with one that does."""
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, BaseModel)) or issubclass(config, Tracked):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "Config": _tracking(config)}
    return type(cls.__name__, (cls,), names)


def settings_of(extension: Any) -> BaseModel | None:
    """The settings object that an extension keeps (usually as `cfg`), if it is one that notes its reads."""
    kept = vars(extension).values() if hasattr(extension, "__dict__") else ()
    config = getattr(type(extension), "Config", BaseModel)
    return next((v for v in kept if isinstance(v, Tracked) and isinstance(v, BaseModel) and type(v) is config), None)


def forget(model: BaseModel) -> None:
    """Drop the notes of `model` and of the models inside it."""
    fields = object.__getattribute__(model, "__dict__")
    fields.pop(_NOTES, None)
    for _, child in _children(fields):
        forget(child)


def unread(model: BaseModel) -> Iterator[str]:
    """Dotted paths of fields that were given and never read; a model that was not read is one path, itself."""
    fields = object.__getattribute__(model, "__dict__")
    notes = fields.get(_NOTES, set())
    given = object.__getattribute__(model, "__pydantic_fields_set__")
    for name in type(model).__pydantic_fields__:
        if name not in given:
            continue
        if name not in notes:
            yield name
            continue
        for place, child in _children({name: fields[name]}):
            yield from (f"{place}.{path}" for path in unread(child))


def read(model: BaseModel, *, but: Collection[str] = ()) -> Iterator[str]:
    """Dotted paths of fields that were given and read, `but` for these; other threads may be reading meanwhile."""
    fields = object.__getattribute__(model, "__dict__")
    given = object.__getattribute__(model, "__pydantic_fields_set__") - set(but)
    yield from sorted(given & set(fields.get(_NOTES, ())))
    for place, child in _children({name: fields[name] for name in given if name in fields}):
        yield from (f"{place}.{path}" for path in read(child))


def note_read(model: BaseModel, paths: Collection[str], *, inside: str = "") -> None:
    """Note that these paths, as `read` names them, were read: by another process, or by another copy of `model`."""
    fields = object.__getattribute__(model, "__dict__")
    known = (name for name in type(model).__pydantic_fields__ if inside + name in paths)
    fields.setdefault(_NOTES, set()).update(known)
    for place, child in _children(fields):
        note_read(child, paths, inside=f"{inside}{place}.")


def _children(fields: dict[str, Any]) -> Iterator[tuple[str, BaseModel]]:
    for name, value in list(fields.items()):
        if isinstance(value, BaseModel):
            yield name, value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield f"{name}[{index}]", item
