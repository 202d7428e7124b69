"""Which rows to keep, by chance, and in which order. The same seed always gives the same answer.

In: rows. Out: some of them, unchanged.
"""

from __future__ import annotations

import hashlib
import math
import random
from itertools import accumulate
from typing import Annotated

from pydantic import Field, model_validator

from evsys_sdk.config.base import Name, Params, tunable
from evsys_sdk.data.columns import fingerprint, require
from evsys_sdk.data.transforms.base import BuiltIn, Change, RowByRow
from evsys_sdk.errors import DataError, not_known
from evsys_sdk.protocols import Row
from evsys_sdk.registry import register_transform


@register_transform("shuffle")
class Shuffle(BuiltIn):
    """Put the rows into a random order."""

    cfg: Config

    class Config(Params):
        seed: int = 0
        """Of the draw."""

    def __call__(self, rows: list[Row]) -> list[Row]:
        return [rows[index] for index in _shuffled_order(len(rows), self.cfg.seed)]


@register_transform("sample")
class Sample(BuiltIn):
    """Keep `n` rows, or a fraction of them, in their order. A larger sample of the same seed holds the smaller."""

    cfg: Config

    class Config(Params):
        n: int | None = Field(default=None, ge=1)
        """Asking for more rows than there are is an error."""
        fraction: float | None = Field(default=None, gt=0, le=1, json_schema_extra=tunable(0.1, 1.0, when={"n": None}))
        """The part of the rows that stays."""
        seed: int = 0
        """Of the draw."""

        @model_validator(mode="after")
        def _one_size(self) -> Sample.Config:
            if (self.n is None) == (self.fraction is None):
                raise ValueError("give exactly one of n and fraction")
            return self

    def __call__(self, rows: list[Row]) -> list[Row]:
        n, fraction = self.cfg.n, self.cfg.fraction
        if n is None:
            n = round(len(rows) * (fraction or 0))
        if n > len(rows):
            raise DataError(f"sample: asks for {n} rows, and there are {len(rows)}")
        # The shuffle does not depend on n, so a smaller sample is the beginning of a larger one's.
        return [rows[index] for index in sorted(_shuffled_order(len(rows), self.cfg.seed)[:n])]


def _shuffled_order(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


@register_transform("split")
class Split(RowByRow):
    """Keep one part of the rows. The parts of one seed never share a row and together hold all of them.

    A row's part follows from its content (or its `key`) and the seed alone, so new rows do not move old ones, and
    equal rows go together. Without `key`, a row that another transform has changed may change its part: split first,
    or name a key.
    """

    cfg: Config

    class Config(Params):
        part: Name
        """Which of the parts to keep."""
        fractions: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=lambda: {"train": 0.9, "val": 0.1})
        """Part -> share of the rows; they add up to 1. The order in which they are written does not matter."""
        seed: int = 0
        """Of the draw."""
        key: Name | None = None
        """Rows with the same value here stay together."""

        @model_validator(mode="after")
        def _adds_up(self) -> Split.Config:
            if self.part not in self.fractions:
                raise ValueError(f"part: {not_known(self.part, 'part', self.fractions)}")
            total = sum(self.fractions.values())
            if not math.isclose(total, 1, abs_tol=1e-6):
                raise ValueError(f"fractions add up to {total:g}, not to 1")
            return self

    def changer(self) -> Change:
        key, seed = self.cfg.key, self.cfg.seed
        # Each part has its stretch of [0, 1); sorted by name, so that `{val, train}` and `{train, val}` mean the same.
        names = sorted(self.cfg.fractions)
        ends = [0.0, *accumulate(self.cfg.fractions[name] for name in names)]
        ends[-1] = 1.0  # rounding must not lose a row
        place = names.index(self.cfg.part)
        low, high = ends[place], ends[place + 1]

        def change(row: Row) -> Row | None:
            value = row if key is None else require(row, key)
            digest = hashlib.blake2b(f"{seed}:".encode() + fingerprint(value), digest_size=8).digest()
            # 53 bits, all that a float holds: never rounds up to 1.
            return row if low <= (int.from_bytes(digest) >> 11) / 2**53 < high else None

        return change
