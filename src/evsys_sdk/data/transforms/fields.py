"""Columns renamed, set, dropped, kept.

In: rows. Out: as many rows, with other columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pydantic import Field, model_validator

from evsys_sdk.config.base import JsonDict, Params
from evsys_sdk.data.columns import BadRow, MissingKey, compile_template, parse_template
from evsys_sdk.data.transforms.base import Change, RowByRow
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform


@register_transform("identity")
class Identity(RowByRow):
    """Leave the rows as they are."""

    def stream(self, rows: Iterable[Row]) -> Iterator[Row]:
        return iter(rows)


@register_transform("map_fields")
class MapFields(RowByRow):
    """Rename, set, drop and keep columns, in that order."""

    cfg: Config

    class Config(Params):
        rename: dict[str, str] = Field(default_factory=dict)
        """Old name -> new name; the column must be there, and the new name must be free."""
        set: JsonDict = Field(default_factory=dict)
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
                try:
                    parse_template(value if isinstance(value, str) else "")
                except ValueError as exc:
                    raise ValueError(f"set.{field}: {exc}") from exc
            return self

    def changer(self) -> Change:
        cfg = self.cfg
        rename, columns, drop, keep = cfg.rename, list(cfg.set), frozenset(cfg.drop), list(cfg.keep)
        constants = {field: value for field, value in cfg.set.items() if not isinstance(value, str)}
        texts = {field: compile_template(value) for field, value in cfg.set.items() if isinstance(value, str)}

        def change(row: Row) -> Row:
            for old, new in rename.items():
                if old not in row:
                    raise MissingKey(row, old)
                if new in row and new not in rename:
                    raise BadRow(
                        f"already has {new!r}, which {old!r} would become; drop it in a map_fields before this one"
                    )
            out = {rename.get(key, key): value for key, value in row.items()} if rename else dict(row)
            filled = {field: fill(out) for field, fill in texts.items()}
            out.update((field, filled[field] if field in filled else constants[field]) for field in columns)
            if drop:
                out = {key: value for key, value in out.items() if key not in drop}
            if not keep:
                return out
            try:
                return {key: out[key] for key in keep}
            except KeyError as exc:
                raise MissingKey(out, str(exc.args[0])) from exc

        return change
