"""Columns renamed, set, dropped, kept.

In: rows. Out: as many rows, with other columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pydantic import Field, model_validator

from evsys_sdk.config.base import Params
from evsys_sdk.data.columns import BadRow, MissingKey
from evsys_sdk.data.templates import compile_template, parse_template
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform


@register_transform("identity")
class Identity(RowByRow):
    """Leave the rows as they are."""

    def stream(self, rows: Iterable[Row]) -> Iterator[Row]:
        return iter(rows)


@register_transform("map_fields", yields=True)
class MapFields(RowByRow):
    """Rename, set, drop and keep columns, in that order."""

    cfg: Config

    class Config(Params):
        rename: dict[str, str] = Field(default_factory=dict)
        """Old name -> new name; the column must be there, and the new name must be free."""
        set: dict[str, Any] = Field(default_factory=dict)
        """Column -> text with `{column}` holes, filled after renaming; anything but text is a constant."""
        drop: list[str] = Field(default_factory=list)
        """Columns to leave out, where a row has them."""
        keep: list[str] = Field(default_factory=list)
        """The only columns to keep, in this order; each must be there."""

        @model_validator(mode="after")
        def _sound(self) -> MapFields.Config:
            if not (self.rename or self.set or self.drop or self.keep):
                raise ValueError("does nothing; give at least one of rename, set, drop, keep")
            if len(set(self.rename.values())) < len(self.rename):
                raise ValueError("rename: two columns would get the same name")
            for field, value in self.set.items():
                if isinstance(value, str):
                    _check(field, value)
            return self

    def changer(self) -> Change:
        cfg = self.cfg
        rename, setters = cfg.rename, [(field, _setter(value)) for field, value in cfg.set.items()]
        drop, keep = frozenset(cfg.drop), list(cfg.keep)

        def change(row: Row) -> Row:
            out = _renamed(row, rename) if rename else dict(row)
            out.update([(field, value(out)) for field, value in setters])
            if drop:
                out = {key: value for key, value in out.items() if key not in drop}
            return _only(out, keep) if keep else out

        return change


def _check(field: str, template: str) -> None:
    try:
        parse_template(template)
    except ValueError as exc:
        raise ValueError(f"set.{field}: {exc}") from exc


def _setter(value: Any) -> Callable[[Row], Any]:
    return compile_template(value) if isinstance(value, str) else lambda row: value


def _only(row: Row, keys: list[str]) -> Row:
    try:
        return {key: row[key] for key in keys}
    except KeyError as exc:
        raise MissingKey(row, str(exc.args[0])) from exc


def _renamed(row: Row, names: dict[str, str]) -> Row:
    for old, new in names.items():
        if old not in row:
            raise MissingKey(row, old)
        if new in row and new not in names:
            raise BadRow(f"already has {new!r}, which {old!r} would become; drop it in a map_fields before this one")
    return {names.get(key, key): value for key, value in row.items()}
