"""What the built-in transforms have in common. A project's own transform needs none of it.

In: a function for one row. Out: a transform that takes a list, and that can `stream`, so that a file passes through a
chain of them without lying in memory several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from evsys_sdk.config.base import Params
from evsys_sdk.data.columns import change_rows
from evsys_sdk.protocols import Row

Change = Callable[[Row], Row | None]


class BuiltIn:
    """Settings in `cfg`, checked by the class's own `Config`."""

    name: ClassVar[str] = ""

    class Config(Params): ...

    def __init__(self, **params: Any) -> None:
        self.cfg: Any = self.Config(**params)


class RowByRow(BuiltIn):
    """A transform that needs no more than one row at a time."""

    def changer(self) -> Change:
        """The function for one row: the changed row, or None to leave it out. Made anew for every pass."""
        raise NotImplementedError

    def stream(self, rows: Iterable[Row]) -> Iterator[Row]:
        return change_rows(rows, self.changer(), name=self.name)

    def __call__(self, rows: list[Row]) -> list[Row]:
        return list(self.stream(rows))
