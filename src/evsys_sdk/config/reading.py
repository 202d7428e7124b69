"""Notes which params of an extension were read, so that one that nothing reads can be reported.

In: an extension's settings object. Out: the params that were given and that no code looked at. `Params` inherits
`Tracked`; `track_reads` makes an extension's plain pydantic `Config` tracked too. The notes lie in the instance's
`__dict__` under a name that is no field, where pydantic's comparison and serialisation do not look. Settings of the
config itself are not tracked: `checks.preflight.ignored_settings` knows which have no effect.
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
            _note_all(self)  # taking everything is reading everything
        elif name[0] != "_" and name in type(self).__pydantic_fields__:  # type: ignore[attr-defined]
            object.__getattribute__(self, "__dict__").setdefault(_NOTES, set()).add(name)
        return value


def _note_all(model: Any) -> None:
    fields = object.__getattribute__(model, "__dict__")
    fields.setdefault(_NOTES, set()).update(type(model).__pydantic_fields__)
    for _, child in _children(fields):
        _note_all(child)


@cache
def track_reads(cls: type) -> type:
    """`cls`, or where its `Config` does not note reads, a subclass with one that does."""
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, BaseModel)) or issubclass(config, Tracked):
        return cls
    names = {"__module__": config.__module__, "__qualname__": config.__qualname__}
    tracked = type(config.__name__, (Tracked, config), names)
    return type(
        cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "Config": tracked}
    )


def settings_of(extension: object) -> BaseModel | None:
    """The settings object that an extension keeps (usually as `cfg`), if it is one that notes its reads."""
    kept = vars(extension).values() if hasattr(extension, "__dict__") else ()
    config = getattr(type(extension), "Config", BaseModel)
    return next((v for v in kept if isinstance(v, Tracked) and isinstance(v, BaseModel) and type(v) is config), None)


def forget(model: BaseModel) -> None:
    """Drop the notes of `model` and of the models inside it, such as those of its validators."""
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


def read(model: BaseModel) -> Iterator[str]:
    """Dotted paths of fields that were given and read; other threads may be reading meanwhile."""
    fields = object.__getattribute__(model, "__dict__")
    given = object.__getattribute__(model, "__pydantic_fields_set__")
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
    """Tracked models inside; what is read of others is not known, so they count as a whole."""
    for name, value in list(fields.items()):
        inside = enumerate(value) if isinstance(value, list) else ()
        for place, item in [(name, value), *((f"{name}[{index}]", item) for index, item in inside)]:
            if isinstance(item, Tracked) and isinstance(item, BaseModel):
                yield place, item
