"""A transform of your own: a few rows that cover everything that the rows speak of.

A transform is a class with a name, a `Config`, and one act: rows in, rows out. `evsys schema transform cover --config
examples/04_custom_transform/config.yaml` shows its params like those of a built-in one.
"""

from __future__ import annotations

import re

from pydantic import Field

from evsys_sdk import register_transform
from evsys_sdk.config.base import Params


@register_transform("cover")
class Cover:
    """Keep the first `each` rows for every value that a pattern finds in a column."""

    class Config(Params):
        key: str
        """The column to look at."""
        pattern: str
        """What to find there: a regular expression with one group."""
        each: int = Field(default=1, ge=1)
        """Rows to keep of each value."""

    def __init__(self, **params):
        self.cfg = self.Config(**params)

    def __call__(self, rows):
        kept = {}
        for row in rows:
            found = re.search(self.cfg.pattern, row[self.cfg.key])
            if found is None:  # to leave the row out would be a silent loss
                raise ValueError(f"{self.cfg.pattern!r} finds nothing in {row[self.cfg.key]!r}")
            kept.setdefault(found[1], []).append(row)
        return [row for same in kept.values() for row in same[: self.cfg.each]]
